"""`barrier` on real processes."""

from __future__ import annotations

import re

import jax
import pytest

import orbax_ext
from orbax_ext import lab
from tests.support.placement import error_of, no_programs, waits_for_process_1


def meet_repeatedly() -> None:
    with no_programs():
        for number in range(5):
            orbax_ext.barrier("between steps", timeout=60)
            orbax_ext.barrier(f"named {number % 2}/in", timeout=60)


def meet_without_the_last(timeout: float) -> str:
    if jax.process_index() == jax.process_count() - 1:
        return ""
    return error_of(lambda: orbax_ext.barrier("not for everyone", timeout=timeout))


def meet_at_different_barriers(timeout: float) -> str:
    name = "this" if jax.process_index() == 0 else "that"
    return error_of(lambda: orbax_ext.barrier(name, timeout=timeout))


def meet_together() -> str:
    return error_of(lambda: orbax_ext.barrier("not for everyone", timeout=60))


def bad_arguments() -> list[str]:
    return [error_of(lambda: orbax_ext.barrier("")), error_of(lambda: orbax_ext.barrier("x", timeout=0))]


def stock_waits() -> bool:
    from jax.experimental import multihost_utils

    return waits_for_process_1("sync", lambda: multihost_utils.sync_global_devices("stock"))


def test_all_processes_can_meet_repeatedly(cluster: lab.Cluster) -> None:
    cluster.run(meet_repeatedly)


def test_a_missing_process_is_named_and_a_later_meeting_works(several: lab.Cluster) -> None:
    """Stock: sync_global_devices has no limit and names nobody; it still waits when our barrier has given up."""
    assert all(several.run(stock_waits))
    last = several.processes - 1
    several.run(meet_together)  # so that all begin together
    for rank, error in enumerate(several.run(meet_without_the_last, 5.0)):
        if rank != last:
            assert error.startswith("MeetingTimeoutError: barrier 'not for everyone'")
            assert f"still missing: process {last}." in error
    assert set(several.run(meet_together)) == {""}


def test_processes_at_different_barriers_name_each_other(several: lab.Cluster) -> None:
    if several.processes != 4:
        pytest.skip("shown by four processes")
    first, *others = several.run(meet_at_different_barriers, 1.0)
    assert "barrier 'this'" in first
    assert f"still missing: processes {', '.join(map(str, range(1, several.processes)))}." in first
    # Without process 0 each gives up alone; processes that have left are missing for those that leave later.
    assert all(re.search("barrier 'that'.* still missing: process(es)? 0[.,]", error) for error in others)


def test_a_barrier_needs_a_name_and_a_limit(cluster: lab.Cluster) -> None:
    for name, timeout in cluster.run(bad_arguments):
        assert name == "ValueError: barrier: expected a name, found ''."
        assert "expected a timeout in seconds, above 0 and finite, found 0" in timeout
