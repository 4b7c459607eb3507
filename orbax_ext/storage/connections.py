"""A limit for connections on which nothing arrives.

TensorStore waits for ever for a silent server unless these variables are set (google/tensorstore#291). They hold for
the whole process, and TensorStore reads them once, when it first connects.
"""

from __future__ import annotations

import os

_LONGEST_CONNECT = 30  # seconds


def limit_silence(seconds: float) -> dict[str, str]:
    """Lets TensorStore give up connections that are silent for so long, and retry; returns the variables it set.

    Variables that are set already are left alone.
    """
    whole = max(1, round(seconds))
    variables = {
        "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": str(whole),
        "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
        "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": str(min(whole, _LONGEST_CONNECT)),
    }
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    return missing


def limit_silence_on_gcs(path: str | os.PathLike[str], stall_timeout: float) -> None:
    """Does it for a restore from gs://, so that reads are retried several times before the restore's own limit."""
    if os.fspath(path).startswith("gs://"):
        limit_silence(stall_timeout / 5)
