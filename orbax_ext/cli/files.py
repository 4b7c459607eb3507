"""Files and checkpoints that commands read and write; one that can't be read or written is the user's error."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from orbax_ext.cli import exits

T = TypeVar("T")


def load(path: pathlib.Path, parse: Callable[[str], T]) -> T:
    """Returns what `parse` makes of a text file; raises `UserError` if the file can't be read or understood."""
    with _user_errors(path):
        return parse(path.read_text(encoding="utf-8"))


def write(path: pathlib.Path, text: str) -> None:
    with _user_errors(path):
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _user_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise exits.UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


@contextlib.contextmanager
def readable_checkpoint(path: str) -> Iterator[None]:
    """Enables s3:// while a command reads `path`; raises `UserError` if the path can't be read."""
    from orbax_ext.storage import checkpoint, s3  # they import JAX, which some commands with files do not need

    try:
        with s3.enabled_for(path):
            yield
    except checkpoint.UnfinishedError as error:
        remedy = "Give a committed step; `orbax-ext inspect` on the parent lists them."
        raise exits.UserError(f"{error}. {remedy}") from None
    except (checkpoint.NotACheckpointError, ImportError) as error:
        raise exits.UserError(str(error)) from None
    except OSError as error:
        raise exits.UserError(f"{path} can't be read: {error}") from None
