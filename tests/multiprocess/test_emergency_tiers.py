"""Restores of Orbax's emergency manager are exact from either tier: every dtype, memory kinds, explicit axes."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping

import pytest

from orbax_ext import lab
from tests.support import emergency
from tests.support.emergency import EVERY_DTYPE, ONE_HOST, STATE, assert_exact, lose
from tests.support.states import MeshSpec, Spec

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
