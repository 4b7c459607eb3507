"""`orbax_ext.abstract` and `orbax_ext.restore` in one process. Other topologies: tests/multiprocess."""

from __future__ import annotations

import asyncio
import collections
import pathlib
import shutil
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions

import orbax_ext
from orbax_ext.storage import checkpoint, counters
from orbax_ext.storage.checkpoint import folders
from tests.support import plain_orbax, states
from tests.support.checkpoints import FORMATS, LARGE, save, state

P = PartitionSpec
Moments = collections.namedtuple("Moments", ["mu", "nu"])  # noqa: PYI024  as in many optimizers
Nothing = collections.namedtuple("Nothing", [])  # noqa: PYI024  as optax.EmptyState


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A manager's directory with two steps; tests do not write to it."""
    path = tmp_path_factory.mktemp("abstract") / "run"
    save(path, steps=(1, 12))
    return path


def mesh(*names: str) -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape([1] * len(names)), names)


def plain(path: pathlib.Path) -> Any:
    """Restores an item with plain Orbax as it was saved: this process has the devices that it was saved on."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path)


@pytest.mark.parametrize("form", FORMATS)
def test_it_restores_what_plain_orbax_restores_on_the_same_devices(tmp_path: pathlib.Path, form: str) -> None:
    save(tmp_path / "run", form)
    ours, theirs = orbax_ext.restore(tmp_path / "run", mesh("dp", "tp")), plain(tmp_path / "run" / "0" / "default")
    everywhere = NamedSharding(mesh("dp", "tp"), P())  # the key was saved on one device, without a mesh
    assert plain_orbax.differences({**ours, "key": 0}, {**theirs, "key": 0}) == []
    assert ours["key"].sharding.is_equivalent_to(everywhere, 0)
    assert jax.random.key_data(ours["key"]).tolist() == jax.random.key_data(state()["key"]).tolist()


def test_the_path_may_be_a_managers_directory_a_step_or_an_item(saved: pathlib.Path) -> None:
    expected = plain(saved / "12" / "default")["params"]
    for path in (saved, saved / "12", saved / "12" / "default", str(saved)):
        assert plain_orbax.differences(orbax_ext.restore(path, mesh("dp", "tp"))["params"], expected) == []
    assert orbax_ext.restore(saved, step=1)["name"] == "a string"


def test_no_file_is_looked_at_for_its_size(saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes_below(path: Any) -> Any:
        raise AssertionError(f"the sizes below {path} are not needed")

    expected = str(orbax_ext.abstract(saved / "12" / "default", mesh("dp")))
    monkeypatch.setattr(folders, "sizes_below", sizes_below)
    assert str(orbax_ext.abstract(saved, mesh("dp"))) == expected
    assert str(orbax_ext.abstract(saved / "12", mesh("dp"))) == expected
    with pytest.raises(AssertionError, match="are not needed"):
        checkpoint.inspect(saved)


def test_a_step_that_was_not_finished_is_not_taken(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run = pathlib.Path(shutil.copytree(saved, tmp_path / "run"))
    (run / "12").rename(run / "12.orbax-checkpoint-tmp")
    with states.logged() as lines:
        orbax_ext.abstract(run)
    assert any(f"{run}/1/default on one device" in line for line in lines)


def test_the_abstract_tree_describes_every_kind_of_leaf(saved: pathlib.Path) -> None:
    before = counters.bytes_read()
    tree = orbax_ext.abstract(saved, mesh("tp", "x"))
    assert counters.bytes_read() - before < LARGE / 20  # metadata only
    large, layer = tree["params"]["large"], tree["params"]["layers"][0]
    assert isinstance(large, jax.ShapeDtypeStruct)
    assert (large.shape, large.dtype, large.sharding.spec) == ((512, 1024), np.uint32, P(None, "tp"))
    assert (layer.dtype, layer.sharding.spec) == (jnp.bfloat16, P("tp"))  # saved as P(("dp", "tp"))
    assert (tree["key"].shape, tree["key"].dtype) == ((), state()["key"].dtype)
    assert (tree["count"], tree["name"], tree["nothing"]) == (0, "", None)
    assert (tree["table"].shape, tree["table"].dtype, tree["table"].strides) == ((5,), np.arange(5).dtype, (0,))
    assert jax.tree.structure(tree) == jax.tree.structure(state())


@pytest.mark.once
def test_metadata_that_does_not_come_ends_it(saved: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    come = threading.Event()
    monkeypatch.setattr(checkpoint, "read_tree", lambda *given: come.wait(60))
    with pytest.raises(TimeoutError, match=r"storage has not answered for 0\.3 s \(stall_timeout\)"):
        orbax_ext.restore(saved, stall_timeout=0.3)
    come.set()


def test_without_a_mesh_all_is_on_the_first_device(saved: pathlib.Path) -> None:
    tree = orbax_ext.abstract(saved)
    assert tree["step"].sharding == tree["params"]["large"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_rich_containers_come_back_if_they_were_saved(tmp_path: pathlib.Path) -> None:
    """Orbax makes the types of named tuples anew; before 0.12 it saves rich containers but does not restore them."""
    rich = ocp.PyTreeCheckpointHandler(pytree_metadata_options=PyTreeMetadataOptions(support_rich_types=True))
    tree = {"moments": Moments(jnp.ones(3), (2, None)), "pair": (jnp.zeros(2), [1]), "optax": (Nothing(), ())}
    with ocp.Checkpointer(rich) as checkpointer:
        checkpointer.save(tmp_path / "rich", args=ocp.args.PyTreeSave(tree))
    restored = orbax_ext.restore(tmp_path / "rich")
    assert restored["moments"]._fields == ("mu", "nu")
    assert restored["moments"].nu == (2, None)
    assert restored["moments"].mu.tolist() == [1, 1, 1]
    assert isinstance(restored["pair"], tuple)
    assert restored["pair"][1] == [1]
    assert restored["optax"] == ((), ())


def test_one_of_several_items_is_named(tmp_path: pathlib.Path) -> None:
    items = {"params": {"w": jnp.ones(3)}, "moments": {"w": jnp.zeros(3)}}
    args = ocp.args.Composite(
        **{name: ocp.args.StandardSave(tree) for name, tree in items.items()}, notes=ocp.args.JsonSave({"epoch": 3})
    )
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=args)
    with pytest.raises(ValueError, match="several items with arrays: moments, params; choose one with item="):
        orbax_ext.restore(tmp_path)
    with pytest.raises(ValueError, match="no item 'notes' with arrays; it has moments, params"):
        orbax_ext.restore(tmp_path, item="notes")
    assert orbax_ext.restore(tmp_path, item="params")["w"].tolist() == [1, 1, 1]
    assert orbax_ext.restore(tmp_path / "0" / "moments")["w"].tolist() == [0, 0, 0]


def test_specs_override_by_pattern_and_the_first_match_counts(saved: pathlib.Path) -> None:
    specs = {"params.layers.*": P(None, "x"), "*.large": "P((x, y))", "params.*": P("y"), "param.*": P()}
    with states.logged() as lines:
        tree = orbax_ext.abstract(saved, mesh("x", "y"), specs=specs)
    assert tree["params"]["layers"][0].sharding.spec == P(None, "x")
    assert tree["params"]["large"].sharding.spec == P(("x", "y"))
    assert any("2 leaves as the given specs say: params.large, params.layers.0" in line for line in lines)
    assert any("the pattern 'param.*' of specs matches no leaf" in line for line in lines)


def test_the_log_says_that_keys_are_replicated_whatever_the_specs_say(saved: pathlib.Path) -> None:
    with states.logged() as lines:
        tree = orbax_ext.abstract(saved, mesh("x", "y"), specs={"key": P("x")})
    assert tree["key"].sharding.spec == P()
    because = "replicated whatever the given specs say, because they are typed PRNG keys: key"
    assert any(because in line for line in lines)


def test_dtype_is_for_floating_point_arrays_alone(saved: pathlib.Path) -> None:
    restored = orbax_ext.restore(saved, dtype=jnp.float32)
    assert restored["params"]["layers"][0].dtype == jnp.float32
    assert restored["params"]["layers"][0].tolist() == np.ones((8, 16)).tolist()
    assert [restored[name].dtype for name in ("step", "table")] == [np.int32, np.arange(5).dtype]
    for wrong in ("int8", "float31"):
        with pytest.raises(ValueError, match=rf"dtype must be a floating-point type.*found '?{wrong}"):
            orbax_ext.abstract(saved, dtype=wrong)


def test_leaves_that_jax_cuts_to_32_bits_are_in_the_log(tmp_path: pathlib.Path) -> None:
    with jax.enable_x64(True), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "wide", args=ocp.args.PyTreeSave({"wide": jnp.arange(3), "other": np.arange(3)}))
    with states.logged() as lines:
        orbax_ext.abstract(tmp_path / "wide")
    assert [line for line in lines if "jax_enable_x64 is off: wide" in line]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"params.large": P("dp")}, r"P\(dp\) names the axis 'dp', which the mesh \(tp=1, x=1\) lacks"),
        ({"params.large": "P(tp"}, "is not a spec such as"),
        ({"params.large": ("tp",)}, "must have a PartitionSpec, or text"),
        ({"step": P("tp")}, "1 entries for 0 dimensions"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(saved: pathlib.Path, specs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        orbax_ext.abstract(saved, mesh("tp", "x"), specs=specs)


def test_specs_need_a_mesh_and_the_mesh_must_be_one(saved: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="specs need a mesh: found specs for step"):
        orbax_ext.abstract(saved, specs={"step": P()})
    with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh or None; found a dict"):
        orbax_ext.abstract(saved, {"dp": 4})
    with pytest.raises(ValueError, match=r"specs must map patterns to specs.*found \[\('step'"):
        orbax_ext.abstract(saved, mesh("tp"), specs=[("step", P())])  # type: ignore[arg-type]


def test_an_unknown_knob_is_refused_before_anything_is_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match="unknown knob 'strateggy'; did you mean 'strategy'"):
        orbax_ext.restore(tmp_path / "nowhere", strateggy="single")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("run8", "run8 does not exist; .* has run, some.txt, things"),
        ("run/13/default", "does not exist; .*/run has 1, 12"),
        ("some.txt", "is a file; give a directory"),
        ("things", "no Orbax checkpoint: .*it has empty, a.txt"),
        ("things/empty", "is empty"),
    ],
)
def test_a_path_without_a_checkpoint_says_what_was_found(
    saved: pathlib.Path, tmp_path: pathlib.Path, path: str, message: str
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "things" / "empty").mkdir(parents=True)
    for file in ("some.txt", "things/a.txt"):
        (tmp_path / file).write_text("text")
    for function in (orbax_ext.abstract, orbax_ext.restore):
        with pytest.raises(checkpoint.NotACheckpointError, match=message):
            function(tmp_path / path)


def test_a_step_that_is_not_there_says_which_are(saved: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="has no step 7; it has 1, 12"):
        orbax_ext.restore(saved, step=7)
    with pytest.raises(ValueError, match="is a step or an item itself: it has no step 1 in it"):
        orbax_ext.restore(saved / "1", step=1)
    with pytest.raises(ValueError, match="step must be an integer or None; found '1'"):
        orbax_ext.restore(saved, step="1")  # type: ignore[arg-type]


def test_missing_arrays_are_named(tmp_path: pathlib.Path) -> None:
    save(tmp_path / "run", "zarr2")
    shutil.rmtree(tmp_path / "run" / "0" / "default" / "params.large")
    with pytest.raises(ValueError, match=r"is damaged: these arrays are missing: params\.large"):
        orbax_ext.restore(tmp_path / "run")


def test_it_works_while_an_event_loop_runs(saved: pathlib.Path) -> None:
    """As in a notebook."""

    async def cell() -> Any:
        return orbax_ext.restore(saved)

    assert int(asyncio.run(cell())["step"]) == 7


def test_the_callers_mesh_and_its_axis_types_do_not_matter(saved: pathlib.Path) -> None:
    explicit = jax.make_mesh((1, 1), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh("mine")):
        restored = orbax_ext.restore(saved, explicit)
    assert restored["params"]["large"].sharding == NamedSharding(explicit, P(None, "tp"))
    assert jax.random.key_data(restored["key"]).tolist() == jax.random.key_data(state()["key"]).tolist()


def test_nothing_is_registered_afterwards(saved: pathlib.Path) -> None:
    before = ocp.type_handlers.get_type_handler(jax.Array)
    orbax_ext.restore(saved)
    assert ocp.type_handlers.get_type_handler(jax.Array) is before
