"""How much this process has read from storage, as TensorStore counts it."""

from __future__ import annotations

from typing import Any

import tensorstore as ts

_KVSTORES = "/tensorstore/kvstore/"
_OVERLAYS = (f"{_KVSTORES}ocdbt/",)  # the store below an overlay counts the same bytes again


def bytes_read() -> int:
    """Returns the bytes that TensorStore has read from files and buckets since the process started."""
    return _total("bytes_read")


def requests() -> int:
    """Returns how many files and objects, or parts of them, TensorStore has read since the process started."""
    return _total("read")


def of_driver(driver: str, *names: str) -> int:
    """Returns the sum of some counters of one of TensorStore's drivers, such as "read" and "list" of "s3"."""
    metrics = ts.experimental_collect_matching_metrics(f"{_KVSTORES}{driver}/")
    return _sum([metric for metric in metrics if metric["name"] in {f"{_KVSTORES}{driver}/{name}" for name in names}])


def _total(name: str) -> int:
    metrics = ts.experimental_collect_matching_metrics(_KVSTORES)
    return _sum([m for m in metrics if m["name"].endswith(f"/{name}") and not m["name"].startswith(_OVERLAYS)])


def _sum(metrics: list[dict[str, Any]]) -> int:
    return sum(int(entry["value"]) for metric in metrics for entry in metric["values"])
