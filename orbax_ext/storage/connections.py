"""TensorStore's variables for connections: a limit for those on which next to nothing arrives, and whom to trust.

TensorStore waits for ever for a silent server unless its variables are set (google/tensorstore#291). They hold for the
whole process, and TensorStore reads them once, when it first connects.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection

from absl import logging

_LONGEST_CONNECT = 30  # seconds
_TIME, _LIMIT = "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES"

STALL_RATE = 4096  # bytes per second; a healthy connection that is one of hundreds still brings more


def limit_silence(seconds: float, rate: int = STALL_RATE) -> dict[str, str]:
    """Lets TensorStore give up connections that bring fewer bytes per second for so long, and retry.

    Returns the variables that it set. Those that are set already are left alone.
    """
    whole = max(1, round(seconds))
    variables = {
        _TIME: str(whole),
        _LIMIT: str(rate),
        "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": str(min(whole, _LONGEST_CONNECT)),
    }
    return _set_missing(variables)


def trust(ca_bundle: str | None) -> dict[str, str]:
    """Lets TensorStore trust the certificate authorities in a file; returns the variables that it set.

    TensorStore does not know AWS_CA_BUNDLE. Its own variables count if they are set already.
    """
    if ca_bundle is None or "TENSORSTORE_CA_PATH" in os.environ:
        return {}
    return _set_missing({"TENSORSTORE_CA_BUNDLE": ca_bundle})


def _set_missing(variables: dict[str, str]) -> dict[str, str]:
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    return missing


def limit_silence_in(
    places: Collection[str],
    seconds: float | None,
    rate: int,
    stall_timeout: float,
    *,
    enabled: tuple[float, int] | None = None,
) -> None:
    """Does it for a restore from some places, by its knobs.

    What they leave open is what S3 was `enabled` with on s3://, otherwise a fifth of the restore's own limit, so that
    reads are retried several times before that. Warns about knobs that come too late.
    """
    given_seconds, given_rate = seconds, None if rate == STALL_RATE else rate
    schemes = {place.partition("://")[0] for place in places}
    if "s3" in schemes and enabled is not None:
        seconds = enabled[0] if seconds is None else seconds
        rate = enabled[1] if rate == STALL_RATE else rate
    if schemes & {"gs", "s3"}:
        limit_silence(stall_timeout / 5 if seconds is None else seconds, rate)
        if given_seconds is not None:
            _warn_if_not("stall_seconds", _TIME, str(max(1, round(given_seconds))))
        if given_rate is not None:
            _warn_if_not("stall_rate", _LIMIT, str(given_rate))


def _warn_if_not(knob: str, variable: str, wanted: str) -> None:
    if os.environ[variable] != wanted:
        _warn(knob, wanted, variable, os.environ[variable])


@functools.cache  # one line for each knob and value
def _warn(knob: str, wanted: str, variable: str, stands: str) -> None:
    logging.warning(
        "orbax_ext: %s=%s has no effect: %s is %s in this process already, and TensorStore reads it only once",
        knob,
        wanted,
        variable,
        stands,
    )
