"""The requests that are sent to S3 for metadata files, by path. Nothing is remembered between them."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import threading
from collections.abc import Callable
from typing import Any

from orbax_ext.storage.s3.errors import explained
from orbax_ext.storage.s3.paths import PREFIX, PathLike, directory_key, split
from orbax_ext.storage.s3.settings import Settings, filesystem_arguments
from orbax_ext.storage.s3.usage import RequestCounter

WHOLE_FILE = 8 << 20  # a smaller file is fetched in one request


@dataclasses.dataclass(frozen=True)
class Listing:
    """What is in a directory, and whether it exists."""

    files: dict[str, tuple[int, int]]  # by name: size and time of change
    directories: tuple[str, ...]
    exists: bool


class ObjectStore:
    """Sends requests to S3 and counts them."""

    def __init__(self, settings: Callable[[], Settings], counter: RequestCounter) -> None:
        self._settings = settings
        self._counter = counter
        self._lock = threading.Lock()
        self._filesystem: Any = None

    @property
    def _fs(self) -> Any:
        """The s3fs file system, created when it is first needed, once for all threads."""
        with self._lock:
            if self._filesystem is None:
                self._filesystem = _new_filesystem(self._settings(), self._counter)
            return self._filesystem

    def fetch(self, path: PathLike) -> bytes | None:
        """Returns the content of a file, or None if it is too large for one request."""
        content = self.read_range(path, 0, WHOLE_FILE)
        return content if len(content) < WHOLE_FILE else None

    def read_range(self, path: PathLike, start: int, end: int) -> bytes:
        """Returns a range of a file's bytes, fewer than asked for at its end."""
        with explained(path):
            content: bytes = self._fs.read_range(*split(path), start, end)
            self._counter.add(read=len(content))
            return content

    def list_directory(self, path: PathLike) -> Listing:
        with explained(path):
            prefix = directory_key(path)
            objects, prefixes = self._list(path, "/")
            files = {
                entry["Key"].removeprefix(prefix): (entry["Size"], int(entry["LastModified"].timestamp()))
                for entry in objects
                if entry["Key"] != prefix  # the directory's own marker
            }
            directories = tuple(key.removeprefix(prefix).rstrip("/") for key in prefixes)
            return Listing(files, directories, exists=bool(objects or prefixes or not prefix))

    def sizes_below(self, path: PathLike) -> dict[str, int]:
        """Returns the sizes of all files below a directory, by their paths from there."""
        with explained(path):
            prefix = directory_key(path)
            entries = {entry["Key"].removeprefix(prefix): entry["Size"] for entry in self._list(path, "")[0]}
            return {name: size for name, size in entries.items() if name and not name.endswith("/")}

    def keys_below(self, path: PathLike) -> list[str]:
        """Returns the keys of all objects below a directory, with markers that earlier releases wrote."""
        return [entry["Key"] for entry in self._list(path, "")[0]]

    def file(self, path: PathLike) -> tuple[int, int] | None:
        """Returns size and time of change of a file, or None if there is no such file."""
        key = split(path)[1]
        if not key:
            return None
        try:
            head = self._call("head_object", path, Key=key)
        except FileNotFoundError:
            return None
        return head["ContentLength"], int(head["LastModified"].timestamp())

    def is_directory(self, path: PathLike) -> bool:
        bucket, key = split(path)
        return self.has_children(path) if key else self.bucket_exists(bucket)

    def bucket_exists(self, bucket: str) -> bool:
        try:
            self._fs.call_s3("head_bucket", Bucket=bucket)
        except FileNotFoundError:
            return False
        return True

    def has_children(self, path: PathLike) -> bool:
        return bool(self._call("list_objects_v2", path, Prefix=directory_key(path), MaxKeys=1).get("Contents"))

    def write(self, path: PathLike, content: bytes) -> None:
        self._fs.pipe_file("/".join(split(path)), content)

    def copy(self, path: PathLike, target: PathLike) -> None:
        self._fs.cp_file("/".join(split(path)), "/".join(split(target)))

    def delete(self, path: PathLike, keys: list[str]) -> None:
        """Deletes objects of the bucket of `path` in one request."""
        answer = self._call("delete_objects", path, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True})
        for error in answer.get("Errors", ()):
            raise OSError(f"{error.get('Code')}: {PREFIX}{split(path)[0]}/{error.get('Key')}: {error.get('Message')}")

    def delete_file(self, path: PathLike) -> None:
        self._call("delete_object", path, Key=split(path)[1])

    def _list(self, path: PathLike, delimiter: str) -> tuple[list[Any], list[str]]:
        """Returns the objects below a directory and, with a delimiter, the directories in it."""
        more: dict[str, Any] = {"Delimiter": delimiter} if delimiter else {}
        files: list[Any] = []
        directories: list[str] = []
        while True:
            page = self._call("list_objects_v2", path, Prefix=directory_key(path), **more)
            files += page.get("Contents", ())
            directories += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
            if not page.get("IsTruncated"):
                return files, directories
            more["ContinuationToken"] = page["NextContinuationToken"]

    def _call(self, method: str, path: PathLike, **arguments: Any) -> Any:
        return self._fs.call_s3(method, Bucket=split(path)[0], **arguments)


def _new_filesystem(settings: Settings, counter: RequestCounter) -> Any:
    """Returns an s3fs file system that counts its requests and reads again when an answer breaks off."""
    try:
        import s3fs
        from fsspec import asyn
    except ImportError as error:
        raise ImportError(
            f"s3:// paths need the package s3fs, and it can't be imported ({error}): pip install 'orbax-ext[s3]'."
        ) from None

    class CountingFileSystem(s3fs.S3FileSystem):
        # botocore repeats requests and `_read_range` repeats reads that broke off; a third loop would multiply them.
        retries = 1

        async def _call_s3(self, method: str, *args: Any, **kwargs: Any) -> Any:
            counter.add(requests=1)
            return await super()._call_s3(method, *args, **kwargs)

        async def _read_range(self, bucket: str, key: str, start: int, end: int) -> bytes:
            for attempt in range(settings.retries + 1):
                try:
                    return await self._read_range_once(bucket, key, start, end)
                except s3fs.core.S3_RETRYABLE_ERRORS:
                    if attempt == settings.retries:
                        raise
                await asyncio.sleep(min(0.1 * 2**attempt, 10.0))
            raise AssertionError("not reached")

        async def _read_range_once(self, bucket: str, key: str, start: int, end: int) -> bytes:
            try:
                answer = await self._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
            except OSError as error:
                if error.errno == errno.EINVAL:  # the file has no byte at `start`: it is empty, or this is its end
                    return b""
                raise
            async with answer["Body"] as body:
                content: bytes = await body.read()
            if len(content) != answer["ContentLength"]:
                raise s3fs.core.IncompleteRead(content, answer["ContentLength"] - len(content))
            return content

        call_s3 = asyn.sync_wrapper(_call_s3)
        read_range = asyn.sync_wrapper(_read_range)

    return CountingFileSystem(**filesystem_arguments(settings))
