from __future__ import annotations

from collections.abc import Iterator

import pytest

from orbax_ext import lab

DEVICES = 8  # in all, over however many processes


# One process and four show what depends on a release; two and eight show other ways to divide the devices.
PROCESSES = [1, pytest.param(2, marks=pytest.mark.once), 4, pytest.param(8, marks=pytest.mark.long)]


@pytest.fixture(scope="session", params=PROCESSES, ids="{}-processes".format)
def cluster(request: pytest.FixtureRequest) -> Iterator[lab.Cluster]:
    with lab.Cluster(request.param, DEVICES // request.param, timeout=90) as running:
        yield running


@pytest.fixture
def several(cluster: lab.Cluster) -> lab.Cluster:
    if cluster.processes == 1:
        pytest.skip("needs several processes")
    return cluster
