"""`orbax-ext inspect`: shows what Orbax itself reads, and reads nothing but metadata."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
import tensorstore as ts
from etils import epath

from orbax_ext.cli import exits, main
from orbax_ext.storage import checkpoint, counters
from orbax_ext.storage import s3 as s3_lib
from orbax_ext.storage.checkpoint import arrays, metadata
from orbax_ext.upstream.array_handler import array_context, array_store
from tests.support.checkpoints import FORMATS, LARGE, save


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A manager's directory with two steps; tests do not write to it."""
    path = tmp_path_factory.mktemp("inspect") / "run"
    save(path, steps=(1, 12))
    return path


@pytest.fixture
def copy(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "run"))


def look(capsys: pytest.CaptureFixture[str], *args: Any, code: int = exits.EXIT_OK) -> Any:
    assert main.main(["inspect", "--json", *map(str, args)]) == code
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *args: Any) -> str:
    """Returns the one line about a path that can't be inspected."""
    assert main.main(["inspect", *map(str, args)]) == exits.EXIT_CANNOT_RUN
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_described_as_orbax_describes_it(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    save(tmp_path / "run", form)
    item_path = tmp_path / "run" / "0" / "default"
    (item,) = look(capsys, tmp_path / "run" / "0")["items"]
    assert (item["format"], item["ocdbt"]) == (form.split()[0], "OCDBT" in form)
    leaves = {leaf["name"]: leaf for leaf in item["leaves"]}
    metadata = ocp.PyTreeCheckpointHandler().metadata(epath.Path(item_path))
    theirs = jax.tree_util.tree_leaves_with_path(getattr(metadata, "tree", metadata))
    compared = 0
    for path, leaf in theirs:
        if getattr(leaf, "shape", None) is None:
            continue
        ours = leaves[".".join(str(getattr(entry, "key", getattr(entry, "idx", None))) for entry in path)]
        assert tuple(ours["shape"]) == tuple(leaf.shape)
        assert ours["dtype"] == jnp.dtype(leaf.dtype).name
        if leaf.storage is not None and leaf.storage.chunk_shape is not None:
            assert tuple(ours["chunk"]) == tuple(leaf.storage.chunk_shape)
            compared += 1
    assert compared >= 4
    assert leaves["params.large"]["chunks"] == 8
    assert leaves["key"]["key_type"] == "threefry2x32"
    assert leaves["nothing"] == {"name": "nothing", "kind": "None"}
    in_store = stored_sizes(item_path, "OCDBT" in form)
    for name, size in in_store.items():
        assert leaves[name]["stored_bytes"] == size, name
    assert item["stored_bytes"] == sum(in_store.values())
    assert item["bytes_on_disk"] == sum(file.stat().st_size for file in item_path.rglob("*") if file.is_file())


def stored_sizes(item: pathlib.Path, in_database: bool) -> dict[str, int]:
    """Returns, by array, the bytes of its chunks, counted by reading all of them."""
    context = array_context(in_database)
    store = ts.KvStore.open(array_store(item, None, in_database), context=context).result()
    sizes: dict[str, int] = {}
    names = {k.rpartition(b"/")[0] for k in store.list().result() if k.endswith((b"/.zarray", b"/zarr.json"))}
    for key in store.list().result():
        owner = next((name for name in names if key.startswith(name + b"/")), None)
        if owner is not None and not key.endswith((b"/.zarray", b"/zarr.json")):
            name = owner.decode().strip("/")
            sizes[name] = sizes.get(name, 0) + len(store.read(key).result().value)
    return sizes


def test_no_array_data_is_read(saved: pathlib.Path) -> None:
    before = counters.bytes_read()
    (item,) = checkpoint.items_of(saved, 12)
    assert item.stored_bytes > LARGE * 0.9
    assert counters.bytes_read() - before < LARGE / 20


def test_the_mesh_of_the_save_is_shown(saved: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (item,) = look(capsys, saved, "--step", 12)["items"]
    assert item["mesh"] == {"dp": 1, "tp": 1}
    assert item["processes_that_wrote"] == 1
    leaves = {leaf["name"]: leaf for leaf in item["leaves"]}
    assert leaves["params.large"]["sharding"]["spec"] == [[], ["tp"]]
    assert leaves["params.layers.0"]["sharding"]["spec"] == [["dp", "tp"]]
    assert leaves["key"]["sharding"]["kind"] != "NamedSharding"


def test_the_text_has_what_the_json_has(saved: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["inspect", str(saved / "12")]) == exits.EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.split()[:1] == ["params.large"])
    assert row.split()[1:] == ["uint32", "512x1024", "256x256", "8", "P(None,", "tp)", "2.1", "MB", "2.1", "MB", "100%"]
    assert "zarr2 in OCDBT; saved on mesh (dp=1, tp=1); written by 1 process" in lines[1]


def test_the_devices_of_each_process_are_shown_if_they_were_saved(
    copy: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy / "12" / "process_metadata"  # as Orbax's emergency checkpoints have it
    folder.mkdir()
    (folder / "global_process_metadata.json").write_text("[[0, 1], [2, 3]]")
    items = look(capsys, copy, "--step", 12)["items"]
    assert items[0]["devices_by_process"] == [[0, 1], [2, 3]]


def test_a_managers_directory_lists_its_steps(copy: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(copy / "12", copy / "13.orbax-checkpoint-tmp")
    steps = look(capsys, copy)["steps"]
    assert [(step["step"], step["committed"]) for step in steps] == [(1, True), (12, True), (13, False)]
    assert all(step["items"] == ["default"] and step["bytes_on_disk"] > LARGE for step in steps)
    assert main.main(["inspect", str(copy)]) == exits.EXIT_OK
    assert "a restore takes 12;" in capsys.readouterr().out


def test_a_manager_without_a_committed_step_is_a_bad_verdict(
    copy: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copy / "1")
    (copy / "12").rename(copy / "12.orbax-checkpoint-tmp")
    assert [step["committed"] for step in look(capsys, copy, code=exits.EXIT_BAD_VERDICT)["steps"]] == [False]
    with pytest.raises(checkpoint.UnfinishedError, match="no committed step"):
        checkpoint.items_of(copy)


def test_an_unfinished_checkpoint_is_refused(copy: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinished = copy / "12.orbax-checkpoint-tmp-1700000000"
    (copy / "12").rename(unfinished)
    for path in (unfinished, unfinished / "default"):
        message = refused(capsys, path)
        assert "not a complete checkpoint" in message
        assert "Give a committed step" in message


def test_a_save_that_was_never_committed_is_refused(copy: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Releases commit with a file, or with a time in the step's metadata; here both are missing."""
    record = copy / "12" / "_CHECKPOINT_METADATA"
    record.write_text(json.dumps({**json.loads(record.read_text()), "commit_timestamp_nsecs": None}))
    (copy / "12" / "commit_success.txt").unlink(missing_ok=True)
    assert "not a complete checkpoint" in refused(capsys, copy / "12")


def test_a_path_without_a_checkpoint_is_refused(copy: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, empty = copy.parent / "other", copy.parent / "empty"
    empty.mkdir()
    (other / "nested").mkdir(parents=True)
    (other / "readme").write_text("")
    (other / "gone").symlink_to("nowhere")
    assert "does not exist" in refused(capsys, copy / "nope")
    assert "is a file" in refused(capsys, copy / "12" / "_CHECKPOINT_METADATA")
    assert "is empty" in refused(capsys, empty)
    assert "is no Orbax checkpoint" in refused(capsys, other)
    assert "has no step 5; it has 1, 12" in refused(capsys, copy, "--step", 5)


def test_damaged_metadata_is_reported_in_one_line(copy: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = copy / "12" / "default"
    (item / "manifest.ocdbt").write_bytes(b"not a manifest")
    assert "can't be listed" in refused(capsys, item)
    (item / "manifest.ocdbt").unlink()
    assert "manifest.ocdbt is missing" in refused(capsys, item)
    (item / "_METADATA").write_text("{}")
    assert "can't be understood" in refused(capsys, item)


def test_a_missing_array_is_a_bad_verdict(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "run", "zarr2")
    shutil.rmtree(tmp_path / "run" / "0" / "default" / "params.large")
    (item,) = look(capsys, tmp_path / "run" / "0", code=exits.EXIT_BAD_VERDICT)["items"]
    assert {leaf["name"]: leaf["problem"] for leaf in item["leaves"] if "problem" in leaf} == {
        "params.large": "its array is missing"
    }


def test_items_without_arrays_are_listed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        args = ocp.args.Composite(state=ocp.args.StandardSave({"a": np.ones(3)}), notes=ocp.args.JsonSave({"b": 1}))
        manager.save(4, args=args)
        manager.wait_until_finished()
    items = {item["path"].rpartition("/")[2]: item for item in look(capsys, tmp_path / "run" / "4")["items"]}
    assert items["notes"]["format"] == "files"
    assert items["notes"]["handler"].endswith("JsonCheckpointHandler")
    assert [leaf["name"] for leaf in items["state"]["leaves"]] == ["a"]


def test_a_checkpoint_of_the_v1_api_is_described(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_v1 = getattr(ocp_v1, "save", None) or ocp_v1.save_pytree  # the name until 0.12.0
    save_v1(tmp_path / "v1", {"a": jnp.ones((4, 4)), "b": [jnp.zeros(3)]})
    (item,) = look(capsys, tmp_path / "v1")["items"]
    assert {leaf["name"]: leaf["shape"] for leaf in item["leaves"]} == {"a": [4, 4], "b.0": [3]}
    assert item["committed"]


def test_a_database_with_many_nodes_is_listed_in_full(tmp_path: pathlib.Path) -> None:
    spec = {
        "driver": "ocdbt",
        "base": f"file://{tmp_path}/",
        "config": {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 20},
    }
    store = ts.KvStore.open(spec).result()
    header = json.dumps({"chunks": [1], "shape": [9], "dtype": "<f4", "zarr_format": 2})
    for number in range(5):
        store.write(f"layers.{number}/.zarray", header).result()
        for chunk in range(9):
            store.write(f"layers.{number}/{chunk}", b"x" * (number + chunk * 10)).result()
    found = arrays.stored_arrays(epath.Path(tmp_path), True, {})
    assert {name: (array.stored_bytes, array.chunks) for name, array in found.items()} == {
        f"layers.{number}": (360 + 9 * number, 9) for number in range(5)
    }
    assert found["layers.3"].header == metadata.ArrayHeader((9,), "float32", 4, (1,), (1,))


def test_a_checkpoint_on_s3_is_described_and_verified_like_one_on_disk(
    s3: str, saved: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(s3, steps=(12,))
    assert [(step["step"], step["committed"]) for step in look(capsys, s3)["steps"]] == [(12, True)]
    (there,), (here,) = look(capsys, f"{s3}/12")["items"], look(capsys, saved / "12")["items"]
    assert there["leaves"] == here["leaves"]
    assert main.main(["verify", s3]) == exits.EXIT_CANNOT_RUN
    assert main.main(["verify", s3, "--write"]) == exits.EXIT_OK
    assert main.main(["verify", s3]) == exits.EXIT_OK
    assert "arrays against the stored digests" in capsys.readouterr().out
    (epath.Path(s3) / "12" / "commit_success.txt").unlink()
    assert "not a complete checkpoint" in refused(capsys, f"{s3}/12")
    assert [step["committed"] for step in look(capsys, s3, code=exits.EXIT_BAD_VERDICT)["steps"]] == [False]
    assert "does not exist" in refused(capsys, f"{s3}/nope")
    assert "NoSuchBucket" in refused(capsys, "s3://no-such-bucket-here/run")
    assert s3_lib.s3_enabled()  # as before the commands


def test_arrays_on_s3_outside_a_database_are_found(s3: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(s3, "zarr2")
    (item,) = look(capsys, f"{s3}/0")["items"]
    leaves: Mapping[str, Any] = {leaf["name"]: leaf for leaf in item["leaves"]}
    assert leaves["params.large"]["chunks"] == 8
    assert leaves["params.large"]["stored_bytes"] > LARGE * 0.9


def test_a_checkpoint_of_another_release_is_described(
    saved: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = os.environ.get("ORBAX_EXT_OTHER_PYTHON")
    if not python:
        pytest.skip("ORBAX_EXT_OTHER_PYTHON names no interpreter of an environment with another Orbax")
    root = pathlib.Path(__file__).parents[2]
    code = f"from tests.support import checkpoints; checkpoints.save({str(tmp_path / 'run')!r}, steps=(1, 12))"
    env = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([python, "-c", code], check=True, timeout=120, env=env, capture_output=True)
    theirs, ours = look(capsys, tmp_path / "run" / "12")["items"], look(capsys, saved / "12")["items"]
    assert theirs[0]["leaves"] == ours[0]["leaves"]
    assert sys.executable != python


def run_code(code: str, devices: int, tail: str) -> str:
    """Runs printed code in a process with this many devices; returns what `tail` prints."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{tail}"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def print_code(capsys: pytest.CaptureFixture[str], *args: Any) -> str:
    assert main.main(["inspect", "--code", *map(str, args)]) == exits.EXIT_OK
    return capsys.readouterr().out


def test_the_printed_code_restores_on_the_mesh(saved: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = print_code(capsys, saved, "--step", 1, "--mesh", "x=2,tp=4", "--spec", "*.layers.*=P((x,tp))")
    assert f"orbax_ext.restore('{saved}', mesh, step=1, specs=specs)" in code
    assert "# " + str(saved / "1" / "default") in code
    assert "1 leaf as the given specs say: params.layers.0" in code
    tail = "print([tuple(a.sharding.spec) for a in jax.tree.leaves(state['params'])], state['name'], mesh.size)"
    assert run_code(code, 8, tail) == "[(None, 'tp'), (('x', 'tp'),)] a string 8"


def test_without_a_mesh_the_printed_code_restores_on_one_device(
    saved: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved.parent)
    code = print_code(capsys, "run")
    assert f"state = orbax_ext.restore('{saved}')" in code  # the absolute path
    assert run_code(code, 2, "print(state['step'].sharding.num_devices, int(state['step']))") == "1 7"


def test_the_printed_code_restores_each_of_several_items(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        items = {name: ocp.args.StandardSave({"w": jnp.full(2, number)}) for number, name in enumerate(("a", "b"))}
        manager.save(5, args=ocp.args.Composite(**items))
    code = print_code(capsys, tmp_path / "run")
    assert run_code(code, 1, "print({name: tree['w'].tolist() for name, tree in state.items()})") == (
        "{'a': [0, 0], 'b': [1, 1]}"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "tp"], "'tp' in the mesh 'tp' is not NAME=SIZE"),
        (["--mesh", "tp=8", "--spec", "step=P(tp)"], "1 entries for 0 dimensions"),
        (["--mesh", "tp=8", "--spec", "*.large=P(dp)"], "names the axis 'dp', which the mesh (tp=8) lacks"),
        (["--spec", "step=P()"], "--spec needs a mesh"),
    ],
)
def test_code_for_a_mesh_or_spec_that_does_not_fit_is_refused(
    saved: pathlib.Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, saved, "--code", *arguments)


def test_a_mesh_without_code_is_refused(saved: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "are for --code" in refused(capsys, saved, "--mesh", "tp=8")
