"""JAX's persistent compilation cache for tests, in the environment that runs them.

A test run compiles thousands of small programs, most of them again in every cluster, and the next run compiles the same
ones. Whatever fails before a program is compiled, such as google/orbax #3184, fails with the cache too.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator

_DIRECTORY = pathlib.Path(sys.prefix, "jax-cache")
_LARGEST = 1 << 29  # bytes; then it starts again, because programs of random shapes are never used twice


def use() -> None:
    """Sets the variables of the cache. Call it before JAX is imported; the processes of tests inherit them."""
    if sys.prefix == sys.base_prefix:  # not an environment of ours
        return
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_DIRECTORY))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["ORBAX_EXT_LAB_PRELOAD"] = "tests.support.cache_writers"


def prune() -> None:
    """Removes the cache if it has become too large."""
    if _DIRECTORY.exists() and sum(file.stat().st_size for file in os.scandir(_DIRECTORY)) > _LARGEST:
        shutil.rmtree(_DIRECTORY, ignore_errors=True)


@contextlib.contextmanager
def of_a_user(directory: pathlib.Path) -> Iterator[None]:
    """Uses another directory in a `with` block, for programs that take a second to compile, as JAX does by default."""
    import jax  # `use` comes before that
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    compilation_cache.reset_cache()
    compilation_cache.set_cache_dir(str(directory))
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
        compilation_cache.reset_cache()
