"""Records a finished restore with JAX's monitoring, under Orbax's event names where Orbax has one."""

from __future__ import annotations

import jax

from orbax_ext.report.report import RestoreReport

_ORBAX_EVENTS = {"read": "primary_replica_deserialization_duration_secs", "exchange": "broadcast_duration_secs"}


def record(report: RestoreReport) -> None:
    """Sends the durations and counts of this process to JAX's listeners."""
    own, record_seconds = report.own, jax.monitoring.record_event_duration_secs
    for phase, name in _ORBAX_EVENTS.items():
        # Orbax sends these events for restores that succeed only, and the first on processes that read only.
        if phase in own.seconds and not report.error and (phase != "read" or own.bytes_read):
            record_seconds(f"/jax/checkpoint/read/{name}", own.seconds[phase])
    for phase, seconds in own.seconds.items():
        record_seconds(f"/orbax_ext/restore/{phase}_duration_secs", seconds)
    record_seconds("/orbax_ext/restore/duration_secs", own.total_seconds)
    for name in ("bytes_read", "bytes_received", "bytes_sent", "requests"):
        jax.monitoring.record_scalar(f"/orbax_ext/restore/{name}", getattr(own, name))
    jax.monitoring.record_event(f"/orbax_ext/restore/{'failed' if report.error else 'finished'}")
