"""A real Slurm of several nodes on this machine: munged, slurmctld, and a slurmd for each node.

A node is a set of Linux namespaces with a host name, a hosts file and a process table of its own. Killing its first
process kills all that runs on it, as losing a machine does. Nothing is written outside the folder that is given, and
nothing is left when the cluster stops. It needs root, and Debian's packages slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "unshare")
START_LIMIT = 60.0  # seconds
COMMAND_LIMIT = 150.0  # seconds
NODES = 4
ROOT = pathlib.Path(__file__).parents[2]

# The first process of a node waits for slurmd and for whatever its jobs leave behind.
_NODE = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && "$@"; exit'
_CONFIGURATION = """
ClusterName=orbax
SlurmctldHost={controller}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
# A job that is requeued waits as long as a credential lives.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
FirstJobId={first_job}
ReturnToService=2
SlurmdTimeout=300
KillWait=2
# `scontrol show job` knows a job for so long after its end.
MinJobAge=3600
MpiDefault=none
ProctrackType=proctrack/linuxproc
SwitchType=switch/none
TaskPlugin=task/none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# All nodes share this machine's processors; each may run several tasks all the same.
SlurmdParameters=config_overrides
NodeName=DEFAULT CPUs=4 State=UNKNOWN
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def missing() -> str:
    """Returns why Slurm can't run here, with the remedy; empty if it can."""
    if os.geteuid() != 0:
        return "a Slurm of several nodes on one machine needs root: run `make test-slurm` as root"
    if absent := [program for program in PROGRAMS if not shutil.which(program)]:
        return f"no {', '.join(absent)}: apt-get install slurm-wlm munge"
    if subprocess.run([*_namespaces(), "true"], capture_output=True, check=False).returncode:
        return "this machine does not allow new namespaces (unshare), and each node of Slurm is in its own"
    return ""


@contextlib.contextmanager
def running(folder: pathlib.Path, environment: Mapping[str, str]) -> Iterator[Slurm]:
    """Starts a Slurm whose files are in `folder`, which must have a short name: Unix sockets are in it."""
    slurm = Slurm(folder, {**environment, "SLURM_CONF": str(folder / "slurm.conf")})
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@dataclasses.dataclass
class Slurm:
    """A running Slurm. Commands get `environment`, and so do the jobs that they start."""

    folder: pathlib.Path
    environment: dict[str, str]
    _daemons: dict[str, subprocess.Popen[bytes]] = dataclasses.field(default_factory=dict)
    _commands: list[subprocess.Popen[str]] = dataclasses.field(default_factory=list)

    @property
    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(NODES)]

    def start(self) -> None:
        (self.folder / "state").mkdir()
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"127.0.0.1 {n}\n" for n in self.nodes))
        (self.folder / "slurm.conf").write_text(self._configuration())
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        paths = [f"--{option}={self.folder}/munge.{ending}" for option, ending in files.items()]
        # `--force`: munged refuses a socket below a folder that others may write to, such as /tmp.
        self._start("munged", ["munged", "--foreground", "--force", *paths])
        self._wait_for((self.folder / "munge.socket").exists, "munged")
        self._start("slurmctld", ["slurmctld", "-D", "-i"])
        for node in self.nodes:
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Starts a node, also one that was killed, and waits until Slurm gives jobs to it."""
        slurmd = ["slurmd", "-D", "-N", node]
        self._start(node, [*_namespaces(), "sh", "-c", _NODE, "node", node, str(self.folder / "hosts"), *slurmd])
        self._wait_for(lambda: self._state(node) == "idle", node)

    def kill_node(self, node: str) -> None:
        """Ends everything that runs on a node at once, as if the machine were gone."""
        self._daemons[node].kill()  # and with it, by `unshare --kill-child`, all processes of the node
        self._daemons.pop(node).wait(START_LIMIT)

    def stop(self) -> None:
        """Ends all commands, jobs, nodes and daemons."""
        for command in self._commands:
            command.kill()
            command.communicate()
        for name in (*self.nodes, "slurmctld", "munged"):
            if daemon := self._daemons.pop(name, None):
                daemon.send_signal(signal.SIGKILL if name in self.nodes else signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(START_LIMIT)
                daemon.kill()
                daemon.wait()

    def run(self, *words: str, limit: float = COMMAND_LIMIT, check: bool = True, **environment: str) -> str:
        """Runs a command of Slurm; returns what it and the tasks that it started printed."""
        done = self.popen(*words, **environment)
        try:
            output, _ = done.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            done.kill()
            raise AssertionError(f"{words[0]} did not end within {limit:g} s:\n{done.communicate()[0]}") from None
        assert not check or done.returncode == 0, f"{words} ended with {done.returncode}:\n{output}"
        return output

    def popen(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        command = subprocess.Popen(
            words,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._commands.append(command)
        return command

    def kill_task(self, step: str, node: str) -> None:
        """Kills the task of a step that runs on a node, and no other. (`scancel` kills all tasks of a step.)"""
        (task,) = self.run("scontrol", "listpids", step, node).splitlines()[1:]
        number, job = task.split()[:2]
        self.run("srun", f"--jobid={job}", "--overlap", "-N1", "-n1", f"--nodelist={node}", "kill", "-KILL", number)

    def job_state(self, job: str) -> str:
        """Returns the state of a job, such as RUNNING."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.removeprefix("JobState=") for word in words if word.startswith("JobState="))

    def _state(self, node: str) -> str:
        return self.run("sinfo", "--noheader", "--nodes", node, "--format=%t", check=False).strip()

    def _configuration(self) -> str:
        controller_port, *ports = _free_ports(1 + NODES)
        nodes = [f"NodeName={n} NodeAddr=127.0.0.1 Port={port}" for n, port in zip(self.nodes, ports, strict=True)]
        return _CONFIGURATION.format(
            folder=self.folder,
            controller=socket.gethostname(),
            controller_port=controller_port,
            # JAX derives the port of its coordinator from the job's number: two clusters need different ones.
            first_job=1 + os.getpid() % 4000,
            nodes="\n".join(nodes),
        )

    def _start(self, name: str, words: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _wait_for(self, condition: Callable[[], bool], name: str) -> None:
        deadline = time.monotonic() + START_LIMIT
        while not condition():
            if time.monotonic() > deadline or self._daemons[name].poll() is not None:
                log = (self.folder / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(f"{name} did not start:\n{log[-2000:]}")
            time.sleep(0.2)


def _namespaces() -> list[str]:
    return ["unshare", "--fork", "--pid", "--mount-proc", "--uts", "--mount", "--kill-child"]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def program(python: list[str], mode: str, path: str) -> list[str]:
    """Returns the command of `tests/support/program.py`, which does not ask Slurm for its place by itself."""
    # The port is not one that JAX would choose for a job of Slurm.
    script = f'exec "$@" {ROOT}/tests/support/program.py n0:61399 $SLURM_NTASKS $SLURM_PROCID {mode} {path}'
    return ["sh", "-c", script, "sh", *python]
