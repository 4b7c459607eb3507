"""The requests that are sent to S3 for metadata files, by path. Nothing is remembered between them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorstore as ts

from orbax_ext.storage.s3.client import bucket_client, open_upload, pause
from orbax_ext.storage.s3.errors import explained, is_missing_bucket
from orbax_ext.storage.s3.paths import PathLike, directory_key, split
from orbax_ext.storage.s3.settings import Settings
from orbax_ext.storage.s3.usage import RequestCounter
from orbax_ext.storage.stall import REQUEST_LIMIT

WHOLE_FILE = 8 << 20  # a smaller file is read, and written, in one request
_PAGE = 1000  # keys in the answer to a request to list
_LARGEST_COPY = 5 << 30  # bytes that S3 copies in one request
_MOST_PARTS = 10_000  # of a multipart upload


@dataclasses.dataclass(frozen=True)
class Listing:
    """What is in a directory, and whether it exists."""

    files: dict[str, tuple[int, int]]  # by name: size and time of change
    directories: tuple[str, ...]
    exists: bool


class ObjectStore:
    """Sends requests to S3 through obstore and counts them, without those that obstore repeats.

    obstore takes no key that ends with a slash, and shows one without the slash. Earlier releases wrote such objects
    for directories. They are found and deleted through TensorStore, which takes keys as they are; it counts these.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        counter: RequestCounter,
        kvstore: Callable[[str, str], dict[str, Any]],
    ) -> None:
        self._settings = settings
        self._counter = counter
        self._kvstore = kvstore
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}

    def _client(self, path: PathLike) -> Any:
        """Returns the client for the bucket of a path, made when it is first needed, once for all threads."""
        bucket = split(path)[0]
        with self._lock:
            if bucket not in self._clients:
                self._clients[bucket] = bucket_client(self._settings(), bucket)
            return self._clients[bucket]

    def fetch(self, path: PathLike) -> bytes | None:
        """Returns the content of a file, or None if it is too large for one request."""
        with explained(path):
            client = self._client(path)
            self._counter.add(requests=1)
            answer = client.get(split(path)[1])
            return self._read(answer.bytes()) if answer.meta["size"] < WHOLE_FILE else None

    def read_range(self, path: PathLike, start: int, end: int) -> bytes:
        """Returns a range of a file's bytes."""
        with explained(path):
            client, key = self._client(path), split(path)[1]
            self._counter.add(requests=1)
            try:
                return self._read(client.get_range(key, start=start, end=end))
            except Exception as error:
                if "non-partial response" not in str(error):
                    raise
            # rclone sends the range with the status of a whole object, which obstore refuses.
            self._counter.add(requests=1)
            return self._read(client.get(key).bytes())[start:end]

    def _read(self, content: Any) -> bytes:
        self._counter.add(read=len(content))
        return bytes(content)

    def list_directory(self, path: PathLike) -> Listing:
        with explained(path):
            prefix = directory_key(path)
            answer = self._client(path).list_with_delimiter(prefix or None)
            objects, prefixes = answer["objects"], answer["common_prefixes"]
            self._count_pages(len(objects) + len(prefixes))
            files = {
                entry["path"].removeprefix(prefix): (entry["size"], int(entry["last_modified"].timestamp()))
                for entry in objects
                if entry["path"].startswith(prefix)  # not the directory's own marker
            }
            directories = tuple(key.removeprefix(prefix).rstrip("/") for key in prefixes)
            return Listing(files, directories, exists=bool(objects or prefixes or not prefix))

    def sizes_below(self, path: PathLike) -> dict[str, int]:
        """Returns the sizes of all files below a directory, by their paths from there."""
        with explained(path):
            prefix = directory_key(path)
            sizes = self.keys_below(path)
            return {key.removeprefix(prefix): size for key, size in sizes.items() if not key.endswith("/")}

    def keys_below(self, path: PathLike) -> dict[str, int]:
        """Returns the sizes of all objects below a directory by key, with markers that earlier releases wrote."""
        pages = list(self._client(path).list(directory_key(path) or None, chunk_size=_PAGE))
        sizes = {entry["path"]: entry["size"] for page in pages for entry in page}
        self._count_pages(len(sizes))
        if 0 not in sizes.values():
            return sizes
        keys = [
            key.decode() for key in self._raw(path).list(_keys_from(directory_key(path))).result(timeout=REQUEST_LIMIT)
        ]
        return {key: sizes.get(key, 0) for key in keys}

    def file(self, path: PathLike) -> tuple[int, int] | None:
        """Returns size and time of change of a file, or None if there is no such file."""
        key = split(path)[1]
        if not key:
            return None
        client = self._client(path)
        self._counter.add(requests=1)
        try:
            head = client.head(key)
        except FileNotFoundError:
            return None
        return head["size"], int(head["last_modified"].timestamp())

    def is_directory(self, path: PathLike) -> bool:
        bucket, key = split(path)
        return self.has_children(path) if key else self.bucket_exists(bucket)

    def bucket_exists(self, bucket: str) -> bool:
        try:
            self.has_children(f"s3://{bucket}")
        except Exception as error:
            if is_missing_bucket(error):
                return False
            raise
        return True

    def has_children(self, path: PathLike) -> bool:
        pages = self._client(path).list(directory_key(path) or None, chunk_size=1)
        self._counter.add(requests=1)
        return next(iter(pages), None) is not None

    def write(self, path: PathLike, content: bytes) -> None:
        client = self._client(path)
        parts = -(-len(content) // WHOLE_FILE)
        self._counter.add(requests=1 if parts <= 1 else parts + 2)  # a multipart upload is begun and completed
        client.put(split(path)[1], content, chunk_size=WHOLE_FILE)

    def copy(self, path: PathLike, target: PathLike, size: int) -> None:
        """Copies a file of `size` bytes: in the store, or through this process if the store can't."""
        self._counter.add(requests=1)
        if split(path)[0] == split(target)[0] and size <= _LARGEST_COPY:
            self._client(path).copy(split(path)[1], split(target)[1])
            return
        upload = open_upload(self._client(target), split(target)[1], max(WHOLE_FILE, size // _MOST_PARTS + 1))
        for chunk in self._client(path).get(split(path)[1]).stream(min_chunk_size=WHOLE_FILE):
            upload.write(self._read(chunk))
        upload.close()  # not reached after an error: what was sent is then not an object
        self._counter.add(requests=1)

    def delete(self, path: PathLike, keys: list[str]) -> None:
        """Deletes objects of the bucket of `path` in one request."""
        if files := [key for key in keys if not key.endswith("/")]:
            self._delete_files(self._client(path), files)
        deletions = [self._raw(path).write(key, None) for key in keys if key.endswith("/")]
        for deletion in deletions:
            deletion.result(timeout=REQUEST_LIMIT)

    def _delete_files(self, client: Any, keys: list[str]) -> None:
        """Deletes objects, and repeats it after silence, which is harmless. obstore repeats no POST after silence."""
        for attempt in range(self._settings().retries + 1):
            self._counter.add(requests=1)
            try:
                client.delete(keys)
                return
            except Exception as error:
                if attempt == self._settings().retries or "HTTP error" not in str(error):
                    raise
            time.sleep(pause(attempt))

    def delete_file(self, path: PathLike) -> None:
        self.delete(path, [split(path)[1]])

    def _raw(self, path: PathLike) -> Any:
        """Returns the bucket of a path in TensorStore."""
        return ts.KvStore.open(self._kvstore(split(path)[0], "")).result(timeout=REQUEST_LIMIT)

    def _count_pages(self, keys: int) -> None:
        self._counter.add(requests=max(1, -(-keys // _PAGE)))


def _keys_from(prefix: str) -> Any:
    """Returns the range of all keys that begin with a prefix that ends with a slash, or of all keys."""
    return ts.KvStore.KeyRange(prefix, prefix[:-1] + "0" if prefix else "")  # "0" comes after "/"
