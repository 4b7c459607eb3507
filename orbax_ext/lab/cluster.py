"""The parent's side of a local cluster: starts the processes, sends them functions, collects outcomes, cleans up."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from typing import Any, Protocol, Self

from orbax_ext.lab import forked
from orbax_ext.lab.protocol import Failure, Job, Setup, describe_function

_START_LIMIT = 180.0  # seconds; importing JAX in many processes on few cores is slow
_START_GRACE = 5.0  # seconds for the others once a process has not started: without process 0 they would wait for long
_STOP_LIMIT = 20.0  # seconds for all processes to leave `jax.distributed` together
_END_LIMIT = 60.0  # seconds for the system to end a process that was killed or has closed its channel
_TERM_GRACE = 3.0  # seconds between SIGTERM and SIGKILL
_STACKS_DELAY = 0.2  # seconds for a process to write its stacks to its log
_PACKAGE_ROOT = str(pathlib.Path(__file__).resolve().parents[2])
_LOG_TAIL_LINES = 40  # of each failed process in an error: a traceback or two


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run on one process: a value, a failure, or neither if the process died or timed out."""

    rank: int
    state: str  # "returned", "raised", "died" or "timed out"
    value: Any = None
    failure: Failure | None = None
    exit_code: int | None = None  # of a process that died; negative is a signal

    @property
    def ok(self) -> bool:
        return self.state == "returned"

    def __str__(self) -> str:
        details = {"raised": f" {self.failure}", "died": f" with exit code {self.exit_code}"}
        return f"process {self.rank} {self.state}{details.get(self.state, '')}"


class RunFailedError(Exception):
    """At least one process did not return. `.outcomes` has all outcomes; the message ends with the processes' logs."""

    def __init__(self, message: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = tuple(outcomes)


class Cluster:
    """`processes` JAX processes with `devices` CPU devices each, on this machine.

    Args:
      processes: Number of processes.
      devices: Number of CPU devices of each process.
      timeout: Limit of a run in seconds, unless the run has its own.
      env: Environment variables to add for every process.
      log_dir: Directory of the `rank<N>.log` files; a temporary one by default.
      python: The interpreter, such as that of another environment that has orbax_ext.
      host: The address at which the processes find each other.
      command_prefix: Returns the words to put before the command of a rank (`ip netns exec h0`, `taskset -c 1`).
      fork_servers: From which processes with a prefix are forked, for clusters that start one after the other on the
        same hosts; each is started on its own by default.
    """

    def __init__(
        self,
        processes: int,
        devices: int = 1,
        *,
        timeout: float = 120.0,
        env: Mapping[str, str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        python: str = sys.executable,
        host: str = "127.0.0.1",
        command_prefix: Callable[[int], Sequence[str]] = lambda rank: (),
        fork_servers: forked.ForkServers | None = None,
    ) -> None:
        if processes < 1 or devices < 1:
            raise ValueError(f"A cluster needs at least 1 process and 1 device, got {processes} x {devices}.")
        self.processes = processes
        self.devices = devices
        self.timeout = timeout
        self._env = dict(env or {})
        self._owns_logs = log_dir is None
        self._log_dir = pathlib.Path(log_dir or tempfile.mkdtemp(prefix="orbax_ext_lab_"))
        self._python = python
        self._host = host
        self._command_prefix = command_prefix
        self._fork_servers = fork_servers
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        return bool(self._workers) and all(worker.alive for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Starts the processes and waits until all have joined. `with` and `run` call it."""
        if self.running:
            return
        self.stop()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        with reserved_port() as port:
            for rank in range(self.processes):
                self._workers.append(self._launch(rank, f"{self._host}:{port}"))
            outcomes = Run(self, self._workers).outcomes(_START_LIMIT, _START_GRACE)
        if not all(outcome.ok for outcome in outcomes):
            self.stop()
            raise self._failed("the cluster did not start", outcomes)

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Run:
        """Starts `function(*args, **kwargs)` on every process and returns without waiting for it.

        The function must be importable (not a lambda or a nested function); arguments and results are pickled.
        """
        self.start()
        module, qualname, main_path = describe_function(function)
        for worker in self._workers:
            worker.send(Job(module, qualname, main_path, args, kwargs))
        return Run(self, self._workers)

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Outcome]:
        """Runs a function on every process and returns the outcomes by rank; a failed process raises nothing here."""
        return self.submit(function, *args, **kwargs).outcomes(timeout)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Runs a function on every process and returns the values by rank, or raises `RunFailedError`."""
        outcomes = self.outcomes(function, *args, timeout=timeout, **kwargs)
        if not all(outcome.ok for outcome in outcomes):
            raise self._failed(f"{function.__qualname__} failed", outcomes)
        return [outcome.value for outcome in outcomes]

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to one process: SIGKILL, SIGSTOP, SIGCONT."""
        self._workers[rank].process.send_signal(number)

    def log(self, rank: int) -> str:
        """Returns everything that one process has printed since the cluster was made."""
        with contextlib.suppress(FileNotFoundError):
            return self._log_path(rank).read_text(errors="replace")
        return ""

    def stop(self) -> None:
        """Ends the processes: with a request, then SIGTERM, then SIGKILL. The next run starts new ones."""
        workers, self._workers = self._workers, []
        all_idle = bool(workers) and all(worker.idle for worker in workers)
        for worker in workers:
            worker.send(None)  # asks the process to exit
        # Processes leave `jax.distributed` together: if one is dead or busy, the others can't, and must be killed.
        deadline = time.monotonic() + (_STOP_LIMIT if all_idle else 0.0)
        for worker in workers:
            worker.end(deadline)

    def close(self) -> None:
        """Stops the cluster, and removes the logs if they are in a temporary directory."""
        self.stop()
        if self._owns_logs:
            shutil.rmtree(self._log_dir, ignore_errors=True)

    def _launch(self, rank: int, coordinator: str) -> _Worker:
        ours, theirs = socket.socketpair()
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(self.devices),
            "PYTHONUNBUFFERED": "1",
            # The worker module must be importable before it can receive the parent's sys.path.
            "PYTHONPATH": os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")])),
            **self._env,
        }
        with theirs, self._log_path(rank).open("ab") as log:
            process = self._start_process(rank, env, theirs.fileno(), log.fileno())
        worker = _Worker(rank, process, connection.Connection(ours.detach()))
        worker.send(Setup(rank, self.processes, coordinator, _paths_to_share(self._python)))
        return worker

    def _start_process(self, rank: int, env: Mapping[str, str], channel: int, log: int) -> _Process:
        """Starts a process, forked from one that has imported JAX where it would have the same interpreter."""
        prefix = self._command_prefix(rank)
        servers = self._fork_servers if prefix else forked.HERE
        if servers is not None and self._python == sys.executable:
            with contextlib.suppress(forked.ForkServerGoneError):  # a process of its own says in its log why
                return servers.server_for(env, prefix).fork(env, self.devices, channel, log)
        command = [*prefix, self._python, "-m", "orbax_ext.lab.worker", str(channel)]
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[channel])

    def _log_path(self, rank: int) -> pathlib.Path:
        return self._log_dir / f"rank{rank}.log"

    def _failed(self, headline: str, outcomes: Sequence[Outcome]) -> RunFailedError:
        parts = [headline]
        for outcome in outcomes:
            if outcome.ok:
                continue
            parts.append(f"--- {outcome}")
            if outcome.failure is not None:
                parts.append(outcome.failure.traceback.rstrip())
            parts.append(f"log of process {outcome.rank}, last {_LOG_TAIL_LINES} lines:")
            parts.extend(self.log(outcome.rank).splitlines()[-_LOG_TAIL_LINES:])
        return RunFailedError("\n".join(parts), outcomes)


class Run:
    """A function under way on every process."""

    def __init__(self, cluster: Cluster, workers: Sequence[_Worker]) -> None:
        self._cluster = cluster
        self._workers = tuple(workers)

    def outcomes(self, timeout: float | None = None, grace: float | None = None) -> list[Outcome]:
        """Waits for every process and returns the outcomes by rank.

        If a process dies or times out, the cluster is stopped. With `grace`, the other processes get that many more
        seconds once one has failed.
        """
        deadline = time.monotonic() + (self._cluster.timeout if timeout is None else timeout)
        by_rank: dict[int, Outcome] = {}
        waiting = {worker.channel: worker for worker in self._workers}
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            # Nothing is ready once the time is up: then `wait` reports all remaining processes as timed out.
            for worker in [waiting.pop(channel) for channel in ready or list(waiting)]:  # type: ignore[call-overload]
                outcome = by_rank[worker.rank] = worker.wait(deadline)
                if grace is not None and not outcome.ok:
                    deadline = min(deadline, time.monotonic() + grace)
        outcomes = [by_rank[rank] for rank in sorted(by_rank)]
        if any(outcome.state in ("died", "timed out") for outcome in outcomes):
            self._cluster.stop()
        return outcomes


class _Process(Protocol):
    """A `subprocess.Popen` or a `ForkedProcess`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def send_signal(self, number: int) -> None: ...


@dataclasses.dataclass(eq=False)
class _Worker:
    """One process and the connection to it."""

    rank: int
    process: _Process
    channel: connection.Connection[Any, Any]
    idle: bool = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, message: object) -> None:
        self.idle = False
        with contextlib.suppress(OSError):  # a dead process is reported by wait()
            self.channel.send(message)

    def wait(self, deadline: float) -> Outcome:
        if not self.channel.poll(max(0.0, deadline - time.monotonic())):
            self._dump_stacks()
            return Outcome(self.rank, "timed out")
        try:
            returned, value = self.channel.recv()
        except (EOFError, OSError):
            return Outcome(self.rank, "died", exit_code=self._exit_code())
        self.idle = True
        if returned:
            return Outcome(self.rank, "returned", value=value)
        return Outcome(self.rank, "raised", failure=value)

    def end(self, deadline: float) -> None:
        for limit, number in ((deadline - time.monotonic(), signal.SIGTERM), (_TERM_GRACE, signal.SIGKILL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, limit))
                break
            self.process.send_signal(number)
        self._exit_code()
        self.channel.close()

    def _exit_code(self) -> int | None:
        """Returns the exit code of a process that is about to end; None if the system does not end it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(_END_LIMIT)
        return None

    def _dump_stacks(self) -> None:
        # The worker's faulthandler writes the stacks of all threads to its log, which shows where the process hangs.
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS_DELAY)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Keeps a port from everybody else who looks for a free one, while JAX's service, which shares ports, takes it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("", 0))  # it does not listen, so connections go to the service
        yield int(held.getsockname()[1])


def _paths_to_share(python: str) -> tuple[str, ...]:
    """Returns the entries of `sys.path` for a process; one with another interpreter does not get our packages."""
    if python == sys.executable:
        return tuple(sys.path)
    homes = tuple(os.path.realpath(home) + os.sep for home in (sys.prefix, sys.base_prefix))
    return tuple(path for path in sys.path if path and not os.path.realpath(path).startswith(homes))
