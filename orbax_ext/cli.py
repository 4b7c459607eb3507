"""The command line, `orbax-ext`.

Exit codes: 0 all is well; 1 the command ran and its verdict is bad; 2 the command could not run (bad arguments,
missing files); 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from orbax_ext import version

# Modules of orbax_ext.commands, in the order that --help shows.
COMMANDS = ("demo", "doctor", "patch", "report", "verify")

EXIT_OK = 0
EXIT_BAD_VERDICT = 1
EXIT_CANNOT_RUN = 2
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """Something that the user can mend: shown in one line, without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="orbax-ext",
        description="Restore of large JAX jobs: tools around orbax_ext.",
        epilog="Stored shapes have one leading axis more than yours, or one less? That is pmap's axis of devices: "
        "orbax_ext.restore_args(abstract, stacked=True) restores either into the other.",
    )
    parser.add_argument("--version", action="version", version=f"orbax-ext {version.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"orbax_ext.commands.{name}").add_parser(commands)
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
    except UserError as error:
        print(f"orbax-ext {args.command}: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `orbax-ext ... | head`
        sys.stderr.close()
        return EXIT_OK
    return code


if __name__ == "__main__":
    from orbax_ext import cli  # as the commands know it, so that UserError is one class

    sys.exit(cli.main())
