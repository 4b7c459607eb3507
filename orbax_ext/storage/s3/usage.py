"""How many requests this process has sent to S3, and how many bytes it has read from there."""

from __future__ import annotations

import dataclasses
import threading

from orbax_ext.storage import counters


@dataclasses.dataclass(frozen=True)
class Usage:
    """Requests and bytes: of metadata files through obstore, and of arrays through TensorStore."""

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
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(earlier), strict=True)
        return Usage(*(now - before for now, before in pairs))


class RequestCounter:
    """Counts the requests and bytes of metadata files, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = 0
        self._bytes = 0

    def add(self, requests: int = 0, read: int = 0) -> None:
        with self._lock:
            self._requests += requests
            self._bytes += read

    def usage(self) -> Usage:
        """Returns the usage since the process started, with TensorStore's own counters for arrays."""
        with self._lock:
            requests, read = self._requests, self._bytes
        array_requests = counters.of_driver("s3", "read", "list", "write", "delete")
        return Usage(requests, read, array_requests, counters.of_driver("s3", "bytes_read"))
