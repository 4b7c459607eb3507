from __future__ import annotations

import pytest

from orbax_ext.plan.boundary import GroupBytes
from orbax_ext.transfer.rates import LatestRate, LinkRates, Stopwatch

pytestmark = pytest.mark.once


def test_a_rate_follows_the_latest_measurements() -> None:
    rate = LatestRate()
    assert rate.latest == 0.0
    for second in range(1, 11):
        rate.add(100 * second, second)
    assert rate.latest == 100.0
    for second in range(1, 7):
        rate.add(1000 + second, 10 + second)
        rate.add(1000 + second, 99)  # nothing new
    assert rate.latest == 1.0


def test_a_stop_does_not_count_for_the_usual_rate() -> None:
    rate = LatestRate()
    assert rate.usual == 0.0
    seconds = 0.0
    for number in range(1, 6):
        seconds += 20.0 if number == 3 else 1.0
        rate.add(100 * number, seconds)
    assert rate.usual == 100.0
    assert rate.latest < 25.0
    for number in range(6, 11):  # one that stays slow does
        seconds += 20.0
        rate.add(100 * number, seconds)
    assert rate.usual == 5.0


def test_short_measurements_are_taken_together_while_they_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("orbax_ext.transfer.rates.time.monotonic", lambda: now[0])
    short, long = LatestRate(at_least=1.0), LatestRate()
    for number in range(1, 201):
        seconds = 0.01 * number + (0.1 if number > 195 else 0)  # once it takes ten times as long
        for rate in (short, long):
            rate.add(number, seconds)
    assert 1.0 <= short.seconds < 1.2
    assert short.latest > 0.8 * 100
    assert long.latest < 0.5 * 100
    for number in range(201, 206):  # it becomes faster, and reads little
        now[0] += 2.5
        short.add(number + 1000, seconds + 0.001 * (number - 200))
    assert short.latest > 1000


def test_a_stopwatch_runs_while_anything_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("orbax_ext.transfer.rates.time.monotonic", lambda: now[0])
    watch = Stopwatch()
    assert watch.part == 1.0
    with watch:
        now[0] = 1.0
        with watch:
            now[0] = 3.0
        now[0] = 4.0
        assert watch.seconds == 4.0
    now[0] = 10.0
    assert watch.seconds == 4.0
    assert watch.part == 0.4
    with watch:
        now[0] = 11.0
    assert watch.seconds == 5.0


def test_rates_of_links_count_the_bytes_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("orbax_ext.transfer.rates.time.monotonic", lambda: now[0])
    rates = LinkRates([GroupBytes(share=10, direct=40, link=30)] * 4)
    assert rates.fabric == 0.0
    with rates.storage_busy, rates.fabric_busy:
        now[0] = 2.0
    for place in (0, 1):
        rates.share_read(place, 1.0)
    rates.group_read(3)
    assert rates.storage == 30.0
    rates.exchanged(2)
    assert rates.fabric == 30.0
    assert rates.half_of_exchange(2) == 0.5


def test_nobody_knows_how_long_the_first_exchange_takes() -> None:
    assert LinkRates([GroupBytes(share=10, direct=40, link=30)]).half_of_exchange(0) is None
