"""From what was recorded to a report: the part of this process and, on process 0, the parts of all others."""

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

from orbax_ext import text as text_lib
from orbax_ext.meeting.session import Session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.plan import RestorePlan, Traffic, traffic_by_group
from orbax_ext.redact import redact
from orbax_ext.report import events
from orbax_ext.report.process_report import DAMAGE, ProcessReport
from orbax_ext.report.recorder import PlannedRestore, Recorder
from orbax_ext.report.report import RestoreReport, last_report, publish
from orbax_ext.report.spans import Span, seconds_by_phase
from orbax_ext.storage import s3
from orbax_ext.upstream.hooks import served_by

# Characters that processes send to process 0, which reads all of them at once from the coordination service.
_ALL_PACKED = 2 << 20  # all processes together
_MOST_PACKED = 32 << 10  # one process, if there are few: half of what a message may hold
_LEAST_PACKED = 1 << 10  # one process, however many there are: its totals and a few spans
_MOST_UNPACKED = 1 << 20  # bytes of one report, so that a damaged one cannot fill the memory of process 0
_MOST_SPANS = 5000  # of a process's own report, which stays in memory until the next restore


@contextlib.contextmanager
def recorded() -> Iterator[Recorder]:
    """Records a restore and publishes its report, also if the restore fails, as `last_report()`."""
    recorder, error = Recorder(), ""
    try:
        yield recorder
    except BaseException as caught:
        error = redact(f"{type(caught).__name__}: {caught}")
        raise
    finally:
        try:
            report = make_report(recorder, error)
            publish(report)
            events.record(report)
            logging.info("orbax_ext: %s", report.headline())
        except Exception as failure:  # a missing report must not fail a restore
            logging.warning("orbax_ext: no report of this restore: %s", failure)


@contextlib.contextmanager
def continuing() -> Iterator[None]:
    """Makes one report, the one that `last_report()` returns, of the latest restore and the one in the `with` block."""
    first = last_report()
    try:
        yield
    finally:
        second = last_report()
        if first is not None and second is not None and second is not first:
            publish(first.followed_by(second))


async def collect(session: Session, recorder: Recorder) -> None:
    """Sends this process's report to process 0, which keeps all that arrive; takes a few seconds at most."""
    try:
        packed = await in_thread(session.hand_in, pack(make_process_report(recorder), jax.process_count()))
    except Exception as failure:  # the arrays are restored: a missing report must not fail them
        logging.warning("orbax_ext: no report of all processes: %s", redact(str(failure)))
        return
    recorder.add_reports(unpack_others(packed, jax.process_index()))


def make_report(recorder: Recorder, error: str) -> RestoreReport:
    """Returns the report of a restore that ended, with `error` if it failed."""
    own, planned = make_process_report(recorder), recorder.plan
    return RestoreReport(
        process=own.process,
        processes=jax.process_count(),
        members={own.process: own, **recorder.other_reports},
        leaves=planned.leaves if planned else 0,
        groups=len(_traffic(planned, own.process)) if planned else 0,
        strategy=dict(planned.strategy or strategies(planned.plan)) if planned else {},
        take_overs=tuple(recorder.take_overs),
        error=error,
        served_by=served_by(),
        through_orbax=sorted(recorder.through_orbax),
    )


def make_process_report(recorder: Recorder) -> ProcessReport:
    """Returns what this process has done so far."""
    process, usage, planned = jax.process_index(), s3.restore_usage(), recorder.plan
    moved = _traffic(planned, process) if planned else []
    spans = sorted((_with_bytes(span, moved) for span in recorder.spans), key=lambda span: span.start)
    memory = [device.memory_stats() or {} for device in jax.local_devices()]
    return ProcessReport(
        process=process,
        host=socket.gethostname(),
        started=recorder.started,
        seconds=seconds_by_phase(spans),
        spans=tuple(spans),
        bytes_read=recorder.bytes_read(),
        bytes_unused=recorder.bytes_unused,
        bytes_again=recorder.bytes_again,
        requests=recorder.requests() + usage.metadata_requests,
        bytes_received=sum(group.received for group in moved),
        bytes_sent=sum(group.sent for group in moved),
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        device_peak_bytes=max((int(stats.get("peak_bytes_in_use", 0)) for stats in memory), default=0),
        s3=dataclasses.asdict(usage),
    ).shortened(_MOST_SPANS)


def _traffic(planned: PlannedRestore, process: int) -> Sequence[Traffic]:
    if planned.traffic is not None:
        return planned.traffic
    return traffic_by_group(planned.plan, planned.meshes, process)


def strategies(plan: RestorePlan) -> dict[str, str]:
    """Returns how each leaf is restored and why, by leaf name."""
    by_leaf = {plan.leaves[index].name: f"direct: {reason}" for index, reason in plan.direct.items()}
    strategy = f"{plan.strategy}: {plan.because}" if plan.because else plan.strategy
    by_leaf.update({plan.leaves[index].name: strategy for group in plan.groups for index in group.leaves})
    return by_leaf


def pack(report: ProcessReport, processes: int) -> str:
    """Returns a process's report as text for process 0, with as many spans as there is room for with `processes`."""
    room = min(_MOST_PACKED, max(_LEAST_PACKED, _ALL_PACKED // processes))
    most = len(report.spans)
    while True:
        text = json.dumps(report.shortened(most).to_dict(), separators=(",", ":"))
        packed = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
        if len(packed) <= room or most == 0:
            return packed
        most = most * 3 // 4


def unpack(packed: str) -> ProcessReport:
    """Returns the report that `pack` packed; raises `ValueError` if it is damaged or too large."""
    decompress = zlib.decompressobj()
    try:
        text = decompress.decompress(base64.b85decode(packed), _MOST_UNPACKED)
        if not decompress.eof:
            raise ValueError(f"cut short, or more than {text_lib.size(_MOST_UNPACKED)}")
        return ProcessReport.from_dict(json.loads(text))
    except (zlib.error, *DAMAGE) as error:
        raise ValueError(f"a damaged report: {type(error).__name__}: {error}") from None


def unpack_others(packed: Mapping[int, str], process: int) -> dict[int, ProcessReport]:
    """Returns the reports of all processes but `process`; a damaged one is left out and so counts as missing."""
    reports = {}
    for other, text in packed.items():
        if other != process:
            with contextlib.suppress(ValueError):
                reports[other] = unpack(text)
    return reports


def _with_bytes(span: Span, moved: Sequence[Traffic]) -> Span:
    if span.group is None or span.group >= len(moved) or span.bytes:
        return span
    group = moved[span.group]
    return dataclasses.replace(span, bytes=group.brought if span.phase == "read" else group.received)
