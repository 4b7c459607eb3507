"""Runs the core tests on every supported Orbax release with several JAX releases, and writes a table of the results.

    python -m tools.matrix [--only 0.12.8 ...] [--python 3.13=/path/to/python3.13] [--jobs 2] [--minutes 10] [--table]

Each pair of Python and JAX has an environment under build/, in which only Orbax is exchanged. Results are kept in
build/matrix.json, so an interrupted run continues where it stopped, unless the sources have changed since.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent import futures
from typing import Any
from xml.etree import ElementTree

from tools import markdown, releases

RESULTS = releases.ROOT / "build" / "matrix.json"
ENVIRONMENTS = releases.ROOT / "build" / "matrix-env"
PAGE = markdown.Page(
    "bench/results/releases.md",
    "Tests on every supported release",
    """The tests marked `core` on every supported Orbax release: with the newest JAX of its time, with the newest JAX
    that runs on Python 3.11, and with the newest JAX of all.""",
    "make test-matrix",
)
_LIMIT = 900.0  # seconds for one run of the tests
_VERIFY = """if True:
    import sys
    from importlib.metadata import version
    installed = [version("orbax-checkpoint"), version("jax"), "%d.%d" % sys.version_info[:2]]
    installed == sys.argv[1:] or sys.exit(f"expected {sys.argv[1:]}, found {installed}")
"""
_TESTS = ("-m", "core", "tests")
_NOT_IN_CORE = ("orbax_ext/cli/",)
_NEWEST_JAX = {"3.11": "0.10.2", "3.13": "0.12.0.1"}  # the newest that runs on this Python
_PINS = {"3.11": "newest", "3.13": "python313"}
_UNDECLARED = {"0.11.34": ("flax",)}  # imports it without requiring it


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One combination to test."""

    python: str
    jax: str
    orbax: str

    @property
    def key(self) -> str:
        return f"orbax {self.orbax}, jax {self.jax}, python {self.python}"


def made_for(release: str) -> str:
    """Returns the newest JAX for Python 3.11 when this Orbax came out."""
    since = {"0.11.33": "0.9.0", "0.11.34": "0.9.2", "0.11.37": "0.10.0", "0.11.40": "0.10.1", "0.12.1": "0.10.2"}
    earlier = [name for name in since if releases.RELEASES.index(name) <= releases.RELEASES.index(release)]
    return since[earlier[-1]]


def cells() -> list[Cell]:
    """Returns every combination; those that share an environment are next to each other."""
    combinations = set()
    for release in releases.RELEASES:
        combinations.add(Cell("3.11", made_for(release), release))
        combinations |= {Cell(python, jax, release) for python, jax in _NEWEST_JAX.items()}
    return sorted(combinations, key=lambda cell: (cell.python, cell.jax, releases.RELEASES.index(cell.orbax)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="RELEASE", default=releases.RELEASES, choices=releases.RELEASES)
    parser.add_argument("--python", action="append", default=[], metavar="X.Y=PATH", help="an interpreter to use")
    parser.add_argument("--jobs", type=int, default=1, help="environments to use at the same time (1)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no new combination after this time")
    parser.add_argument("--table", action="store_true", help="run nothing, only write the table again")
    args = parser.parse_args(argv)
    pythons = {name: f"python{name}" for name in _NEWEST_JAX} | dict(given.split("=", 1) for given in args.python)
    digest = sources()
    if not args.table:
        wanted = [cell for cell in cells() if cell.orbax in args.only]
        run_all(wanted, pythons, digest, args.jobs, time.monotonic() + args.minutes * 60)
    results = load(digest)
    PAGE.write(table(results))
    bad = [cell.key for cell in cells() if not passed(results.get(cell.key))]
    print(f"{len(cells()) - len(bad)} of {len(cells())} combinations passed")
    print(*(f"  not passed: {key}" for key in bad), sep="\n")
    return 1 if bad else 0


def run_all(wanted: Iterable[Cell], pythons: dict[str, str], digest: str, jobs: int, deadline: float) -> None:
    """Runs the combinations that have not passed yet: those of one environment in turn, a release's own JAX first."""
    left = [cell for cell in wanted if not passed(load(digest).get(cell.key))]
    shared = [list(group) for _, group in itertools.groupby(left, lambda cell: (cell.python, cell.jax))]
    saving = threading.Lock()

    def run_one_by_one(group: list[Cell]) -> None:
        for cell in sorted(group, key=lambda cell: cell.jax != made_for(cell.orbax)):
            if time.monotonic() > deadline:
                return
            result = test(cell, environment(cell, pythons[cell.python]))
            with saving:
                save(digest, cell, result)
            print(f"{cell.key}: {describe(result)}, {result['seconds']} s", flush=True)

    with futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_one_by_one, sorted(shared, key=len, reverse=True)))


def environment(cell: Cell, python: str) -> pathlib.Path:
    """Returns the directory of the environment with this Python and JAX; creates it if there is none."""
    home = ENVIRONMENTS / f"{cell.python}-{cell.jax}"
    if not home.exists():
        run(python, "-m", "venv", str(home))
    return home


def install(cell: Cell, home: pathlib.Path) -> None:
    """Installs the combination into its environment: everything the first time, only Orbax after that."""
    python, complete, constraints = str(home / "bin" / "python"), home / "complete", home / "constraints.txt"
    constraints.write_text("\n".join(pins(cell)) + "\n")
    packages = [f"orbax-checkpoint=={cell.orbax}", *_UNDECLARED.get(cell.orbax, ())]
    if not complete.exists():
        packages += ["-e", ".[test,s3]"]
    run(python, "-m", "pip", "install", "--quiet", "-c", str(constraints), *packages)
    complete.touch()
    run(python, "-c", _VERIFY, cell.orbax, cell.jax, cell.python)


def test(cell: Cell, home: pathlib.Path) -> dict[str, Any]:
    """Installs the combination, runs the tests and returns their counts, or the error that kept them from running."""
    python = str(home / "bin" / "python")
    started = time.monotonic()
    report, log = home / "report.xml", RESULTS.parent / "matrix-logs" / f"{cell.key.replace(', ', '_')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    try:
        install(cell, home)
        with log.open("w") as output:
            command = [python, "-m", "pytest", *_TESTS, "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
            subprocess.run(command, cwd=releases.ROOT, stdout=output, stderr=output, timeout=_LIMIT, check=False)
        suite = next(ElementTree.parse(report).iter("testsuite"))
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    except (subprocess.SubprocessError, OSError, StopIteration) as error:
        return {"error": str(error), "seconds": round(time.monotonic() - started)}
    return {**counts, "seconds": round(time.monotonic() - started)}


def pins(cell: Cell) -> list[str]:
    """Returns the pinned packages for this Python, with the combination's own Orbax and JAX."""
    text = (releases.ROOT / "constraints" / f"{_PINS[cell.python]}.txt").read_text()
    replaced = ("orbax-checkpoint==", "jax==", "jaxlib==", "flax==")
    kept = [line for line in text.splitlines() if not line.startswith(replaced)]
    return [*kept, f"orbax-checkpoint=={cell.orbax}", f"jax=={cell.jax}", f"jaxlib=={cell.jax}"]


def passed(result: dict[str, Any] | None) -> bool:
    return bool(result and result.get("tests") and not result["failures"] and not result["errors"])


def describe(result: dict[str, Any] | None) -> str:
    if not result:
        return "not run"
    if "error" in result:
        return f"could not run: {result['error'].splitlines()[0]}"
    bad = result["failures"] + result["errors"]
    good = result["tests"] - bad - result["skipped"]
    parts = [f"{good} passed", *([f"**{bad} failed**"] if bad else [])]
    return ", ".join([*parts, *([f"{result['skipped']} skipped"] if result["skipped"] else [])])


def table(results: dict[str, Any]) -> str:
    """Returns a table with a row for each Orbax release and a column for each kind of combination."""
    newest = [f"JAX {jax}, Python {python}" for python, jax in _NEWEST_JAX.items()]
    rows = []
    for release in releases.RELEASES:
        own = Cell("3.11", made_for(release), release)
        others = [Cell(python, jax, release) for python, jax in _NEWEST_JAX.items()]
        cells = ["the same" if other == own else describe(results.get(other.key)) for other in others]
        rows.append((release, f"JAX {own.jax}: {describe(results.get(own.key))}", *cells))
    return markdown.table(("Orbax", "JAX of its time, Python 3.11", *newest), rows)


def sources() -> str:
    """Returns a digest of everything that the core tests run, so that no result outlives a change."""
    digest = hashlib.sha256()
    for pattern in ("orbax_ext/**/*.py", "tests/**/*.py"):
        for path in sorted(releases.ROOT.glob(pattern)):
            content = path.read_bytes()
            other_test = path.name.startswith("test_") and b"mark.core" not in content
            if not other_test and not path.relative_to(releases.ROOT).as_posix().startswith(_NOT_IN_CORE):
                digest.update(content)
    return digest.hexdigest()[:16]


def load(digest: str) -> dict[str, Any]:
    by_digest: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return by_digest.get(digest, {})


def save(digest: str, cell: Cell, result: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({digest: load(digest) | {cell.key: result}}, indent=2))


def run(*command: str) -> None:
    subprocess.run(command, cwd=releases.ROOT, check=True, timeout=1800)


if __name__ == "__main__":
    sys.exit(main())
