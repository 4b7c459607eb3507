"""Metadata files on S3, as an etils backend: what `epath.Path("s3://...")` does.

A method sends one request where possible. Where it needs several, it writes the commit file of a checkpoint last and
deletes it first, so that a part of a checkpoint never looks like a whole one.

A directory exists if a key below it does. `mkdir` writes nothing: a directory without files exists for the process that
made it. Earlier releases wrote a marker for each directory, an object whose key ends with a slash, which stores on top
of file systems refuse; markers that are there are still understood.
"""

from __future__ import annotations

import errno
import fnmatch
import functools
import io
import os
from collections.abc import Callable, Iterator
from typing import IO, Any

from etils.epath import backend, stat_utils

from orbax_ext.storage.s3 import objects as objects_lib
from orbax_ext.storage.s3 import streams
from orbax_ext.storage.s3.directories import EmptyDirectories
from orbax_ext.storage.s3.errors import explained
from orbax_ext.storage.s3.objects import Listing, ObjectStore
from orbax_ext.storage.s3.paths import (
    PREFIX,
    PathLike,
    deletion_order,
    directory_key,
    is_pattern,
    is_s3,
    normalized,
    split,
    split_at_wildcard,
)
from orbax_ext.storage.s3.sharing import Snapshot


class S3Files(backend.Backend):
    """The file system of paths that begin with s3://."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects
        self._empty = EmptyDirectories()
        self.snapshots: list[Snapshot] = []  # of the restores that are under way

    def snapshot(self, path: PathLike) -> Snapshot | None:
        """Returns the snapshot that covers this path, if a restore from it is under way."""
        return next((snapshot for snapshot in self.snapshots if snapshot.covers(os.fspath(path))), None)

    def open(self, path: PathLike, mode: str) -> IO[Any]:
        raw: Any = self._open_to_read(path) if "r" in mode else self._open_to_write(path, append="a" in mode)
        return raw if "b" in mode else streams.TextFile(raw, encoding="utf-8")

    def _open_to_read(self, path: PathLike) -> IO[Any]:
        with explained(path):
            snapshot = self.snapshot(path)
            content = snapshot.content(os.fspath(path)) if snapshot else self.objects.fetch(path)
            if content is not None:
                return io.BytesIO(content)
            large = streams.LargeFile(functools.partial(self.objects.read_range, path), self.stat(path).length)
            return io.BufferedReader(large, objects_lib.WHOLE_FILE)

    def _open_to_write(self, path: PathLike, append: bool) -> IO[Any]:
        def store(content: bytes) -> None:
            with explained(path):
                self.objects.write(path, content)
                self._empty.filled(path)

        return streams.Upload(store, self._open_to_read(path).read() if append and self.exists(path) else b"")

    def exists(self, path: PathLike) -> bool:
        with explained(path):
            if snapshot := self.snapshot(path):
                return snapshot.file(os.fspath(path)) is not None or snapshot.is_directory(os.fspath(path))
            return self.objects.file(path) is not None or self._is_directory(path)

    def isdir(self, path: PathLike) -> bool:
        with explained(path):
            if snapshot := self.snapshot(path):
                return snapshot.is_directory(os.fspath(path))
            return self._is_directory(path)

    def _is_directory(self, path: PathLike) -> bool:
        if not self.objects.is_directory(path):
            return path in self._empty
        self._empty.filled(f"{normalized(path)}/any")
        return True

    def listdir(self, path: PathLike) -> list[str]:
        with explained(path):
            listing = self._listing(path)
            if not listing.exists:
                raise FileNotFoundError(f"{path} does not exist.")
            return sorted({*listing.files, *listing.directories})

    def glob(self, path: PathLike) -> list[str]:
        fixed, *parts = split_at_wildcard(os.fspath(path))
        matches = [fixed]
        for part in parts:
            if is_pattern(part):
                children = [(base, name) for base in matches if self.isdir(base) for name in self.listdir(base)]
                matches = [f"{base}/{name}" for base, name in children if fnmatch.fnmatchcase(name, part)]
            else:
                matches = [f"{base}/{part}" for base in matches if self.exists(f"{base}/{part}")]
        return matches

    def walk(
        self, top: PathLike, *, top_down: bool = True, on_error: Callable[[OSError], object] | None = None
    ) -> Iterator[tuple[Any, list[str], list[str]]]:
        try:
            with explained(top):
                listing = self._listing(top)
        except OSError as error:
            if on_error is not None:
                on_error(error)
            return
        directories = list(listing.directories)  # the caller may remove those that it does not want to walk
        here = (os.fspath(top), directories, list(listing.files))
        if top_down:
            yield here
        for name in directories:
            yield from self.walk(f"{os.fspath(top).rstrip('/')}/{name}", top_down=top_down, on_error=on_error)
        if not top_down:
            yield here

    def makedirs(self, path: PathLike, *, exist_ok: bool = False, mode: int | None = None) -> None:
        self.mkdir(path, exist_ok=exist_ok, mode=mode)  # an object needs no parents

    def mkdir(self, path: PathLike, *, exist_ok: bool = False, mode: int | None = None) -> None:
        del mode  # S3 has no permission bits
        with explained(path):
            bucket, key = split(path)
            if not key and not self.objects.bucket_exists(bucket):
                raise FileNotFoundError(f"NoSuchBucket: there is no bucket {bucket!r}")
            if not key or self.exists(path):
                if exist_ok and self.isdir(path):
                    return
                raise FileExistsError(f"{path} exists already.")
            self._empty.add(path)

    def rmtree(self, path: PathLike) -> None:
        with explained(path):
            keys = list(self.objects.keys_below(path))
            if not keys and path not in self._empty:
                raise FileNotFoundError(f"{path} does not exist.")
            for batch in deletion_order(keys):
                self.objects.delete(path, batch)
            self._empty.removed(path)

    def remove(self, path: PathLike) -> None:
        with explained(path):
            if self.objects.file(path) is None:
                raise FileNotFoundError(f"{path} does not exist, or is a directory.")
            self.objects.delete_file(path)

    def rename(self, path: PathLike, dst: PathLike) -> None:
        if self.exists(dst):
            raise FileExistsError(f"{dst} exists already. Cannot rename {path}.")
        self.replace(path, dst)

    def replace(self, path: PathLike, dst: PathLike) -> None:
        """Copies and deletes, because S3 has no rename. Commit files are copied last and deleted first."""
        _check_both_on_s3(path, dst)
        _check_not_inside(path, dst)
        with explained(path):
            bucket, source = split(path)
            file = self.objects.file(path)
            sizes = {source: file[0]} if file is not None else self.objects.keys_below(path)
            if not sizes and path not in self._empty:
                raise FileNotFoundError(f"{path} does not exist.")
            if normalized(path) == normalized(dst):
                return  # else the copies would be deleted as sources
            if file is not None:
                targets = {source: normalized(dst)}
            else:
                inside = directory_key(path)
                names = {key: key.removeprefix(inside) for key in sizes if not key.endswith("/")}  # without markers
                targets = {key: f"{normalized(dst)}/{name}" for key, name in names.items()}
            for batch in reversed(deletion_order(list(targets))):
                for key in batch:
                    self.objects.copy(f"{PREFIX}{bucket}/{key}", targets[key], sizes[key])
            for batch in deletion_order(list(sizes)):
                self.objects.delete(path, batch)
            self._empty.moved(path, dst)
            for target in targets.values():
                self._empty.filled(target)

    def copy(self, path: PathLike, dst: PathLike, overwrite: bool) -> None:
        _check_both_on_s3(path, dst)
        if not overwrite and self.exists(dst):
            raise FileExistsError(f"{dst} exists already. Cannot copy {path}.")
        with explained(path):
            self.objects.copy(path, dst, self.stat(path).length)
            self._empty.filled(dst)

    def stat(self, path: PathLike) -> stat_utils.StatResult:
        with explained(path):
            snapshot = self.snapshot(path)
            file = snapshot.file(os.fspath(path)) if snapshot else self.objects.file(path)
            if file is None and not self.isdir(path):
                raise FileNotFoundError(f"{path} does not exist.")
        length, changed = file or (0, 0)
        return stat_utils.StatResult(
            is_directory=file is None, length=length, mtime=changed, owner=None, group=None, mode=None
        )

    def _listing(self, path: PathLike) -> Listing:
        if snapshot := self.snapshot(path):
            return snapshot.listing(os.fspath(path))
        listing = self.objects.list_directory(path)
        directories = sorted({*listing.directories, *self._empty.names_in(path)})
        return Listing(listing.files, tuple(directories), listing.exists or path in self._empty)


def _check_both_on_s3(path: PathLike, dst: PathLike) -> None:
    if not (is_s3(path) and is_s3(dst)):
        raise ValueError(f"Moving and copying works within S3 only; got {os.fspath(path)} and {os.fspath(dst)}.")


def _check_not_inside(path: PathLike, dst: PathLike) -> None:
    """Raises OSError, as a disk does, if one path is inside the other: some copies would be deleted as sources."""
    source, target = f"{normalized(path)}/", f"{normalized(dst)}/"
    if source != target and (source.startswith(target) or target.startswith(source)):
        raise OSError(errno.EINVAL, f"can't be moved to {target[:-1]}: one is inside the other", source[:-1])
