"""`verify=True` on real processes: what one replica holds differently, and what is not as stored, is found."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext import lab
from orbax_ext.cli import main
from orbax_ext.transfer.verify import verify
from tests.support import world
from tests.support.world import MeshSpec, P, Spec

MESH = MeshSpec((4, 2), ("dp", "tp"))
KNOBS = {"replica_axis": "dp", "stall_timeout": 30, "verify": True}
STATE = {**world.STATE, "tied": Spec((8, 4), "float32", P("tp")), "nested": Spec((4, 6), "int8", P(None, "tp"))}


@pytest.fixture(scope="module")
def team(small_cluster: lab.Cluster) -> lab.Cluster:
    return small_cluster


@pytest.fixture(scope="module")
def kept(team: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with digests beside it."""
    path = str(tmp_path_factory.mktemp("kept") / "checkpoint")
    team.run(world.save, path, STATE, MESH)
    assert main.main(["verify", "--write", path]) == 0
    return path


@pytest.mark.parametrize("strategy", ["spread", "direct"])
def test_what_is_restored_well_passes(team: lab.Cluster, kept: str, strategy: str) -> None:
    knobs = {**KNOBS, "strategy": strategy}
    assert world.all_of(team.run(world.restore, kept, STATE, MESH, knobs=knobs)) == []


def test_digests_beside_a_checkpoint_are_no_step(kept: str) -> None:
    with ocp.CheckpointManager(kept) as manager:
        assert manager.all_steps() == [0]


@pytest.mark.parametrize(
    ("rank", "leaf", "box"),
    [
        (2, "tied", "[4:8, :]"),
        (0, "mask", "[:]"),
        (2, "nested", "[:, 3:6]"),
        (0, "nested", "[:, 3:6]"),
    ],
)
def test_a_replica_that_differs_is_named_with_leaf_and_box(
    team: lab.Cluster, kept: str, rank: int, leaf: str, box: str
) -> None:
    texts = {str(outcome.failure) for outcome in team.outcomes(restore_and_damage, kept, leaf, [rank])}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert text.startswith(f"RestoreFailedError: restore failed on 1 process:\n  process {rank} (")
    assert f"in phase 'verify': ValueError: leaf {leaf!r}, box {box}: digest" in text


@pytest.mark.core
def test_on_the_reporters_mesh_what_is_good_passes_and_a_replica_that_differs_is_named(
    cluster: lab.Cluster, saved: str
) -> None:
    assert world.all_of(cluster.run(world.restore, saved, world.STATE, knobs=KNOBS)) == []
    for outcome in cluster.outcomes(restore_and_damage, saved, "layer_0", [2], specs=world.STATE, mesh=world.REPORTERS):
        assert "process 2 (" in str(outcome)
        assert "in phase 'verify': ValueError: leaf 'layer_0', box [896:1024, :]: digest" in str(outcome)


def test_what_differs_from_the_stored_digests_on_all_replicas_is_found(team: lab.Cluster, kept: str) -> None:
    for outcome in team.outcomes(restore_and_damage, kept, "tied", [0, 1, 2, 3]):
        assert "leaf 'tied', box [:, :]: digest" in str(outcome)
        assert "stored beside the checkpoint" in str(outcome)


def test_without_verify_nothing_is_noticed(team: lab.Cluster, kept: str) -> None:
    assert all(outcome.ok for outcome in team.outcomes(restore_and_damage, kept, "tied", [2], verify=False))


def test_leaves_that_are_cast_are_not_compared_with_the_stored_ones_and_the_log_says_so(
    team: lab.Cluster, kept: str
) -> None:
    lines = team.run(restore_cast, kept)[0]
    assert ["1 leaves are cast, cut or new, and not compared with stored digests: bias" in line for line in lines] == [
        True
    ]


def test_the_command_tells_good_damaged_and_unknown_apart(
    team: lab.Cluster, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    team.run(world.save, path, STATE, MESH)
    before = sorted(file for file in pathlib.Path(path).rglob("*"))
    assert main.main(["verify", path]) == 2
    assert "verify --write" in capsys.readouterr().err
    assert main.main(["verify", "--write", path]) == 0
    beside = [file for file in pathlib.Path(path).rglob("*") if file not in before]
    assert [file.name for file in beside] == [".0.default.orbax_ext_digests.json"]
    assert main.main(["verify", path, "--step", "0", "--json"]) == 0
    capsys.readouterr()
    beside[0].write_text(beside[0].read_text().replace('"digest": "', '"digest": "0', 1))
    assert main.main(["verify", path]) == 1
    assert f"damaged: 1 of {len(STATE)} arrays" in capsys.readouterr().out


# Run on the processes.


def restore_and_damage(
    path: str,
    leaf: str,
    ranks: list[int],
    verify: bool = True,
    specs: Mapping[str, Spec] = STATE,
    mesh: MeshSpec = MESH,
) -> None:
    with damaging(leaf, ranks):
        assert world.restore(path, specs, mesh, knobs={**KNOBS, "verify": verify}) == []


@contextlib.contextmanager
def damaging(leaf: str, ranks: list[int]) -> Iterator[None]:
    """Changes one element of a leaf on the last device of some processes, after the exchange."""

    async def damaged(session: Any, request: Any, arrays: Any) -> None:
        arrays = list(arrays)
        index = next(i for i, each in enumerate(request.leaves) if each.name == leaf)
        if jax.process_index() in ranks:
            arrays[index] = _with_a_changed_element(arrays[index])
        await verify(session, request, arrays)

    with mock.patch("orbax_ext.handler.verify", damaged):
        yield


def _with_a_changed_element(array: jax.Array) -> jax.Array:
    buffers = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == jax.local_devices()[-1]:
            data.reshape(-1).view(np.uint8)[-1] ^= 1
        buffers.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, buffers)


def restore_cast(path: str) -> list[str]:
    mesh = MESH.make()
    specs = {**STATE, "bias": Spec((24,), "bfloat16")}
    abstract = world.abstract_state(specs, mesh)
    with world.logged() as lines, orbax_ext.registered(**KNOBS), ocp.CheckpointManager(path) as manager:
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = manager.restore(0, args=args)
    assert restored["bias"].dtype == jnp.bfloat16
    return [line for line in lines if "not compared with stored" in line]
