"""Open files on S3, where an object is written as a whole and may be read in parts."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


class Upload(io.BytesIO):
    """A file that is stored in one request when it is closed, and not at all if an error closes it."""

    def __init__(self, store: Callable[[bytes], None], before: bytes) -> None:
        super().__init__()
        self._store = store
        self.write(before)

    def __exit__(self, kind: object, error: object, where: object) -> None:
        self.close(discard=kind is not None)

    def close(self, discard: bool = False) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            if not discard:
                self._store(content)


class TextFile(io.TextIOWrapper):
    """A text file on top of one of bytes; an `Upload` below it is not stored if an error closes it."""

    def __exit__(self, kind: object, error: object, where: object) -> None:
        if kind is not None and isinstance(self.buffer, Upload):
            self.flush()
            self.buffer.close(discard=True)
        else:
            self.close()


class LargeFile(io.RawIOBase):
    """A file that is read in the ranges that are asked for."""

    def __init__(self, read_range: Callable[[int, int], bytes], length: int) -> None:
        self._read_range = read_range
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = self._next(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def readall(self) -> bytes:
        """Returns the rest in one request. The inherited method would ask for 8 KiB at a time."""
        return self._next(self._length)

    def _next(self, most: int) -> bytes:
        end = min(self._at + most, self._length)
        content = self._read_range(self._at, end) if end > self._at else b""
        self._at += len(content)
        return content
