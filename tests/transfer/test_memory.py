from __future__ import annotations

import pathlib

import jax
import pytest

from orbax_ext.options import Options
from orbax_ext.plan import Leaf
from orbax_ext.request import LeafRequest, Request
from orbax_ext.transfer import memory

LARGE = Leaf("w", (1 << 38,), "float32", 4, (1 << 38,))
REQUEST = Request((LeafRequest(None, None, LARGE),), (), ())


def test_the_limit_needs_no_knob_and_no_backend_that_knows_its_memory() -> None:
    assert jax.local_devices()[0].memory_stats() is None
    assert 0 < memory.memory_limit(Options(), REQUEST) <= 256 << 20


def test_the_limit_is_the_one_that_is_given() -> None:
    assert memory.memory_limit(Options(broadcast_memory_limit_bytes=12345), REQUEST) == 12345


def test_free_memory_is_what_the_backend_says_where_it_does() -> None:
    class Device:
        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 100, "bytes_in_use": 30}

    assert memory.free_bytes(Device()) == 70


def test_cpu_devices_share_what_is_available_page_cache_included(monkeypatch: pytest.MonkeyPatch) -> None:
    (device, *_) = devices = jax.local_devices()
    monkeypatch.setattr(memory, "_available_bytes", lambda: 1000)
    assert memory.free_bytes(device) == 1000 // len(devices)


def test_what_may_be_held_is_an_eighth_of_what_the_container_has_left(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    unlimited = memory.host_memory_limit()
    assert unlimited > 0
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 1000\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.max").write_text("12000\n")
    assert memory.host_memory_limit() == (12000 - 4000) // 8
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.host_memory_limit() > 8000
