"""The page with the timeline in a real browser: positions, colors, tooltips, keys."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from orbax_ext.report import page, timeline
from orbax_ext.report.report import RestoreReport
from orbax_ext.report.spans import Span
from orbax_ext.report.take_over import TakeOver
from tests.support import browser as browser_lib
from tests.support import reports
from tests.support.browser import Browser

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(
        bool(browser_lib.missing()),
        reason=f"{browser_lib.missing()} is not installed",
    ),
]

SLOW = 2
ALL_BOXES = """
  const rect = element => {
    const {left, top, width, height} = element.getBoundingClientRect();
    return {left, top, width, height};
  };
  return [...document.querySelectorAll(".row")].map(row => ({
    process: Number(row.dataset.process), label: row.querySelector(".label").innerText, ...rect(row),
    font: parseFloat(getComputedStyle(row.querySelector(".label")).fontSize),
    plot: rect(row.querySelector(".plot")), marks: [...row.querySelectorAll(".crit")].map(rect),
    boxes: [...row.querySelectorAll(".box")].map(
      box => ({kind: box.classList[1], span: Number(box.dataset.span), ...rect(box)})),
  })).sort((a, b) => a.top - b.top);
"""
TIP = """
  const tip = document.getElementById("tip"), r = tip.getBoundingClientRect();
  return {shown: getComputedStyle(tip).display !== "none", text: tip.innerText,
    inside: r.left >= 0 && r.top >= 0 && r.right <= innerWidth && r.bottom <= innerHeight,
    waited_for: [...document.querySelectorAll(".row.waited-for")].map(row => Number(row.dataset.process))};
"""
TAKEN_OVER = """
  const table = [...document.querySelectorAll("section")].find(
    section => section.innerText.startsWith("Read in place of others"));
  return [table ? table.innerText : "", [...document.querySelectorAll(".box.taken-over")].map(box => {
    const {left, top, width, height} = box.getBoundingClientRect();
    return {left, top, width, height, process: Number(box.closest(".row").dataset.process)};
  })];
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browser_lib.running() as started:
        yield started


@pytest.fixture
def show(browser: Browser, tmp_path: pathlib.Path) -> Any:
    """A function that opens a report's page and returns its lanes as they are laid out."""

    def open_page(report: RestoreReport) -> list[dict[str, Any]]:
        file = tmp_path / "page.html"
        file.write_text(page.render(report), encoding="utf-8")
        browser.open(file)
        assert browser.run("return document.documentElement.dataset.ready") == "true"
        rows: list[dict[str, Any]] = browser.run(ALL_BOXES)
        return rows

    return open_page


@pytest.mark.parametrize("processes", [1, 4, 20])
def test_every_span_has_the_position_of_its_time_in_the_lane_of_its_process(show: Any, processes: int) -> None:
    report = reports.make_report(processes, slow=SLOW if processes > SLOW else None)
    lanes, rows = timeline.make_lanes(report), show(report)
    total = max(span.end for spans in lanes.values() for span in spans)
    assert [row["process"] for row in rows] == list(range(processes))
    assert all(above["top"] + above["height"] <= below["top"] + 1 for above, below in itertools.pairwise(rows))
    for row in rows:
        assert row["label"].split() == [str(row["process"]), f"host-{row['process'] // 8}"]
        assert len(row["boxes"]) == len(lanes[row["process"]])
        for box in row["boxes"]:
            span = lanes[row["process"]][box["span"]]
            assert box["kind"] == ("other" if span.phase == "describe" else span.phase)
            assert box["left"] == pytest.approx(
                row["plot"]["left"] + row["plot"]["width"] * span.start / total, abs=1.5
            )
            assert box["width"] == pytest.approx(max(1.0, row["plot"]["width"] * span.seconds / total), abs=1.5)
            assert row["top"] <= box["top"] < box["top"] + box["height"] <= row["top"] + row["height"]


def test_no_span_is_hidden_by_another_element(show: Any, browser: Browser) -> None:
    for row in show(reports.make_report(4, slow=SLOW)):
        for box in row["boxes"]:
            if box["width"] > 4:
                seen = browser.run(
                    "return document.elementFromPoint(arguments[0], arguments[1]).className",
                    box["left"] + box["width"] / 2,
                    box["top"] + box["height"] / 2,
                )
                assert seen == f"box {box['kind']}"


def test_pointing_at_a_wait_shows_its_figures_and_marks_the_process_waited_for(show: Any, browser: Browser) -> None:
    report = reports.make_report(4, slow=SLOW)
    rows = show(report)
    wait = max((box for box in rows[0]["boxes"] if box["kind"] == "wait"), key=lambda box: box["width"])
    assert not browser.run(TIP)["shown"]
    browser.point_at(wait["left"] + wait["width"] / 2, wait["top"] + wait["height"] / 2)
    tip = browser.run(TIP)
    span = timeline.make_lanes(report)[0][wait["span"]]
    assert tip["shown"]
    assert tip["inside"]
    assert tip["text"].splitlines() == [
        "process 0 (host-0)",
        f"wait, at {span.note}, {span.seconds:.2f} s",
        f"from {span.start:.3f} s to {span.end:.3f} s",
        f"waited for process {SLOW} (host-0)",
    ]
    assert tip["waited_for"] == [SLOW]
    browser.point_at(2, 2)
    assert not browser.run(TIP)["shown"]


def test_pointing_at_a_read_shows_its_bytes_and_rate(show: Any, browser: Browser) -> None:
    read = next(box for box in show(reports.make_report(4))[1]["boxes"] if box["kind"] == "read")
    browser.point_at(read["left"] + read["width"] / 2, read["top"] + read["height"] / 2)
    assert "256.0 MB, " in browser.run(TIP)["text"]


def test_a_read_in_place_of_others_is_marked_and_named(show: Any, browser: Browser) -> None:
    plain = reports.make_report(4)
    member = plain.members[1]
    spans = [
        dataclasses.replace(span, note="in place of process 2 (host-0)")
        if (span.phase, span.group) == ("read", 1)
        else span
        for span in member.spans
    ]
    taken = dataclasses.replace(
        plain,
        members={**plain.members, 1: dataclasses.replace(member, spans=tuple(spans))},
        take_overs=(TakeOver(0, 2, "host-0", "late"),),
    )
    show(plain)
    assert browser.run(TAKEN_OVER) == ["", []]
    show(taken)
    text, marked = browser.run(TAKEN_OVER)
    assert "group 1" in text
    assert "process 2 (host-0)" in text
    assert "late" in text
    (box,) = marked
    assert box["process"] == 1
    browser.point_at(box["left"] + box["width"] / 2, box["top"] + box["height"] / 2)
    assert browser.run(TIP)["text"].splitlines()[1].startswith("read group 2, in place of process 2 (host-0), ")


def test_the_critical_path_is_marked_on_the_process_that_all_wait_for(show: Any, browser: Browser) -> None:
    rows = show(reports.make_report(4, slow=SLOW))
    marked = {row["process"]: row["marks"] for row in rows}
    slow = rows[SLOW]
    for read in (box for box in slow["boxes"] if box["kind"] == "read"):
        assert any(_covers(mark, read) for mark in slow["marks"]), read
    others = [mark for process, marks in marked.items() if process != SLOW for mark in marks]
    assert sum(mark["width"] for mark in others) < 0.1 * slow["plot"]["width"]
    colors = browser.run(
        "return [...document.querySelectorAll('.crit, #legend .path')].map(e => getComputedStyle(e).borderTopColor)"
    )
    assert len(set(colors)) == 1


def test_groups_that_are_read_at_the_same_time_do_not_cover_each_other(show: Any) -> None:
    report = reports.make_report(2)
    first = next(span for span in report.members[1].spans if span.phase == "read")
    more = Span("read", first.start + first.seconds / 3, first.end, 1), Span("read", first.end - 0.01, first.end, 2)
    member = dataclasses.replace(report.members[1], spans=(*report.members[1].spans, *more))
    row = show(dataclasses.replace(report, members={**report.members, 1: member}))[1]
    reads = [box for box in row["boxes"] if box["kind"] == "read"]
    assert len(reads) == report.groups + 2
    for one, other in ((one, other) for one in reads for other in reads if one["span"] < other["span"]):
        assert (
            one["left"] + one["width"] <= other["left"] + 1
            or other["left"] + other["width"] <= one["left"] + 1
            or one["top"] + one["height"] <= other["top"] + 0.5
            or other["top"] + other["height"] <= one["top"] + 0.5
        )


def test_512_processes_are_legible_and_can_be_scrolled_to(show: Any, browser: Browser) -> None:
    report = reports.make_report(512, slow=300)
    rows = show(report)
    assert all(row["height"] >= 15 and row["font"] >= 10 for row in rows)
    assert 20 < len(rows) < 100  # the others are added when they come into view
    window = browser.run(
        "const r = document.getElementById('timeline').getBoundingClientRect(); return [r.top, r.bottom]"
    )
    browser.run("document.getElementById('timeline').scrollTop = 1e9")
    browser.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    last = browser.run(ALL_BOXES)[-1]
    assert last["process"] == 511
    assert window[0] < last["top"] < last["top"] + last["height"] <= window[1] + 1
    assert len(last["boxes"]) == len(report.members[511].spans)


def test_the_overview_of_512_processes_shows_the_one_that_others_wait_for(show: Any, browser: Browser) -> None:
    slow = 300
    report = reports.make_report(512, slow=slow)
    show(report)
    lanes = timeline.make_lanes(report)
    total = max(span.end for spans in lanes.values() for span in spans)
    longest = max((span for span in lanes[slow] if span.phase == "read"), key=lambda span: span.seconds)
    when = longest.end - 0.2  # all others have finished reading
    colors = browser.run(
        """
        const canvas = document.querySelector("#overview canvas"), box = canvas.getBoundingClientRect();
        const scale = canvas.width / box.width, label = document.querySelector(".label").offsetWidth;
        const x = (label + (box.width - label) * arguments[0]) * scale;
        const at = share => [...canvas.getContext("2d").getImageData(x, canvas.height * share, 1, 1).data.slice(0, 3)];
        const style = getComputedStyle(document.documentElement);
        const named = name => { const c = document.createElement("canvas").getContext("2d");
          c.fillStyle = style.getPropertyValue(name); c.fillRect(0, 0, 1, 1);
          return [...c.getImageData(0, 0, 1, 1).data.slice(0, 3)]; };
        return {seen: arguments[1].map(at), wait: named("--hatch"), path: named("--crit")};
        """,
        when / total,
        [(row + 0.5) / 512 for row in (100, slow, 450)],
    )
    assert colors["seen"] == [colors["wait"], colors["path"], colors["wait"]]


def test_lanes_can_be_ordered_by_how_long_others_waited_for_them(show: Any, browser: Browser) -> None:
    show(reports.make_report(40, slow=17))
    browser.run(
        "const order = document.getElementById('order');"
        "order.value = 'waited_for'; order.dispatchEvent(new Event('change'))"
    )
    assert browser.run(ALL_BOXES)[0]["process"] == 17


def test_zooming_in_makes_spans_wider_and_fit_undoes_it(show: Any, browser: Browser) -> None:
    before = show(reports.make_report(4))[0]["plot"]["width"]
    browser.run("document.getElementById('in').click()")
    assert browser.run(ALL_BOXES)[0]["plot"]["width"] == pytest.approx(2 * before, abs=2)
    browser.run("document.getElementById('fit').click()")
    assert browser.run(ALL_BOXES)[0]["plot"]["width"] == pytest.approx(before, abs=2)


def test_spans_can_be_selected_with_the_keyboard(show: Any, browser: Browser) -> None:
    show(reports.make_report(4))
    browser.run("document.getElementById('timeline').focus()")
    for key in ("\ue014", "\ue014", "\ue015"):  # right, right, down
        browser.press(key)
    tip = browser.run(TIP)
    assert tip["shown"]
    assert tip["text"].startswith("process 1 ")
    assert browser.run("return document.querySelectorAll('.box.selected').length") == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_stand_out_in_both_color_schemes(show: Any, browser: Browser, scheme: str) -> None:
    browser.prefer(scheme)
    try:
        show(reports.make_report(4))
        colors = browser.run(
            """
            const style = getComputedStyle(document.documentElement);
            const context = document.createElement("canvas").getContext("2d");
            return Object.fromEntries(arguments[0].map(name => {
              context.fillStyle = style.getPropertyValue("--" + name); context.fillRect(0, 0, 1, 1);
              return [name, [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)]]; }));
            """,
            ["bg", "fg", "muted", "read", "exchange", "compile", "other", "crit"],
        )
    finally:
        browser.prefer("light")
    background = colors.pop("bg")
    assert (sum(background) < 384) == (scheme == "dark")
    for name, color in colors.items():
        assert _contrast(color, background) >= (4.5 if name in ("fg", "muted") else 2.8), name


def test_the_page_loads_nothing_from_the_network(show: Any, browser: Browser) -> None:
    show(reports.make_report(4))
    assert browser.run("return performance.getEntriesByType('resource').map(entry => entry.name)") == []


def test_names_that_look_like_markup_are_shown_as_text(show: Any, browser: Browser) -> None:
    report = reports.make_report(1)
    host = "</script><img id=bad src=x>"
    row = show(dataclasses.replace(report, members={0: dataclasses.replace(report.members[0], host=host)}))[0]
    assert host in row["label"]
    assert browser.run("return document.getElementById('bad')") is None


def test_the_page_of_a_failed_restore_says_why(show: Any, browser: Browser) -> None:
    show(dataclasses.replace(reports.make_report(1), error="OSError: the disk is gone"))
    assert browser.run("return document.getElementById('error').innerText") == "OSError: the disk is gone"
    assert browser.run("return document.title").startswith("Failed restore")


def test_pointing_at_a_label_shows_the_figures_of_the_process(show: Any, browser: Browser) -> None:
    report = reports.make_report(2)
    label = show(report)[1]
    browser.point_at(label["left"] + 10, label["top"] + label["height"] / 2)
    lines = browser.run(TIP)["text"].splitlines()
    assert lines[0] == "process 1 (host-0)"
    assert "bytes read: 1.0 GB" in lines
    assert lines[-1].startswith("waited most for: ")


def test_the_tables_name_phases_processes_and_strategies(show: Any, browser: Browser) -> None:
    show(reports.make_report(4, slow=SLOW))
    titles_and_rows = browser.run(
        "return [...document.querySelectorAll('#tables section')].map(section => ["
        "section.querySelector('h2, summary').innerText, "
        "[...section.querySelectorAll('tbody tr')].map(row => [...row.children].map(cell => cell.innerText))])"
    )
    tables = dict(titles_and_rows)
    assert list(tables) == ["Critical path by phase", "Processes that others waited for", "Strategies", "All processes"]
    assert tables["Critical path by phase"][0][0] == "read"
    assert tables["Critical path by phase"][0][3] == f"process {SLOW} (host-0)"
    assert tables["Processes that others waited for"][0][:2] == [f"process {SLOW} (host-0)", "3 processes"]
    assert tables["Strategies"] == [
        ["32", "spread", "layer_0, layer_1, layer_2, layer_3 and 28 more"],
        ["1", "direct: it is a typed PRNG key", "rng"],
    ]
    assert [row[0] for row in tables["All processes"]] == ["0", "1", "2", "3"]


def _covers(mark: dict[str, float], box: dict[str, float]) -> bool:
    return (
        mark["left"] <= box["left"] + 1.5
        and mark["left"] + mark["width"] >= box["left"] + box["width"] - 1.5
        and mark["top"] <= box["top"]
        and mark["top"] + mark["height"] >= box["top"] + box["height"]
    )


def _contrast(one: list[int], other: list[int]) -> float:
    """Returns the contrast of two colors as the accessibility guidelines (WCAG 2) define it."""

    def luminance(color: list[int]) -> float:
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
