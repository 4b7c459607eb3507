"""Lets all processes of a cluster share JAX's compilation cache. Imported by all of them.

JAX lets only process 0 write to it. On CPUs, a program of one device has an entry for each device of a process, because
the key names the device: here that is left out, as JAX does on GPUs. A program is loaded for the device that is asked
for, whichever it was compiled for.
"""

from __future__ import annotations

import os
import types
from typing import Any

from jax._src import cache_key, compiler, distributed, lru_cache

_hash_options = cache_key._hash_serialized_compile_options


class _AsProcess0:
    process_id = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(distributed.global_state, name)


def _put(cache: Any, key: str, value: bytes) -> None:
    """Writes an entry at once: tests kill processes, and processes read what others write."""
    entry = cache.path / f"{key}-cache"
    unfinished = cache.path / f"{key}.{os.getpid()}"
    unfinished.write_bytes(value)
    os.replace(unfinished, entry)


def _hash_options_without_one_device(hash_obj: Any, options: Any, strip_device_assignment: bool = False) -> None:
    devices = options.device_assignment
    alone = bool(devices) and devices.replica_count() * devices.computation_count() == 1
    _hash_options(hash_obj, options, strip_device_assignment or alone)


cache_key._hash_serialized_compile_options = _hash_options_without_one_device
compiler.distributed = types.SimpleNamespace(global_state=_AsProcess0())
lru_cache.LRUCache.put = _put
