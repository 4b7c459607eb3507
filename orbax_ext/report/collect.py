"""From what was recorded to a report: figures of this process, the others' if it is process 0, JAX's events."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import resource
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence

import jax
from absl import logging

from orbax_ext.meeting.session import Session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.plan import Traffic, traffic_by_group
from orbax_ext.redact import redact
from orbax_ext.report.recorder import Recorder
from orbax_ext.report.report import ProcessReport, RestoreReport, publish, strategies
from orbax_ext.report.spans import Span, seconds_by_phase
from orbax_ext.storage import s3

_ALL_WORDS = 2 << 20  # characters that the processes hand in to process 0, in all
_MOST_WORDS = 32 << 10  # and each of them
_LEAST_WORDS = 1 << 10
_UNPACKED = 1 << 20  # bytes that one process's report may be unpacked to
_MOST_SPANS = 5000  # that a process keeps for itself
_ORBAX_EVENTS = {
    "read": "primary_replica_deserialization_duration_secs",
    "exchange": "broadcast_duration_secs",
}


@contextlib.contextmanager
def recorded() -> Iterator[Recorder]:
    """Records a restore; its report, also that of one that fails, is `last_report()` afterwards."""
    recorder, error = Recorder(), ""
    try:
        yield recorder
    except BaseException as caught:
        error = redact(f"{type(caught).__name__}: {caught}")
        raise
    finally:
        try:
            finished = _report(recorder, error)
            publish(finished)
            emit(finished)
            logging.info("orbax_ext: %s", finished.headline())
        except Exception as trouble:  # a report is not worth a restore
            logging.warning("orbax_ext: no report of this restore: %s", trouble)


async def collect(session: Session, recorder: Recorder) -> None:
    """Hands this process's report in to process 0, which keeps all of them; takes a few seconds at most."""
    try:
        handed_in = await in_thread(session.hand_in, pack(own(recorder), jax.process_count()))
    except Exception as error:  # the arrays are there: a report is not worth a restore
        logging.warning("orbax_ext: no report of all processes: %s", redact(str(error)))
        return
    recorder.add_reports(_unpacked(handed_in))


def own(recorder: Recorder) -> ProcessReport:
    """What this process did so far."""
    planned, process = recorder.plan, jax.process_index()
    moved = [] if planned is None else traffic_by_group(planned.plan, planned.meshes, process)
    spans = sorted((_with_bytes(span, moved) for span in recorder.spans), key=lambda span: span.start)
    usage = s3.restore_usage()
    found = ProcessReport(
        process=process,
        host=socket.gethostname(),
        started=recorder.started,
        seconds=seconds_by_phase(spans),
        spans=tuple(spans),
        bytes_read=recorder.bytes_read(),
        requests=recorder.requests() + usage.metadata_requests,
        bytes_received=sum(group.received for group in moved),
        bytes_sent=sum(group.sent for group in moved),
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        device_peak_bytes=max((_device_peak(device) for device in jax.local_devices()), default=0),
        s3=dataclasses.asdict(usage),
    )
    return found.shortened(_MOST_SPANS)


def pack(mine: ProcessReport, processes: int) -> str:
    """A process's report as text that is short enough for so many processes."""
    room = min(_MOST_WORDS, max(_LEAST_WORDS, _ALL_WORDS // processes))
    most = len(mine.spans)
    while True:
        text = json.dumps(mine.shortened(most).to_dict(), separators=(",", ":"))
        packed = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
        if len(packed) <= room or most == 0:
            return packed
        most = most * 3 // 4


def unpack(word: str) -> ProcessReport:
    decompress = zlib.decompressobj()
    text = decompress.decompress(base64.b85decode(word), _UNPACKED)
    if not decompress.eof:
        raise ValueError(f"a report of more than {_UNPACKED} bytes")
    return ProcessReport.from_dict(json.loads(text))


def emit(finished: RestoreReport) -> None:
    """JAX's events, under Orbax's names where it has one."""
    own_part, record = finished.own, jax.monitoring.record_event_duration_secs
    for phase, name in _ORBAX_EVENTS.items():
        if phase in own_part.seconds and not finished.error and (phase != "read" or own_part.bytes_read):
            record(f"/jax/checkpoint/read/{name}", own_part.seconds[phase])
    for phase, seconds in own_part.seconds.items():
        record(f"/orbax_ext/restore/{phase}_duration_secs", seconds)
    record("/orbax_ext/restore/duration_secs", own_part.total_seconds)
    for name in ("bytes_read", "bytes_received", "bytes_sent", "requests"):
        jax.monitoring.record_scalar(f"/orbax_ext/restore/{name}", getattr(own_part, name))
    jax.monitoring.record_event(f"/orbax_ext/restore/{'failed' if finished.error else 'finished'}")


def _unpacked(handed_in: Mapping[int, str]) -> dict[int, ProcessReport]:
    """Returns the reports of the other processes; a damaged one is left out and listed as missing."""
    reports = {}
    for process, packed in handed_in.items():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, zlib.error):
            if process != jax.process_index():
                reports[process] = unpack(packed)
    return reports


def _report(recorder: Recorder, error: str) -> RestoreReport:
    mine, planned = own(recorder), recorder.plan
    return RestoreReport(
        process=mine.process,
        processes=jax.process_count(),
        members={mine.process: mine, **recorder.other_reports},
        leaves=planned.leaves if planned else 0,
        groups=len(planned.plan.groups) if planned else 0,
        strategy=strategies(planned.plan) if planned else {},
        error=error,
    )


def _with_bytes(span: Span, moved: Sequence[Traffic]) -> Span:
    if span.group is None or span.group >= len(moved):
        return span
    group = moved[span.group]
    return dataclasses.replace(span, bytes=group.brought if span.phase == "read" else group.received)


def _device_peak(device: jax.Device) -> int:
    return int((device.memory_stats() or {}).get("peak_bytes_in_use", 0))
