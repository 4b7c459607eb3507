"""Single-replica restore for Orbax that works: exact, bounded in time, on any mesh.

Names are imported when they are first used (PEP 562), so that commands which need no JAX do not wait for it.
"""

import importlib as _importlib
import typing as _typing

from orbax_ext import version as _version
from orbax_ext.version import __version__

_version.check_orbax_version(_version.orbax_version())

if _typing.TYPE_CHECKING:
    from orbax_ext import storage, v1
    from orbax_ext.errors import (
        DataMismatchError,
        MeetingTimeoutError,
        PlanMismatchError,
        ProcessFailure,
        RestoreError,
        RestoreFailedError,
        RestoreTimeoutError,
    )
    from orbax_ext.handler import BroadcastArrayHandler
    from orbax_ext.latest import ValidRestore, restore_latest_valid
    from orbax_ext.placement import (
        barrier,
        canonical_spec,
        device_put_replicated,
        device_put_sharded,
        match_sharding,
        replicate,
        shard,
        stack,
        stitch,
        unstack,
    )
    from orbax_ext.registration import pytree_handler, register, registered, restore_args, unregister
    from orbax_ext.report.report import RestoreReport, last_report

_HOMES = {
    "BroadcastArrayHandler": "orbax_ext.handler",
    "DataMismatchError": "orbax_ext.errors",
    "MeetingTimeoutError": "orbax_ext.errors",
    "PlanMismatchError": "orbax_ext.errors",
    "ProcessFailure": "orbax_ext.errors",
    "RestoreError": "orbax_ext.errors",
    "RestoreFailedError": "orbax_ext.errors",
    "RestoreReport": "orbax_ext.report.report",
    "RestoreTimeoutError": "orbax_ext.errors",
    "ValidRestore": "orbax_ext.latest",
    "barrier": "orbax_ext.placement",
    "canonical_spec": "orbax_ext.placement",
    "device_put_replicated": "orbax_ext.placement",
    "device_put_sharded": "orbax_ext.placement",
    "last_report": "orbax_ext.report.report",
    "match_sharding": "orbax_ext.placement",
    "pytree_handler": "orbax_ext.registration",
    "register": "orbax_ext.registration",
    "registered": "orbax_ext.registration",
    "replicate": "orbax_ext.placement",
    "restore_args": "orbax_ext.registration",
    "restore_latest_valid": "orbax_ext.latest",
    "shard": "orbax_ext.placement",
    "stack": "orbax_ext.placement",
    "stitch": "orbax_ext.placement",
    "storage": "orbax_ext.storage",
    "unregister": "orbax_ext.registration",
    "unstack": "orbax_ext.placement",
    "v1": "orbax_ext.v1",
}

__all__ = [
    "BroadcastArrayHandler",
    "DataMismatchError",
    "MeetingTimeoutError",
    "PlanMismatchError",
    "ProcessFailure",
    "RestoreError",
    "RestoreFailedError",
    "RestoreReport",
    "RestoreTimeoutError",
    "ValidRestore",
    "__version__",
    "barrier",
    "canonical_spec",
    "device_put_replicated",
    "device_put_sharded",
    "last_report",
    "match_sharding",
    "pytree_handler",
    "register",
    "registered",
    "replicate",
    "restore_args",
    "restore_latest_valid",
    "shard",
    "stack",
    "stitch",
    "storage",
    "unregister",
    "unstack",
    "v1",
]


def __getattr__(name: str) -> _typing.Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orbax_ext' has no attribute {name!r}")
    home = _importlib.import_module(_HOMES[name])
    value = home if _HOMES[name] == f"orbax_ext.{name}" and not hasattr(home, name) else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
