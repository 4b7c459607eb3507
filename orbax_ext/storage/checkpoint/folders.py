"""Directories as plain data, with few listings, because on S3 each of them is a request."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from etils import epath

from orbax_ext.storage import s3


@dataclasses.dataclass(frozen=True)
class Folder:
    """The content of one directory."""

    path: epath.Path
    files: Mapping[str, int]  # name: bytes
    folders: tuple[str, ...]

    def text(self, name: str) -> str | None:
        """Returns the content of a file in it, or None if there is no such file."""
        return (self.path / name).read_text() if name in self.files else None


def list_folder(path: epath.Path) -> Folder:
    """Returns what is in a directory. Raises FileNotFoundError or NotADirectoryError."""
    text = os.fspath(path)
    if s3.is_s3(text):
        listing = s3.object_store().list_directory(text)
        if not listing.exists:
            raise FileNotFoundError(f"{text} does not exist.")
        sizes = {name: size for name, (size, _) in listing.files.items()}
        return Folder(path, sizes, tuple(sorted(listing.directories)))
    if "://" in text:
        children = list(path.iterdir())
        inner = {child.name for child in children if child.is_dir()}
        outer = {child.name: child.stat().length for child in children if child.name not in inner}
        return Folder(path, outer, tuple(sorted(inner)))
    with os.scandir(text) as scan:
        entries = list(scan)
    sizes = {entry.name: _size(entry) for entry in entries if not entry.is_dir()}
    return Folder(path, sizes, tuple(sorted(entry.name for entry in entries if entry.is_dir())))


def sizes_below(path: epath.Path) -> dict[str, int]:
    """Returns the sizes of all files below a directory, by their paths from there."""
    text = os.fspath(path)
    if s3.is_s3(text):
        return s3.object_store().sizes_below(text)
    if "://" in text:
        return {os.fspath(f.relative_to(path)): f.stat().length for f in path.rglob("*") if not f.is_dir()}
    files = [os.path.join(folder, name) for folder, _, names in os.walk(text) for name in names]
    return {os.path.relpath(file, text): _size(file) for file in files}


def files_below(path: epath.Path) -> list[str]:
    """Returns the files below a directory, by their paths from there, without a look at each of them."""
    text = os.fspath(path)
    if "://" in text:
        return [*sizes_below(path)]  # a listing there has the sizes
    return [os.path.relpath(os.path.join(folder, name), text) for folder, _, names in os.walk(text) for name in names]


def _size(file: str | os.PathLike[str]) -> int:
    return os.stat(file, follow_symlinks=os.path.exists(file)).st_size  # a link may lead nowhere
