"""`orbax-ext patch`: mend an Orbax that you carry in your own tree, instead of registering a handler."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

from orbax_ext.cli.exits import EXIT_BAD_VERDICT, EXIT_OK, UserError
from orbax_ext.upstream import patching

_EXAMPLE = """\
example:
  orbax-ext patch --to third_party/orbax/checkpoint --check
  orbax-ext patch --to third_party/orbax/checkpoint

DIR is the directory that holds orbax/checkpoint. Which release it is, is told by the files themselves: they must be,
byte for byte, those of a release that there are patches for. Otherwise nothing is touched and the exit code is 2.
--check exits with 1 if the patches are not applied.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Applies the patches for the stock single-replica handler to a source tree of Orbax."
    parser.epilog = _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--to", metavar="DIR", required=True, type=pathlib.Path, help="holds orbax/checkpoint")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="change nothing, say where the tree stands")
    how.add_argument("--reverse", action="store_true", help="take the patches back")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    known = patching.load_all()
    tree = read_tree(args.to, known)
    candidates, state = identify(args.to, tree, known)
    series = candidates[-1]  # those of a few releases are the same, and so are their patches
    if args.check:
        did, code = "checked", EXIT_OK if state == "patched" else EXIT_BAD_VERDICT
    elif args.reverse:
        did, code = "nothing to take back" if state == "original" else "taken back", EXIT_OK
        if state == "patched":
            write_tree(args.to, patching.reverse(series, tree))
            state = "original"
    else:
        did, code = "nothing to do" if state == "patched" else "applied", EXIT_OK
        if state == "original":
            write_tree(args.to, patching.apply(series, tree))
            state = "patched"
    _print(args, [series.release for series in candidates], series, state, did)
    return code


def read_tree(root: pathlib.Path, known: Sequence[patching.Series]) -> dict[str, bytes]:
    """The files below `root` that some release's patches change."""
    if not (root / "orbax" / "checkpoint").is_dir():
        raise UserError(f"{root} holds no orbax/checkpoint. Give the directory that does, such as site-packages.")
    paths = {path for series in known for path in series.originals}
    missing = sorted(path for path in paths if not (root / path).is_file())
    if missing:
        raise UserError(f"{root} is not a release that there are patches for: it has no {', '.join(missing)}.")
    return {path: (root / path).read_bytes() for path in sorted(paths)}


def identify(
    root: pathlib.Path, tree: Mapping[str, bytes], known: Sequence[patching.Series]
) -> tuple[list[patching.Series], str]:
    """The releases that the files are of, and whether they are "original" or "patched"."""
    for state in ("original", "patched"):
        found = [series for series in known if patching.state(series, tree) == state]
        if found:
            return found, state
    raise UserError("\n".join(_why_unknown(root, tree, known)))


def _why_unknown(root: pathlib.Path, tree: Mapping[str, bytes], known: Sequence[patching.Series]) -> list[str]:
    lines = [f"the files in {root} are not those of a release that there are patches for. Nothing was changed."]
    found = {path: patching.sha256(data) for path, data in tree.items()}
    likely = [series for series in known if any(_whose(series, path, digest) for path, digest in found.items())]
    for path, digest in found.items():
        whose = [
            f"{_whose(series, path, digest)} {series.release}" for series in likely if _whose(series, path, digest)
        ]
        lines += [
            f"  {path}",
            f"    found     {digest} ({', '.join(whose) or 'changed by someone, or another release'})",
        ]
        for series in likely if not whose else ():
            lines.append(f"    expected  {series.originals[path]} (as released in {series.release})")
    if not likely:
        lines.append(f"  expected are the files of a release from {known[0].release} to {known[-1].release}")
    return [*lines, "  Put the released files back first, or start from a fork: make fork ORBAX=<release>"]


def _whose(series: patching.Series, path: str, digest: str) -> str:
    if series.originals[path] == digest:
        return "as released in"
    return "as patched for" if series.results[path] == digest else ""


def write_tree(root: pathlib.Path, files: Mapping[str, bytes]) -> None:
    """Replaces the files; every new one is on disk before the first old one goes."""
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
        raise UserError(f"cannot write below {root}: {error}") from error
    finally:
        for name, _ in staged:
            with contextlib.suppress(OSError):
                os.unlink(name)


def _print(args: argparse.Namespace, releases: Sequence[str], series: patching.Series, state: str, did: str) -> None:
    patches = [patch.name for patch in series.patches]
    if args.json:
        print(json.dumps({"releases": releases, "state": state, "did": did, "patches": patches}))
        return
    print(f"{args.to}: Orbax {' or '.join(releases)}, {state} ({did})")
    for patch in series.patches:
        title = patch.header.splitlines()[0].removeprefix("Description: ")
        print(f"  {patch.name:34} {title}")
