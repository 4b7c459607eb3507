"""Empty directories. S3 has none, because a directory there is nothing but the beginning of keys. Pure."""

from __future__ import annotations

import threading

from orbax_ext.storage.s3.paths import PathLike, normalized


class EmptyDirectories:
    """The directories that this process made and in which nothing was found yet.

    Other processes do not see them. A directory that has held an object exists as long as an object is below it, so it
    is forgotten here: another process may delete it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: set[str] = set()

    def add(self, path: PathLike) -> None:
        with self._lock:
            self._paths.add(normalized(path))

    def __contains__(self, path: PathLike) -> bool:
        """Returns whether the directory, or one below it, was made."""
        return bool(self._below(path))

    def names_in(self, path: PathLike) -> set[str]:
        """Returns the names of the directories directly below `path`."""
        start = len(normalized(path)) + 1
        return {made[start:].partition("/")[0] for made in self._below(path) if len(made) > start}

    def filled(self, path: PathLike) -> None:
        """Forgets the directories that hold an object at `path`."""
        with self._lock:
            self._paths = {made for made in self._paths if not normalized(path).startswith(f"{made}/")}

    def removed(self, path: PathLike) -> None:
        """Forgets a directory and all below it."""
        self._replace(self._below(path), set())

    def moved(self, path: PathLike, target: PathLike) -> None:
        """Moves a directory and all below it."""
        below = self._below(path)
        self._replace(below, {normalized(target) + made.removeprefix(normalized(path)) for made in below})

    def _below(self, path: PathLike) -> set[str]:
        with self._lock:
            return {made for made in self._paths if f"{made}/".startswith(f"{normalized(path)}/")}

    def _replace(self, old: set[str], new: set[str]) -> None:
        with self._lock:
            self._paths = (self._paths - old) | new
