"""What `orbax-ext check` says about the launcher: its words agree with what JAX itself detects."""

from __future__ import annotations

import os
import warnings
from unittest import mock

import pytest
from jax._src import clusters

from orbax_ext.cli.check import launcher

pytestmark = pytest.mark.once

SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_NODELIST": "n[0-3]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-workers-0-1"}
SSH = {"SLURM_JOB_ID": "12"}  # a shell on a node of a job: jax #30073
SCRIPT = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}  # sbatch without srun


def found(environ: dict[str, str]) -> launcher.Launcher:
    answer = launcher.find(environ)
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("environ", "name", "jax_class"),
    [
        (SLURM, "Slurm", clusters.SlurmCluster),
        (OPEN_MPI, "Open MPI", clusters.OmpiCluster),
        ({**SLURM, **OPEN_MPI}, "Open MPI", clusters.OmpiCluster),
        ({**SSH, **OPEN_MPI}, "Open MPI", clusters.OmpiCluster),
        ({**SLURM, "WORLD_SIZE": "4"}, "Slurm", clusters.SlurmCluster),
    ],
    ids=["Slurm", "Open MPI", "Open MPI inside a step of Slurm", "Open MPI by ssh", "Slurm and a variable of torchrun"],
)
def test_a_complete_launcher_is_the_one_that_jax_takes(
    environ: dict[str, str], name: str, jax_class: type[clusters.ClusterEnv]
) -> None:
    assert (found(environ).name, found(environ).complete) == (name, True)
    assert jax_detects(environ) is jax_class


@pytest.mark.parametrize("missing", SLURM)
def test_neither_jax_nor_we_take_slurm_without_one_of_its_variables(missing: str) -> None:
    environ = {name: value for name, value in SLURM.items() if name != missing}
    assert jax_detects(environ) is None
    answer = launcher.find(environ)
    assert answer is None if missing == "SLURM_JOB_ID" else answer is not None and answer.missing == (missing,)


def test_slurm_in_part_is_described_with_a_remedy() -> None:
    answer = found({**SCRIPT, "SLURM_JOB_NUM_NODES": "4"})
    assert str(answer) == (
        "Slurm in part (SLURM_JOB_ID=12, SLURM_NTASKS=4, SLURM_PROCID=1, SLURM_LOCALID=0; not set: SLURM_STEP_NODELIST)"
    )
    assert answer.several
    assert "`srun orbax-ext check ...`" in answer.advice
    assert answer.advice.endswith("to check on this process alone: env -u SLURM_JOB_ID orbax-ext check ...")


def test_a_shell_on_a_node_is_one_process() -> None:
    assert not found(SSH).several
    assert launcher.alone(found(SSH)).startswith("Slurm in part (SLURM_JOB_ID=12; not set: SLURM_STEP_NODELIST, ")
    assert "--overlap" in found(SSH).advice


def test_kubernetes_needs_more_than_variables() -> None:
    assert found(KUBERNETES).complete
    assert found(KUBERNETES).several
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "notebook"}
    assert found(pod).missing == ("JOB_COMPLETION_INDEX",)
    assert not found(pod).several
    for part in ("jax[k8s]", "completionMode: Indexed", "headless service", "service account"):
        assert part in found(pod).advice


def test_without_its_package_jax_does_not_detect_kubernetes() -> None:
    with mock.patch.dict("sys.modules", {"kubernetes": None}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert jax_detects(KUBERNETES) is None


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"PMI_SIZE": "4"}, "MPICH or Intel MPI"),
        ({"WORLD_SIZE": "4"}, "torchrun"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "WORLD_SIZE": "4"}, "torchrun"),
    ],
)
def test_launchers_that_jax_does_not_know_are_named(environ: dict[str, str], name: str) -> None:
    answer = found(environ)
    assert (answer.name, answer.complete, answer.several) == (name, False, True)
    assert f"{name} (" in str(answer)
    assert "which JAX does not detect" in str(answer)
    assert "--coordinator" in answer.advice


def test_open_mpi_5_does_not_set_what_jax_needs() -> None:
    environ = {name: value for name, value in OPEN_MPI.items() if name != "OMPI_MCA_orte_hnp_uri"}
    assert found(environ).missing == ("OMPI_MCA_orte_hnp_uri",)
    assert "Open MPI 5" in found(environ).advice


def test_no_launcher_is_none() -> None:
    assert launcher.find({"HOME": "/root"}) is None
    assert launcher.alone(None) == "none: no variables of Open MPI, Slurm, Kubernetes"


def test_how_the_processes_found_each_other_is_described() -> None:
    slurm = found(SLURM)
    assert launcher.joined(slurm, 1, 4, by_hand=False) == f"{slurm}: process 1 of 4"
    assert launcher.joined(slurm, 1, 4, by_hand=True) == "process 1 of 4, from --processes and --process"
    assert "as JAX found by other means" in launcher.joined(None, 1, 4, by_hand=False)


def test_gpus_that_no_process_uses_are_found() -> None:
    environ = {**SLURM, "SLURM_GPUS_ON_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
    assert "set JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7" in launcher.unused_gpus(environ, 1)
    assert launcher.unused_gpus(environ, 8) == ""
    assert launcher.unused_gpus({**environ, "SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, 1) == ""
    assert launcher.unused_gpus({**environ, "JAX_LOCAL_DEVICE_IDS": "0"}, 1) == ""
    assert launcher.unused_gpus(SLURM, 1) == ""


def jax_detects(environ: dict[str, str]) -> type[clusters.ClusterEnv] | None:
    """Returns the class that JAX itself takes in this environment, out of those that look at variables only."""
    kinds = (clusters.OmpiCluster, clusters.SlurmCluster, clusters.K8sCluster)
    with mock.patch.dict(os.environ, environ, clear=True):
        return next(
            (kind for kind in clusters.ClusterEnv._cluster_types if kind in kinds and kind.is_env_present()), None
        )
