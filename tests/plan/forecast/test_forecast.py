from __future__ import annotations

import pytest

from orbax_ext.plan import Rates
from orbax_ext.plan.forecast import described, forecast

pytestmark = pytest.mark.once

RATES = Rates(1e9, 1e10)


def test_chunks_that_do_not_fit_are_listed_with_their_leaf() -> None:
    mesh = forecast.mesh_on((("dp", 2), ("tp", 4)), 2)
    model = "good float32 4096x4096 P(None,tp) 4096x1024\nbad float32 4096x4096 P(tp) 4096x512"
    leaves, _ = described.place(described.parse_shapes(model), mesh, [])
    found = forecast.forecast(leaves, mesh, 2, RATES, 10**9, "direct")
    assert forecast.unfit_chunks(found.volumes, leaves) == []  # each process has all of it anyway
    mesh = forecast.mesh_on((("dp", 2), ("tp", 4)), 8)
    found = forecast.forecast(leaves, mesh, 8, RATES, 10**9, "direct")
    (unfit,) = forecast.unfit_chunks(found.volumes, leaves)
    assert (unfit.leaf.name, unfit.read / unfit.needed) == ("bad", 4)
    assert "chunks (4096, 512) do not fit blocks (1024, 4096) in dimension 0" in str(unfit)
    good = forecast.forecast(leaves[:1], mesh, 8, RATES, 10**9, "direct")
    assert found.seconds > 4 * good.seconds  # reading whole chunks takes time too


def test_auto_follows_the_rates_and_gives_the_reason() -> None:
    mesh = forecast.mesh_on((("dp", 8), ("tp", 4)), 8)
    leaves, _ = described.place(described.parse_shapes("w.{0..15} bfloat16 8192x8192 P(None,tp) 1024x2048"), mesh, [])
    slow_storage, fast_storage = Rates(1e8, 1e10), Rates(1e10, 1e8)
    found = forecast.forecast(leaves, mesh, 8, slow_storage, 10**10, "auto")
    (reason,) = forecast.reasons(found, leaves)
    assert reason.startswith("spread: ")
    assert found.volumes.total_read == sum(leaf.block_bytes * 4 for leaf in leaves)
    found = forecast.forecast(leaves, mesh, 8, fast_storage, 10**10, "auto")
    (reason,) = forecast.reasons(found, leaves)
    assert reason.startswith("direct: ")
    assert found.volumes.total_received == 0


def test_auto_does_some_of_both_where_storage_and_fabric_are_alike() -> None:
    mesh = forecast.mesh_on((("dp", 8), ("tp", 4)), 8)
    leaves, _ = described.place(described.parse_shapes("w.{0..63} bfloat16 8192x8192 P(None,tp) 1024x2048"), mesh, [])
    found = {name: forecast.forecast(leaves, mesh, 8, Rates(1e9, 1e9), 10**10, name) for name in forecast.STRATEGIES}
    auto, spread, direct = found["auto"], found["spread"], found["direct"]
    reasons = forecast.reasons(auto, leaves)
    assert sorted(reason.partition(":")[0] for reason in reasons) == ["direct", "spread"]
    assert auto.plan.groups
    assert spread.volumes.total_read < auto.volumes.total_read < direct.volumes.total_read
    assert direct.volumes.total_received < auto.volumes.total_received < spread.volumes.total_received
    assert auto.seconds < min(spread.seconds, direct.seconds)


def test_auto_reads_fewer_groups_directly_the_more_storage_has_to_read_besides() -> None:
    mesh = forecast.mesh_on((("dp", 8), ("tp", 4)), 8)
    travelling = "w.{0..31} bfloat16 8192x8192 P(None,tp) 1024x2048"
    moments = "m.{0..31} bfloat16 8192x8192 P(dp,tp) 1024x2048"  # sharded over all devices
    exchanged = []
    for shapes in (travelling, f"{travelling}\n{moments}"):
        leaves, _ = described.place(described.parse_shapes(shapes), mesh, [])
        auto = forecast.forecast(leaves, mesh, 8, Rates(1e9, 1e9), 10**10, "auto")
        exchanged.append(len(auto.plan.sources(auto.plan.groups)))
    assert exchanged[0] < exchanged[1]
