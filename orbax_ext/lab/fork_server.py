"""A process that has imported JAX, Orbax and orbax_ext, from which the processes of clusters are forked.

The imports are most of what starting a process costs. JAX makes its backends and its threads when they are first used,
which only the forked processes do. `forked.ForkServer` starts it as `python -m orbax_ext.lab.fork_server FD`, where FD
is a socket to the parent; it ends when the parent closes the socket or ends.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
import warnings
from typing import NoReturn

from orbax_ext.lab import worker
from orbax_ext.lab.protocol import LONGEST_MESSAGE, Fork

_PRELOADED = ("jax", "orbax.checkpoint", "orbax_ext.handler", "orbax_ext.registration")


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends the processes
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # the forked processes need not visit, and so copy, what is here already
    requests = socket.socket(fileno=fd)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, LONGEST_MESSAGE, 2)
        if not message:
            return
        request = pickle.loads(message)
        answer: int | None
        if isinstance(request, Fork):
            answer = _fork()
            if not answer:
                requests.close()
                _run_worker(request, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            pid, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        requests.send(pickle.dumps(answer))


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 and newer warn of threads, which may hold locks: here they are OpenBLAS's, which expects forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run_worker(request: Fork, channel: int, log: int) -> NoReturn:
    """Makes this process what a new interpreter with the worker module would be, and runs the worker."""
    try:
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        os.chdir(request.directory)
        os.environ.clear()
        os.environ.update(request.environment)

        import jax
        import numpy as np

        jax.config.update("jax_num_cpu_devices", request.devices)
        np.random.seed()  # else all processes draw the same numbers; Python's own generator does this itself
        sys.argv = [worker.__file__]
        worker.main(channel)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
