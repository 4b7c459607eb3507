"""What all processes brought to a meeting, in few words: what most of them say is said once. Pure."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any

from orbax_ext import errors
from orbax_ext.redact import scrub, sendable

Payload = Mapping[str, Any]

MAX_ERROR = 4096  # characters of a message that goes to every process
_MAX_TRACEBACK = 16384


def pack(found: Mapping[int, Payload]) -> dict[str, Any]:
    """The contributions as one JSON value; `unpack` makes them again."""
    usual = {key: _most_common(key, found) for key in sorted({key for each in found.values() for key in each})}
    others, lacking = {}, {}
    for process, each in found.items():
        own = {key: value for key, value in each.items() if value != usual[key]}
        missing = [key for key in usual if key not in each]
        if own:
            others[str(process)] = own
        if missing:
            lacking[str(process)] = missing
    return {
        "processes": len(found) if sorted(found) == list(range(len(found))) else sorted(found),
        "usual": usual,
        "others": others,
        "lacking": lacking,
    }


def unpack(packed: Mapping[str, Any]) -> dict[int, Payload]:
    processes: int | list[int] = packed["processes"]
    found: dict[int, Payload] = {}
    for process in range(processes) if isinstance(processes, int) else processes:
        lacking = packed["lacking"].get(str(process), ())
        usual = {key: value for key, value in packed["usual"].items() if key not in lacking}
        found[int(process)] = {**usual, **packed["others"].get(str(process), {})}
    return found


def _most_common(key: str, found: Mapping[int, Payload]) -> Any:
    texts = Counter(json.dumps(each[key], sort_keys=True) for each in found.values() if key in each)
    return json.loads(texts.most_common(1)[0][0])


def to_payload(error: BaseException) -> dict[str, str]:
    """An error as text for the other processes: cut to size, without secrets."""
    trace = sendable(scrub("".join(traceback.format_exception(error))))
    cut_off = isinstance(error, (asyncio.CancelledError, GeneratorExit))
    text = sendable(scrub(f"{type(error).__name__}: {'the restore was interrupted' if cut_off else error}"))
    return {"error": text[:MAX_ERROR], "traceback": trace[-_MAX_TRACEBACK:], "kind": errors.builtin_kind(error)}


def failures(
    outcomes: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str], phase: str
) -> dict[int, errors.ProcessFailure]:
    """What went wrong, among the outcomes that all processes brought to a meeting."""
    return {
        process: errors.ProcessFailure(
            hosts[process],
            phase,
            str(outcome["error"]),
            str(outcome.get("traceback", "")),
            str(outcome.get("kind", "")),
        )
        for process, outcome in outcomes.items()
        if "error" in outcome
    }


def to_verdict(error: errors.RestoreFailedError | errors.RestoreTimeoutError) -> dict[str, Any]:
    """An error that one process has found for all, as plain data."""
    if isinstance(error, errors.RestoreTimeoutError):
        return {"message": str(error), "missing": error.missing, "phases": error.phases}
    return {"failures": {process: dataclasses.astuple(failure) for process, failure in error.failures.items()}}


def from_verdict(verdict: Mapping[str, Any]) -> errors.RestoreFailedError | errors.RestoreTimeoutError:
    """The same error on another process."""
    if "failures" in verdict:
        return errors.restore_failed(
            {int(p): errors.ProcessFailure(*map(str, f)) for p, f in verdict["failures"].items()}
        )
    phases = {int(process): str(text) for process, text in verdict["phases"].items()}
    return errors.RestoreTimeoutError(str(verdict["message"]), [int(process) for process in verdict["missing"]], phases)
