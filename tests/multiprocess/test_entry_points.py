"""Every Orbax call that restores goes through orbax_ext, and returns what plain Orbax returns."""

from __future__ import annotations

import pytest

from orbax_ext import lab
from tests.support import entry_points, plain_orbax

# One of each kind runs on every release; the others share its code path.
CORE = ("v1_load", "v1_own_context_with_load_and_broadcast")


@pytest.fixture(scope="module")
def checkpoints(cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("entry_points"))
    cluster.run(entry_points.save, path)
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.core if name in CORE else ()) for name in entry_points.ENTRY_POINTS]
)
def test_restored_through(cluster: lab.Cluster, checkpoints: str, name: str) -> None:
    comparisons = cluster.run(entry_points.compare, checkpoints, name)
    plain_orbax.assert_restored(comparisons)
    assert [set(comparison.strategy.values()) for comparison in comparisons] == [{"single"}] * 4


def test_v1_uses_its_own_handler_outside_of_our_contexts(cluster: lab.Cluster) -> None:
    expected = ["ArrayHandler", "BroadcastArrayHandler", "ArrayHandler", "ArrayHandler"]
    assert cluster.run(entry_points.handlers_of_v1_contexts) == [expected] * 4


def test_v1_load_async_gives_what_orbax_gives(cluster: lab.Cluster, checkpoints: str) -> None:
    """Up to 0.12.8 that is a NotImplementedError for all formats but safetensors; in later releases it may restore."""
    comparisons = cluster.run(entry_points.load_async, checkpoints)
    plain_orbax.assert_same(comparisons)
    for comparison in comparisons:
        assert "NotImplementedError" in comparison.errors[1] or set(comparison.strategy.values()) == {"single"}
