"""Paths on S3 as buckets and keys. Pure."""

from __future__ import annotations

import math
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
    """Returns batches of keys to delete one after the other: commit files first, outer ones before those inside.

    A store deletes the keys of a batch in any order, so commit files of different depths are in different batches.
    """
    groups: dict[float, list[str]] = {}  # by depth; all that are not commit files are below them
    for key in keys:
        depth = key.count("/") if posixpath.basename(key) == COMMIT_FILE else math.inf
        groups.setdefault(depth, []).append(key)
    batches: list[list[str]] = []
    for _, group in sorted(groups.items()):
        batches += [group[start : start + _MOST_DELETED] for start in range(0, len(group), _MOST_DELETED)]
    return batches
