"""The command line, `orbax-ext`. Exit codes are in `exits`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from orbax_ext import version
from orbax_ext.cli import exits

# The commands in the order that --help shows. A command's module is imported when it is asked for: some need JAX.
COMMANDS = {
    "check": "restore for real on this cluster, into nothing, and give a verdict",
    "demo": "restore a small state with stock Orbax and with orbax_ext on a local cluster",
    "doctor": "tell which known defects of Orbax this installation has, and what mends them",
    "inspect": "show what a checkpoint holds and how it is stored",
    "patch": "apply the patches to a source tree of Orbax",
    "plan": "tell what a restore would do on a given mesh: bytes, seconds, memory",
    "report": "show where the time of a restore went, on all processes",
    "verify": "compare a checkpoint with the digests stored beside it, or write them",
}


def main(argv: Sequence[str] | None = None) -> int:
    name = "orbax-ext"
    try:
        try:
            args = _parser(sys.argv[1:] if argv is None else argv).parse_args(argv)
            name = f"orbax-ext {args.command}"
            code: int = args.run(args)
        finally:
            sys.stdout.flush()  # here, where a closed pipe is noticed
    except exits.UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return exits.EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return exits.EXIT_INTERRUPTED
    except BrokenPipeError:  # `orbax-ext ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more when it exits
        return exits.EXIT_BROKEN_PIPE
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(exits.EXIT_CANNOT_RUN, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="orbax-ext",
        description="Restore of large JAX jobs: tools around orbax_ext.",
        epilog="Stored shapes have one leading axis more than yours, or one less? That is pmap's axis of devices: "
        "orbax_ext.restore_args(abstract, stacked=True) restores either into the other.",
    )
    parser.add_argument("--version", action="version", version=f"orbax-ext {version.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name == chosen:
            importlib.import_module(f"orbax_ext.cli.{name}").configure(command)
    return parser
