from __future__ import annotations

import os
import pathlib
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support import compilation_cache, s3_proxy, s3_server

# Most programs run once in a test, so that optimising them would take longer than running them.
_FAST_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FAST_TO_COMPILE}".strip()
compilation_cache.use()

# A shell makes what it starts in the background ignore Ctrl-C, and children would inherit that: some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take longest, the longest first, so that no worker has one of them left when the others have ended.
_LONGEST = [
    "multiprocess/test_damaged_metadata",
    "multiprocess/test_demo",
    "multiprocess/test_take_over",
    "multiprocess/test_emergency",
    "multiprocess/test_auto",
    "multiprocess/test_examples",
    "cli/test_run",
    "multiprocess/placement",
    "multiprocess/test_restore_async",
    "multiprocess/test_meeting",
    "multiprocess/test_trainers",
    "multiprocess/test_check",
    "storage/s3/test_faults",
    "multiprocess/test_release",
    "multiprocess/test_s3",
    "multiprocess/test_abstract_state",
    "multiprocess/test_run",
    "multiprocess/test_lab",
    "simulation/test_conformance",
    "multiprocess/test_leaf_kinds",
    "multiprocess/test_restore",
    "meeting/test_session",
    "multiprocess/test_bench",
    "multiprocess/test_gcs",
    "plan/test_course",
    "multiprocess/test_slices",
    "multiprocess/test_step_listing",
    "report/test_progress",
    "multiprocess/test_dtypes",
    "multiprocess/test_emergency_tiers",
    "multiprocess/test_saving",
    "multiprocess/test_report",
    "multiprocess/test_fallback",
    "storage/s3/test_credentials",
    "multiprocess/test_entry_points",
    "cli/test_main",
    "multiprocess/test_property",
    "multiprocess/test_topology",
    "multiprocess/test_donation",
    "cli/test_inspect",
    "storage/s3/test_stores",
    "multiprocess/test_verification",
    "report/test_page",
    "multiprocess/test_fuzz",
    "multiprocess/test_job",
]


# Files whose tests share nothing that is slow to make, and take long: any worker runs any of them.
_APART = {"simulation/test_simulation"}
# Tests that only wait, by the file that the same worker runs meanwhile.
_MEANWHILE = {"multiprocess/test_late_reader": "multiprocess/test_damaged_metadata"}


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # the only process, or the one that starts the workers
        compilation_cache.prune()


class _ByFile(LoadScopeScheduling):
    """Gives a worker a whole file, or a folder where files share slow fixtures: it starts their clusters once."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(nodeid)


def _group(nodeid: str) -> str:
    """Returns the tests with which a test shares a worker: itself, its file or its folder."""
    name = _file(nodeid)
    return nodeid if name in _APART else _MEANWHILE.get(name, name)


def _file(nodeid: str) -> str:
    file = pathlib.PurePosixPath(nodeid.partition("::")[0])
    return str(file.parent if file.parent.name == "placement" else file.with_suffix("")).removeprefix("tests/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByFile(config, log)  # not `--dist loadgroup`: xdist 3.8 ignores its marks with pytest 9.2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first, where several workers share them; what waits meanwhile comes behind."""
    if items and hasattr(items[0].config, "workerinput"):
        ranks = {name: rank for rank, name in enumerate(_LONGEST)}

        def rank(item: pytest.Item) -> tuple[int, bool]:
            name = _file(item.nodeid)
            return ranks.get(_MEANWHILE.get(name, name), len(ranks)), name in _MEANWHILE

        items.sort(key=rank)


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of a real S3-compatible server."""
    if reason := s3_server.missing():
        pytest.skip(reason)
    with s3_server.running() as port:
        yield port


@pytest.fixture(scope="session")
def _proxy(s3_port: int) -> Iterator[s3_proxy.FaultProxy]:
    with s3_proxy.FaultProxy(s3_port) as proxy:
        yield proxy


@pytest.fixture
def proxy(_proxy: s3_proxy.FaultProxy) -> Iterator[s3_proxy.FaultProxy]:
    """A proxy in front of the S3 server, without faults."""
    _proxy.calm()
    yield _proxy
    _proxy.calm()


@pytest.fixture
def bucket(s3_port: int) -> str:
    """The name of a new bucket."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    s3_server.make_bucket(s3_port, name)
    return name


@pytest.fixture
def s3(proxy: s3_proxy.FaultProxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An s3:// directory that does not exist yet; S3 is enabled in this process, through the proxy."""
    from orbax_ext.storage import s3

    for name, value in s3_server.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    s3.enable_s3(proxy.url, "us-east-1", retries=2, stall_seconds=2)
    try:
        yield f"s3://{bucket}/run"
    finally:
        s3.disable_s3()
