"""Checkpoints move: to more or fewer processes and devices, to other formats, to another release of Orbax."""

from __future__ import annotations

import os
from collections.abc import Iterator

import orbax.checkpoint as ocp
import pytest

from orbax_ext import lab
from tests.support import plain, topologies

KNOBS = {"replica_axis": "dp", "strategy": "single"}
OTHERS = {"2x4": (2, 4), "8x1": (8, 1), "1x8": (1, 8)}


@pytest.fixture(scope="module", params=[pytest.param("2x4", marks=pytest.mark.long), "8x1", "1x8"])
def other(request: pytest.FixtureRequest) -> Iterator[lab.Cluster]:
    with lab.Cluster(*OTHERS[request.param]) as running:
        yield running


def test_a_state_saved_on_4x8_is_restored_elsewhere(cluster: lab.Cluster, other: lab.Cluster, path: str) -> None:
    cluster.run(topologies.save, path)
    restored_alike(other, path)


def test_a_state_saved_elsewhere_is_restored_on_4x8(cluster: lab.Cluster, other: lab.Cluster, path: str) -> None:
    other.run(topologies.save, path)
    restored_alike(cluster, path)


@pytest.mark.parametrize("form", topologies.FORMATS)
def test_every_format_is_restored(cluster: lab.Cluster, path: str, form: str) -> None:
    cluster.run(topologies.save, path, form)
    restored_alike(cluster, path)


def test_what_the_other_end_of_the_supported_releases_saved_is_restored(cluster: lab.Cluster, path: str) -> None:
    """`make test` names the other environment: the oldest release restores what the newest saved, and vice versa."""
    python = os.environ.get("ORBAX_EXT_OTHER_PYTHON")
    if not python:
        pytest.skip("ORBAX_EXT_OTHER_PYTHON names no interpreter of an environment with another Orbax")
    with lab.Cluster(2, 4, python=python) as elsewhere:
        releases = set(elsewhere.run(topologies.save, path))
    assert len(releases) == 1
    assert releases != {ocp.__version__}
    restored_alike(cluster, path)


def restored_alike(cluster: lab.Cluster, path: str) -> None:
    found = cluster.run(topologies.compare, path, KNOBS)
    plain.agreed(found)
    for each in found:
        assert each.errors == ((), ()), each.messages
        assert each.strategy["weights"] == "single"
        assert each.strategy["fully_sharded"].startswith("direct")
