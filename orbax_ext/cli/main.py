"""The command line, `orbax-ext`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from orbax_ext import version
from orbax_ext.cli import exits

# In the order of --help. A command's module is imported only when that command runs: importing JAX takes a second.
COMMANDS = {
    "check": "restore a checkpoint on this cluster, discard the result, and give a verdict",
    "demo": "show in five acts what stock Orbax and orbax_ext do on a local cluster",
    "doctor": "list which known defects of Orbax this installation has, and what fixes them",
    "inspect": "show what a checkpoint holds and how it is stored",
    "patch": "apply the patches to a source tree of Orbax",
    "plan": "forecast a restore on a given mesh: bytes, seconds, memory",
    "report": "show where the time of a restore went, on all processes",
    "run": "run a Python program with orbax_ext registered",
    "verify": "compare a checkpoint with the digests stored beside it, or write them",
}
_FOLDERS = ("check", "demo", "doctor")  # commands that are a folder with a module `command`


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code, which is one of those in `exits`."""
    name = "orbax-ext"
    try:
        try:
            args = _parser(sys.argv[1:] if argv is None else argv).parse_args(argv)
            name = f"orbax-ext {args.command}"
            outcome: bool | Callable[[], int] = args.run(args)
        finally:
            sys.stdout.flush()  # raises BrokenPipeError here rather than when Python exits
    except exits.UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return exits.EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return exits.EXIT_INTERRUPTED
    except BrokenPipeError:  # `orbax-ext ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports the pipe again at exit
        return exits.EXIT_BROKEN_PIPE
    if callable(outcome):  # the program of `run`: Python decides what its exceptions mean, not this function
        return outcome()
    return exits.EXIT_OK if outcome else exits.EXIT_BAD_VERDICT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line instead of the usage, which is long."""
        self.exit(exits.EXIT_CANNOT_RUN, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of all commands; only the command that `argv` names gets its arguments."""
    parser = _Parser(
        prog="orbax-ext",
        description="Restore of large JAX jobs: tools around orbax_ext.",
        epilog="If the stored shapes have one leading axis more or less than yours, that axis is pmap's axis of "
        "devices: orbax_ext.restore_args(abstract, stacked=True) restores either form into the other.",
    )
    parser.add_argument("--version", action="version", version=f"orbax-ext {version.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name == chosen:
            module = importlib.import_module(f"orbax_ext.cli.{name}{'.command' if name in _FOLDERS else ''}")
            command.description, command.epilog = module.DESCRIPTION, module.EPILOG
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            command.set_defaults(run=module.run)
            module.configure(command)
    return parser
