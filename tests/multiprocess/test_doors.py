"""Whichever way a restore is asked for, it goes through orbax_ext and gives what plain Orbax gives."""

from __future__ import annotations

import pytest

from orbax_ext import lab
from tests.support import doors, plain

# In every release; the others of its kind share its way in.
CORE = ("v1_load", "v1_own_context_with_load_and_broadcast")


@pytest.fixture(scope="module")
def checkpoints(cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("doors"))
    cluster.run(doors.save, path)
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.core if name in CORE else ()) for name in doors.DOORS]
)
def test_restored_through(cluster: lab.Cluster, checkpoints: str, name: str) -> None:
    found = cluster.run(doors.compare, checkpoints, name)
    plain.agreed(found)
    for each in found:
        assert each.errors == ((), ()), each.messages
        assert set(each.strategy.values()) == {"single"}


def test_v1_loads_as_ever_outside_of_our_contexts(cluster: lab.Cluster) -> None:
    expected = ["ArrayHandler", "BroadcastArrayHandler", "ArrayHandler", "ArrayHandler"]
    assert cluster.run(doors.handlers_of_v1_contexts) == [expected] * 4


def test_v1_load_async_gives_what_orbax_gives(cluster: lab.Cluster, checkpoints: str) -> None:
    """Up to 0.12.8 that is a NotImplementedError for all but safetensors; the day it is not, this still holds."""
    found = cluster.run(doors.load_async, checkpoints)
    plain.agreed(found)
    for each in found:
        assert each.errors[1] or set(each.strategy.values()) == {"single"}
