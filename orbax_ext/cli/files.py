"""Text files that commands read and write; a file that can't be read or written is the user's error."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

from orbax_ext.cli import exits


def read(path: pathlib.Path) -> str:
    with _named(path):
        return path.read_text(encoding="utf-8")


def write(path: pathlib.Path, text: str) -> None:
    with _named(path):
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise exits.UserError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise exits.UserError(f"{path}: {error}") from None
