from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from orbax_ext import mesh as mesh_lib

P = PartitionSpec


def one_device_mesh() -> Mesh:
    types = (AxisType.Auto, AxisType.Explicit, AxisType.Auto)
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("dp", "fsdp", "tp"), axis_types=types)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P(), ((), ())),
        (P("dp"), (("dp",), ())),
        (P(None, ("dp", "tp")), ((), ("dp", "tp"))),
        (P(P.UNCONSTRAINED, "tp"), ((), ("tp",))),
    ],
    ids=str,
)
def test_a_spec_lists_the_axes_of_every_dimension(spec: PartitionSpec, expected: tuple[tuple[str, ...], ...]) -> None:
    assert mesh_lib.normalized_spec(spec, 2) == expected


def test_a_replica_keeps_the_axes_and_their_types() -> None:
    mesh = one_device_mesh()
    replica = mesh_lib.replica_mesh(mesh, ["dp", "tp"], 0)
    assert (replica.axis_names, replica.axis_types, replica.devices.shape) == (
        mesh.axis_names,
        mesh.axis_types,
        (1, 1, 1),
    )
    assert mesh_lib.by_replica(mesh, ["dp", "tp"]).shape == (1, 1)


def test_unconstrained_dimensions_and_memory_kinds_are_dropped_for_a_replica() -> None:
    mesh = one_device_mesh()
    sharding = NamedSharding(mesh, P(P.UNCONSTRAINED, "tp"), memory_kind="pinned_host")
    assert mesh_lib.replica_sharding(sharding, mesh) == NamedSharding(mesh, P(None, "tp"))


def test_splits_are_added_to_the_dimensions_they_name() -> None:
    mesh = one_device_mesh()
    split = mesh_lib.split_sharding(NamedSharding(mesh, P("tp")), mesh, [("dp", 0), ("fsdp", 1)])
    assert split.spec == P(("tp", "dp"), "fsdp")
