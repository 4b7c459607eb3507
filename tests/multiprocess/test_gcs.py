"""gs:// on real processes: TensorStore's own driver and gcsfs, from an emulated Google Cloud Storage."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from orbax_ext import lab
from tests.support import gcs_server, states
from tests.support.s3_proxy import SILENCE, Fault, FaultProxy
from tests.support.states import MeshSpec

MESH = MeshSpec((4, 2), ("dp", "tp"))
STATE = {name: spec for name, spec in states.STATE.items() if name != "embedding"}
PATH = f"gs://{gcs_server.BUCKET}/run"


@pytest.fixture(scope="module")
def emulator() -> Iterator[FaultProxy]:
    if reason := gcs_server.missing():
        pytest.skip(reason)
    with gcs_server.running() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def job(emulator: FaultProxy) -> Iterator[lab.Cluster]:
    """4 processes x 2 devices; their checkpoint was saved by processes that have ended."""
    with lab.Cluster(processes=4, devices=2, env=gcs_server.environment(emulator.url)) as running:
        running.run(save)
        running.stop()
        yield running


@pytest.mark.parametrize("strategy", [pytest.param("single", marks=pytest.mark.once), "spread"])
def test_four_processes_restore_bit_for_bit(job: lab.Cluster, emulator: FaultProxy, strategy: str) -> None:
    emulator.calm()
    assert states.all_differences(job.run(restore, strategy)) == []
    sent = sum(request.sent for request in emulator.requests if re.search("GET .*/d/.*alt=media", request.line))
    stored = sum(array.nbytes for array in states.host_data(STATE).values())  # random bytes, which do not get smaller
    assert 0.9 * stored < sent < 1.5 * stored  # once in all, although each of the four replicas needs all of it
    job.stop()  # so that the next restore finds nothing in a cache


@pytest.mark.once
def test_a_silent_connection_is_given_up_and_the_read_repeated(job: lab.Cluster, emulator: FaultProxy) -> None:
    emulator.calm()
    emulator.faults.append(Fault("stall", "GET .*/d/.*alt=media", times=1))
    begin = time.monotonic()
    assert states.all_differences(job.run(restore, "spread", stall_timeout=300.0, stall_seconds=2.0)) == []
    assert time.monotonic() - begin < SILENCE / 2  # it was the client that gave up the connection
    assert emulator.faults[0].hits == 1
    assert job.run(silence_limit) == ["2"] * 4
    assert job.run(take_overs) == [0] * 4  # and that read again
    emulator.calm()


# Functions that run on the processes.


def save() -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(PATH) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(states.make_state(STATE, MESH.make())))
        manager.wait_until_finished()


def restore(strategy: str, **knobs: Any) -> list[str]:
    import jax
    import orbax.checkpoint as ocp

    import orbax_ext

    # Nobody reads in place of a late process: that would be read twice.
    knobs = {"replica_axis": "dp", "strategy": strategy, "late_seconds": math.inf, **knobs}
    mesh = MESH.make()
    abstract = states.abstract_state(STATE, mesh)
    with (
        ocp.CheckpointManager(PATH, options=ocp.CheckpointManagerOptions(read_only=True)) as manager,
        orbax_ext.registered(**knobs),
    ):
        args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
        restored = jax.block_until_ready(manager.restore(manager.latest_step(), args=args))
    return states.differences(restored, STATE, mesh)


def silence_limit() -> str:
    return os.environ["TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"]


def take_overs() -> int:
    import orbax_ext

    report = orbax_ext.last_report()
    assert report is not None
    return len(report.take_overs)
