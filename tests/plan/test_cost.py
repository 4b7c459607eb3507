from __future__ import annotations

import pytest

from orbax_ext.plan.cost import PER_ARRAY, PER_GROUP, START, Rates, seconds
from orbax_ext.plan.volumes import Load

pytestmark = pytest.mark.once


def test_reading_and_exchanging_overlap() -> None:
    rates = Rates(storage=100.0, fabric=50.0)
    slow_reads, slow_exchange = Load(read=1000, link=100, groups=10), Load(read=100, link=1000, groups=10)
    assert seconds(slow_reads, rates) == pytest.approx(START + 10 + (2 + 10 * PER_GROUP) / 10)
    assert seconds(slow_exchange, rates) == pytest.approx(START + 20 + 10 * PER_GROUP + 0.1)


def test_direct_reads_wait_for_the_busiest_process_or_for_a_shared_store() -> None:
    load = Load(read=1000, read_by_all=4000)
    assert seconds(Load(read=1000, read_by_all=4000, arrays=8), Rates(100.0, 50.0)) == pytest.approx(10 + 8 * PER_ARRAY)
    assert seconds(load, Rates(100.0, 50.0, storage_total=200.0)) == pytest.approx(20)


def test_rates_are_shown_in_megabytes() -> None:
    assert str(Rates(1e9, 1e10)) == "storage 1000 and fabric 10000 MB/s a process, given"
