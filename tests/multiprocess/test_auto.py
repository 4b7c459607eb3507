"""`auto` takes the faster way; and what is under way stays within the limit, as measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest

import orbax_ext
from bench import memory
from orbax_ext import lab
from orbax_ext.lab import handlers
from orbax_ext.transfer import choice
from tests.support import injection, world
from tests.support.world import MeshSpec, P, Spec

MIB = 1 << 20
MESH = MeshSpec((4, 2), ("dp", "tp"))
STATE = {f"layer_{number}": Spec((2048, 2048), "float32", P("tp")) for number in range(8)}
MIXED_MESH = MeshSpec((2, 2, 2), ("dp", "fsdp", "tp"))
MIXED_STATE = {
    # With links as fast as those of the test, reading half is not worth an exchange; reading a quarter is.
    **{f"a_{number}": Spec((2048, 2048), "float32", P("tp")) for number in range(8)},
    **{f"b_{number}": Spec((4096, 2048), "float32", P(("fsdp", "tp"))) for number in range(8)},
}
HOST_BYTES = 8 * 16 * MIB


@pytest.fixture(scope="module")
def layers(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("layers") / "checkpoint")
    small_cluster.run(world.save, path, STATE, MESH)
    return path


@pytest.mark.parametrize(("storage", "fabric", "way"), [(0.3, 1.6, "spread"), (0.3, 0.01, "direct")])
def test_the_faster_way_by_the_given_bandwidths_is_taken(
    small_cluster: lab.Cluster, layers: str, storage: float, fabric: float, way: str
) -> None:
    knobs = {"strategy": "auto", "storage_gbps": storage, "fabric_gbps": fabric}
    for found in small_cluster.run(restore_and_tell_ways, layers, knobs):
        assert {how.partition(":")[0] for how in found} == {way}
        assert all("s expected" in how and "given" in how for how in found)


def test_bandwidths_are_measured_where_none_are_given(small_cluster: lab.Cluster, layers: str) -> None:
    first, *others = small_cluster.run(restore_and_tell_ways, layers, {"strategy": "auto"})
    assert others == [first] * 3  # all decide alike
    assert any("MB/s a process, measured" in how for how in first)


@pytest.mark.parametrize(("fabric", "way"), [(1e3, "direct"), (1e9, "spread")])
def test_the_faster_way_by_the_measured_bandwidths_is_taken(
    small_cluster: lab.Cluster, layers: str, fabric: float, way: str
) -> None:
    for found in small_cluster.run(restore_with_measured, layers, 10e6, fabric):
        assert {how.partition(":")[0] for how in found} == {way}


def test_bandwidths_are_measured_where_processes_have_different_numbers_of_devices(
    small_cluster: lab.Cluster, layers: str
) -> None:
    uneven = MeshSpec((3, 2), ("dp", "tp"), devices=(0, 1, 2, 3, 4, 6))  # two, two, one and one
    first, *others = small_cluster.run(restore_with_measured, layers, 10e6, 1e9, STATE, uneven)
    assert others == [first] * 3
    assert {how.partition(":")[0] for how in first} == {"spread"}


def test_what_was_read_before_the_way_is_chosen_is_not_read_again(small_cluster: lab.Cluster, layers: str) -> None:
    for found in small_cluster.run(restore_with_measured, layers, 10e6, 4.9e6):
        assert [how.partition(":")[0] for how in found] == ["direct"] * 6 + ["spread"] * 2  # a group is two leaves
        assert "had been read before" in found[-1]


@pytest.mark.parametrize("fabric", [1e3, 1e9])
def test_a_read_error_while_links_are_measured_is_raised_by_all(
    small_cluster: lab.Cluster, layers: str, fabric: float
) -> None:
    for outcome in small_cluster.outcomes(restore_with_a_bad_disk, layers, fabric):
        assert "RestoreFailedError: restore failed on 1 process:\n  process 2 (" in str(outcome)
        assert "OSError: the disk is gone" in str(outcome)


def test_leaves_that_are_replicated_otherwise_go_each_their_own_way(small_cluster: lab.Cluster, path: str) -> None:
    small_cluster.run(world.save, path, MIXED_STATE, MIXED_MESH)
    for found in small_cluster.run(restore_with_measured, path, 50e6, 160e6, MIXED_STATE, MIXED_MESH):
        assert [how.partition(":")[0] for how in found] == ["direct"] * 8 + ["spread"] * 8


def test_what_is_seen_to_be_slow_is_given_up_on_the_way(small_cluster: lab.Cluster, layers: str) -> None:
    for found in small_cluster.run(restore_with_a_slow_pace, layers):
        assert [how.partition(":")[0] for how in found] == ["direct"] * 3 + ["spread"] * 5


def test_processes_that_are_given_other_bandwidths_do_not_agree(small_cluster: lab.Cluster, layers: str) -> None:
    for outcome in small_cluster.outcomes(restore_with_bandwidths_of_their_own, layers):
        assert outcome.failure is not None
        assert outcome.failure.type == "PlanMismatchError"
        assert "bandwidths" in outcome.failure.message


def test_the_lists_of_arrays_are_read_once_however_many_groups_there_are(
    small_cluster: lab.Cluster, layers: str
) -> None:
    assert small_cluster.run(restore_and_count_lists, layers) == [(1, 8)] * 4


@pytest.mark.parametrize("strategy", world.STRATEGIES)
def test_what_is_under_way_keeps_to_the_limit(small_cluster: lab.Cluster, layers: str, strategy: str) -> None:
    knobs = {"strategy": strategy, "replica_axis": "dp", "stall_timeout": 60}

    def growth(limit: int) -> int:
        return max(small_cluster.run(restore_and_measure, layers, {**knobs, "broadcast_memory_limit_bytes": limit}))

    tight = min(growth(16 * MIB), growth(16 * MIB))  # what the allocator keeps differs from run to run, and only adds
    loose = growth(1 << 30)
    slack = 64 * MIB  # the allocator's, and what compiling takes
    assert tight <= HOST_BYTES + 2 * 16 * MIB + slack
    assert loose > tight


# Run on the processes.


def restore_and_tell_ways(
    path: str, knobs: dict[str, object], state: Mapping[str, Spec] = STATE, mesh: MeshSpec = MESH
) -> list[str]:
    assert world.restore(path, state, mesh, knobs=knobs) == []
    report = orbax_ext.last_report()
    assert report is not None
    return sorted(report.strategy.values())


def restore_with_measured(
    path: str,
    storage: float,
    fabric: float,
    state: Mapping[str, Spec] = STATE,
    mesh: MeshSpec = MESH,
    knobs: Mapping[str, object] | None = None,
    **others: float,
) -> list[str]:
    """As if so many bytes per second had been measured."""
    rates = choice.Choice.rates

    def find_otherwise(self: choice.Choice) -> dict[str, float]:
        measured = rates(self)
        assert measured["fabric"] > 0
        return {**measured, "storage": storage, "fabric": fabric, **others}

    with mock.patch.object(choice.Choice, "rates", find_otherwise):
        return restore_and_tell_ways(path, {"strategy": "auto", **(knobs or {})}, state, mesh)


def restore_with_a_slow_pace(path: str) -> list[str]:
    """Eight groups, of which five have begun to travel when the pace is looked at."""
    knobs = {"broadcast_memory_limit_bytes": 16 * MIB}
    return restore_with_measured(path, 10e6, 1e9, knobs=knobs, pace=1e-3)


def restore_with_a_bad_disk(path: str, fabric: float) -> None:
    with injection.on(2, injection.read_error):
        restore_with_measured(path, 10e6, fabric)


def restore_with_bandwidths_of_their_own(path: str) -> None:
    import jax

    knobs = {"strategy": "auto", "storage_gbps": 1.0 + jax.process_index(), "fabric_gbps": 1.0}
    world.restore(path, STATE, MESH, knobs=knobs)


def restore_and_count_lists(path: str) -> tuple[int, int]:
    """How often Orbax's list of saved arrays is read by this process, and how many groups there are."""
    from orbax_ext.upstream.array_handler import ArrayMetadataStore

    read, count = ArrayMetadataStore.read, 0

    async def read_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return await read(*args, **kwargs)

    with mock.patch.object(ArrayMetadataStore, "read", read_and_count):
        restore_and_tell_ways(path, {"strategy": "spread", "broadcast_memory_limit_bytes": 16 * MIB})
    report = orbax_ext.last_report()
    assert report is not None
    return count, report.groups


def restore_and_measure(path: str, knobs: dict[str, object]) -> int:
    import orbax.checkpoint as ocp

    abstract = world.abstract_state(STATE, MESH.make())
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
    with handlers.registered("ours", **knobs), ocp.CheckpointManager(path) as manager:
        manager.restore(0, args=args)  # so that what is compiled and kept does not count
        return memory.peak_growth(lambda: manager.restore(0, args=args))
