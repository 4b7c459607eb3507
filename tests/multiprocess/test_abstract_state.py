"""`orbax_ext.abstract` and `orbax_ext.restore`: checkpoints that nobody described, on other topologies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from orbax_ext import lab
from tests.support import s3_server, states, undescribed
from tests.support.checkpoints import FORMATS

TOPOLOGIES = {"1x1": (1, 1), "1x8": (1, 8), "2x4": (2, 4), "8x1": (8, 1)}
# What plain Orbax says to a checkpoint of 32 devices on 8 or 1, without a description.
PLAIN_ORBAX = "ValueError: sharding passed to deserialization should be specified, concrete"


@pytest.fixture(scope="module")
def checkpoints(cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """A checkpoint of 4x8 for each API and format. No test may write to it."""
    paths = {}
    for api in undescribed.APIS:
        for form in FORMATS:
            path = str(tmp_path_factory.mktemp("undescribed") / "checkpoint")
            cluster.run(undescribed.save, path, api, form)
            paths[api, form] = path
    return paths


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.once if "1x" in name else ()) for name in TOPOLOGIES],
)
def elsewhere(request: pytest.FixtureRequest) -> Iterator[lab.Cluster]:
    with lab.Cluster(*TOPOLOGIES[request.param]) as running:
        yield running


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("api", undescribed.APIS)
def test_it_restores_elsewhere_what_plain_orbax_does_not(
    checkpoints: dict[tuple[str, str], str], elsewhere: lab.Cluster, api: str, form: str
) -> None:
    path = checkpoints[api, form]
    for message in elsewhere.run(undescribed.restore_with_plain_orbax, path, api):
        assert message.startswith(PLAIN_ORBAX), message
    assert states.all_differences(elsewhere.run(undescribed.restore, path)) == []


@pytest.mark.parametrize("api", undescribed.APIS)
def test_without_a_mesh_everything_is_on_one_device(
    checkpoints: dict[tuple[str, str], str], elsewhere: lab.Cluster, api: str
) -> None:
    differences = elsewhere.run(undescribed.restore_on_one_device, checkpoints[api, "zarr2 in OCDBT"])
    assert states.all_differences(differences) == []


@pytest.mark.parametrize("api", undescribed.APIS)
def test_plain_orbax_restores_into_the_abstract_tree(
    checkpoints: dict[tuple[str, str], str], elsewhere: lab.Cluster, api: str, orbax: tuple[int, ...]
) -> None:
    differences = elsewhere.run(undescribed.restore_into_abstract, checkpoints[api, "zarr2 in OCDBT"], api)
    if api == "v1" and orbax < (0, 11, 37):  # v1 did not take an abstract typed key
        assert all("Requested shape: () is not compatible" in message for (message,) in differences)
    else:
        assert states.all_differences(differences) == []


def test_one_process_reads_the_metadata_for_all(checkpoints: dict[tuple[str, str], str], cluster: lab.Cluster) -> None:
    results = cluster.run(undescribed.count_reads, checkpoints["v0", "zarr3"])
    assert sum(reads for reads, _ in results) == 1
    logs = [lines for _, lines in results]
    assert [len(lines) for lines in logs] == [1, 0, 0, 0]
    assert "the mesh (dp=4, tp=8) lacks the axis 'pp': arrays.experts, arrays.stages" in logs[0][0]
    assert "dimension 0 can't be cut into 4: arrays.uneven" in logs[0][0]
    assert not any(cluster.run(states.coordination_keys))


def test_an_error_is_raised_on_all_processes(small_cluster: lab.Cluster, path: str) -> None:
    for message, kinds in small_cluster.run(undescribed.refuse, path):
        assert f"{path} does not exist" in message
        assert {"RestoreFailedError", "ValueError"} <= set(kinds)


def test_processes_that_ask_for_different_checkpoints_are_told(small_cluster: lab.Cluster, path: str) -> None:
    for message, kinds in small_cluster.run(undescribed.refuse_different_paths, path):
        assert f"process 1 asks for {path}/1, None, None" in message
        assert "PlanMismatchError" in kinds


@pytest.mark.parametrize(
    ("specs", "dtypes", "asked"),
    [
        ([{"*": "P()"}, {"*.w": "P()"}], [None, None], "None, None, '*.w': P(), None"),
        ([None, None], ["float32", "bfloat16"], "None, None, None, bfloat16"),
    ],
)
def test_processes_that_ask_for_different_specs_or_dtypes_are_told(
    small_cluster: lab.Cluster, path: str, specs: list[Any], dtypes: list[Any], asked: str
) -> None:
    for message, kinds in small_cluster.run(undescribed.refuse_different, path, specs, dtypes):
        assert f"process 1 asks for {path}, {asked}" in message
        assert "PlanMismatchError" in kinds


def test_a_missing_process_is_named_within_the_limit(
    checkpoints: dict[tuple[str, str], str], small_cluster: lab.Cluster
) -> None:
    results = small_cluster.run(undescribed.refuse_without, checkpoints["v0", "zarr3"], 2)
    for message, kinds in [result for result in results if result is not None]:
        assert "process 2" in message
        assert "RestoreTimeoutError" in kinds


def test_without_a_mesh_nobody_waits_for_a_process_that_fails(
    checkpoints: dict[tuple[str, str], str], small_cluster: lab.Cluster
) -> None:
    results = small_cluster.run(undescribed.restore_while_one_fails, checkpoints["v0", "zarr3"])
    assert results == ["", "", "the disk is gone", ""]


def test_a_checkpoint_on_s3_is_restored_by_new_processes(s3_port: int) -> None:
    """They find the server by the usual variables; nobody enables S3."""
    s3_server.make_bucket(s3_port, "undescribed")
    url = f"http://127.0.0.1:{s3_port}"
    with lab.Cluster(2, 4, env={**s3_server.ENVIRONMENT, "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}) as job:
        job.run(undescribed.save_on_s3, "s3://undescribed/run")
        job.stop()  # and start again
        assert job.run(undescribed.restore_from_s3, "s3://undescribed/run") == [([], False)] * 2
        assert sum(reads for reads, _ in job.run(undescribed.count_reads, "s3://undescribed/run")) == 1
        for message, kinds in job.run(undescribed.refuse, "s3://undescribed/other"):
            assert "s3://undescribed/other does not exist" in message
            assert "ValueError" in kinds


def test_it_works_without_jax_distributed(checkpoints: dict[tuple[str, str], str]) -> None:
    """A program of one process with 8 devices, which can't call `jax.distributed.initialize` any more then."""
    path = checkpoints["v1", "zarr3 in OCDBT"]
    script = (
        "from tests.support import undescribed as u; "
        f"print(u.restore({path!r}) + u.restore_on_one_device({path!r}), u.initialize())"
    )
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.stdout.startswith("[] jax.distributed.initialize() must be called before"), done.stderr
