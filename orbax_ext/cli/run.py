"""`orbax-ext run`: registers orbax_ext in a program that can't be edited, and runs the program."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from orbax_ext.cli import exits, files, knobs, program
from orbax_ext.report import page
from orbax_ext.report.report import last_report

DESCRIPTION = (
    "Runs a Python program as `python train.py` or `python -m package.module` would, with orbax_ext registered: every\n"
    "restore of the program goes through it. The program is registered when it imports Orbax, so what it sets before\n"
    "that (environment variables for JAX, for instance) has its effect. The exit code is the program's."
)
EPILOG = f"""examples:
  orbax-ext run train.py --config big.yml
  orbax-ext run --replica-axis dp --strategy spread -m maxtext.train config.yml
  srun python -m orbax_ext run --report restore.html train.py    # process 0 writes the report of the last restore
  {knobs.PREFIX}REPLICA_AXIS=dp {knobs.PREFIX}TIMEOUT=900 orbax-ext run train.py

A bad value, on the command line or in the environment, ends with code 2 before the program starts.
"""
_ORBAX = "orbax.checkpoint"
_REPORT = f"{knobs.PREFIX}REPORT"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "orbax-ext run [knobs] [--report FILE] (FILE | -m MODULE) [ARGS ...]"
    parser.allow_abbrev = False  # else argparse looks for abbreviations of our options in the program's arguments
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="FILE ARGS", help="the program and its arguments")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ARGS", help="run a module")
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="on process 0, write the report of the last restore when the program ends, also when it fails: "
        f".json (see orbax-ext report) or .html; also as {_REPORT}",
    )
    knobs.add_options(parser)


def run(args: argparse.Namespace) -> Callable[[], int]:
    """Returns a function that runs the program, so that no handler of errors of ours is around it."""
    given = knobs.given_knobs(args, os.environ)
    report = _report_path("--report", args.report) or _report_path(_REPORT, os.environ.get(_REPORT))
    if args.module is not None:
        start = _starter(program.run_module, [*args.module, *args.words], "give a module after -m")
    else:
        words = args.words[1:] if args.words[:1] == ["--"] else args.words
        start = _starter(program.run_file, words, "give a program: a file, or -m and a module")
    return functools.partial(_run, start, given, report)


def _starter(runner: Callable[[str, Sequence[str]], None], words: Sequence[str], missing: str) -> Callable[[], None]:
    if not words:
        raise exits.UserError(missing)
    return functools.partial(runner, words[0], words[1:])


def _run(start: Callable[[], None], given: dict[str, Any], report: pathlib.Path | None) -> int:
    _register_with_orbax(given)
    with _report_afterwards(report):
        try:
            start()
        except exits.UserError as error:
            _say(str(error))
            return exits.EXIT_CANNOT_RUN
    return exits.EXIT_OK


def _register_with_orbax(given: dict[str, Any]) -> None:
    """Registers now if Orbax is imported, else right after the program imports it."""
    if _ORBAX in sys.modules:
        _register(given)
    else:
        sys.meta_path.insert(0, _OrbaxFinder(functools.partial(_register, given)))


def _register(given: dict[str, Any]) -> None:
    from orbax_ext.registration import register  # imports JAX, which the program may have to configure before

    register(**given)


class _OrbaxFinder(importlib.abc.MetaPathFinder):
    """Calls a function once, right after Orbax was imported.

    If a module of ours imports Orbax first, because the program uses orbax_ext itself, the function is called when that
    module is complete: the function needs it.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._under_way = 0  # imports of Orbax and of our modules, one inside the other

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _ORBAX and not name.startswith("orbax_ext."):
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            self._under_way += 1
            try:
                execute(module)
            finally:
                self._under_way -= 1
                del loader.exec_module
            if not self._under_way and _ORBAX in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._function()

        loader.exec_module = exec_module


def _report_path(place: str, text: str | None) -> pathlib.Path | None:
    if not text:
        return None
    path = pathlib.Path(text).absolute()  # the program may change the working directory
    if path.suffix not in (".json", ".html"):
        raise exits.UserError(f"{place}: expected a name that ends in .json or .html; found {text!r}")
    return path


@contextlib.contextmanager
def _report_afterwards(path: pathlib.Path | None) -> Iterator[None]:
    process = os.getpid()
    try:
        yield
    finally:
        if path is not None and os.getpid() == process:  # a forked process has the same report
            _write_report(path)


def _write_report(path: pathlib.Path) -> None:
    """Writes the report on process 0 of the job. A report that can't be written does not change the exit code."""
    report = last_report()
    if report is None:
        if _may_be_first():
            _say(f"{path} is not written: the program restored nothing through orbax_ext")
    elif report.process == 0:
        try:
            files.write(path, report.to_json() if path.suffix == ".json" else page.render(report))
        except exits.UserError as error:
            _say(f"the report is not written: {error}")


def _may_be_first() -> bool:
    """Returns whether this may be process 0, without starting JAX's backend: the program may not have done that."""
    if "orbax_ext.registration" not in sys.modules:
        return True
    from orbax_ext.upstream.runtime import place_in_job  # is imported already

    return place_in_job()[0] == 0


def _say(text: str) -> None:
    print(f"orbax-ext run: {text}", file=sys.stderr, flush=True)
