"""Restores of Orbax's emergency manager after the loss of hosts, with stock Orbax and with orbax_ext."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import pytest

from orbax_ext import lab
from tests.support import emergency, file_damage, states
from tests.support.emergency import ONE_HOST, STATE, SWAPPED_HOSTS, SWAPPED_REPLICAS, TWO_HOSTS, Restored


@pytest.fixture(scope="module")
def saved(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Step 1 in both tiers, for a mesh with replicas of one host and one with replicas of two."""
    roots = {}
    for name, mesh in {"one host": ONE_HOST, "two hosts": TWO_HOSTS}.items():
        roots[name] = str(tmp_path_factory.mktemp("emergency"))
        small_cluster.run(emergency.save, roots[name], STATE, mesh)
    return roots


@pytest.fixture
def root(saved: dict[str, str], tmp_path: pathlib.Path) -> str:
    """A copy of the saved steps of replicas of one host."""
    return _copy(saved["one host"], tmp_path)


@pytest.fixture
def wide_root(saved: dict[str, str], tmp_path: pathlib.Path) -> str:
    """A copy of the saved steps of replicas of two hosts."""
    return _copy(saved["two hosts"], tmp_path)


def _copy(saved: str, target: pathlib.Path) -> str:
    shutil.copytree(saved, target / "root")
    return str(target / "root")


def lose(root: str, *places: Any) -> None:
    """Removes the steps of hosts, by number, or of "persistent" storage."""
    for place in places:
        directory = pathlib.Path(root) / (place if isinstance(place, str) else f"host{place}")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()


def assert_exact(results: Sequence[Restored]) -> None:
    assert [result.error for result in results] == [""] * len(results)
    assert states.all_differences([result.differences for result in results]) == []


def test_stock_fails_under_set_mesh(small_cluster: lab.Cluster, root: str) -> None:
    for result in small_cluster.run(
        emergency.restore, root, STATE, ONE_HOST, implementation="stock", context="set_mesh"
    ):
        assert "Gathering global non-fully-addressable arrays only supports tiled=True" in result.error


def test_stock_changes_data(small_cluster: lab.Cluster, root: str) -> None:
    for result in small_cluster.run(emergency.restore, root, STATE, ONE_HOST, implementation="stock"):
        assert result.error == ""
        assert "mask: dtype int32, not bool" in result.differences
        assert "quantized: dtype int32, not int8" in result.differences
        assert "embedding: bytes" in result.differences


@pytest.mark.parametrize("context", ["none", "set_mesh"])
@pytest.mark.parametrize(
    "lost",
    [(), (1,), (2, 3), (1, 2, 3)],
    ids=["nothing", "one replica", "all but one", "all"],
)
def test_ours_is_exact_after_the_loss_of(
    small_cluster: lab.Cluster, root: str, lost: tuple[int, ...], context: str
) -> None:
    lose(root, *lost, *(["persistent"] if len(lost) < 3 else []))  # storage is needed only if no host has the step
    assert_exact(small_cluster.run(emergency.restore, root, STATE, ONE_HOST, context=context))
