"""S3 on real processes: saving, restoring after a restart, shared errors, and the requests that are sent."""

from __future__ import annotations

import collections
import math
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from orbax_ext import lab
from orbax_ext.cli.check import rehearsal, verdict
from orbax_ext.cli.check.target import CheckRequest
from orbax_ext.storage import s3 as s3_lib
from tests.support import s3_server, states
from tests.support.s3_proxy import Fault, FaultProxy
from tests.support.states import MeshSpec

MESH = MeshSpec((4, 2), ("dp", "tp"))
STATE = {name: spec for name, spec in states.STATE.items() if name != "embedding"}


@pytest.fixture(scope="module")
def job(_proxy: FaultProxy) -> Iterator[lab.Cluster]:
    """4 processes x 2 devices that find the proxy by the usual variables."""
    env = {**s3_server.ENVIRONMENT, "AWS_ENDPOINT_URL": _proxy.url, "AWS_REGION": "us-east-1"}
    with lab.Cluster(processes=4, devices=2, env=env) as running:
        yield running


@pytest.fixture(scope="module")
def saved(job: lab.Cluster, s3_port: int) -> str:
    """A checkpoint on S3, saved by 4 processes that have ended; those of `job` start again."""
    s3_server.make_bucket(s3_port, "multi")
    job.run(save, "s3://multi/run")
    job.stop()
    return "s3://multi/run"


def test_four_new_processes_restore_what_four_others_saved(job: lab.Cluster, saved: str, proxy: FaultProxy) -> None:
    del proxy
    results = job.run(restore, saved)
    assert states.all_differences([differences for differences, _ in results]) == []
    assert [report["array_bytes"] > 0 for _, report in results] == [True, False, False, False]  # one replica reads


def test_arrays_are_read_by_their_specs(job: lab.Cluster, saved: str, proxy: FaultProxy) -> None:
    del saved, proxy
    assert states.all_differences(job.run(write_and_read_arrays)) == []


def test_check_rehearses_a_checkpoint_on_s3(job: lab.Cluster, saved: str, proxy: FaultProxy) -> None:
    del proxy
    results = job.run(rehearsal.rehearse, CheckRequest(saved))
    assert [verdict.line(result).startswith("verdict: OK") for result in results] == [True] * 4, results[0].error


def test_each_piece_of_metadata_is_read_by_one_process(job: lab.Cluster, saved: str, proxy: FaultProxy) -> None:
    job.run(make_manager, saved)
    proxy.requests.clear()
    reports = [report for _, report in job.run(restore_again)]
    asked = collections.Counter(request.line for request in proxy.requests if "/d/" not in request.line)
    assert set(asked.values()) == {1}
    assert sum(report["metadata_requests"] + report["array_requests"] for report in reports) == len(proxy.requests)
    job.run(make_manager, saved, share_metadata=False)
    proxy.requests.clear()
    job.run(restore_again)
    assert len(proxy.requests) > 3 * sum(asked.values())


def test_shapes_and_dtypes_that_are_not_given_are_read_by_one_process(
    job: lab.Cluster, saved: str, proxy: FaultProxy
) -> None:
    job.run(make_manager, saved)
    proxy.requests.clear()
    assert states.all_differences(job.run(restore_by_shardings)) == []
    manifests = [request for request in proxy.requests if request.line.endswith("default/manifest.ocdbt")]
    assert 1 <= len(manifests) <= 2  # one process reads the metadata, one replica the arrays


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        (Fault("expired", "GET .*/(d/|manifest)"), "renew the credentials"),
        (Fault("denied", "GET .*/d/"), "bucket policy"),
        (Fault("503", "GET .*manifest"), "try again later"),
    ],
    ids=["expired credentials", "access denied", "throttled for good"],
)
def test_all_raise_the_read_error_of_one_without_a_secret(
    job: lab.Cluster, saved: str, proxy: FaultProxy, fault: Fault, remedy: str
) -> None:
    proxy.faults.append(Fault(fault.kind, fault.match))
    outcomes = job.outcomes(restore, saved, strict_readers=True)
    assert [outcome.failure.type if outcome.failure else "" for outcome in outcomes] == ["RestoreFailedError"] * 4
    messages = {outcome.failure.message for outcome in outcomes if outcome.failure}
    assert len(messages) == 1
    message = messages.pop()
    assert f"{saved}/0/default" in message
    assert remedy in message
    output = message + "".join(
        str(outcome.failure and outcome.failure.traceback) + job.log(outcome.rank) for outcome in outcomes
    )
    assert s3_server.SECRET_KEY not in output
    assert s3_server.SESSION_TOKEN not in output


def test_metadata_that_can_not_be_read_is_one_error_on_all(job: lab.Cluster, saved: str, proxy: FaultProxy) -> None:
    job.run(make_manager, saved)
    proxy.faults.append(Fault("denied", "GET .*/default/_METADATA"))
    outcomes = job.outcomes(restore_again)
    assert {str(outcome.failure) for outcome in outcomes} == {str(outcomes[0].failure)}
    assert "s3://multi/run/0/default/_METADATA: AccessDenied" in str(outcomes[0].failure)
    assert len([request for request in proxy.requests if "default/_METADATA" in request.line]) == 1


def test_a_process_that_does_not_restore_is_waited_for_within_the_limits(
    job: lab.Cluster, saved: str, proxy: FaultProxy
) -> None:
    del proxy
    *others, absent = job.outcomes(restore_but_not_on_the_last, saved, stall_timeout=5.0)
    assert absent.ok
    assert absent.value < 100  # it would be 300 s with limits of its own for the metadata
    for outcome in others:
        assert outcome.failure is not None
        assert outcome.failure.type == "RestoreTimeoutError"
        assert "process 3" in outcome.failure.message


def test_a_missing_bucket_is_named_by_all(job: lab.Cluster, proxy: FaultProxy) -> None:
    del proxy
    outcomes = job.outcomes(restore, "s3://no-such-bucket/run")
    assert all("s3://no-such-bucket/run" in str(outcome.failure) for outcome in outcomes)


def test_passing_faults_are_retried(job: lab.Cluster, saved: str, proxy: FaultProxy) -> None:
    proxy.faults += [
        Fault("503", "GET ", times=3),
        Fault("reset", "GET .*/d/", times=2),
        Fault("short", "GET .*_METADATA", times=1),
    ]
    results = job.run(restore, saved)
    assert states.all_differences([differences for differences, _ in results]) == []
    assert all(fault.hits for fault in proxy.faults)


def test_a_job_killed_just_before_a_save_is_complete_leaves_no_checkpoint(
    job: lab.Cluster, saved: str, proxy: FaultProxy
) -> None:
    proxy.faults.append(Fault("hold", "PUT .*/1/commit_success"))
    run = job.submit(save, saved, step=1)
    deadline = time.monotonic() + 60
    while not proxy.faults[0].hits:
        assert time.monotonic() < deadline, "the save did not reach its commit file"
        time.sleep(0.01)
    for rank in range(4):
        job.signal(rank, signal.SIGKILL)
    assert not any(outcome.ok for outcome in run.outcomes(30))
    proxy.calm()
    assert job.run(latest_step, saved) == [0] * 4


def test_all_processes_agree_on_what_was_deleted(job: lab.Cluster, saved: str, proxy: FaultProxy) -> None:
    del saved, proxy  # the bucket is there
    path = "s3://multi/deleted"
    assert job.run(save_three_keep_one, path) == [([2], [])] * 4


def test_work_that_fails_on_the_first_process_is_done_by_each_of_the_others(job: lab.Cluster) -> None:
    assert sorted(job.run(share_what_fails_first)) == ["done by itself"] * 3 + ["failed"]


def test_a_long_result_is_shared_in_full(job: lab.Cluster) -> None:
    assert job.run(share_a_long_result) == [1] * 4


# Functions that run on the processes.

_manager: Any = None


def save(path: str, step: int = 0) -> None:
    import orbax.checkpoint as ocp

    s3_lib.enable_s3(retries=2)
    with ocp.CheckpointManager(path) as manager:
        manager.save(step, args=ocp.args.PyTreeSave(states.make_state(STATE, MESH.make())))
        manager.wait_until_finished()


def save_three_keep_one(path: str) -> tuple[list[int], list[int]]:
    """Saves three steps, of which one is kept, and then deletes that; returns the steps that this process sees."""
    import orbax.checkpoint as ocp
    from etils import epath

    import orbax_ext

    def steps() -> list[int]:
        orbax_ext.barrier("changed", timeout=100)
        root = epath.Path(path)
        found = sorted(int(child.name) for child in root.iterdir()) if root.exists() else []
        assert [step for step in range(3) if (root / str(step)).exists()] == found
        with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(read_only=True)) as new:
            assert sorted(new.all_steps()) == found
        orbax_ext.barrier("seen", timeout=100)
        return found

    s3_lib.enable_s3(retries=2)
    with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        for step in range(3):
            manager.save(step, args=ocp.args.PyTreeSave(states.make_state(STATE, MESH.make())))
        manager.wait_until_finished()
        kept = steps()
        manager.delete(2)
        return kept, steps()


def make_manager(path: str, share_metadata: bool = True) -> None:
    import orbax.checkpoint as ocp

    global _manager
    s3_lib.enable_s3(retries=2, stall_seconds=20, share_metadata=share_metadata)
    _manager = ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(read_only=True))


def write_and_read_arrays() -> list[str]:
    """Reads arrays that process 0 has written with TensorStore alone."""
    import os

    import jax
    import tensorstore as ts

    import orbax_ext

    mesh = MESH.make()
    store = {"driver": "s3", "bucket": "multi", "endpoint": os.environ["AWS_ENDPOINT_URL"], "aws_region": "us-east-1"}
    specs = {name: {"driver": "zarr3", "kvstore": {**store, "path": f"plain/{name}/"}} for name in STATE}
    if jax.process_index() == 0:
        for name, data in states.host_data(STATE).items():
            array = ts.open(specs[name], create=True, dtype=ts.dtype(data.dtype), shape=data.shape).result()
            array.write(data).result()
    orbax_ext.barrier("written", timeout=60)
    return states.differences(orbax_ext.read_arrays(specs, states.shardings(STATE, mesh)), STATE, mesh)


def restore_again(**knobs: Any) -> tuple[list[str], dict[str, int]]:
    """Restores with the manager that `make_manager` has made."""
    import jax
    import orbax.checkpoint as ocp

    import orbax_ext

    # Nobody reads in place of a late process: that would be counted twice.
    knobs = {"replica_axis": "dp", "strategy": "single", "late_seconds": math.inf, **knobs}
    mesh = MESH.make()
    abstract = states.abstract_state(STATE, mesh)
    with orbax_ext.registered(**knobs):
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = jax.block_until_ready(_manager.restore(0, args=args))
    report = orbax_ext.last_report()
    assert report is not None
    return states.differences(restored, STATE, mesh), report.s3


def restore_by_shardings() -> list[str]:
    """Restores with restore args that do not give shapes and dtypes."""
    import jax
    import orbax.checkpoint as ocp

    import orbax_ext

    mesh = MESH.make()
    restore_args = jax.tree.map(lambda sharding: ocp.ArrayRestoreArgs(sharding=sharding), states.shardings(STATE, mesh))
    with orbax_ext.registered(replica_axis="dp", strategy="single", late_seconds=math.inf):
        restored = _manager.restore(0, args=ocp.args.PyTreeRestore(restore_args=restore_args))
    return states.differences(restored, STATE, mesh)


def restore(path: str, **knobs: Any) -> tuple[list[str], dict[str, int]]:
    make_manager(path)
    return restore_again(**knobs)


def restore_but_not_on_the_last(path: str, **knobs: Any) -> float:
    """Restores on all processes but the last, which waits until the others have ended; returns its seconds there."""
    import jax

    import orbax_ext

    make_manager(path)
    begin = time.monotonic()
    try:
        if jax.process_index() < jax.process_count() - 1:
            restore_again(**knobs)
    finally:
        orbax_ext.barrier("ended", timeout=500)
    return time.monotonic() - begin


def latest_step(path: str) -> int | None:
    make_manager(path)
    step: int | None = _manager.latest_step()
    return step


def share_what_fails_first() -> str:
    import jax

    from orbax_ext.meeting import once
    from orbax_ext.upstream.runtime import coordination_client

    client = coordination_client()

    def work() -> str:
        if client.key_value_increment("tries", 1) == 1:
            raise OSError("no")
        return "done by itself"

    try:
        return once.SharedResults(client, "test of once", jax.process_index(), 60.0).once("some work", work)
    except OSError:
        return "failed"


def share_a_long_result() -> int:
    import jax

    from orbax_ext.meeting import once
    from orbax_ext.upstream.runtime import coordination_client

    client = coordination_client()

    def work() -> str:
        client.key_value_increment("long tries", 1)
        return "long" * once._MAX_PART

    result = once.SharedResults(client, "test of once", jax.process_index(), 60.0).once("long work", work)
    assert result == "long" * once._MAX_PART
    tries: int = client.key_value_increment("long tries", 0)
    return tries
