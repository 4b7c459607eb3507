"""`orbax-ext patch`: fixes an Orbax in your own source tree, instead of registering a handler."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

from orbax_ext import text as text_lib
from orbax_ext.cli import exits
from orbax_ext.upstream import patching

DESCRIPTION = "Applies the patches for the stock single-replica handler to a source tree of Orbax."
EPILOG = """examples:
  orbax-ext patch --to third_party/orbax/checkpoint --check
  orbax-ext patch --to third_party/orbax/checkpoint

DIR is the directory that holds orbax/checkpoint. The files themselves show which release it is: byte for byte, they
must be those of a release that there are patches for, as released or as patched.

Exit code 0: done, or nothing to do; 1: --check found that the patches are not applied; 2: the files are those of no
known release, and nothing was changed.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to", metavar="DIR", required=True, type=pathlib.Path, help="the directory that holds orbax/checkpoint"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="change nothing, only show whether the patches are applied")
    how.add_argument("--reverse", action="store_true", help="remove the patches")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> bool:
    known = patching.load_all()
    tree = read_tree(args.to, known)
    candidates, state = identify(tree, known)
    if not candidates:
        raise exits.UserError("\n".join(_why_unknown(args.to, tree, known)))
    series = candidates[-1]  # releases with the same files have the same patches
    wanted = "original" if args.reverse else "patched"
    if args.check:
        did = "checked"
    elif state == wanted:
        did = "nothing to take back" if args.reverse else "nothing to do"
    else:
        write_tree(args.to, (patching.reverse if args.reverse else patching.apply)(series, tree))
        did, state = "taken back" if args.reverse else "applied", wanted
    _print(args, [series.release for series in candidates], series, state, did)
    return state == wanted


def read_tree(root: pathlib.Path, known: Sequence[patching.Series]) -> dict[str, bytes]:
    """Returns the files below `root` that the patches of any release change."""
    if not (root / "orbax" / "checkpoint").is_dir():
        raise exits.UserError(f"{root} holds no orbax/checkpoint. Give the directory that does, such as site-packages.")
    paths = {path for series in known for path in series.originals}
    if missing := sorted(path for path in paths if not (root / path).is_file()):
        raise exits.UserError(
            f"{root} is not a release that there are patches for: it has no {text_lib.listing(missing)}."
        )
    return {path: (root / path).read_bytes() for path in sorted(paths)}


def identify(tree: Mapping[str, bytes], known: Sequence[patching.Series]) -> tuple[list[patching.Series], str]:
    """Returns the releases that the files belong to, and "original" or "patched"; or none, and "other"."""
    for state in ("original", "patched"):
        if matching := [series for series in known if patching.state(series, tree) == state]:
            return matching, state
    return [], "other"


def _why_unknown(root: pathlib.Path, tree: Mapping[str, bytes], known: Sequence[patching.Series]) -> list[str]:
    """Returns, file by file, which releases it belongs to and what was expected."""
    lines = [f"the files in {root} are not those of a release that there are patches for. Nothing was changed."]
    digests = {path: patching.sha256(data) for path, data in tree.items()}
    likely = [series for series in known if any(_origin(series, path, digest) for path, digest in digests.items())]
    for path, digest in digests.items():
        origins = [origin for series in likely if (origin := _origin(series, path, digest))]
        lines.append(f"  {path}")
        lines.append(f"    found     {digest} ({', '.join(origins) or 'changed by someone, or another release'})")
        if not origins:
            lines += [f"    expected  {series.originals[path]} (as released in {series.release})" for series in likely]
    if not likely:
        lines.append(f"  expected are the files of a release from {known[0].release} to {known[-1].release}")
    return [*lines, "  Put the released files back first, or start from a fork: make fork ORBAX=<release>"]


def _origin(series: patching.Series, path: str, digest: str) -> str:
    """Returns where a file comes from if it belongs to this release, else an empty string."""
    if series.originals[path] == digest:
        return f"as released in {series.release}"
    return f"as patched for {series.release}" if series.results[path] == digest else ""


def write_tree(root: pathlib.Path, files: Mapping[str, bytes]) -> None:
    """Replaces the files; all new files are written before the first old one is replaced."""
    staged: list[tuple[str, pathlib.Path]] = []
    try:
        for path, data in files.items():
            target = root / path
            with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as new:
                staged.append((new.name, target))
                new.write(data)
            os.chmod(new.name, target.stat().st_mode)
        while staged:
            os.replace(*staged[-1])
            staged.pop()
    except OSError as error:
        raise exits.UserError(f"cannot write below {root}: {error}") from error
    finally:
        for name, _ in staged:
            with contextlib.suppress(OSError):
                os.unlink(name)


def _print(args: argparse.Namespace, releases: Sequence[str], series: patching.Series, state: str, did: str) -> None:
    if args.json:
        patches = [patch.name for patch in series.patches]
        print(json.dumps({"releases": releases, "state": state, "did": did, "patches": patches}))
        return
    print(f"{args.to}: Orbax {' or '.join(releases)}, {state} ({did})")
    for patch in series.patches:
        title = patch.header.splitlines()[0].removeprefix("Description: ")
        print(f"  {patch.name:34} {title}")
