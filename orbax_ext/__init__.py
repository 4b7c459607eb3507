"""Single-replica restore for Orbax that works: exact, bounded in time, on any mesh."""

from orbax_ext import version as _version

_version.check_orbax_version(_version.orbax_version())

from orbax_ext import v1  # noqa: E402
from orbax_ext.errors import (  # noqa: E402, the version is checked before anything that needs it is imported
    DataMismatchError,
    MeetingTimeoutError,
    PlanMismatchError,
    ProcessFailure,
    RestoreError,
    RestoreFailedError,
    RestoreTimeoutError,
)
from orbax_ext.fallback import ValidRestore, restore_latest_valid  # noqa: E402
from orbax_ext.handler import BroadcastArrayHandler  # noqa: E402
from orbax_ext.placement import (  # noqa: E402
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
from orbax_ext.register import pytree_handler, register, registered, restore_args, unregister  # noqa: E402
from orbax_ext.report import RestoreReport, last_report  # noqa: E402
from orbax_ext.version import __version__  # noqa: E402

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
    "unregister",
    "unstack",
    "v1",
]
