"""Where the command `orbax-ext` begins: outside of the package, so that Ctrl-C is met before JAX has been imported."""

from __future__ import annotations

import os
import signal
from typing import Any


def main() -> int:
    signal.signal(signal.SIGINT, _stop)
    from orbax_ext import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


def _stop(number: int, frame: Any) -> None:
    os.write(2, b"orbax-ext: interrupted\n")
    os._exit(130)
