"""How much this process has read from storage, as TensorStore counts it."""

from __future__ import annotations

import tensorstore as ts

_OVERLAYS = ("/tensorstore/kvstore/ocdbt/",)  # counted again by the store beneath


def bytes_read() -> int:
    """Bytes that TensorStore has read from files and buckets since the process began."""
    return _total("bytes_read")


def requests() -> int:
    """How often TensorStore has asked for a file or an object, or a part of one, since the process began."""
    return _total("read")


def _total(name: str) -> int:
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    chosen = [m for m in metrics if m["name"].endswith(f"/{name}") and not m["name"].startswith(_OVERLAYS)]
    return sum(int(value["value"]) for metric in chosen for value in metric["values"])
