"""`orbax-ext demo`: the arguments, the order of the acts, the table at the end."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable, Collection
from typing import TextIO

import jax

from orbax_ext import lab, version
from orbax_ext import text as text_lib
from orbax_ext.cli import exits, files
from orbax_ext.cli.demo import acts, work
from orbax_ext.cli.demo.rows import Act, table

DESCRIPTION = """Restores a small training state with plain Orbax, with Orbax's single-replica
handler and with orbax_ext, on processes of this machine, in five acts:
""" + "\n".join(f"  {letter}. {title}" for letter, title in acts.TITLES.items())
EPILOG = """examples:
  orbax-ext demo               all acts, in about a minute on two cores
  orbax-ext demo --act d       only what happens when a checkpoint is damaged
  orbax-ext demo --open        and open the timeline in a browser

Exit code 0: orbax_ext did all that it claims; 1: it did not, and the last lines
say what is missing."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--act", action="append", choices=sorted(acts.TITLES), help="play only this act; may be repeated"
    )
    parser.add_argument("--megabytes", type=int, default=32, help="size of the state in MiB (32)")
    parser.add_argument("--html", metavar="FILE", type=pathlib.Path, help="where to write the page of act e")
    parser.add_argument("--open", action="store_true", help="open the page of act e in a browser")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> bool:
    if args.megabytes < 1:
        raise exits.UserError("a demo needs a state of at least 1 megabyte")
    letters = set(args.act or acts.TITLES)
    letters |= {"b"} if "e" in letters or args.open or args.html else set()
    say = _printer(sys.stderr if args.json else sys.stdout)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="orbax_ext_demo_") as folder:
        played = _play(pathlib.Path(folder), letters, args.megabytes, say)
    page = next((act.page for act in played if act.page), None)
    where = None
    if "e" in letters or args.open or args.html:
        where = _write_page(page, args.html, say)
    kept = all(act.kept for act in played) and ("e" not in letters or where is not None)
    if args.json:
        print(json.dumps(_result(played, where, kept, time.monotonic() - started), indent=2))
    else:
        print(_ending(played, time.monotonic() - started))
    if args.open and where is not None and not webbrowser.open(where.as_uri()):
        say(f"no browser was found; open {where} yourself")
    return kept


def _printer(stream: TextIO) -> Callable[[str], None]:
    return lambda line: print(line, file=stream, flush=True)


def _play(folder: pathlib.Path, letters: set[str], megabytes: int, say: Callable[[str], None]) -> list[Act]:
    """Plays the acts in their order, except that c plays beside the others."""
    played = []
    say(f"Starting {acts.PROCESSES} processes with {acts.DEVICES} CPU devices each ...")
    with contextlib.ExitStack() as stack:
        late = None
        if "c" in letters:
            say("   and two times as many for act c, which waits most of the time: it plays beside the others")
            late = acts.LateReader(folder, megabytes)
            stack.callback(late.close)
            late.begin()
        cluster = lab.Cluster(acts.PROCESSES, acts.DEVICES)
        stack.callback(cluster.close)
        stage = acts.Stage(cluster, folder, megabytes, say)
        if letters & {"a", "b", "d"}:
            say(f"Saving a training state of {text_lib.size(megabytes * 2**20)} with plain Orbax, as steps 1 and 2 ...")
            cluster.run(work.save, stage.path, megabytes, [1, 2], acts.MESH)
        plays: dict[str, Callable[[acts.Stage], Act]] = {
            "a": acts.exactness,
            "b": acts.slow_storage,
            "d": acts.damage,
            **({"c": late.end} if late else {}),  # last: until then its processes wait
        }
        for letter, play in plays.items():
            if letter in letters:
                say(f"\n{letter}. {acts.TITLES[letter]}")
                played.append(play(stage))
    return sorted(played, key=lambda act: act.letter)


def _write_page(page: str | None, path: pathlib.Path | None, say: Callable[[str], None]) -> pathlib.Path | None:
    """Act e: writes the timeline, and returns where it is."""
    say(f"\ne. {acts.TITLES['e']}")
    if page is None:
        say("   not written: orbax_ext did not restore in act b")
        return None
    path = (path or pathlib.Path(tempfile.mkdtemp(prefix="orbax_ext_demo_"), "timeline.html")).absolute()
    files.write(path, page)
    say(f"   {path}")
    return path


def _versions() -> dict[str, str]:
    return {"orbax_ext": version.__version__, "orbax-checkpoint": version.orbax_version(), "jax": jax.__version__}


def _result(played: Collection[Act], page: pathlib.Path | None, kept: bool, seconds: float) -> dict[str, object]:
    return {
        "ok": kept,
        "seconds": round(seconds, 1),
        "versions": _versions(),
        "acts": [act.to_json() for act in played],
        "timeline": None if page is None else str(page),
    }


def _ending(played: list[Act], seconds: float) -> str:
    lines = ["", table(played), "", "orbax_ext:"]
    for act in played:
        lines.append(f"  {act.letter}. {act.claim}: {'yes' if act.kept else 'NO'}")
        lines += [f"     {reason}" for reason in act.broken]
    versions = _versions()
    lines += ["", f"{text_lib.seconds(seconds)}, " + ", ".join(f"{name} {number}" for name, number in versions.items())]
    return "\n".join(lines)
