"""`orbax-ext verify`: compares a checkpoint with the digests that were stored beside it, or stores them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from etils import epath

from orbax_ext.cli import exits, paths
from orbax_ext.storage import checkpoint, s3
from orbax_ext.storage.checkpoint import digest_files

_EPILOG = """examples:
  orbax-ext verify --write /ckpt/run7       stores digests of the newest step, once it is known to be good
  orbax-ext verify /ckpt/run7 --step 1200   exit code 0: the same, 1: damaged, 2: nothing to compare with
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads every array of a checkpoint and compares its digest with the one stored beside the checkpoint. With "
        "--write, stores them; nothing in the checkpoint changes. Restores with verify=True compare with them too."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkpoint", metavar="CKPT", help=paths.HELP)
    parser.add_argument("--step", type=int, help="which step of a CheckpointManager's directory (the newest)")
    parser.add_argument("--write", action="store_true", help="write the digests instead of comparing with them")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with paths.readable(args.checkpoint):
        items = checkpoint.locate(args.checkpoint, args.step)
        results = [_write(item) if args.write else _compare(item) for item in items]
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        print("\n".join(line for result in results for line in _lines(result)))
    return exits.EXIT_BAD_VERDICT if any(result["bad"] for result in results) else exits.EXIT_OK


def _digests(item: epath.Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    shown = sys.stderr.isatty()
    try:
        for number, (name, found) in enumerate(digest_files.compute(item), 1):
            if shown:
                print(f"\r{number} arrays read", end="", file=sys.stderr, flush=True)
            yield name, found
    except ValueError as error:  # TensorStore's word for a list of arrays that is damaged
        yield "the list of arrays", str(s3.explain(error, str(item)))
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _write(item: epath.Path) -> dict[str, Any]:
    found = dict(_digests(item))
    bad = {name: f"can't be read: {what}" for name, what in found.items() if isinstance(what, str)}
    good = {name: what for name, what in found.items() if not isinstance(what, str)}
    written = None if bad else str(digest_files.write(item, good))
    return {"item": str(item), "arrays": len(found), "written": written, "bad": bad}


def _compare(item: epath.Path) -> dict[str, Any]:
    try:
        stored = digest_files.load(item)
    except (ValueError, KeyError) as error:
        raise exits.UserError(f"{digest_files.path_for(item)} can't be understood: {error}") from None
    if stored is None:
        place = digest_files.path_for(item)
        why = "is of another checkpoint of the same name" if place.exists() else "does not exist"
        raise exits.UserError(f"nothing to compare {item} with: {place} {why}; `orbax-ext verify --write` makes it")
    found = dict(_digests(item))
    bad = {name: "is missing" for name in stored if name not in found}
    for name, what in found.items():
        if isinstance(what, str):
            bad[name] = f"can't be read: {what}"
        elif name not in stored:
            bad[name] = "was not there when the digests were written"
        elif what != stored[name]:
            bad[name] = f"is {_words(what)}, not {_words(stored[name])}"
    return {"item": str(item), "arrays": len(found), "written": None, "bad": bad}


def _words(what: Any) -> str:
    return f"{what['dtype']}{what['shape']} with digest {what['digest']}"


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [f"{result['item']}: {name} {why.splitlines()[0]}" for name, why in sorted(result["bad"].items())]
    if result["written"]:
        lines.append(f"{result['item']}: digests of {result['arrays']} arrays written to {result['written']}")
    elif result["bad"]:
        lines.append(f"{result['item']}: {len(result['bad'])} of {result['arrays']} arrays are bad")
    else:
        lines.append(f"{result['item']}: all {result['arrays']} arrays have the digests that were stored")
    return lines
