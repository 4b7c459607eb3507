"""What processes send each other, as JSON: contributions to a meeting, failures and errors. Pure."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any

from orbax_ext import errors
from orbax_ext.redact import redact, sendable

Contribution = Mapping[str, Any]  # what one process brings to a meeting; must survive JSON

# Characters of one failure, which is sent to every process: together they fit into one contribution.
MAX_ERROR = 4096
_MAX_TRACEBACK = 16384


def pack(contributions: Mapping[int, Contribution]) -> dict[str, Any]:
    """Returns all contributions as one JSON value, in which a value that most processes share stands once."""
    keys = sorted({key for own in contributions.values() for key in own})
    usual = {key: _most_common(key, contributions) for key in keys}
    others, lacking = {}, {}
    for process, own in contributions.items():
        unusual = {key: value for key, value in own.items() if value != usual[key]}
        absent = [key for key in usual if key not in own]
        if unusual:
            others[str(process)] = unusual
        if absent:
            lacking[str(process)] = absent
    numbers = sorted(contributions)
    return {
        "processes": len(numbers) if numbers == list(range(len(numbers))) else numbers,
        "usual": usual,
        "others": others,
        "lacking": lacking,
    }


def unpack(packed: Mapping[str, Any]) -> dict[int, Contribution]:
    """Returns the contributions that `pack` was given."""
    processes: int | list[int] = packed["processes"]
    contributions: dict[int, Contribution] = {}
    for process in range(processes) if isinstance(processes, int) else processes:
        lacking = packed["lacking"].get(str(process), ())
        usual = {key: value for key, value in packed["usual"].items() if key not in lacking}
        contributions[int(process)] = {**usual, **packed["others"].get(str(process), {})}
    return contributions


def _most_common(key: str, contributions: Mapping[int, Contribution]) -> Any:
    values = Counter(json.dumps(own[key], sort_keys=True) for own in contributions.values() if key in own)
    return json.loads(values.most_common(1)[0][0])


def failure_to_json(error: BaseException) -> dict[str, str]:
    """Returns an error of this process for the others: without secrets, and cut to size."""
    interrupted = isinstance(error, (asyncio.CancelledError, GeneratorExit))  # which have no message of their own
    said = _specific(error)
    message = f"{type(said).__name__}: {'the restore was interrupted' if interrupted else said}"
    trace = "".join(traceback.format_exception(error))
    return {
        "error": sendable(redact(message))[:MAX_ERROR],
        "traceback": sendable(redact(trace))[-_MAX_TRACEBACK:],
        "kind": errors.builtin_kind(error),
    }


def _specific(error: BaseException) -> BaseException:
    """Returns the error to name: not a bare `Exception`, but the error that it was raised from.

    Orbax raises one from TensorStore's error when a read fails. Its message is a page about the array; TensorStore's
    is one line with the leaf, the file and the reason.
    """
    return error.__cause__ if type(error) is Exception and isinstance(error.__cause__, Exception) else error


def failures_from_json(
    contributions: Mapping[int, Contribution], hosts: Mapping[int, str], phase: str
) -> dict[int, errors.ProcessFailure]:
    """Returns the failures among the contributions to a meeting."""
    return {
        process: errors.ProcessFailure(
            hosts[process], phase, str(own["error"]), str(own.get("traceback", "")), str(own.get("kind", ""))
        )
        for process, own in contributions.items()
        if "error" in own
    }


def restore_error_to_json(error: errors.RestoreFailedError | errors.RestoreTimeoutError) -> dict[str, Any]:
    """Returns an error that one process raises on behalf of all, for the others to raise."""
    if isinstance(error, errors.RestoreTimeoutError):
        return {"message": str(error), "missing": error.missing, "phases": error.phases}
    return {"failures": {process: dataclasses.astuple(failure) for process, failure in error.failures.items()}}


def restore_error_from_json(value: Mapping[str, Any]) -> errors.RestoreFailedError | errors.RestoreTimeoutError:
    """Returns the error that `restore_error_to_json` was given."""
    if "failures" in value:
        return errors.restore_failed(
            {int(process): errors.ProcessFailure(*map(str, fields)) for process, fields in value["failures"].items()}
        )
    phases = {int(process): str(phase) for process, phase in value["phases"].items()}
    return errors.RestoreTimeoutError(str(value["message"]), [int(process) for process in value["missing"]], phases)
