"""Restores of Orbax's emergency manager are exact from either tier: every dtype, memory kinds, explicit axes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Mapping

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from orbax_ext import lab
from tests.support import emergency, states
from tests.support.emergency import EVERY_DTYPE, ONE_HOST, STATE, assert_exact, lose
from tests.support.states import MeshSpec, P, Spec

SAVED = {"every dtype": EVERY_DTYPE, "state": STATE}
# Which hosts have lost the step. Storage has it only where no host has it.
LOST: Mapping[str, tuple[int, ...]] = {"moved": (), "summed": (2, 3), "from storage": (1, 2, 3)}
TIERS = pytest.mark.parametrize("tier", LOST)


@pytest.fixture(scope="module")
def saved(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Step 1 of each of `SAVED`, on hosts 1 to 3 and in persistent storage."""
    roots = {name: str(tmp_path_factory.mktemp("emergency")) for name in SAVED}
    for name, specs in SAVED.items():
        small_cluster.run(emergency.save, roots[name], specs, ONE_HOST)
    return roots


def after_loss(saved: str, tmp_path: pathlib.Path, tier: str) -> str:
    root = str(tmp_path / "root")
    shutil.copytree(saved, root)
    lose(root, *LOST[tier], *([] if tier == "from storage" else ["persistent"]))
    return root


def restore_from(
    tier: str,
    cluster: lab.Cluster,
    root: str,
    specs: Mapping[str, Spec],
    mesh: MeshSpec = ONE_HOST,
    context: str = "none",
) -> None:
    results = cluster.run(emergency.restore, root, specs, mesh, context=context)
    assert_exact(results)
    sources = {how.partition(":")[0] for how in results[0].strategy.values()}
    assert sources == {"storage" if tier == "from storage" else "local"}


@pytest.mark.core
@TIERS
def test_every_dtype_is_exact(
    small_cluster: lab.Cluster, saved: Mapping[str, str], tmp_path: pathlib.Path, tier: str
) -> None:
    restore_from(tier, small_cluster, after_loss(saved["every dtype"], tmp_path, tier), EVERY_DTYPE)


@TIERS
def test_memory_kinds_and_explicit_axes_are_kept(
    small_cluster: lab.Cluster, saved: Mapping[str, str], tmp_path: pathlib.Path, tier: str
) -> None:
    mesh = dataclasses.replace(ONE_HOST, types=("auto", "explicit"))
    wanted = {name: dataclasses.replace(spec, memory_kind="pinned_host") for name, spec in STATE.items()}
    root = after_loss(saved["state"], tmp_path, tier)
    restore_from(tier, small_cluster, root, wanted, mesh=mesh, context="set_mesh")


@pytest.mark.parametrize("fault", ["storage refuses", "storage hangs"])
def test_storage_is_not_asked_for_what_the_hosts_have(
    small_cluster: lab.Cluster, saved: Mapping[str, str], tmp_path: pathlib.Path, fault: str
) -> None:
    root = after_loss(saved["state"], tmp_path, "moved")
    assert_exact(small_cluster.run(emergency.restore, root, STATE, ONE_HOST, fault=(1, fault)))


def test_storage_that_can_not_be_asked_fails_all_who_need_it(
    small_cluster: lab.Cluster, saved: Mapping[str, str], tmp_path: pathlib.Path
) -> None:
    root = after_loss(saved["state"], tmp_path, "from storage")
    results = small_cluster.run(emergency.restore_after_failure, root, STATE, ONE_HOST, (1, "storage refuses"), {})
    for error, _ in results:
        assert error.startswith("RestoreFailedError")
        assert "process 1 (" in error
        assert "in phase 'find the step in storage': OSError: no route to storage" in error
    assert_exact([after for _, after in results])


def test_replicas_are_compared_alone_where_storage_does_not_answer(
    small_cluster: lab.Cluster, saved: Mapping[str, str], tmp_path: pathlib.Path
) -> None:
    root = after_loss(saved["state"], tmp_path, "moved")
    fault, knobs = (0, "storage refuses"), {"verify": True}
    results = small_cluster.run(emergency.restore, root, STATE, ONE_HOST, fault=fault, knobs=knobs)
    assert_exact(results)
    assert any("persistent storage does not answer" in line for line in results[0].lines)


@pytest.mark.once
def test_all_meet_once_between_arriving_and_the_first_group(
    small_cluster: lab.Cluster, saved: Mapping[str, str], tmp_path: pathlib.Path
) -> None:
    root = after_loss(saved["state"], tmp_path, "moved")
    results = small_cluster.run(emergency.restore_with_phases, root, STATE, ONE_HOST)
    assert_exact([result for result, _ in results])
    groups = ["read group 1 of 2", "read group 2 of 2"]  # of two tables of devices
    assert results[0][1] == ["look at the local step", *groups, "hand over"]


def test_a_persistent_step_of_an_ordinary_manager_is_restored(
    small_cluster: lab.Cluster, saved: Mapping[str, str], tmp_path: pathlib.Path
) -> None:
    root = after_loss(saved["state"], tmp_path, "from storage")
    lose(root, "persistent")
    with ocp.CheckpointManager(f"{root}/persistent") as manager:
        state = {name: jnp.asarray(data) for name, data in states.host_data(STATE).items()}
        manager.save(1, args=ocp.args.StandardSave(state))
    metadata = json.loads(pathlib.Path(root, "persistent", "1", "default", "_METADATA").read_text())
    assert metadata["use_zarr3"] is False
    restore_from("from storage", small_cluster, root, STATE)


@TIERS
@pytest.mark.parametrize("change", ["fewer", "more"])
def test_a_step_with_other_leaves_is_refused_by_all(
    small_cluster: lab.Cluster, saved: Mapping[str, str], tmp_path: pathlib.Path, tier: str, change: str
) -> None:
    root = after_loss(saved["state"], tmp_path, tier)
    wanted = {name: spec for name, spec in STATE.items() if name != "bias"}
    if change == "more":
        wanted = {**STATE, "momentum": Spec((16, 64), "float32", P("tp"))}
    for result in small_cluster.run(emergency.restore, root, wanted, ONE_HOST):
        assert result.error.startswith("ValueError: the tree structures do not match: expected step 1 to have")
        assert ("also has bias" if change == "fewer" else "lacks momentum") in result.error


def test_a_host_with_another_tree_is_no_reader(
    small_cluster: lab.Cluster, saved: Mapping[str, str], tmp_path: pathlib.Path
) -> None:
    root = after_loss(saved["state"], tmp_path, "moved")
    file = pathlib.Path(root, "host1", "1", "state", "_METADATA")
    metadata = json.loads(file.read_text())
    removed = next(key for key in metadata["tree_metadata"] if "bias" in key)
    del metadata["tree_metadata"][removed]
    file.write_text(json.dumps(metadata))
    results = small_cluster.run(emergency.restore, root, STATE, ONE_HOST)
    assert_exact(results)
    (line,) = [line for line in results[1].lines if "lacks bias; other hosts or storage have to provide it" in line]
    assert "/host1/1/state" in line
