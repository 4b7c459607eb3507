"""barrier on real processes."""

from __future__ import annotations

import re

import jax
import pytest

import orbax_ext
from orbax_ext import lab
from tests.support.placement import no_programs, said_by, waits_for_process_1


def met_again_and_again() -> None:
    with no_programs():
        for number in range(5):
            orbax_ext.barrier("between steps", timeout=60)
            orbax_ext.barrier(f"named {number % 2}/in", timeout=60)


def without_the_last(timeout: float) -> str:
    if jax.process_index() == jax.process_count() - 1:
        return ""
    return said_by(lambda: orbax_ext.barrier("not for everyone", timeout=timeout))


def at_different_ones(timeout: float) -> str:
    name = "this" if jax.process_index() == 0 else "that"
    return said_by(lambda: orbax_ext.barrier(name, timeout=timeout))


def then_together() -> str:
    return said_by(lambda: orbax_ext.barrier("not for everyone", timeout=60))


def bad_arguments() -> list[str]:
    return [said_by(lambda: orbax_ext.barrier("")), said_by(lambda: orbax_ext.barrier("x", timeout=0))]


def stock_waits() -> bool:
    from jax.experimental import multihost_utils

    return waits_for_process_1("sync", lambda: multihost_utils.sync_global_devices("stock"))


def test_all_processes_meet_as_often_as_they_like(cluster: lab.Cluster) -> None:
    cluster.run(met_again_and_again)


def test_the_missing_process_is_named_and_a_later_meeting_works(several: lab.Cluster) -> None:
    """Stock's sync_global_devices has no limit and names nobody: it still waits when this one has given up."""
    assert all(several.run(stock_waits))
    last = several.processes - 1
    for rank, said in enumerate(several.run(without_the_last, 1.0)):
        if rank != last:
            assert said.startswith("MeetingTimeoutError: barrier 'not for everyone'")
            assert f"still missing: process {last}." in said
    assert set(several.run(then_together)) == {""}


def test_processes_at_different_barriers_name_each_other(several: lab.Cluster) -> None:
    if several.processes != 4:
        pytest.skip("four processes show it")
    first, *others = several.run(at_different_ones, 1.0)
    assert "barrier 'this'" in first
    assert f"still missing: process {', '.join(map(str, range(1, several.processes)))}." in first
    # Without process 0 each gives up by itself, and one that has left is missing to those who leave after it.
    assert all(re.search("barrier 'that'.* still missing: process 0[.,]", said) for said in others)


def test_a_barrier_needs_a_name_and_a_limit(cluster: lab.Cluster) -> None:
    for name, timeout in cluster.run(bad_arguments):
        assert name == "ValueError: barrier: expected a name, found ''."
        assert "expected a timeout in seconds, above 0 and finite, found 0" in timeout
