"""Restores once on hosts of which one reads slowly, and takes a picture of the timeline, for README.

python -m bench.timeline_picture [--out docs/pictures/timeline.png] [--page build/bench/timeline.html]
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import signal
import sys
import tempfile
from collections.abc import Sequence

import orbax_ext
from bench import network, running, steering, work
from bench.changes import Change
from bench.network import Links
from bench.scenarios import Scenario
from bench.strategies import AUTO
from orbax_ext import lab
from orbax_ext.report import page
from orbax_ext.report.report import RestoreReport
from tests.support import browser as browser_lib
from tools import releases

PICTURE = releases.ROOT / "docs" / "pictures" / "timeline.png"
_SLOW = 2  # the host that reads slowly
_WIDTH = 860  # pixels of the page: as wide as a README is shown, so that its text has its size
_SCALE = 2.0  # pixels of the picture for one of the page, for sharp screens
# Hides what nobody can use in a picture, and returns where the part to be shown ends.
_PREPARE = """
  for (const name of [".tools", "#tables", "#when"]) document.querySelector(name).style.display = "none";
  document.getElementById("timeline").nextElementSibling.style.display = "none";
  return document.getElementById("timeline").getBoundingClientRect().bottom;
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.timeline_picture", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=pathlib.Path, default=PICTURE, help="the picture")
    parser.add_argument("--page", type=pathlib.Path, default=pathlib.Path("build/bench/timeline.html"), help="the page")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that hosts are removed
    if browser_lib.missing():
        print(f"No picture of the timeline: {browser_lib.missing()} is not installed.")
        return 0
    if network.why_not():
        print(f"Links are not shaped, no host reads slowly: {network.why_not()}.")
    args.page.parent.mkdir(parents=True, exist_ok=True)
    args.page.write_text(page.render(restore(make_scenario())), encoding="utf-8")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    take(args.page, args.out)
    print("Wrote", args.page, args.out)
    return 0


def make_scenario() -> Scenario:
    """Returns 256 MiB on the usual links. The slow host keeps more of its rate than one whose part others take over."""
    mesh, links = (("dp", 4), ("tp", 2)), Links(320, 1600)
    slow = (Change(links.storage // 2, host=_SLOW),)
    about = "a host reads half as fast"
    return Scenario("picture", about, links, mesh, (2048, 4096), ("tp", None), 256 // 16, changes=slow)


def restore(scenario: Scenario) -> RestoreReport:
    """Saves and restores with `auto`, and returns the report of all processes."""
    with tempfile.TemporaryDirectory(prefix="orbax_ext_bench_") as folder, contextlib.ExitStack() as stack:
        root = pathlib.Path(folder)
        path, started = str(root / "checkpoint"), root / "started"
        with lab.Cluster(scenario.hosts, scenario.devices, timeout=scenario.time_limit) as cluster:
            cluster.run(work.save, scenario, path)
        net = None
        if not network.why_not():
            net = stack.enter_context(network.Network(scenario.hosts, scenario.links, root))
        where = running.Hosts(root, net)
        cluster = stack.enter_context(
            running.processes(running.Step(scenario, False, AUTO, 1), where, running.Settings())
        )
        if net is not None:
            stack.enter_context(steering.changing(net, scenario.changes, started))
        restored = cluster.run(work.restore, scenario, path, AUTO, net.url if net else "", str(started))
        if not all(one.exact for one in restored):
            raise RuntimeError("the restore was not exact")
        return RestoreReport.from_json(cluster.run(report_json)[0])


def take(html: pathlib.Path, picture: pathlib.Path) -> None:
    """Writes a picture of the upper part of a timeline's page: title, figures, legend and lanes."""
    with browser_lib.running() as browser:
        browser.prefer("light")
        browser.view(_WIDTH, 900, _SCALE)
        browser.open(html)
        if browser.run("return document.documentElement.dataset.ready") != "true":
            raise RuntimeError(f"{html} was not drawn")
        browser.view(_WIDTH, round(browser.run(_PREPARE)) + 16, _SCALE)
        browser.screenshot(picture)


# Run on the processes.


def report_json() -> str:
    report = orbax_ext.last_report()
    assert report is not None
    return report.to_json()


if __name__ == "__main__":
    sys.exit(main())
