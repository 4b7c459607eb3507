"""`verify=True` on real processes finds replicas that differ from each other or from the stored digests."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any
from unittest import mock

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext import lab
from orbax_ext.cli import main
from orbax_ext.storage.checkpoint import digest_files
from orbax_ext.transfer.verify import Digests
from tests.support import fault_injection, states
from tests.support.states import MeshSpec, P, Spec

MESH = MeshSpec((4, 2), ("dp", "tp"))
KNOBS: dict[str, Any] = {"replica_axis": "dp", "stall_timeout": 30, "verify": True}
STATE = {**states.STATE, "tied": Spec((8, 4), "float32", P("tp")), "nested": Spec((4, 6), "int8", P(None, "tp"))}


@pytest.fixture(scope="module")
def team(small_cluster: lab.Cluster) -> lab.Cluster:
    return small_cluster


@pytest.fixture(scope="module")
def kept(team: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with digests beside it."""
    path = str(tmp_path_factory.mktemp("kept") / "checkpoint")
    team.run(states.save, path, STATE, MESH)
    assert main.main(["verify", "--write", path]) == 0
    return path


@pytest.mark.parametrize("strategy", ["spread", "direct"])
def test_an_exact_restore_passes(team: lab.Cluster, kept: str, strategy: str) -> None:
    knobs = {**KNOBS, "strategy": strategy}
    assert states.all_differences(team.run(states.restore, kept, STATE, MESH, knobs=knobs)) == []


def test_digests_of_the_first_version_are_compared_too(team: lab.Cluster, kept: str, tmp_path: pathlib.Path) -> None:
    path = str(shutil.copytree(kept, tmp_path / "checkpoint"))
    (written,) = pathlib.Path(path).glob(".*digests_2.json")
    written.unlink()
    item = pathlib.Path(path) / "0" / "default"
    old = {name: record for name, record in digest_files.compute(item, 1) if isinstance(record, dict)}
    content = {"checkpoint": digest_files.identity(item), "leaves": old}
    file = written.with_name(".0.default.orbax_ext_digests.json")
    file.write_text(json.dumps(content))
    assert main.main(["verify", path]) == 0
    assert states.all_differences(team.run(states.restore, path, STATE, MESH, knobs=KNOBS)) == []
    old["tied"]["digest"] = "0" * 16
    file.write_text(json.dumps(content))
    assert main.main(["verify", path]) == 1
    for outcome in team.outcomes(states.restore, path, STATE, MESH, knobs=KNOBS):
        assert "leaf 'tied', box [:, :]: digest" in str(outcome)
        assert f"is not {'0' * 16}, stored beside the checkpoint" in str(outcome)


def test_digests_beside_a_checkpoint_are_not_a_step(kept: str) -> None:
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
def test_a_replica_that_differs_is_named_on_the_reported_mesh(cluster: lab.Cluster, saved: str) -> None:
    assert states.all_differences(cluster.run(states.restore, saved, states.STATE, knobs=KNOBS)) == []
    for outcome in cluster.outcomes(
        restore_and_damage, saved, "layer_0", [2], specs=states.STATE, mesh=states.REPORTED_MESH
    ):
        assert "process 2 (" in str(outcome)
        assert "in phase 'verify': ValueError: leaf 'layer_0', box [896:1024, :]: digest" in str(outcome)


def test_replicas_that_all_differ_from_the_stored_digests_are_found(team: lab.Cluster, kept: str) -> None:
    for outcome in team.outcomes(restore_and_damage, kept, "tied", [0, 1, 2, 3]):
        assert "leaf 'tied', box [:, :]: digest" in str(outcome)
        assert "stored beside the checkpoint" in str(outcome)


def test_leaves_are_hashed_as_they_arrive(team: lab.Cluster, kept: str) -> None:
    """All but those of the last group have been given to be hashed when the restore's last meeting begins."""
    for given in team.run(given_before_the_end, kept):
        assert len(given) > 1
        assert sorted(leaf for leaves in given for leaf in leaves) == sorted(STATE)


def test_a_replica_that_differs_passes_without_verify(team: lab.Cluster, kept: str) -> None:
    assert all(outcome.ok for outcome in team.outcomes(restore_and_damage, kept, "tied", [2], verify=False))


def test_the_log_names_cast_leaves_that_are_not_compared_with_digests(team: lab.Cluster, kept: str) -> None:
    lines = team.run(restore_cast, kept)[0]
    assert ["1 leaves are cast, cut or new, and not compared with stored digests: bias" in line for line in lines] == [
        True
    ]


def test_the_command_distinguishes_good_damaged_and_unknown(
    team: lab.Cluster, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    team.run(states.save, path, STATE, MESH)
    before = sorted(file for file in pathlib.Path(path).rglob("*"))
    assert main.main(["verify", path]) == 2
    assert "verify --write" in capsys.readouterr().err
    assert main.main(["verify", "--write", path]) == 0
    added = [file for file in pathlib.Path(path).rglob("*") if file not in before]
    assert [file.name for file in added] == [".0.default.orbax_ext_digests_2.json"]
    assert main.main(["verify", path, "--step", "0", "--json"]) == 0
    capsys.readouterr()
    added[0].write_text(added[0].read_text().replace('"digest": "', '"digest": "0', 1))
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
    with fault_injection.damaging(leaf, ranks):
        assert states.restore(path, specs, mesh, knobs={**KNOBS, "verify": verify}) == []


def given_before_the_end(path: str) -> list[list[str]]:
    """Restores in small groups; returns the leaves that were given to be hashed, by call, before `verify` began."""
    given: list[list[str]] = []
    begin = Digests.begin

    def noting(digests: Digests, arrays: Mapping[int, Any]) -> None:
        given.append([digests._leaves[index].name for index in arrays])
        begin(digests, arrays)

    with mock.patch.object(Digests, "begin", noting):
        knobs = {**KNOBS, "strategy": "spread", "broadcast_memory_limit_bytes": 1 << 20}
        assert states.restore(path, STATE, MESH, knobs=knobs) == []
    return given[:-1]


def restore_cast(path: str) -> list[str]:
    mesh = MESH.make()
    specs = {**STATE, "bias": Spec((24,), "bfloat16")}
    abstract = states.abstract_state(specs, mesh)
    with states.logged() as lines, orbax_ext.registered(**KNOBS), ocp.CheckpointManager(path) as manager:
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = manager.restore(0, args=args)
    assert restored["bias"].dtype == jnp.bfloat16
    return [line for line in lines if "not compared with stored" in line]
