"""One process of a local cluster: joins the others, then calls the functions that the parent sends.

The fork server forks it, or `Cluster` starts it as `python -m orbax_ext.lab.worker FD`, where FD is a socket to the
parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import threading
import time
from multiprocessing import connection
from typing import Any

from orbax_ext.lab.protocol import Failure, Setup, find_function

_JOIN_LIMIT = 170  # seconds; below the parent's limit, so that the reason gets into the log


def main(fd: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A parent that a shell started in the background ignores SIGINT, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _exit_with_parent()
    channel: connection.Connection[Any, Any] = connection.Connection(fd)
    setup: Setup = channel.recv()
    sys.path[:] = [*setup.sys_path, *(path for path in sys.path if path not in setup.sys_path)]
    _answer(channel, lambda: _join(setup))
    while (job := channel.recv()) is not None:
        _answer(channel, lambda job=job: find_function(job)(*job.args, **job.kwargs))
    _leave()


def _join(setup: Setup) -> int:
    import jax

    for module in os.environ.get("ORBAX_EXT_LAB_PRELOAD", "").split():
        importlib.import_module(module)

    jax.distributed.initialize(setup.coordinator, setup.processes, setup.rank, initialization_timeout=_JOIN_LIMIT)
    return jax.device_count()


def _answer(channel: connection.Connection[Any, Any], work: Any) -> None:
    """Sends (True, value) or (False, Failure). A value that can't be pickled is a failure."""
    try:
        channel.send((True, work()))
    except BaseException as error:
        channel.send((False, Failure.of(error)))


def _leave() -> None:
    import jax

    with contextlib.suppress(Exception):
        jax.distributed.shutdown()
    sys.stdout.flush()
    os._exit(0)  # skips destructors that may wait for processes that are gone


def _exit_with_parent() -> None:
    """Ends this process when its parent ends: one that hangs in a collective would stay for ever."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
