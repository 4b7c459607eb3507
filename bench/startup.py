"""Seconds that commands which need no JAX take, from start to end: python -m bench.startup [--write]."""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from orbax_ext.report.process_report import ProcessReport
from orbax_ext.report.report import RestoreReport
from tools import markdown

PAGE = markdown.Page(
    "bench/results/startup.md",
    "Commands that need no JAX, measured",
    """Wall-clock seconds of a new process each, the quickest and the slowest of all runs, with `import jax` for
    comparison.""",
    "make bench-startup",
)
_MODEL = "layers.{0..31}.w bfloat16 4096x16384 P(None,tp)\n"
_CLI = ("-m", "orbax_ext.cli")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.startup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="of each command (5)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.path}")
    args = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name, words in _commands(pathlib.Path(directory)).items():
            seconds = [_run(words) for _ in range(args.runs)]
            rows.append((name, f"{min(seconds):.2f} to {max(seconds):.2f} s"))
            print(markdown.row(rows[-1]), flush=True)
    if args.write:
        PAGE.write(markdown.table(("command", "seconds"), rows))
    return 0


def _commands(directory: pathlib.Path) -> dict[str, Sequence[str]]:
    model, report = directory / "model.txt", directory / "report.json"
    model.write_text(_MODEL)
    report.write_text(RestoreReport(0, 1, {0: ProcessReport(0, "host", 0.0, {}, ())}).to_json())
    mesh = ("--mesh", "dp=4,tp=8", "--processes", "4")
    return {
        "`orbax-ext --help`": (*_CLI, "--help"),
        "`orbax-ext plan --shapes`": (*_CLI, "plan", "--shapes", str(model), *mesh),
        "`orbax-ext report`": (*_CLI, "report", str(report)),
        "`orbax-ext patch --help`": (*_CLI, "patch", "--help"),
        "`import jax`": ("-c", "import jax"),
    }


def _run(words: Sequence[str]) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
