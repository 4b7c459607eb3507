"""How much this process has read from storage, as TensorStore counts it, and how much it has asked for again."""

from __future__ import annotations

import tensorstore as ts

_KVSTORES = "/tensorstore/kvstore/"
_OVERLAY = f"{_KVSTORES}ocdbt/"  # the store below an overlay counts the same bytes again

_RESPONSES = "/tensorstore/http/response_codes"
_REFUSALS = ("429", "503")  # too many requests, slow down

_again = 0


def bytes_again() -> int:
    """Returns the bytes that were asked for a second time because storage did not answer."""
    return _again


def note_again(count: int) -> None:
    """Notes bytes that are asked for a second time. Called in the event loop only."""
    global _again
    _again += count


def bytes_read() -> int:
    """Returns the bytes that TensorStore has read from files and buckets since the process started."""
    return _sum(_KVSTORES, "bytes_read")


def requests() -> int:
    """Returns how many files and objects, or parts of them, TensorStore has read since the process started."""
    return _sum(_KVSTORES, "read")


def http_responses() -> tuple[int, int]:
    """Returns how many requests over HTTP were answered since the process started, and how many of them refused."""
    metrics = ts.experimental_collect_matching_metrics(_RESPONSES)
    codes = [(entry["code"], int(entry["value"])) for metric in metrics for entry in metric["values"]]
    return sum(count for _, count in codes), sum(count for code, count in codes if code in _REFUSALS)


def of_driver(driver: str, *names: str) -> int:
    """Returns the sum of some counters of one of TensorStore's drivers, such as "read" and "list" of "s3"."""
    return _sum(f"{_KVSTORES}{driver}/", *names)


def _sum(prefix: str, *names: str) -> int:
    metrics = {metric["name"]: metric["values"] for metric in ts.experimental_collect_matching_metrics(prefix)}
    counted = [name for name in metrics if name.rpartition("/")[2] in names and not name.startswith(_OVERLAY)]
    return sum(int(entry["value"]) for name in counted for entry in metrics[name])
