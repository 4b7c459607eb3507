from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import orbax_ext
from orbax_ext.placement import specs

P = PartitionSpec
MESH = AbstractMesh((1, 4, 2), ("a", "b", "c"), axis_types=(AxisType.Auto, AxisType.Explicit, AxisType.Auto))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (P(), P()),
        (P(None, None), P()),
        (P("a"), P()),
        (P("b", None), P("b")),
        (P(("a", "b")), P("b")),
        (P(("b",)), P("b")),
        (P(("b", "a", "c"), None), P(("b", "c"))),
        (P("a", "b"), P(None, "b")),
        (P(P.UNCONSTRAINED, "a"), P(P.UNCONSTRAINED)),
    ],
    ids=str,
)
def test_the_canonical_spec_has_no_axes_of_size_1_and_no_trailing_none(
    spec: PartitionSpec, expected: PartitionSpec
) -> None:
    canonical = orbax_ext.canonical_spec(NamedSharding(MESH, spec))
    assert canonical == expected
    assert orbax_ext.canonical_spec(NamedSharding(MESH, canonical)) == canonical


def test_a_single_device_has_an_empty_spec() -> None:
    assert orbax_ext.canonical_spec(SingleDeviceSharding(jax.devices()[0])) == P()


def test_only_shardings_have_a_canonical_spec() -> None:
    with pytest.raises(ValueError, match="expected a NamedSharding, found ndarray"):
        orbax_ext.canonical_spec(np.zeros(3))


@pytest.mark.parametrize(
    ("spec", "explicit", "auto"),
    [
        (P("b", "c"), P("b"), P(None, "c")),
        (P(("b", "c")), P("b"), P("c")),
        (P(None, ("a", "c")), P(), P(None, ("a", "c"))),
        (P(), P(), P()),
    ],
    ids=str,
)
def test_a_spec_is_split_by_the_types_of_its_axes(
    spec: PartitionSpec, explicit: PartitionSpec, auto: PartitionSpec
) -> None:
    assert specs.split_by_axis_type(NamedSharding(MESH, spec)) == (explicit, auto)


def test_an_auto_axis_before_an_explicit_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"auto axis before an explicit one .*\('c', 'b'\)"):
        specs.split_by_axis_type(NamedSharding(MESH, P(("c", "b"))))


def grid(tiles: tuple[int, ...], by_device: dict[str, tuple[int, ...]]) -> specs.LocalGrid:
    held = tuple(tuple(sorted({tile[axis] for tile in by_device.values()})) for axis in range(len(tiles)))
    return specs.LocalGrid(tiles, held, by_device)


def test_the_local_array_joins_tiles_that_lie_apart() -> None:
    local_grid = grid((4, 2), {"x": (1, 0), "y": (1, 1), "z": (3, 0), "w": (3, 1)})
    assert local_grid.is_box
    assert local_grid.local_shape((8, 6)) == (4, 6)
    assert local_grid.global_shape((4, 6)) == (8, 6)
    assert local_grid.piece("z", (4, 6)) == (slice(2, 4), slice(0, 3))


def test_tiles_on_a_diagonal_are_not_one_box() -> None:
    assert not grid((2, 2), {"x": (0, 0), "y": (1, 1)}).is_box


def test_a_part_that_is_no_multiple_of_the_tiles_has_no_global_shape() -> None:
    assert grid((4,), {"x": (0,), "y": (1,)}).global_shape((3,)) is None


def test_the_grid_of_one_device_is_the_whole_array() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P("x"))
    local_grid = specs.LocalGrid.of(sharding, 2)
    assert local_grid.tiles == (1, 1)
    assert local_grid.local_shape((3, 5)) == local_grid.global_shape((3, 5)) == (3, 5)
