"""From what was recorded to a report, and reports on their way to process 0."""

from __future__ import annotations

import base64
import json
import types
import zlib
from collections.abc import Callable
from typing import cast

import pytest

import orbax_ext
from orbax_ext import handler
from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo, RestorePlan
from orbax_ext.plan.planner import make_plan
from orbax_ext.report import collect
from orbax_ext.report.collect import pack, unpack, unpack_others
from orbax_ext.report.process_report import ProcessReport
from orbax_ext.report.recorder import Recorder
from orbax_ext.report.report import RestoreReport
from tests.support import reports


@pytest.mark.core
def test_a_restore_on_one_process_leaves_a_report(restore: Callable[..., RestoreReport]) -> None:
    report = restore()
    assert (report.process, report.processes, report.leaves, report.error) == (0, 1, 2, "")
    assert {strategy.partition(":")[0] for strategy in report.strategy.values()} == {"direct"}
    phases = [span.phase for span in report.own.spans]
    assert phases == ["describe", "plan", "read"]
    assert all(span.end >= span.start >= 0 for span in report.own.spans)
    assert report.own.bytes_read > 0
    assert report.own.requests > 0
    assert report.own.host_peak_bytes > 10_000_000


@pytest.mark.core
def test_a_failed_restore_leaves_a_report_that_says_why(
    restore: Callable[..., RestoreReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise ValueError("no memory to speak of")

    monkeypatch.setattr(handler, "memory_limit", fail)
    with pytest.raises(ValueError, match="no memory"):
        restore()
    report = orbax_ext.last_report()
    assert report is not None
    assert report.error == "ValueError: no memory to speak of"
    assert "error: ValueError: no memory to speak of" in str(report)


def test_a_report_that_cannot_be_made_does_not_fail_the_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> RestoreReport:
        raise RuntimeError("no report")

    monkeypatch.setattr(collect, "make_report", fail)
    with collect.recorded():
        restored = True
    assert restored


def test_bytes_of_the_plan_are_zero_before_there_is_one() -> None:
    with collect.recorded() as recorder, recorder.span("read", group=0):
        pass
    report = collect.make_process_report(recorder)
    assert (report.bytes_received, report.bytes_sent) == (0, 0)
    assert [span.bytes for span in report.spans] == [0]


def test_every_span_of_a_group_has_its_bytes() -> None:
    mesh = MeshInfo(("dp",), (2,), (0, 1))
    leaves = [
        Leaf(f"w{n}", (1024, 512), "float32", 4, (1024, 512), 0, ((), ()), (512, 512), divisible=True) for n in range(3)
    ]
    plan = make_plan(leaves, [mesh], Options(), processes=2, group_bytes=2 << 20)
    recorder = Recorder()
    recorder.planned(3, (mesh,), plan.divided([1, 2]))
    with recorder.span("read", group=0), recorder.span("exchange", group=0):
        pass
    with recorder.span("read directly", group=2, size=2 << 20):
        pass
    with recorder.span("read directly", group=0, size=2 << 20):  # as if one that was added came after it
        pass
    spans = collect.make_process_report(recorder).spans
    assert sorted((span.phase, span.group, span.bytes) for span in spans) == [
        ("exchange", 0, 1 << 20),
        ("read", 0, 1 << 20),
        ("read directly", 0, 2 << 20),
        ("read directly", 2, 2 << 20),
    ]


@pytest.mark.parametrize(
    ("because", "strategy"),
    [("", "spread"), ("storage is slow", "spread: storage is slow")],
    ids=["asked for", "chosen"],
)
def test_every_leaf_has_its_strategy_and_the_reason(because: str, strategy: str) -> None:
    plan = types.SimpleNamespace(
        strategy="spread",
        because=because,
        leaves=[types.SimpleNamespace(name=name) for name in "abc"],
        groups=[types.SimpleNamespace(leaves=[0]), types.SimpleNamespace(leaves=[2])],
        direct={1: "it is small"},
    )
    assert collect.strategies(cast(RestorePlan, plan)) == {"a": strategy, "b": "direct: it is small", "c": strategy}


@pytest.mark.parametrize("processes", [1, 64, 512, 4096])
def test_packed_reports_are_small_with_any_number_of_processes(processes: int) -> None:
    report = _long_report()
    packed = pack(report, processes)
    assert len(packed) * processes <= max(4 << 20, len(packed))
    unpacked = unpack(packed)
    assert unpacked.seconds == pytest.approx(report.seconds, abs=1e-5)
    assert len(unpacked.spans) + unpacked.spans_left_out == len(report.spans)
    assert unpacked.spans  # the longest at least


def test_a_short_report_is_unpacked_as_it_was_packed() -> None:
    report = reports.make_report(2).members[1]
    unpacked = unpack(pack(report, 64))
    assert unpacked.to_dict() == report.to_dict()
    assert unpacked.spans_left_out == 0


def test_packing_leaves_out_the_shortest_spans() -> None:
    report = _long_report()
    kept = unpack(pack(report, 4096)).spans
    longest = sorted((span.seconds for span in report.spans), reverse=True)[: len(kept)]
    assert sorted((span.seconds for span in kept), reverse=True) == pytest.approx(longest, abs=1e-5)


def test_the_room_for_a_report_shrinks_with_the_number_of_processes_down_to_a_limit() -> None:
    sizes = [len(pack(_long_report(), processes)) for processes in (1, 256, 1024, 2048, 100_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= 32 << 10
    assert sizes[-2:] == [sizes[-1]] * 2
    assert sizes[-1] <= 1 << 10


def test_a_report_whose_totals_alone_exceed_the_room_is_packed_without_spans() -> None:
    report = _long_report()
    phases = {f"phase {number**3}": number / 7 for number in range(2000)}
    unpacked = unpack(pack(ProcessReport(1, "host", 0.0, phases, report.spans), 4096))
    assert (len(unpacked.seconds), unpacked.spans) == (2000, ())
    assert unpacked.spans_left_out == len(report.spans)


def test_a_report_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="or more than"):
        unpack(_packed({"host": "x" * (64 << 20)}))


@pytest.mark.parametrize(
    "packed",
    [
        "",
        "no base 85: \x7f",
        base64.b85encode(b"not compressed").decode(),
        pack(reports.make_report(1).own, 1)[:-5],
        base64.b85encode(zlib.compress(b"{")).decode(),
        base64.b85encode(zlib.compress(b"[" * 100_000)).decode(),
        base64.b85encode(zlib.compress(b"\xff")).decode(),
    ],
    ids=["empty", "no base 85", "not compressed", "cut short", "no JSON", "nested too deep", "no text"],
)
def test_damaged_text_is_a_value_error(packed: str) -> None:
    with pytest.raises(ValueError, match="a damaged report"):
        unpack(packed)


@pytest.mark.parametrize(
    "change",
    [
        {"host": ...},
        {"process": "x"},
        {"requests": float("inf")},
        {"spans": 3},
        {"spans": [{"phase": "read"}]},
        {"seconds": []},
        {"s3": {"array_bytes": None}},
    ],
    ids=str,
)
def test_damaged_fields_are_a_value_error(change: dict[str, object]) -> None:
    fields = reports.make_report(1).own.to_dict() | change
    with pytest.raises(ValueError, match="a damaged report"):
        unpack(_packed({name: value for name, value in fields.items() if value is not ...}))


def test_process_0_keeps_the_reports_of_others_that_are_not_damaged() -> None:
    members = reports.make_report(4).members
    packed = {process: pack(member, 4) for process, member in members.items()}
    kept = unpack_others({**packed, 2: packed[2][:-5]}, process=0)
    assert sorted(kept) == [1, 3]
    assert kept[3].to_dict() == members[3].to_dict()


def _long_report() -> ProcessReport:
    return reports.make_report(2, groups=400).members[1]


def _packed(data: dict[str, object]) -> str:
    return base64.b85encode(zlib.compress(json.dumps(data).encode())).decode()
