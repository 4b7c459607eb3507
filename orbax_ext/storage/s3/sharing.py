"""The files of a checkpoint during a restore: each question is asked once, by one process.

Only a complete checkpoint is restored, and that does not change. So the first process that needs a directory lists it,
the first that needs a small file fetches it, and the others get the answer over JAX's coordination service. Whether
something exists is answered from the listing of its parent directory.
"""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import json
import threading
import zlib
from collections.abc import Callable
from typing import Any

from orbax_ext.storage.s3.errors import DeniedError, MissingBucketError, StoreError
from orbax_ext.storage.s3.objects import Listing, ObjectStore

# FileNotFoundError is last because MissingBucketError is one.
_SHARED_ERRORS = {kind.__name__: kind for kind in (MissingBucketError, DeniedError, StoreError, FileNotFoundError)}


Once = Callable[[str, Callable[[], str]], str]  # does named work on one process and returns the result on all


class Snapshot:
    """The files below `root`, a checkpoint's directory, during one restore. A save may write other steps beside it."""

    def __init__(self, root: str, objects: ObjectStore, once: Once) -> None:
        self.root = root.rstrip("/")
        self._objects = objects
        self._once = once
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, str], concurrent.futures.Future[Any]] = {}

    def covers(self, path: str) -> bool:
        return f"{path.rstrip('/')}/".startswith(f"{self.root}/")

    def listing(self, path: str) -> Listing:
        data = self.ask("list", path, lambda: dataclasses.asdict(self._objects.list_directory(path)))
        files = {name: (size, changed) for name, (size, changed) in data["files"].items()}
        return Listing(files, tuple(data["directories"]), data["exists"])

    def is_directory(self, path: str) -> bool:
        if path.rstrip("/") == self.root:
            return self.listing(self.root).exists
        parent, name = path.rstrip("/").rsplit("/", 1)
        return name in self.listing(parent).directories

    def file(self, path: str) -> tuple[int, int] | None:
        """Returns size and time of change of a file, or None if there is no such file."""
        if path.rstrip("/") == self.root:
            return None
        parent, name = path.rsplit("/", 1)
        return self.listing(parent).files.get(name)

    def content(self, path: str) -> bytes | None:
        """Returns the content of a file, or None if it is too large to be shared."""
        if self.file(path) is None:
            raise FileNotFoundError(f"{path} does not exist.")
        packed = self.ask("read", path, lambda: _packed(self._objects.fetch(path)))
        return None if packed is None else zlib.decompress(base64.b64decode(packed))

    def ask(self, what: str, path: str, question: Callable[[], Any]) -> Any:
        """Returns the answer to a question: from memory, from another process, or by asking it.

        The answer must survive JSON. An error of the store is an answer too: all processes raise it.
        """
        with self._lock:
            first = (what, path) not in self._answers
            answer = self._answers.setdefault((what, path), concurrent.futures.Future())
        if first:
            try:
                answer.set_result(decode_answer(self._once(f"{what} {path}", lambda: encode_answer(question))))
            except BaseException as error:
                answer.set_exception(error)
        return answer.result()


def encode_answer(question: Callable[[], Any]) -> str:
    """Asks a question and returns the answer, or the store's error, as text."""
    try:
        return json.dumps({"answer": question()})
    except tuple(_SHARED_ERRORS.values()) as error:
        kind = next(name for name, kind in _SHARED_ERRORS.items() if isinstance(error, kind))
        return json.dumps({"error": kind, "text": str(error)})


def decode_answer(text: str) -> Any:
    """Returns the answer in a text, or raises the error in it."""
    data = json.loads(text)
    if "error" in data:
        raise _SHARED_ERRORS[data["error"]](data["text"])
    return data["answer"]


def _packed(content: bytes | None) -> str | None:
    return None if content is None else base64.b64encode(zlib.compress(content)).decode()
