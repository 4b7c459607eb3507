"""Metadata files on S3: an etils backend on s3fs, in which a directory is a zero-byte object with a trailing slash.

Every method is one request where one will do. What takes several is ordered so that a checkpoint's commit file is the
first thing to go and the last thing to come: at no moment does a part of a checkpoint look like a whole one.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

from etils.epath import backend, stat_utils

from orbax_ext.storage.s3 import client, errors, streams
from orbax_ext.storage.s3.errors import DeniedError, ExplainedError, MissingBucketError, StoreError
from orbax_ext.storage.s3.settings import Settings
from orbax_ext.storage.s3.sharing import Listing, Snapshot
from orbax_ext.storage.s3.usage import Counter

PREFIX = "s3://"
_COMMIT_FILE = "commit_success.txt"
_WHOLE = 8 << 20  # a file up to this size is fetched in one request
_PAGE = 1000  # keys that one request may delete


class S3Files(backend.Backend):
    """What etils asks of a file system, for paths that begin with s3://."""

    def __init__(self, settings: Settings, counter: Counter) -> None:
        self._settings = settings
        self._counter = counter
        self._lock = threading.Lock()
        self._fs: Any = None
        self.snapshots: list[Snapshot] = []  # of the restores that are under way

    def snapshot(self, path: backend.PathLike) -> Snapshot | None:
        """The snapshot that knows about this path, if it is being restored from."""
        return next((snapshot for snapshot in self.snapshots if snapshot.covers(os.fspath(path))), None)

    def open(self, path: backend.PathLike, mode: str) -> IO[Any]:
        raw: Any = self._open_to_read(path) if "r" in mode else self._open_to_write(path, append="a" in mode)
        return raw if "b" in mode else streams.Text(raw, encoding="utf-8")

    def _open_to_read(self, path: backend.PathLike) -> IO[Any]:
        with _explained(path):
            snapshot = self.snapshot(path)
            whole = snapshot.content(os.fspath(path)) if snapshot else self.fetch(os.fspath(path))
            if whole is not None:
                return io.BytesIO(whole)
            large = streams.LargeFile(functools.partial(self.read_range, path), self.stat(path).length)
            return io.BufferedReader(large, _WHOLE)

    def _open_to_write(self, path: backend.PathLike, append: bool) -> IO[Any]:
        def store(content: bytes) -> None:
            with _explained(path):
                self.fs.pipe_file("/".join(split(path)), content)

        before = b""
        if append and self.exists(path):
            with self._open_to_read(path) as old:
                before = old.read()
        return streams.Upload(store, before)

    def exists(self, path: backend.PathLike) -> bool:
        with _explained(path):
            if snapshot := self.snapshot(path):
                return snapshot.file(os.fspath(path)) is not None or snapshot.is_directory(os.fspath(path))
            return self._head(path) is not None or self._has_children(path)

    def isdir(self, path: backend.PathLike) -> bool:
        with _explained(path):
            if snapshot := self.snapshot(path):
                return snapshot.is_directory(os.fspath(path))
            bucket, key = split(path)
            return self._has_children(path) if key else self._head_bucket(bucket)

    def listdir(self, path: backend.PathLike) -> list[str]:
        with _explained(path):
            listing = self._listing(path)
            if not listing.exists:
                raise FileNotFoundError(f"{path} does not exist.")
            return sorted({*listing.files, *listing.directories})

    def glob(self, path: backend.PathLike) -> list[str]:
        fixed, *parts = _split_at_wildcard(os.fspath(path))
        found = [fixed]
        for part in parts:
            if not _is_pattern(part):
                found = [f"{base}/{part}" for base in found if self.exists(f"{base}/{part}")]
                continue
            found = [
                f"{base}/{name}"
                for base in found
                if self.isdir(base)
                for name in self.listdir(base)
                if fnmatch.fnmatchcase(name, part)
            ]
        return found

    def walk(
        self,
        top: backend.PathLike,
        *,
        top_down: bool = True,
        on_error: Callable[[OSError], object] | None = None,
    ) -> Iterator[tuple[Any, list[str], list[str]]]:
        try:
            with _explained(top):
                listing = self._listing(top)
        except OSError as error:
            if on_error is not None:
                on_error(error)
            return
        inner = list(listing.directories)
        here = (os.fspath(top), inner, list(listing.files))
        if top_down:
            yield here
        for name in inner:
            yield from self.walk(f"{os.fspath(top).rstrip('/')}/{name}", top_down=top_down, on_error=on_error)
        if not top_down:
            yield here

    def makedirs(self, path: backend.PathLike, *, exist_ok: bool = False, mode: int | None = None) -> None:
        self.mkdir(path, exist_ok=exist_ok, mode=mode)  # the parents of an object need not be made

    def mkdir(self, path: backend.PathLike, *, exist_ok: bool = False, mode: int | None = None) -> None:
        del mode  # S3 has no permission bits
        with _explained(path):
            bucket, key = split(path)
            if not key and not self._head_bucket(bucket):
                raise FileNotFoundError(f"NoSuchBucket: there is no bucket {bucket!r}")
            if not key or self.exists(path):
                if exist_ok and self.isdir(path):
                    return
                raise FileExistsError(f"{path} exists already.")
            self._call("put_object", path, Key=_as_directory(key), Body=b"")

    def rmtree(self, path: backend.PathLike) -> None:
        with _explained(path):
            keys = self._tree(path)
            if not keys:
                raise FileNotFoundError(f"{path} does not exist.")
            for batch in deletion_order(keys):
                self._delete(path, batch)

    def remove(self, path: backend.PathLike) -> None:
        with _explained(path):
            if self._head(path) is None:
                raise FileNotFoundError(f"{path} does not exist, or is a directory.")
            self._call("delete_object", path, Key=split(path)[1])

    def rename(self, path: backend.PathLike, dst: backend.PathLike) -> None:
        if self.exists(dst):
            raise FileExistsError(f"{dst} exists already. Cannot rename {path}.")
        self.replace(path, dst)

    def replace(self, path: backend.PathLike, dst: backend.PathLike) -> None:
        """Copies and deletes: S3 has no rename. The commit files are copied last, and deleted first."""
        _both_on_s3(path, dst)
        with _explained(path):
            source, target = split(path), split(dst)
            keys = [source[1]] if self._head(path) is not None else self._tree(path)
            if not keys:
                raise FileNotFoundError(f"{path} does not exist.")
            for batch in reversed(deletion_order(keys)):
                for key in batch:
                    moved = target[1] + key.removeprefix(source[1])
                    if key.endswith("/"):
                        self._call("put_object", dst, Key=moved, Body=b"")
                    else:
                        self.fs.cp_file(f"{source[0]}/{key}", f"{target[0]}/{moved}")
            for batch in deletion_order(keys):
                self._delete(path, batch)

    def copy(self, path: backend.PathLike, dst: backend.PathLike, overwrite: bool) -> None:
        _both_on_s3(path, dst)
        if not overwrite and self.exists(dst):
            raise FileExistsError(f"{dst} exists already. Cannot copy {path}.")
        with _explained(path):
            self.fs.cp_file("/".join(split(path)), "/".join(split(dst)))

    def stat(self, path: backend.PathLike) -> stat_utils.StatResult:
        with _explained(path):
            if snapshot := self.snapshot(path):
                found = snapshot.file(os.fspath(path))
            else:
                head = self._head(path)
                found = (head["ContentLength"], int(head["LastModified"].timestamp())) if head else None
            if found is None and not self.isdir(path):
                raise FileNotFoundError(f"{path} does not exist.")
        return stat_utils.StatResult(
            is_directory=found is None,
            length=found[0] if found else 0,
            mtime=found[1] if found else 0,
            owner=None,
            group=None,
            mode=None,
        )

    @property
    def fs(self) -> Any:
        """The s3fs file system, made when it is first needed."""
        with self._lock:
            if self._fs is None:
                self._fs = client.make(self._settings, self._counter)
            return self._fs

    def fetch(self, path: str) -> bytes | None:
        """The content of a file of ordinary size; None if it is better read bit by bit."""
        content = self.read_range(path, 0, _WHOLE)
        return content if len(content) < _WHOLE else None

    def read_range(self, path: backend.PathLike, start: int, end: int) -> bytes:
        """Some of a file's bytes, fewer than asked for at its end."""
        with _explained(path):
            content: bytes = self.fs.read_range(*split(path), start, end)
            self._counter.add_bytes(len(content))
            return content

    def list_directory(self, path: str) -> Listing:
        """What is in a directory, as the store says now."""
        with _explained(path):
            prefix = _as_directory(split(path)[1])
            files, directories = self._list(path, "/")
            return Listing(
                {
                    name: (entry["Size"], int(entry["LastModified"].timestamp()))
                    for entry in files
                    if (name := entry["Key"].removeprefix(prefix))
                },
                tuple(key.removeprefix(prefix).rstrip("/") for key in directories),
                exists=bool(files or directories or not prefix),
            )

    def sizes_below(self, path: str) -> dict[str, int]:
        """The sizes of all files below a directory, by their paths from there."""
        with _explained(path):
            prefix = _as_directory(split(path)[1])
            entries = {entry["Key"].removeprefix(prefix): entry["Size"] for entry in self._list(path, "")[0]}
            return {name: size for name, size in entries.items() if name and not name.endswith("/")}

    def _listing(self, path: backend.PathLike) -> Listing:
        snapshot = self.snapshot(path)
        return snapshot.listing(os.fspath(path)) if snapshot else self.list_directory(os.fspath(path))

    def _head(self, path: backend.PathLike) -> Any:
        """What is known of the object, or None if there is no such object."""
        key = split(path)[1]
        if not key:
            return None
        try:
            return self._call("head_object", path, Key=key)
        except FileNotFoundError:
            return None

    def _head_bucket(self, bucket: str) -> bool:
        try:
            self.fs.call_s3("head_bucket", Bucket=bucket)
        except FileNotFoundError:
            return False
        return True

    def _has_children(self, path: backend.PathLike) -> bool:
        prefix = _as_directory(split(path)[1])
        return bool(self._call("list_objects_v2", path, Prefix=prefix, MaxKeys=1).get("Contents"))

    def _tree(self, path: backend.PathLike) -> list[str]:
        return [entry["Key"] for entry in self._list(path, "")[0]]

    def _list(self, path: backend.PathLike, delimiter: str) -> tuple[list[Any], list[str]]:
        """The objects below a directory and, with a delimiter, the directories in it."""
        more: dict[str, Any] = {"Delimiter": delimiter} if delimiter else {}
        files: list[Any] = []
        directories: list[str] = []
        while True:
            page = self._call("list_objects_v2", path, Prefix=_as_directory(split(path)[1]), **more)
            files += page.get("Contents", ())
            directories += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
            if not page.get("IsTruncated"):
                return files, directories
            more["ContinuationToken"] = page["NextContinuationToken"]

    def _delete(self, path: backend.PathLike, keys: list[str]) -> None:
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        answer = self._call("delete_objects", path, Delete=wanted)
        for error in answer.get("Errors", ()):
            raise OSError(f"{error.get('Code')}: {PREFIX}{split(path)[0]}/{error.get('Key')}: {error.get('Message')}")

    def _call(self, method: str, path: backend.PathLike, **arguments: Any) -> Any:
        return self.fs.call_s3(method, Bucket=split(path)[0], **arguments)


def split(path: backend.PathLike) -> tuple[str, str]:
    """The bucket and the key of s3://bucket/key."""
    text = os.fspath(path)
    if not text.startswith(PREFIX):
        raise ValueError(f"Expected a path that begins with {PREFIX}, got {text!r}.")
    bucket, _, key = text.removeprefix(PREFIX).partition("/")
    if not bucket:
        raise ValueError(f"A path on S3 names a bucket, as in s3://bucket/prefix; got {text!r}.")
    return bucket, key.rstrip("/")


def deletion_order(keys: list[str]) -> list[list[str]]:
    """Batches of keys to delete one after the other: commit files first, the outermost before all others."""
    commits = sorted((key for key in keys if key.rsplit("/", 1)[-1] == _COMMIT_FILE), key=lambda key: key.count("/"))
    others = [key for key in keys if key.rsplit("/", 1)[-1] != _COMMIT_FILE]
    batches = [[key] for key in commits[:1]]
    for group in (commits[1:], others):
        batches += [group[start : start + _PAGE] for start in range(0, len(group), _PAGE)]
    return batches


@contextlib.contextmanager
def _explained(path: backend.PathLike) -> Iterator[None]:
    """Errors name bucket and key and what to do, and never a secret; missing files are left as they are."""
    try:
        yield
    except (FileExistsError, ImportError, ExplainedError):
        raise
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error) or "bucket does not exist" in str(error):
            raise MissingBucketError(errors.explain(os.fspath(path), f"NoSuchBucket: {error}")) from None
        raise FileNotFoundError(f"{os.fspath(path)} does not exist.") from None
    except Exception as error:
        text = f"{_code(error)}: {error}"
        kind = DeniedError if isinstance(error, PermissionError) else StoreError
        raise kind(errors.explain(os.fspath(path), text)) from None


def _code(error: Exception) -> str:
    """The store's own word for what went wrong; s3fs keeps it in the cause."""
    answer = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    return str(answer.get("Error", {}).get("Code") or type(error).__name__)


def _both_on_s3(path: backend.PathLike, dst: backend.PathLike) -> None:
    for each in (path, dst):
        if not os.fspath(each).startswith(PREFIX):
            raise ValueError(f"Moving and copying works within S3 only; got {os.fspath(path)} and {os.fspath(dst)}.")


def _as_directory(key: str) -> str:
    return f"{key}/" if key else ""


def _is_pattern(part: str) -> bool:
    return any(mark in part for mark in "*?[")


def _split_at_wildcard(path: str) -> list[str]:
    """The part without wildcards, then the components from the first wildcard on."""
    parts = path.removeprefix(PREFIX).split("/")
    first = next((index for index, part in enumerate(parts) if _is_pattern(part)), len(parts))
    return [PREFIX + "/".join(parts[:first]), *parts[first:]]
