"""The files in examples/: what Kubernetes and JAX need of the manifest, and that they can be copied.

tests/multiprocess/test_examples.py runs the programs; `make test-slurm` submits examples/slurm.sbatch to a real Slurm.
There is no Kubernetes here: JAX's own detection runs against a client that answers from the manifest.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import subprocess
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import yaml
from jax._src import clusters

from orbax_ext.cli.check import launcher

pytestmark = pytest.mark.once

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"


def test_the_batch_script_is_valid_and_its_program_exists() -> None:
    script = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    (program,) = re.findall(r"PROGRAM:-([\w.]+)", script.read_text())
    assert (EXAMPLES / program).exists()


def test_every_example_is_listed() -> None:
    listed = re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(
        path.name for path in EXAMPLES.iterdir() if path.name != "README.md" and path.is_file()
    )


def test_programs_are_short_and_need_no_helper_module() -> None:
    for program in EXAMPLES.glob("*.py"):
        lines = program.read_text().splitlines()
        assert len(lines) <= 80, program
        imported = {line.split()[1].split(".")[0] for line in lines if re.match(r"(import|from) ", line)}
        assert not imported & {"tests", "bench", "tools", *(path.stem for path in EXAMPLES.glob("*.py"))}, program


def test_the_pods_of_the_manifest_have_the_rights_that_jax_needs() -> None:
    objects = manifest()
    account = objects["ServiceAccount"]["metadata"]["name"]
    assert pod_spec()["serviceAccountName"] == account
    assert [subject["name"] for subject in objects["RoleBinding"]["subjects"]] == [account]
    assert objects["RoleBinding"]["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
    rights = {
        (resource, verb)
        for rule in objects["Role"]["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {("pods", "list"), ("jobs", "get"), ("services", "list")} <= rights


def test_all_pods_of_the_manifest_run_at_once() -> None:
    job = job_spec()
    assert job["parallelism"] == job["completions"] > 1
    assert job["backoffLimit"] == 0


@pytest.mark.parametrize("index", [0, 3])
def test_jax_finds_the_job_of_the_manifest(index: int) -> None:
    with pod(index):
        address, processes, process, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, None
        )
        found = launcher.find(os.environ)
    assert (address, processes, process) == ("train-workers-0-0.train:55527", 4, index)
    assert f"containerPort: {str(address).split(':')[1]}" in (EXAMPLES / "jobset.yaml").read_text()
    assert found is not None
    assert found.complete
    assert launcher.joined(found, index, 4, by_hand=False).startswith("Kubernetes (KUBERNETES_SERVICE_HOST=10.0.0.1, ")


def test_jax_refuses_a_job_without_indexes_as_we_do() -> None:
    with pod(0):
        del os.environ["JOB_COMPLETION_INDEX"]
        with pytest.raises(RuntimeError, match="completionMode"):
            clusters.K8sCluster.get_process_id()
        found = launcher.find(os.environ)
    assert found is not None
    assert found.missing == ("JOB_COMPLETION_INDEX",)
    assert "completionMode: Indexed" in found.advice


@contextlib.contextmanager
def pod(index: int) -> Iterator[None]:
    """The environment of a pod of the manifest, with a client that answers as the Kubernetes API would."""
    jobset = manifest()["JobSet"]["metadata"]["name"]
    name = f"{jobset}-{replicated_job()['name']}-0"
    job = record(metadata=record(name=name, labels={JOBSET_LABEL: jobset}), spec=record(**job_spec()))
    owners = [record(controller=True, kind="Job")]
    this_pod = record(metadata=record(name=f"{name}-{index}-x7k2p", labels={"job-name": name}, owner_references=owners))
    core = record(list_namespaced_pod=lambda namespace, field_selector: record(items=[this_pod]))
    batch = record(read_namespaced_job=lambda name, namespace: job)
    client = record(CoreV1Api=lambda: core, BatchV1Api=lambda: batch, exceptions=record(ApiException=OSError))
    kubernetes = record(config=record(load_incluster_config=lambda: None), client=client)
    environ = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "JOB_COMPLETION_INDEX": str(index),
        "HOSTNAME": f"{name}-{index}",
    }
    forget_answers()
    with (
        mock.patch.dict("sys.modules", {"kubernetes": kubernetes}),
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch.object(clusters.K8sCluster, "_namespace", return_value="default"),
        mock.patch("socket.gethostbyname", return_value="10.1.0.1"),
    ):
        yield
    forget_answers()


def forget_answers() -> None:
    for name in ("_pod", "_job", "_controller"):
        getattr(clusters.K8sCluster, name).cache_clear()


def record(**fields: Any) -> Any:
    return types.SimpleNamespace(**fields)


def manifest() -> dict[str, Any]:
    return {part["kind"]: part for part in yaml.safe_load_all((EXAMPLES / "jobset.yaml").read_text())}


def replicated_job() -> dict[str, Any]:
    (job,) = manifest()["JobSet"]["spec"]["replicatedJobs"]
    return dict(job)


def job_spec() -> dict[str, Any]:
    return dict(replicated_job()["template"]["spec"])


def pod_spec() -> dict[str, Any]:
    return dict(job_spec()["template"]["spec"])
