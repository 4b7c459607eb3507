"""Every kind of leaf comes back exactly as plain Orbax restores it, or is refused as plain Orbax refuses it."""

from __future__ import annotations

import pytest

from orbax_ext import lab
from tests.support import leaf_kinds, plain_orbax

KNOBS: list[dict[str, object]] = [{"strategy": "single"}, {"strategy": "spread"}, {"strategy": "direct"}]
REFUSED = {  # a part of plain Orbax's message
    "refused_another_shape": "Requested shape: (24, 4) is not compatible with the stored shape: (16, 4)",
    "refused_another_rank": "Requested shape: (16, 4, 1) is not compatible with the stored shape: (16, 4)",
    "refused_a_leaf_that_was_not_saved": "restore item and on-disk value metadata tree structures do not match",
    "refused_a_shape_that_does_not_divide": "axis 0 is partitioned 2 times, but the dimension size is 13",
    "refused_a_spec_of_too_many_dimensions": "list index out of range",
}
ACCEPTED = [name for name in leaf_kinds.CASES if name not in REFUSED]


@pytest.mark.parametrize("name", ACCEPTED)
def test_leaves_come_back_as_plain_orbax_restores_them(small_cluster: lab.Cluster, path: str, name: str) -> None:
    for comparisons in zip(*small_cluster.run(leaf_kinds.compare, path, name, KNOBS), strict=True):
        plain_orbax.assert_restored(comparisons)


@pytest.mark.parametrize("name", REFUSED)
def test_all_processes_refuse_what_plain_orbax_refuses(small_cluster: lab.Cluster, path: str, name: str) -> None:
    for comparisons in zip(*small_cluster.run(leaf_kinds.compare, path, name, KNOBS), strict=True):
        plain_orbax.assert_same(comparisons)
        for comparison in comparisons:
            assert [REFUSED[name] in message for message in comparison.messages] == [True, True], comparison.messages


def test_a_mesh_without_some_processes_is_refused_on_all_of_them(small_cluster: lab.Cluster, path: str) -> None:
    # Plain Orbax raises this ValueError on the processes without devices, and leaves the others waiting for them.
    errors = small_cluster.run(leaf_kinds.restore_to_some_processes, path, {"strategy": "single"})
    assert {is_value_error for _, is_value_error in errors} == {True}
    assert all("processes 2 (" in message and "no addressable shards" in message for message, _ in errors)


@pytest.mark.parametrize("name", ["one_dimensional_mesh", "fully_sharded"])
def test_one_process_that_cannot_read_fails_all_with_the_type_of_its_error(
    small_cluster: lab.Cluster, path: str, name: str
) -> None:
    """Holds for leaves that are broadcast and for leaves that are read directly."""
    for message, types in small_cluster.run(leaf_kinds.restore_with_a_bad_disk, path, name, 0):
        assert "process 0 " in message
        assert "no such chunk" in message
        assert {"RestoreFailedError", "FileNotFoundError"} <= set(types)
