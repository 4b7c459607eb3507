from __future__ import annotations

import importlib.metadata
import os
import pathlib
from collections.abc import Iterator

import pytest

from orbax_ext import lab
from tests.support import late_reader, states


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves tests of a late reader to the end; `late_restores` starts their restores first."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else tests/conftest.py says after which file they come
        items.sort(key=lambda item: bool(_late_restores(item)))


@pytest.fixture(scope="module", autouse=True)
def _begin_late_restores(request: pytest.FixtureRequest) -> None:
    """Starts the restores that mostly wait, so that other tests of the same worker run meanwhile."""
    if "PYTEST_XDIST_WORKER" not in os.environ or request.module.__name__.endswith(".test_damaged_metadata"):
        request.getfixturevalue("late_restores")


@pytest.fixture(scope="session")
def late_restores(request: pytest.FixtureRequest) -> None:
    """Starts those of the restores with a late reader that tests need, so that they wait at the same time."""
    for name in sorted({name for item in request.session.items for name in _late_restores(item)}):
        request.getfixturevalue(name)


def _late_restores(item: pytest.Item) -> set[str]:
    return {"stock_late_restore", "our_late_restore"} & set(getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def stock_late_restore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.Run]:
    """A running restore by stock Orbax with a late reader, on a cluster of its own."""
    with lab.Cluster(4, 4) as running:
        yield _begin_late_restore(running, str(tmp_path_factory.mktemp("late")), "stock")


@pytest.fixture(scope="session")
def our_late_restore(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.Run]:
    """A running restore by orbax_ext with a late reader, on a cluster of its own."""
    with lab.Cluster(4, 4) as running:
        yield _begin_late_restore(running, str(tmp_path_factory.mktemp("late")), "ours")


def _begin_late_restore(running: lab.Cluster, path: str, implementation: str) -> lab.Run:
    running.run(states.save, f"{path}/checkpoint", states.STATE, late_reader.MESH)
    return running.submit(late_reader.restore, f"{path}/checkpoint", implementation)


@pytest.fixture(scope="session")
def cluster() -> Iterator[lab.Cluster]:
    """The topology of google/orbax #3184: 4 processes x 8 devices."""
    with lab.Cluster(processes=4, devices=8) as running:
        yield running


@pytest.fixture(scope="session")
def small_cluster() -> Iterator[lab.Cluster]:
    """4 processes x 2 devices, for tests that do not need more."""
    with lab.Cluster(processes=4, devices=2) as running:
        yield running


@pytest.fixture(scope="session")
def measured_cluster() -> Iterator[lab.Cluster]:
    """4 processes x 2 devices whose memory can be measured. Everything else is faster on `small_cluster`."""
    # glibc returns every freed block of that size to the system. By default it keeps blocks of up to 32 MiB, so that
    # the peak of a restore would depend on what ran before it.
    with lab.Cluster(processes=4, devices=2, env={"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}) as running:
        yield running


@pytest.fixture(scope="session")
def half_cluster() -> Iterator[lab.Cluster]:
    """4 processes x 4 devices: with mesh (1, 2, 8) a replica spans two processes."""
    with lab.Cluster(processes=4, devices=4) as running:
        yield running


@pytest.fixture(scope="session")
def saved(cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of `states.STATE`, saved once by plain Orbax. No test may write to it."""
    path = str(tmp_path_factory.mktemp("saved") / "checkpoint")
    cluster.run(states.save, path, states.STATE)
    return path


@pytest.fixture(scope="session")
def orbax() -> tuple[int, ...]:
    """The installed Orbax release, such as (0, 11, 33)."""
    return tuple(int(part) for part in importlib.metadata.version("orbax-checkpoint").split("+")[0].split("."))


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "checkpoint")
