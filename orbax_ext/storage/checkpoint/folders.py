"""Directories as plain data: one listing where one will do, because on S3 each costs a request."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from etils import epath

from orbax_ext.storage import s3


@dataclasses.dataclass(frozen=True)
class Folder:
    """What is in one directory."""

    path: epath.Path
    files: Mapping[str, int]  # name: bytes
    folders: tuple[str, ...]

    def text(self, name: str) -> str | None:
        """The content of a file in it, or None if there is no such file."""
        return (self.path / name).read_text() if name in self.files else None


def look(path: epath.Path) -> Folder:
    """Raises FileNotFoundError or NotADirectoryError."""
    text = os.fspath(path)
    if s3.is_s3(text):
        files, folders = s3.list_folder(text)
        return Folder(path, files, tuple(sorted(folders)))
    if "://" in text:
        children = list(path.iterdir())
        inner = {child.name for child in children if child.is_dir()}
        outer = {child.name: child.stat().length for child in children if child.name not in inner}
        return Folder(path, outer, tuple(sorted(inner)))
    sizes: dict[str, int] = {}
    inside: list[str] = []
    with os.scandir(text) as entries:
        for entry in entries:
            if entry.is_dir():
                inside.append(entry.name)
            else:
                sizes[entry.name] = entry.stat(follow_symlinks=entry.is_file()).st_size  # a link may lead nowhere
    return Folder(path, sizes, tuple(sorted(inside)))


def sizes_below(path: epath.Path) -> dict[str, int]:
    """Bytes of every file below a directory, by its path from there."""
    text = os.fspath(path)
    if s3.is_s3(text):
        return s3.sizes_below(text)
    if "://" in text:
        return {os.fspath(f.relative_to(path)): f.stat().length for f in path.rglob("*") if not f.is_dir()}
    sizes = {}
    for folder, _, names in os.walk(text):
        for name in names:
            found = os.path.join(folder, name)
            sizes[os.path.relpath(found, text)] = os.stat(found, follow_symlinks=os.path.exists(found)).st_size
    return sizes
