from __future__ import annotations

import pytest

from orbax_ext.options import Options
from orbax_ext.plan.cost import PER_ARRAY, PER_GROUP, START, Rates, is_tiny, seconds
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


@pytest.mark.parametrize(
    ("load", "tiny"), [(Load(), True), (Load(read=1 << 20), False), (Load(read=1, arrays=32), False)]
)
def test_a_load_is_tiny_if_it_has_few_bytes_in_few_arrays(load: Load, tiny: bool) -> None:
    assert is_tiny(load) == tiny


def test_given_rates_are_in_gigabits() -> None:
    assert Rates.given(Options()) is None
    rates = Rates.given(Options(storage_gbps=8, fabric_gbps=80))
    assert rates == Rates(1e9, 1e10)
    assert str(rates) == "storage 1000 and fabric 10000 MB/s a process, given"


@pytest.mark.parametrize(
    ("fabric", "how", "one"), [(9e8, "measured", True), (4e9, "measured", False), (9e8, "given", False)]
)
def test_only_measured_rates_that_are_near_each_other_may_be_one_link(fabric: float, how: str, one: bool) -> None:
    assert Rates(1e9, fabric, how=how).may_be_one_link == one
