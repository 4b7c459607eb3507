"""`orbax-ext verify`: compares a checkpoint with the digests that are stored beside it, or writes them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from orbax_ext import text as text_lib
from orbax_ext.cli import arguments, exits, files
from orbax_ext.storage import checkpoint, s3
from orbax_ext.storage.checkpoint import digest_files, digests

DESCRIPTION = (
    "Reads every array of a checkpoint and compares its digest with the one stored beside the checkpoint. With "
    "--write, writes the digests; the checkpoint itself does not change. Restores with verify=True use them too."
)
EPILOG = """examples:
  orbax-ext verify --write /ckpt/run7       writes digests of the newest step, while it is known to be good
  orbax-ext verify /ckpt/run7 --step 1200   compares that step with its digests

Exit code 0: all arrays have the stored digests; 1: arrays are damaged; 2: there are no digests to compare with.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help=arguments.CHECKPOINT)
    arguments.add_step(parser)
    parser.add_argument("--write", action="store_true", help="write the digests instead of comparing with them")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> bool:
    with files.readable_checkpoint(args.checkpoint):
        items = checkpoint.locate(args.checkpoint, args.step)
        results = [_write(item) if args.write else _compare(item) for item in items]
    lines = [line for result in results for line in _lines(result)]
    print(json.dumps(results, indent=2) if args.json else "\n".join(lines))
    return not any(result["bad"] for result in results)


def _digests(item: epath.Path, version: int = digests.CURRENT) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yields the name and digest of every array, or the reason why it can't be read; shows progress on a terminal."""
    show = sys.stderr.isatty()
    try:
        for number, (name, digest) in enumerate(digest_files.compute(item, version), 1):
            if show:
                print(f"\r{text_lib.count(number, 'array')} read", end="", file=sys.stderr, flush=True)
            yield name, digest
    except ValueError as error:  # TensorStore raises it if the list of arrays is damaged
        yield "the list of arrays", str(s3.explain(error, str(item)))
    finally:
        if show:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _write(item: epath.Path) -> dict[str, Any]:
    found = dict(_digests(item))
    bad = {name: f"can't be read: {digest}" for name, digest in found.items() if isinstance(digest, str)}
    good = {name: digest for name, digest in found.items() if not isinstance(digest, str)}
    written = None if bad else str(digest_files.write(item, good))
    return {"item": str(item), "arrays": len(found), "written": written, "bad": bad}


def _compare(item: epath.Path) -> dict[str, Any]:
    path = digest_files.existing_path(item)
    try:
        stored = digest_files.load(item)
    except (ValueError, KeyError) as error:
        raise exits.UserError(f"{path} can't be understood: {error}") from None
    if stored is None:
        reason = "belongs to another checkpoint of the same name" if path else "does not exist"
        path = path or digest_files.path_for(item)
        raise exits.UserError(f"nothing to compare {item} with: {path} {reason}; `orbax-ext verify --write` makes it")
    found, expected = dict(_digests(item, stored.version)), stored.leaves
    bad = {name: "is missing" for name in expected if name not in found}
    for name, digest in found.items():
        if isinstance(digest, str):
            bad[name] = f"can't be read: {digest}"
        elif name not in expected:
            bad[name] = "did not exist when the digests were written"
        elif digest != expected[name]:
            bad[name] = f"is {_digest_text(digest)}, not {_digest_text(expected[name])}"
    return {"item": str(item), "arrays": len(found), "written": None, "bad": bad}


def _digest_text(digest: Mapping[str, Any]) -> str:
    return f"{digest['dtype']}{digest['shape']} with digest {digest['digest']}"


def _lines(result: Mapping[str, Any]) -> list[str]:
    item, arrays = result["item"], text_lib.count(result["arrays"], "array")
    lines = [f"{item}: {name} {reason.splitlines()[0]}" for name, reason in sorted(result["bad"].items())]
    if result["written"]:
        lines.append(f"{item}: digests of {arrays} written to {result['written']}")
    elif result["bad"]:
        lines.append(f"{item}: damaged: {len(result['bad'])} of {arrays}")
    else:
        lines.append(f"{item}: verified {arrays} against the stored digests")
    return lines
