"""The events that JAX's monitoring listeners get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.monitoring
import pytest

from orbax_ext.report import events
from orbax_ext.report.report import RestoreReport
from tests.support import reports

ORBAX_READ = "/jax/checkpoint/read/primary_replica_deserialization_duration_secs"
ORBAX_EXCHANGE = "/jax/checkpoint/read/broadcast_duration_secs"


@dataclasses.dataclass
class Heard:
    durations: dict[str, float] = dataclasses.field(default_factory=dict)
    scalars: dict[str, float] = dataclasses.field(default_factory=dict)
    events: list[str] = dataclasses.field(default_factory=list)


@pytest.fixture
def heard() -> Heard:
    heard = Heard()
    jax.monitoring.register_event_duration_secs_listener(lambda name, secs, **_: heard.durations.update({name: secs}))
    jax.monitoring.register_scalar_listener(lambda name, value, **_: heard.scalars.update({name: value}))
    jax.monitoring.register_event_listener(lambda name, **_: heard.events.append(name))
    return heard


@pytest.mark.core
def test_jax_gets_events_under_orbax_names_and_ours(restore: Callable[..., RestoreReport], heard: Heard) -> None:
    report = restore()
    read = heard.durations[ORBAX_READ]
    assert read == heard.durations["/orbax_ext/restore/read_duration_secs"] == report.own.seconds["read"]
    assert heard.durations["/orbax_ext/restore/duration_secs"] >= read
    assert heard.scalars["/orbax_ext/restore/bytes_read"] == report.own.bytes_read
    assert "/orbax_ext/restore/finished" in heard.events


def test_a_failed_restore_sends_its_figures_but_none_of_orbax_events(heard: Heard) -> None:
    events.record(dataclasses.replace(reports.make_report(1), error="OSError: gone"))
    assert not {ORBAX_READ, ORBAX_EXCHANGE} & heard.durations.keys()
    assert "/orbax_ext/restore/read_duration_secs" in heard.durations
    assert heard.events == ["/orbax_ext/restore/failed"]


def test_a_process_that_read_nothing_sends_no_read_event_of_orbax(heard: Heard) -> None:
    report = reports.make_report(2)
    receiver = dataclasses.replace(report.own, bytes_read=0)
    events.record(dataclasses.replace(report, members={**report.members, 0: receiver}))
    assert ORBAX_READ not in heard.durations
    assert heard.durations[ORBAX_EXCHANGE] == report.own.seconds["exchange"]
