"""The benchmark, on a state so small that only its byte counts mean something."""

from __future__ import annotations

import json
import pathlib

import pytest

from bench import __main__ as bench
from bench import network, results
from bench.network import Links
from bench.scenarios import Scenario, scenarios

pytestmark = pytest.mark.once

TINY = Scenario(
    "tiny", "two hosts", Links(800, 800), (("dp", 2), ("tp", 2)), (512, 1024), ("tp", None), leaves=8, hosts=2, repeat=1
)

shaped = pytest.mark.skipif(bool(network.why_not()), reason=f"no hosts with shaped links here: {network.why_not()}")


@shaped
def test_every_byte_is_counted_on_its_link(tmp_path: pathlib.Path) -> None:
    plain, spread = bench.run(TINY, ["plain", "spread"], 1, None, "")
    for result in (plain, spread):
        assert not result.failed
        assert result.exact
    assert 2.0 <= plain.median("storage_bytes") / TINY.unique_bytes < 2.2
    assert 1.0 <= spread.median("storage_bytes") / TINY.unique_bytes < 1.2
    assert plain.median("fabric_bytes") < 0.1 * TINY.unique_bytes
    assert 1.0 <= spread.median("fabric_bytes") / spread.fabric_least < 1.2
    assert results.from_json(json.loads(json.dumps(results.to_json([plain, spread], {})))) == [plain, spread]
    assert results.table(TINY, [plain, spread]).count("| yes |") == 2


@shaped
def test_hosts_are_removed_afterwards(tmp_path: pathlib.Path) -> None:
    with network.Network(2, Links(100, 100), tmp_path) as net:
        assert namespaces() == {*map(net.namespace_of, range(2))}
    assert not namespaces()


def test_without_root_it_runs_on_loopback() -> None:
    (result,) = bench.run(TINY, ["auto"], 1, None, "it needs root")
    assert result.exact
    assert result.median("storage_bytes") == 0  # not known


def test_limits_are_what_the_links_allow() -> None:
    known = {scenario.name: scenario for scenario in scenarios()}
    assert known["dense"].limit() == pytest.approx((1 << 30) / 4 / 40e6)
    assert known["fast_storage"].limit() == pytest.approx((256 << 20) / 60e6)  # some travels while most is read
    assert known["shared_link"].limit() == pytest.approx((1 << 30) / 50e6)
    assert known["capped_storage"].limit() == pytest.approx((128 << 20) / 40e6)
    assert known["hosts_2"].limit() == known["hosts_4"].limit() == known["hosts_8"].limit()


def namespaces() -> set[str]:
    folder = pathlib.Path("/var/run/netns")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return {name for name in names if name.startswith(network.PREFIX) and "-h" in name}
