"""The function with which patch 06 shares lists of steps, on the coordination service of a process of its own."""

from __future__ import annotations

import json
import os
import types
from typing import Any

import pytest

from tools import releases

pytestmark = pytest.mark.once


class Service:
    """The keys of a coordination service; the other process shares the same data."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        self.keys[key] = value
        self.keys[key.replace("/00000000", "/00000001")] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.keys.items() if name.startswith(f"{key}/")]

    def key_value_delete(self, key: str) -> None:
        del self.keys[key]


def test_a_process_deletes_what_it_has_shared_before() -> None:
    source = (releases.PATCHES / "source" / "06-emergency-mesh-scope.in").read_text()
    function = source[source.index("_lists_shared = [0]") : source.index("def _listing_errors_reach_all")]
    service = Service()
    multihost = types.SimpleNamespace(
        get_jax_distributed_client=lambda: service,
        process_index=lambda: 0,
        sync_global_processes=lambda name, timeout, processes: None,
    )
    scope: dict[str, Any] = {
        "Any": Any,
        "jax": types.SimpleNamespace(process_count=lambda: 2),
        "json": json,
        "multihost": multihost,
        "os": os,
    }
    exec(function, scope)
    for number in range(3):
        assert scope["_share_over_service"]({"steps": [number]}) == [{"steps": [number]}] * 2
    mine = [key for key in service.keys if key.endswith("/00000000")]
    assert mine == ["emergency_sync_global_data.2/00000000"]
