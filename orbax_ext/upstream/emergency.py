"""Orbax's emergency checkpoint manager: its restores go to orbax_ext while these hooks are installed.

The manager keeps its own choice of the step and of the tier: `restore` is untouched. Hooks are on its class, so that
managers that exist already are served too.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import jax
from etils import epath
from orbax.checkpoint import checkpoint_utils, type_handlers
from orbax.checkpoint._src import asyncio_utils
from orbax.checkpoint._src.logging import step_statistics
from orbax.checkpoint._src.serialization import limits, tensorstore_utils
from orbax.checkpoint._src.tree import utils as tree_utils
from orbax.checkpoint.experimental.emergency import checkpoint_manager
from orbax.checkpoint.experimental.emergency import path as emergency_path

from orbax_ext.upstream.hooks import Hook, serving

T = TypeVar("T")

# Whether local steps are being listed, and this process has not shared its own yet.
_listing_steps: contextvars.ContextVar[bool] = contextvars.ContextVar("orbax_ext_listing_steps", default=False)


@dataclasses.dataclass(frozen=True)
class EmergencyStep:
    """One step of an emergency manager: what is asked for, and where each tier may have it."""

    step: int
    names: tuple[str, ...]  # of the leaves, as Orbax stores them
    args: tuple[Any, ...]  # Orbax's ArrayRestoreArgs
    # Return the directory of the step's arrays, on this host and in persistent storage; None if there is no such step.
    find_local: Callable[[], epath.Path | None]
    find_persistent: Callable[[], epath.Path | None]


class Service(Protocol):
    """What the hooks call."""

    def restore(self, step: EmergencyStep) -> Sequence[jax.Array]:
        """Returns the leaves, in the order of `step.names`. All processes call it."""

    def share(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the data of all processes, in their order. All processes call it, or `share_failure`."""

    def share_failure(self, error: Exception) -> None:
        """Raises the error of this process on all processes, where the others are in `share`."""


def param_infos(
    directory: epath.Path, names: Sequence[str], *, ocdbt: bool = True, zarr3: bool = True, every_chunk: bool = True
) -> list[Any]:
    """Returns Orbax's descriptions of arrays in a directory; by default as the emergency manager saves them.

    `every_chunk` says that a chunk that is not there has been lost, and must not be read as zeros.
    """
    context = tensorstore_utils.get_ts_context(use_ocdbt=ocdbt)
    limiter = limits.get_byte_limiter()
    return [
        type_handlers.ParamInfo(
            name=name,
            parent_dir=directory,
            path=directory / name,
            is_ocdbt_checkpoint=ocdbt,
            use_zarr3=zarr3,
            byte_limiter=limiter,
            ts_context=context,
            raise_array_data_missing_error=every_chunk,
        )
        for name in names
    ]


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, also where an event loop is running already."""
    result: T = asyncio_utils.run_sync(work)
    return result


def _restore_from_local(original: Callable[..., Any], service: Service) -> Callable[..., Any]:
    @functools.wraps(original)
    def restore(self: Any, step: int, restoring_slice_id: int, directory: Any = None) -> Any:
        with serving(LOCAL.label):
            return _restore(self, service, step, directory or self._local_directory, self._persistent_directory)

    return restore


def _restore_from_persistent(original: Callable[..., Any], service: Service) -> Callable[..., Any]:
    @functools.wraps(original)
    def restore(self: Any, step: int, directory: Any = None) -> Any:
        with serving(PERSISTENT.label):
            return _restore(self, service, step, self._local_directory, directory or self._persistent_directory)

    return restore


def _restore(manager: Any, service: Service, step: int, local: Any, persistent: Any) -> Any:
    abstract = manager._abstract_state
    names = jax.tree.leaves(tree_utils.get_param_names(abstract, include_empty_nodes=False))
    args = jax.tree.leaves(
        checkpoint_utils.construct_restore_args(abstract),
        is_leaf=lambda node: isinstance(node, type_handlers.RestoreArgs),
    )
    stats = step_statistics.EmergencyRestoreStepStatistics()
    stats.step, stats.in_primary_slice = step, manager.in_primary_slice
    stats.checkpoint_manager_start_time = time.time()
    described = EmergencyStep(
        step,
        tuple(names),
        tuple(args),
        functools.partial(_item, manager, local, step, checkpoint_manager._STATE_ITEM_NAME),
        functools.partial(_item, manager, persistent, step, "default"),
    )
    arrays = service.restore(described)
    stats.checkpoint_manager_duration_secs = time.time() - stats.checkpoint_manager_start_time
    manager._logger.log_entry(dataclasses.asdict(stats))
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


def _item(manager: Any, directory: Any, step: int, name: str) -> epath.Path | None:
    """Returns the directory of arrays of a step, or None if there is no such step."""
    try:
        found: epath.Path = manager._options.step_name_format.find_step(epath.Path(directory), step).path / name
    except ValueError:  # "No step path found ..."
        return None
    return found


def _list_steps(original: Callable[..., Any], service: Service) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_per_replica_local_steps(*args: Any, **kwargs: Any) -> Any:
        token = _listing_steps.set(True)
        try:
            return original(*args, **kwargs)
        except Exception as error:
            if _listing_steps.get():
                service.share_failure(error)
            raise
        finally:
            _listing_steps.reset(token)

    return get_per_replica_local_steps


def _sync_global_data(original: Callable[..., Any], service: Service) -> Callable[..., Any]:
    @functools.wraps(original)
    def sync_global_data(local_data: dict[str, Any]) -> list[dict[str, Any]]:
        # Orbax's p2p manager also saves through this function, data of any length: that stays as it is.
        if not _listing_steps.get():
            return original(local_data)
        _listing_steps.set(False)
        return service.share(local_data)

    return sync_global_data


LOCAL = Hook(
    checkpoint_manager._MultisliceCheckpointManager,
    "_restore_from_local",
    "restores of a step that a replica has in full",
    _restore_from_local,
)
PERSISTENT = Hook(
    checkpoint_manager._MultisliceCheckpointManager,
    "_restore_from_persistent",
    "restores of all other steps; what hosts still have of them is taken from there",
    _restore_from_persistent,
)
STEPS = Hook(
    emergency_path,
    "get_per_replica_local_steps",
    "lists local steps by a collective, which fails under `jax.set_mesh` and has no time limit",
    _list_steps,
)
SHARING = Hook(
    emergency_path,
    "sync_global_data",
    "the collective; it is replaced only where local steps are listed",
    _sync_global_data,
)
HOOKS = (LOCAL, PERSISTENT, STEPS, SHARING)
