"""Every difference between releases of Orbax and JAX, and everything private of theirs that we touch.

No other module imports from `orbax.checkpoint._src` or `jax._src`.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import warnings
from typing import Any

import jax
from jax._src import distributed
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata import array_metadata as array_metadata_lib
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.serialization import jax_array_restore_args

OLDEST_ORBAX = "0.11.33"
NEWEST_ORBAX = "0.12.8"  # the newest that the tests run with

ArrayMetadataStore = array_metadata_store.Store
Format = jax_array_restore_args.Format
ShardingMetadata = sharding_metadata.ShardingMetadata
sync_global_processes = multihost.sync_global_processes


def orbax_version() -> str:
    return importlib.metadata.version("orbax-checkpoint")


def check_orbax_version(found: str | None = None) -> None:
    """Refuses an Orbax that is too old; warns of one that is newer than any tested."""
    found = found or orbax_version()
    if _numbers(found) < _numbers(OLDEST_ORBAX):
        raise ImportError(
            f"orbax_ext needs orbax-checkpoint {OLDEST_ORBAX} or newer, found {found}. "
            f"Upgrade with: pip install 'orbax-checkpoint>={OLDEST_ORBAX}'"
        )
    if _numbers(found) > _numbers(NEWEST_ORBAX):
        warnings.warn(
            f"orbax_ext is tested with orbax-checkpoint up to {NEWEST_ORBAX}; found {found}.",
            stacklevel=3,
        )


def _numbers(release: str) -> tuple[int, ...]:
    """The release numbers of a version, such as (0, 11, 33) of "0.11.33+ext.1"."""
    return tuple(int(part) for part in re.findall(r"\d+", release.split("+")[0])[:3])


def coordination_client() -> Any:
    """JAX's client of the coordination service, or None in a job of one process that never called initialize."""
    return distributed.global_state.client


def array_handler_settings(handler: type_handlers.ArrayHandler) -> dict[str, Any]:
    """The keyword arguments that would make an ArrayHandler with the same settings as this one.

    ArrayHandler keeps each argument in an attribute of the same name with an underscore, in every supported release.
    """
    names = [name for name in inspect.signature(type_handlers.ArrayHandler.__init__).parameters if name != "self"]
    return {name: getattr(handler, f"_{name}") for name in names if hasattr(handler, f"_{name}")}


async def random_key_impls(handler: type_handlers.ArrayHandler, checkpoint_dir: Any) -> dict[str, str]:
    """Names of the leaves that were saved as typed PRNG keys, with the key implementation of each."""
    store = handler._array_metadata_store
    if store is None:
        return {}
    by_process = await store.read(checkpoint_dir=checkpoint_dir)
    if not by_process:
        return {}
    found = {}
    for metadata in next(iter(by_process.values())):
        impl = (getattr(metadata, "ext_metadata", None) or {}).get(array_metadata_lib.RANDOM_KEY_IMPL)
        if impl:
            found[metadata.param_name] = impl
    return found


def make_mesh(devices: Any, axis_names: tuple[str, ...], axis_types: Any) -> jax.sharding.Mesh:
    """A Mesh with the given axis types."""
    return jax.sharding.Mesh(devices, axis_names, axis_types=axis_types)
