"""What a launcher has told this process about its job. Pure: environment variables in, text out.

JAX itself decides, by the same variables in the same order (`jax/_src/clusters`). This module explains the decision,
and says what to do where JAX finds nothing although a launcher is there (jax #30073).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from orbax_ext import text as text_lib

BY_HAND = "give --coordinator HOST:PORT, --processes and --process"


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A launcher, and the variables that it sets."""

    name: str
    signs: tuple[str, ...]  # one of them set: the launcher is there
    needed: tuple[str, ...]  # all of them set: JAX can join; empty: JAX does not know this launcher
    sizes: tuple[str, ...]  # each may hold the number of processes or nodes
    remedy: str


_SLURM = _Kind(
    "Slurm",
    ("SLURM_JOB_ID",),
    ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"),
    "start it with srun, which sets them: `srun orbax-ext check ...` in the job's script, `srun --overlap "
    "--jobid=$SLURM_JOB_ID orbax-ext check ...` from another shell; a container must be given them too",
)
_OPEN_MPI = _Kind(
    "Open MPI",
    ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE"),
    ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("OMPI_COMM_WORLD_SIZE",),
    "mpirun of Open MPI 4 sets them; with Open MPI 5, "
    f"{BY_HAND} (for example $OMPI_COMM_WORLD_SIZE and $OMPI_COMM_WORLD_RANK)",
)
_KUBERNETES = _Kind(
    "Kubernetes",
    ("KUBERNETES_SERVICE_HOST",),
    ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "HOSTNAME"),
    (),
    "JAX asks the Kubernetes API: it needs `pip install jax[k8s]`, a Job or JobSet with `completionMode: Indexed`, a "
    "headless service, and a service account that may read pods, jobs and services (see examples/jobset.yaml); or "
    f"{BY_HAND} (for example $JOB_COMPLETION_INDEX)",
)
# JAX has no detection for these.
_PMI = _Kind("MPICH or Intel MPI", ("PMI_SIZE",), (), ("PMI_SIZE",), f"{BY_HAND} (for example $PMI_SIZE and $PMI_RANK)")
_TORCHRUN = _Kind(
    "torchrun",
    ("WORLD_SIZE",),
    (),
    ("WORLD_SIZE",),
    f"{BY_HAND} (for example $MASTER_ADDR:1234, $WORLD_SIZE and $RANK)",
)
_KINDS = (_OPEN_MPI, _SLURM, _KUBERNETES, _PMI, _TORCHRUN)  # in the order in which JAX asks


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A launcher that left its variables in the environment, all of those that JAX needs or only some."""

    name: str
    variables: Mapping[str, str]  # those that are set, of those that JAX needs or that are a sign of the launcher
    missing: tuple[str, ...]  # those that JAX needs and that are not set
    signs: tuple[str, ...]  # those that, all unset, hide the launcher
    known: bool  # whether JAX knows this launcher
    several: bool  # whether the variables speak of several processes
    remedy: str

    @property
    def complete(self) -> bool:
        return self.known and not self.missing

    def __str__(self) -> str:
        seen = ", ".join(f"{name}={value}" for name, value in self.variables.items())
        if not self.known:
            return f"{self.name} ({seen}), which JAX does not detect"
        if self.missing:
            return f"{self.name} in part ({seen}; not set: {', '.join(self.missing)})"
        return f"{self.name} ({seen})"

    @property
    def advice(self) -> str:
        """Returns what to do if JAX did not join the processes that this launcher has started."""
        hidden = " ".join(f"-u {name}" for name in self.signs)
        return f"{self}: {self.remedy}; or, to check on this process alone: env {hidden} orbax-ext check ..."


def find(environ: Mapping[str, str]) -> Launcher | None:
    """Returns the launcher that JAX takes, or else one that speaks of several processes, or else any."""
    there = [_launcher(kind, environ) for kind in _KINDS if any(name in environ for name in kind.signs)]
    return max(there, key=lambda launcher: (launcher.complete, launcher.several), default=None)


def joined(launcher: Launcher | None, process: int, processes: int, by_hand: bool) -> str:
    """Returns how this process found the others, for the verdict."""
    place = f"process {process} of {processes:,}"
    if by_hand:
        return f"{place}, from --processes and --process"
    if launcher is None or not launcher.complete:  # on Cloud TPU, for one
        return f"{place}, as JAX found by other means than the variables of {_known()}"
    return f"{launcher}: {place}"


def alone(launcher: Launcher | None) -> str:
    """Returns why this process is alone, for the verdict."""
    return f"none: no variables of {_known()}" if launcher is None else f"{launcher}: not used"


def unused_gpus(environ: Mapping[str, str], devices: int) -> str:
    """Returns what to do if Slurm gave this node more GPUs than its processes use; empty if it did not."""
    gpus = _number(environ.get("SLURM_GPUS_ON_NODE", ""))
    tasks = _number(environ.get("SLURM_STEP_TASKS_PER_NODE", "")) or 1  # such as "2(x4),1": 2 on each of the first 4
    if "JAX_LOCAL_DEVICE_IDS" in environ or devices != 1 or gpus <= tasks:
        return ""
    every = ",".join(str(number) for number in range(gpus))
    return (
        f"under Slurm JAX gives each process one GPU, and this node has {gpus} for {text_lib.count(tasks, 'process')}: "
        f"start a process for each GPU, or set JAX_LOCAL_DEVICE_IDS={every}"
    )


def _launcher(kind: _Kind, environ: Mapping[str, str]) -> Launcher:
    asked_for = dict.fromkeys([*kind.signs, *kind.needed])
    return Launcher(
        kind.name,
        {name: environ[name] for name in asked_for if name in environ},
        tuple(name for name in kind.needed if name not in environ),
        tuple(name for name in kind.signs if name in environ),
        bool(kind.needed),
        _several(kind, environ),
        kind.remedy,
    )


def _several(kind: _Kind, environ: Mapping[str, str]) -> bool:
    if kind is _KUBERNETES:  # the size of the job is not in the environment; an index is there if it may be above 1
        return "JOB_COMPLETION_INDEX" in environ
    return any(_number(environ.get(name, "")) > 1 for name in kind.sizes)


def _known() -> str:
    return text_lib.listing([kind.name for kind in _KINDS if kind.needed])


def _number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits.group()) if digits else 0
