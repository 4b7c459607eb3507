"""Paths on S3 as buckets and keys. Pure."""

from __future__ import annotations

import os
import posixpath

from orbax_ext.storage.filenames import COMMIT_FILE

PREFIX = "s3://"
_MOST_DELETED = 1000  # keys that one request may delete

PathLike = str | os.PathLike[str]


def is_s3(path: PathLike) -> bool:
    return os.fspath(path).startswith(PREFIX)


def split(path: PathLike) -> tuple[str, str]:
    """Returns the bucket and the key of s3://bucket/key."""
    text = os.fspath(path)
    if not is_s3(text):
        raise ValueError(f"Expected a path that begins with {PREFIX}, got {text!r}.")
    bucket, _, key = text.removeprefix(PREFIX).partition("/")
    if not bucket:
        raise ValueError(f"A path on S3 names a bucket, as in s3://bucket/prefix; got {text!r}.")
    return bucket, key.rstrip("/")


def normalized(path: PathLike) -> str:
    """Returns the path without slashes at its end."""
    return os.fspath(path).rstrip("/")


def directory_key(path: PathLike) -> str:
    """Returns the common prefix of the keys in a directory."""
    key = split(path)[1]
    return f"{key}/" if key else ""


def is_pattern(part: str) -> bool:
    return any(mark in part for mark in "*?[")


def split_at_wildcard(path: str) -> list[str]:
    """Returns the part without wildcards, then the components from the first wildcard on."""
    parts = path.removeprefix(PREFIX).split("/")
    first = next((index for index, part in enumerate(parts) if is_pattern(part)), len(parts))
    return [PREFIX + "/".join(parts[:first]), *parts[first:]]


def deletion_order(keys: list[str]) -> list[list[str]]:
    """Returns batches of keys to delete one after the other: commit files first, the outermost before all others."""
    commits = sorted((key for key in keys if posixpath.basename(key) == COMMIT_FILE), key=lambda key: key.count("/"))
    others = [key for key in keys if posixpath.basename(key) != COMMIT_FILE]
    batches = [[key] for key in commits[:1]]
    for group in (commits[1:], others):
        batches += [group[start : start + _MOST_DELETED] for start in range(0, len(group), _MOST_DELETED)]
    return batches
