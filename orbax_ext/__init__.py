"""Single-replica restore for Orbax that works: exact, bounded in time, on any mesh.

Public names are imported when they are first used (PEP 562), so that commands which need no JAX do not import it. A new
one is imported below for type checkers and editors, and listed in `__all__`; a module that is new here, in `_HOMES`.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

from orbax_ext import version
from orbax_ext.version import __version__

version.check_orbax_version(version.orbax_version())

if _typing.TYPE_CHECKING:
    from orbax_ext import storage, v1
    from orbax_ext.abstract_state import abstract, restore
    from orbax_ext.background import PendingRestore, restore_async
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
    from orbax_ext.spec_reader import read_arrays

__all__ = [
    "BroadcastArrayHandler",
    "DataMismatchError",
    "MeetingTimeoutError",
    "PendingRestore",
    "PlanMismatchError",
    "ProcessFailure",
    "RestoreError",
    "RestoreFailedError",
    "RestoreReport",
    "RestoreTimeoutError",
    "ValidRestore",
    "__version__",
    "abstract",
    "barrier",
    "canonical_spec",
    "device_put_replicated",
    "device_put_sharded",
    "last_report",
    "match_sharding",
    "pytree_handler",
    "read_arrays",
    "register",
    "registered",
    "replicate",
    "restore",
    "restore_args",
    "restore_async",
    "restore_latest_valid",
    "shard",
    "stack",
    "stitch",
    "storage",
    "unregister",
    "unstack",
    "v1",
]

_SUBMODULES = ("errors", "handler", "options", "placement", "report", "storage", "v1")  # `orbax_ext.errors` and so on
_HOMES = (
    "errors",
    "placement",
    "report.report",
    "handler",
    "spec_reader",
    "registration",
    "abstract_state",
    "background",
    "latest",
)  # in order of their weight


def __getattr__(name: str) -> _typing.Any:
    """Imports a public name. Python calls this for names that the module does not have yet."""
    if name in _SUBMODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    for home in _HOMES if name in __all__ else ():
        module = _importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=_sys.modules[__name__])


def __dir__() -> list[str]:
    return list(__all__)
