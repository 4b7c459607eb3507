"""The parent's side of the fork server: starts it, asks it for processes, and follows them."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from orbax_ext.lab.protocol import LONGEST_MESSAGE, Fork

# Libraries read variables with these prefixes when they are imported. The other two are set again after the fork.
_READ_AT_IMPORT = ("JAX_", "XLA_", "TF_", "TPU_", "CUDA_", "OPENBLAS_", "OMP_", "MKL_", "MALLOC_", "LD_", "PYTHON")
_SET_AGAIN = {"JAX_NUM_CPU_DEVICES"}
_ANSWER_LIMIT = 180.0  # seconds; the first answer comes after the imports, which are slow on few cores
_END_LIMIT = 5.0  # seconds for the system to end a server that was killed
_POLL_INTERVAL = 0.005  # seconds between two looks at a process that is about to end


class ForkServerGoneError(Exception):
    """The fork server has ended or can't be used."""


class ForkedProcess:
    """As much of `subprocess.Popen` as a cluster needs, for a process that is the fork server's child."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._returncode: int | None = None

    def poll(self) -> int | None:
        if self._returncode is None:
            try:
                self._returncode = self._server.ask(self.pid)
            except ForkServerGoneError:  # its children end with it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, 0)
                    return None
                self._returncode = 1
        return self._returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_POLL_INTERVAL)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # nobody else can have its number before that has returned its exit code
            os.kill(self.pid, number)


class ForkServer:
    """The parent's side. Processes are forked for one environment, apart from variables that are read later."""

    def __init__(self, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        """`prefix` are words before the server's command, such as `ip netns exec h0`."""
        self._environment = dict(environment)
        self._asking = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "orbax_ext.lab.fork_server", str(theirs.fileno())],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        ours.settimeout(_ANSWER_LIMIT)
        self._socket = ours

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Returns whether the server lives and has imported what a process with this environment would import."""
        changed = {
            name
            for name in {*environment, *self._environment} - {*_SET_AGAIN}
            if environment.get(name) != self._environment.get(name)
        }
        return self._process.poll() is None and not any(name.startswith(_READ_AT_IMPORT) for name in changed)

    def fork(self, environment: Mapping[str, str], devices: int, channel: int, log: int) -> ForkedProcess:
        """Returns a new process, which runs `worker.main`. Raises `ForkServerGoneError`."""
        return ForkedProcess(self, self.ask(Fork(environment, os.getcwd(), devices), [channel, log]))

    def end(self) -> None:
        """Ends the server; its children end with it."""
        self._socket.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT)

    def ask(self, request: int | Fork, descriptors: Sequence[int] = ()) -> Any:
        with self._asking:
            try:
                socket.send_fds(self._socket, [pickle.dumps(request)], descriptors)
                answer = self._socket.recv(LONGEST_MESSAGE)
            except OSError as error:
                self._process.kill()  # a late answer would be taken for the next one
                raise ForkServerGoneError from error
        if not answer:
            raise ForkServerGoneError
        return pickle.loads(answer)


class ForkServers:
    """Fork servers by the words before their command, each made when it is first needed.

    Used in a `with` block, at the end of which they end: before the hosts go on which the words made them run.
    """

    def __init__(self) -> None:
        self._servers: dict[tuple[str, ...], ForkServer] = {}
        self._starting = threading.Lock()

    def server_for(self, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> ForkServer:
        """Returns a server that forks processes for an environment."""
        with self._starting:
            server = self._servers.get(tuple(prefix))
            if server is None or not server.serves(environment):
                server = self._servers[tuple(prefix)] = ForkServer(environment, prefix)
            return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers.values():
            server.end()
        self._servers = {}


HERE = ForkServers()  # those of processes that are started without a prefix
