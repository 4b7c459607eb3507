from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbax_ext.meeting import wire

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    st.sampled_from(["", "x", "yz"]),
    st.lists(st.integers(0, 2), max_size=2),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.integers(0, 20), st.dictionaries(st.sampled_from("abc"), VALUES), min_size=1))
def test_what_is_packed_comes_out_again(found: dict[int, dict[str, object]]) -> None:
    through_json = json.loads(json.dumps(wire.pack(found)))
    assert wire.unpack(through_json) == found


def test_what_all_say_is_said_once() -> None:
    found = {process: {"wanted": "x" * 1000} for process in range(1000)}
    assert len(json.dumps(wire.pack(found))) < 10_000
