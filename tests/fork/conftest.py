from __future__ import annotations

from collections.abc import Iterator

import pytest

from orbax_ext import lab
from tests.fork import scenarios
from tests.support import fork_installation
from tests.support.fork_installation import Installation
from tools import fork, releases

RELEASES = ("0.11.33", "0.12.3", "0.12.8")  # the oldest, one in the middle, the newest


@pytest.fixture(
    scope="module",
    params=[(release, kind) for release in RELEASES for kind in ("stock", "fork")],
    ids=lambda param: "-".join(param),
)
def orbax(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Each release as it is, then the fork built from it."""
    release, kind = request.param
    directory = tmp_path_factory.mktemp(f"{kind}-{release}")
    wheel = fork.build(release, directory) if kind == "fork" else releases.wheel(release)
    python = fork_installation.install(release, wheel)
    with lab.Cluster(4, 4, python=str(python), log_dir=directory / "logs") as cluster:
        wanted = f"{release}+ext.{fork.FORK}" if kind == "fork" else release
        assert set(cluster.run(scenarios.installed_version)) == {wanted}
        yield Installation(release, kind == "fork", cluster, str(python), directory)
