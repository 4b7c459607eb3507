"""Every kind of leaf comes back exactly as plain Orbax restores it, or is refused as plain Orbax refuses it."""

from __future__ import annotations

import pytest

from orbax_ext import lab
from tests.support import leaves, plain

ACCEPTED = [name for name in leaves.CASES if not name.startswith("refused")]
WAYS: list[dict[str, object]] = [{"strategy": "single"}, {"strategy": "spread"}]
REFUSED = [name for name in leaves.CASES if name.startswith("refused")]


@pytest.mark.parametrize("name", ACCEPTED)
def test_leaves_come_back_as_plain_orbax_restores_them(small_cluster: lab.Cluster, path: str, name: str) -> None:
    for found in zip(*small_cluster.run(leaves.compare, path, name, WAYS), strict=True):
        plain.agreed(found)
        assert {each.errors for each in found} == {((), ())}


@pytest.mark.parametrize("name", REFUSED)
def test_what_plain_orbax_refuses_is_refused_alike_on_all_processes(
    small_cluster: lab.Cluster, path: str, name: str
) -> None:
    for found in zip(*small_cluster.run(leaves.compare, path, name, WAYS), strict=True):
        plain.agreed(found)
        assert all(each.errors[1] for each in found)


def test_a_mesh_that_leaves_processes_out_is_refused_on_all_of_them(small_cluster: lab.Cluster, path: str) -> None:
    # Plain Orbax raises this ValueError on the processes without devices, and leaves the others waiting for them.
    found = small_cluster.run(leaves.restore_to_some_processes, path, {"strategy": "single"})
    assert {is_value_error for _, is_value_error in found} == {True}
    assert all("process 2" in message and "no addressable shards" in message for message, _ in found)


@pytest.mark.parametrize("name", ["one_dimensional_mesh", "fully_sharded"])
def test_one_process_that_cannot_read_fails_all_with_the_type_of_its_error(
    small_cluster: lab.Cluster, path: str, name: str
) -> None:
    """Broadcast or read the ordinary way: nobody is left alone with half a state."""
    for message, types in small_cluster.run(leaves.restore_with_a_bad_disk, path, name, 0):
        assert "process 0 " in message
        assert "no such chunk" in message
        assert {"RestoreFailedError", "FileNotFoundError"} <= set(types)
