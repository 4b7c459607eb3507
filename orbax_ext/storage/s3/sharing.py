"""What a restore needs to know about the files of a checkpoint, asked of the store once and not by every process.

A complete checkpoint does not change, and only such a one is restored. So a directory is listed once and a small file
is fetched once, by whichever process needs it first; the others get the answer over JAX's coordination service. Every
question about what exists is answered from the listing of its parent directory.
"""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import json
import threading
import zlib
from collections.abc import Callable
from typing import Any, Protocol

from orbax_ext.storage.s3.errors import DeniedError, MissingBucketError, StoreError

_KINDS = {kind.__name__: kind for kind in (FileNotFoundError, DeniedError, MissingBucketError, StoreError)}


@dataclasses.dataclass(frozen=True)
class Listing:
    """What is in a directory: its files with (size, time of change), its directories, and whether it exists at all."""

    files: dict[str, tuple[int, int]]
    directories: tuple[str, ...]
    exists: bool


class Store(Protocol):
    """What is asked of the store itself."""

    def list_directory(self, path: str) -> Listing: ...
    def fetch(self, path: str) -> bytes | None: ...


Once = Callable[[str, Callable[[], str]], str]  # does a named piece of work on one process and tells all the result


class Snapshot:
    """The files below `root`, a checkpoint's directory, as they are during one restore.

    Not those beside it: another step may be on its way there from a save in the background.
    """

    def __init__(self, root: str, store: Store, once: Once) -> None:
        self.root = root.rstrip("/")
        self._store = store
        self._once = once
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, str], concurrent.futures.Future[Any]] = {}

    def covers(self, path: str) -> bool:
        return f"{path.rstrip('/')}/".startswith(f"{self.root}/")

    def listing(self, path: str) -> Listing:
        found = self.ask("list", path, lambda: dataclasses.asdict(self._store.list_directory(path)))
        files = {name: (size, changed) for name, (size, changed) in found["files"].items()}
        return Listing(files, tuple(found["directories"]), found["exists"])

    def is_directory(self, path: str) -> bool:
        if path.rstrip("/") == self.root:
            return self.listing(self.root).exists
        parent, name = path.rstrip("/").rsplit("/", 1)
        return name in self.listing(parent).directories

    def file(self, path: str) -> tuple[int, int] | None:
        """Size and time of change of a file, or None if there is none."""
        if path.rstrip("/") == self.root:
            return None
        parent, name = path.rsplit("/", 1)
        return self.listing(parent).files.get(name)

    def content(self, path: str) -> bytes | None:
        """The content of a file, or None if it is too large to be shared."""
        if self.file(path) is None:
            raise FileNotFoundError(f"{path} does not exist.")
        packed = self.ask("read", path, lambda: _packed(self._store.fetch(path)))
        return None if packed is None else zlib.decompress(base64.b64decode(packed))

    def ask(self, what: str, path: str, question: Callable[[], Any]) -> Any:
        """The answer, which must survive JSON: from memory, from another process, or by asking the question."""
        with self._lock:
            mine = (what, path) not in self._answers
            answer = self._answers.setdefault((what, path), concurrent.futures.Future())
        if mine:
            try:
                answer.set_result(_opened(self._once(f"{what} {path}", lambda: _sealed(question))))
            except BaseException as error:
                answer.set_exception(error)
        return answer.result()


def _sealed(question: Callable[[], Any]) -> str:
    """The answer as text; an error too, because it is the same for all."""
    try:
        return json.dumps({"answer": question()})
    except tuple(_KINDS.values()) as error:
        kind = next(name for name, kind in _KINDS.items() if type(error) is kind or isinstance(error, kind))
        return json.dumps({"error": kind, "text": str(error)})


def _opened(text: str) -> Any:
    found = json.loads(text)
    if "error" in found:
        raise _KINDS[found["error"]](found["text"])
    return found["answer"]


def _packed(content: bytes | None) -> str | None:
    return None if content is None else base64.b64encode(zlib.compress(content)).decode()
