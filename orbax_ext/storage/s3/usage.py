"""How many requests this process has sent to S3, and how many bytes it has read from there."""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading


@dataclasses.dataclass(frozen=True)
class Usage:
    """Requests and bytes: of metadata files through s3fs, and of arrays through TensorStore."""

    metadata_requests: int = 0
    metadata_bytes: int = 0
    array_requests: int = 0
    array_bytes: int = 0

    @property
    def requests(self) -> int:
        return self.metadata_requests + self.array_requests

    @property
    def bytes(self) -> int:
        return self.metadata_bytes + self.array_bytes

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(
            *(
                getattr(self, field.name) - getattr(earlier, field.name)  # both count from the process's start
                for field in dataclasses.fields(Usage)
            )
        )


class Counter:
    """Counts what the metadata backend does; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: collections.Counter[str] = collections.Counter()
        self._bytes = 0

    def add_request(self, method: str) -> None:
        with self._lock:
            self._requests[method] += 1

    def add_bytes(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    @property
    def by_method(self) -> dict[str, int]:
        with self._lock:
            return dict(self._requests)

    def usage(self) -> Usage:
        """All of this process so far, with TensorStore's own count of what it did."""
        with self._lock:
            requests, read = sum(self._requests.values()), self._bytes
        return Usage(requests, read, _tensorstore("read", "list", "write", "delete"), _tensorstore("bytes_read"))


def _tensorstore(*names: str) -> int:
    """The sum of some of TensorStore's counters of its s3 driver; 0 before that is used."""
    if "tensorstore" not in sys.modules:
        return 0
    import tensorstore as ts

    total = 0
    for name in names:
        for metric in ts.experimental_collect_matching_metrics(f"/tensorstore/kvstore/s3/{name}"):
            if metric["name"] == f"/tensorstore/kvstore/s3/{name}":
                total += sum(int(entry.get("value", 0)) for entry in metric["values"])
    return total
