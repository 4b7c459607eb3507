"""`auto` takes the faster strategy, and a restore keeps to the memory limit, as measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import jax
import orbax.checkpoint as ocp
import pytest

import orbax_ext
from bench import memory
from orbax_ext import lab
from orbax_ext.lab import handlers
from orbax_ext.transfer import choice
from orbax_ext.upstream.array_handler import ArrayMetadataStore
from tests.support import fault_injection, states
from tests.support.states import MeshSpec, P, Spec, strategy_names

MIB = 1 << 20
MESH = MeshSpec((4, 2), ("dp", "tp"))
STATE = {f"layer_{number}": Spec((2048, 2048), "float32", P("tp")) for number in range(8)}
MIXED_MESH = MeshSpec((2, 2, 2), ("dp", "fsdp", "tp"))
MIXED_STATE = {
    # At the bandwidths of the test, an exchange pays where each process reads a quarter, and not where it reads half.
    **{f"a_{number}": Spec((2048, 2048), "float32", P("tp")) for number in range(8)},
    **{f"b_{number}": Spec((4096, 2048), "float32", P(("fsdp", "tp"))) for number in range(8)},
}
HOST_BYTES = 8 * 16 * MIB


@pytest.fixture(scope="module")
def layers(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("layers") / "checkpoint")
    small_cluster.run(states.save, path, STATE, MESH)
    return path


@pytest.mark.parametrize(("storage", "fabric", "strategy"), [(0.3, 1.6, "spread"), (0.3, 0.01, "direct")])
def test_the_faster_strategy_by_the_given_bandwidths_is_taken(
    small_cluster: lab.Cluster, layers: str, storage: float, fabric: float, strategy: str
) -> None:
    knobs = {"strategy": "auto", "storage_gbps": storage, "fabric_gbps": fabric}
    for strategies in small_cluster.run(restore_strategies, layers, knobs):
        assert set(strategy_names(strategies)) == {strategy}
        assert all("s expected" in text and "given" in text for text in strategies)


def test_bandwidths_are_measured_where_none_are_given(small_cluster: lab.Cluster, layers: str) -> None:
    first, *others = small_cluster.run(restore_strategies, layers, {"strategy": "auto"})
    assert others == [first] * 3  # all processes decide the same
    assert any("MB/s a process, measured" in text for text in first)


@pytest.mark.parametrize(("fabric", "strategy"), [(1e3, "direct"), (1e9, "spread")])
def test_the_faster_strategy_by_the_measured_bandwidths_is_taken(
    small_cluster: lab.Cluster, layers: str, fabric: float, strategy: str
) -> None:
    for strategies in small_cluster.run(restore_with_rates, layers, 10e6, fabric):
        assert set(strategy_names(strategies)) == {strategy}


def test_bandwidths_are_measured_where_processes_have_different_numbers_of_devices(
    small_cluster: lab.Cluster, layers: str
) -> None:
    uneven = MeshSpec((3, 2), ("dp", "tp"), devices=(0, 1, 2, 3, 4, 6))  # of the four processes: two, two, one and one
    first, *others = small_cluster.run(restore_with_rates, layers, 10e6, 1e9, STATE, uneven)
    assert others == [first] * 3
    assert set(strategy_names(first)) == {"spread"}


def test_groups_read_before_the_choice_are_not_read_again(small_cluster: lab.Cluster, layers: str) -> None:
    for strategies in small_cluster.run(restore_with_rates, layers, 10e6, 4.9e6):
        assert strategy_names(strategies) == ["direct"] * 6 + ["spread"] * 2  # a group is two leaves
        assert "had been read before" in strategies[-1]


@pytest.mark.parametrize("fabric", [1e3, 1e9])
def test_a_read_error_while_links_are_measured_is_raised_by_all(
    small_cluster: lab.Cluster, layers: str, fabric: float
) -> None:
    for outcome in small_cluster.outcomes(restore_with_a_bad_disk, layers, fabric):
        assert "RestoreFailedError: restore failed on 1 process:\n  process 2 (" in str(outcome)
        assert "OSError: the disk is gone" in str(outcome)


def test_leaves_with_different_replicas_get_different_strategies(small_cluster: lab.Cluster, path: str) -> None:
    small_cluster.run(states.save, path, MIXED_STATE, MIXED_MESH)
    for strategies in small_cluster.run(restore_with_rates, path, 50e6, 160e6, MIXED_STATE, MIXED_MESH):
        assert strategy_names(strategies) == ["direct"] * 8 + ["spread"] * 8


def test_a_strategy_that_proves_slow_is_given_up_midway(small_cluster: lab.Cluster, layers: str) -> None:
    for strategies in small_cluster.run(restore_with_a_slow_pace, layers):
        assert strategy_names(strategies) == ["direct"] * 3 + ["spread"] * 5


def test_processes_with_different_given_bandwidths_are_refused(small_cluster: lab.Cluster, layers: str) -> None:
    for outcome in small_cluster.outcomes(restore_with_different_bandwidths, layers):
        assert outcome.failure is not None
        assert outcome.failure.type == "PlanMismatchError"
        assert "bandwidths" in outcome.failure.message


def test_array_metadata_is_read_once_for_all_groups(small_cluster: lab.Cluster, layers: str) -> None:
    assert small_cluster.run(restore_and_count_metadata_reads, layers) == [(1, 8)] * 4


@pytest.mark.parametrize("strategy", states.STRATEGIES)
def test_memory_growth_keeps_to_the_limit(small_cluster: lab.Cluster, layers: str, strategy: str) -> None:
    knobs = {"strategy": strategy, "replica_axis": "dp", "stall_timeout": 60}

    def growth(limit: int) -> int:
        return max(small_cluster.run(restore_and_measure, layers, {**knobs, "broadcast_memory_limit_bytes": limit}))

    tight = min(growth(16 * MIB), growth(16 * MIB))  # memory kept by the allocator varies between runs and only adds
    loose = growth(1 << 30)
    slack = 64 * MIB  # for the allocator and for compiling
    assert tight <= HOST_BYTES + 2 * 16 * MIB + slack
    assert loose > tight


# Run on the processes.


def restore_strategies(
    path: str, knobs: dict[str, object], state: Mapping[str, Spec] = STATE, mesh: MeshSpec = MESH
) -> list[str]:
    return sorted(states.restore_exactly(path, knobs, state, mesh).strategy.values())


def restore_with_rates(
    path: str,
    storage: float,
    fabric: float,
    state: Mapping[str, Spec] = STATE,
    mesh: MeshSpec = MESH,
    knobs: Mapping[str, object] | None = None,
    **others: float,
) -> list[str]:
    """Replaces the measured rates, in bytes per second, and returns the strategies chosen by them."""
    rates = choice.Choice.rates

    def replaced_rates(self: choice.Choice) -> dict[str, float]:
        measured = rates(self)
        assert measured["fabric"] > 0
        return {**measured, "storage": storage, "fabric": fabric, **others}

    with mock.patch.object(choice.Choice, "rates", replaced_rates):
        return restore_strategies(path, {"strategy": "auto", **(knobs or {})}, state, mesh)


def restore_with_a_slow_pace(path: str) -> list[str]:
    """Restores eight groups, of which five have begun their exchange when the pace is measured."""
    knobs = {"broadcast_memory_limit_bytes": 16 * MIB}
    return restore_with_rates(path, 10e6, 1e9, knobs=knobs, pace=1e-3)


def restore_with_a_bad_disk(path: str, fabric: float) -> None:
    with fault_injection.on(2, fault_injection.read_error):
        restore_with_rates(path, 10e6, fabric)


def restore_with_different_bandwidths(path: str) -> None:
    knobs = {"strategy": "auto", "storage_gbps": 1.0 + jax.process_index(), "fabric_gbps": 1.0}
    states.restore(path, STATE, MESH, knobs=knobs)


def restore_and_count_metadata_reads(path: str) -> tuple[int, int]:
    """Returns the number of times this process reads Orbax's metadata of all arrays, and the number of groups."""
    read, count = ArrayMetadataStore.read, 0

    async def read_and_count(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return await read(*args, **kwargs)

    with mock.patch.object(ArrayMetadataStore, "read", read_and_count):
        knobs = {"strategy": "spread", "broadcast_memory_limit_bytes": 16 * MIB}
        report = states.restore_exactly(path, knobs, STATE, MESH)
    return count, report.groups


def restore_and_measure(path: str, knobs: dict[str, object]) -> int:
    abstract = states.abstract_state(STATE, MESH.make())
    args = ocp.args.PyTreeRestore(abstract, restore_args=orbax_ext.restore_args(abstract))
    with handlers.registered("ours", **knobs), ocp.CheckpointManager(path) as manager:
        manager.restore(0, args=args)  # compiles, so that compiled programs do not count
        return memory.peak_growth(lambda: manager.restore(0, args=args))
