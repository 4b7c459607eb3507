from __future__ import annotations

from typing import Any

import pytest

from orbax_ext.options import Options


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"replica_axis": "dp", "replica_axis_index": 1}, "not both"),
        ({"strategy": "fast"}, "one of auto, spread, single, direct"),
        ({"primary_replica_id": -1}, "0 or more"),
        ({"broadcast_memory_limit_bytes": 0}, "positive"),
        ({"broadcast_memory_scaling_factor": 1.5}, "at most 1"),
        ({"stall_timeout": 0}, "positive number of seconds"),
        ({"timeout": -1}, "positive number of seconds"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_found(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**knobs)


@pytest.mark.parametrize(
    ("knobs", "axes"),
    [
        ({}, None),
        ({"replica_axis": "dp"}, ("dp",)),
        ({"replica_axis": 1}, (1,)),
        ({"replica_axis": ["dp", "fsdp"]}, ("dp", "fsdp")),
        ({"replica_axis_index": 2}, (2,)),
    ],
)
def test_the_replica_axis_may_be_given_in_several_ways(knobs: dict[str, Any], axes: tuple[Any, ...] | None) -> None:
    assert Options(**knobs).axes == axes
