"""Checkpoints are restored on more or fewer processes and devices, from every format, and across releases."""

from __future__ import annotations

import os
from collections.abc import Iterator

import orbax.checkpoint as ocp
import pytest

from orbax_ext import lab
from tests.support import plain_orbax, topologies

KNOBS = {"replica_axis": "dp", "strategy": "single"}
TOPOLOGIES = {"2x4": (2, 4), "8x1": (8, 1), "1x8": (1, 8)}


@pytest.fixture(scope="module", params=[pytest.param("2x4", marks=pytest.mark.long), "8x1", "1x8"])
def other_cluster(request: pytest.FixtureRequest) -> Iterator[lab.Cluster]:
    with lab.Cluster(*TOPOLOGIES[request.param]) as running:
        yield running


def test_a_state_saved_on_4x8_is_restored_elsewhere(
    cluster: lab.Cluster, other_cluster: lab.Cluster, path: str
) -> None:
    cluster.run(topologies.save, path)
    assert_restored(other_cluster, path)


def test_a_state_saved_elsewhere_is_restored_on_4x8(
    cluster: lab.Cluster, other_cluster: lab.Cluster, path: str
) -> None:
    other_cluster.run(topologies.save, path)
    assert_restored(cluster, path)


@pytest.mark.parametrize("form", topologies.FORMATS)
def test_every_format_is_restored(cluster: lab.Cluster, path: str, form: str) -> None:
    cluster.run(topologies.save, path, form)
    assert_restored(cluster, path)


def test_a_state_saved_by_another_release_is_restored(cluster: lab.Cluster, path: str) -> None:
    """`make test` sets the other environment: the oldest release restores a state of the newest, and vice versa."""
    python = os.environ.get("ORBAX_EXT_OTHER_PYTHON")
    if not python:
        pytest.skip("ORBAX_EXT_OTHER_PYTHON names no interpreter of an environment with another Orbax")
    with lab.Cluster(2, 4, python=python) as other:
        releases = set(other.run(topologies.save, path))
    assert len(releases) == 1
    assert releases != {ocp.__version__}
    assert_restored(cluster, path)


def assert_restored(cluster: lab.Cluster, path: str) -> None:
    comparisons = cluster.run(topologies.compare, path, KNOBS)
    plain_orbax.assert_restored(comparisons)
    for comparison in comparisons:
        assert comparison.strategy["weights"] == "single"
        assert comparison.strategy["fully_sharded"].startswith("direct")
