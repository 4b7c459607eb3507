"""The mesh and the specs that `orbax-ext check` restores onto."""

from __future__ import annotations

import dataclasses

import pytest

from orbax_ext.cli.check import target
from orbax_ext.cli.check.target import CheckRequest
from orbax_ext.plan.forecast import notation
from orbax_ext.storage.checkpoint import CheckpointItem, SavedSharding, StoredArray, StoredLeaf
from orbax_ext.storage.checkpoint.metadata import ArrayHeader
from orbax_ext.storage.checkpoint.records import CommitState

pytestmark = pytest.mark.once

REQUEST = CheckRequest("/ckpt")
MESH = {"dp": 4, "tp": 8}


def leaf(name: str, shape: tuple[int, ...], spec: notation.Spec | None, kind: str = "jax.Array") -> StoredLeaf:
    array = StoredArray(ArrayHeader(shape, "float32", 4, shape, shape), 0, 1, False)
    sharding = None if spec is None else SavedSharding("NamedSharding", (("dp", 4), ("tp", 8)), spec)
    return StoredLeaf(name, kind, array, sharding)


def item(*leaves: StoredLeaf) -> CheckpointItem:
    return CheckpointItem(
        "/ckpt/0", CommitState(True, ""), "", 0, 0, leaves, has_arrays=True, mesh=(("dp", 4), ("tp", 8))
    )


def test_the_mesh_of_the_request_comes_first() -> None:
    request = dataclasses.replace(REQUEST, mesh=(("x", 32),))
    assert target.choose_mesh(request, item(), 32, 4) == ((("x", 32),), "--mesh")


def test_a_mesh_with_another_number_of_devices_is_refused() -> None:
    request = dataclasses.replace(REQUEST, mesh=(("x", 2),))
    with pytest.raises(ValueError, match=r"--mesh \(x=2\) has 2 devices, but this job has 32 on 4 processes"):
        target.choose_mesh(request, item(), 32, 4)


def test_the_saved_mesh_is_taken_if_it_fits() -> None:
    axes, mesh_from = target.choose_mesh(REQUEST, item(), 32, 4)
    assert axes == (("dp", 4), ("tp", 8))
    assert "saved on it" in mesh_from


def test_a_saved_mesh_that_does_not_fit_becomes_one_axis() -> None:
    axes, mesh_from = target.choose_mesh(REQUEST, item(), 16, 4)
    assert axes == (("replica", 16),)
    assert "--spec" in mesh_from


def test_leaves_keep_their_saved_spec_where_it_fits() -> None:
    saved = item(leaf("fits", (16, 8), ((), ("tp",))), leaf("unfit", (9,), (("tp",),)), leaf("unknown", (4,), None))
    specs, unfit = target.choose_specs(REQUEST, saved, MESH)
    assert specs == {"fits": ((), ("tp",)), "unfit": (), "unknown": ()}
    assert unfit == ["unfit"]


def test_a_rule_replaces_the_saved_spec() -> None:
    request = dataclasses.replace(REQUEST, rules=(notation.parse_rule("w*=P(dp)"),))
    specs, unfit = target.choose_specs(request, item(leaf("w", (16,), (("tp",),)), leaf("b", (8,), (("tp",),))), MESH)
    assert specs == {"w": (("dp",),), "b": (("tp",),)}
    assert unfit == []


def test_leaves_that_are_not_arrays_on_devices_have_no_spec() -> None:
    saved = item(leaf("table", (4,), None, "np.ndarray"), StoredLeaf("name", "string"))
    assert target.choose_specs(REQUEST, saved, MESH) == ({}, [])


def test_typed_keys_are_restored_as_copies() -> None:
    key = dataclasses.replace(leaf("key", (8, 2), (("tp",),)), key_type="threefry2x32")
    assert target.choose_specs(REQUEST, item(key), MESH) == ({"key": ()}, [])


def test_shares_are_by_bytes() -> None:
    saved = item(leaf("large", (24,), (("tp",),)), leaf("small", (8,), ()))
    specs, _ = target.choose_specs(REQUEST, saved, MESH)
    assert target.sharded_shares(saved, specs) == {"tp": 0.75}


def test_a_device_holds_one_block_of_every_leaf() -> None:
    saved = item(leaf("large", (24, 4), (("tp",),)), leaf("small", (8,), ()), leaf("host", (99,), None, "np.ndarray"))
    specs, _ = target.choose_specs(REQUEST, saved, MESH)
    assert target.bytes_per_device(saved, specs, MESH) == 4 * (3 * 4 + 8)
