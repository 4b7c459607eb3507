"""The command line, `orbax-ext`.

Exit codes: 0 all is well; 1 the command ran and its verdict is bad; 2 the command could not run (bad arguments,
missing files); 130 interrupted; 141 whoever read the output has gone, as `head` does.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from orbax_ext import version

# Modules of orbax_ext.commands, in the order that --help shows.
COMMANDS = ("check", "demo", "doctor", "inspect", "patch", "plan", "report", "verify")

EXIT_OK = 0
EXIT_BAD_VERDICT = 1
EXIT_CANNOT_RUN = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class UserError(Exception):
    """Something that the user can mend: shown in one line, without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    name = "orbax-ext"
    try:
        try:
            args = _parser().parse_args(argv)
            name = f"orbax-ext {args.command}"
            code: int = args.run(args)
        finally:
            sys.stdout.flush()  # here, where a closed pipe is noticed
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `orbax-ext ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more when it exits
        return EXIT_BROKEN_PIPE
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_CANNOT_RUN, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="orbax-ext",
        description="Restore of large JAX jobs: tools around orbax_ext.",
        epilog="Stored shapes have one leading axis more than yours, or one less? That is pmap's axis of devices: "
        "orbax_ext.restore_args(abstract, stacked=True) restores either into the other.",
    )
    parser.add_argument("--version", action="version", version=f"orbax-ext {version.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        importlib.import_module(f"orbax_ext.commands.{command}").add_parser(commands)
    return parser


if __name__ == "__main__":
    from orbax_ext import cli  # as the commands know it, so that UserError is one class

    sys.exit(cli.main())
