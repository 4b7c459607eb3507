"""Paths of checkpoints as users give them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from orbax_ext import cli, inspection, storage

HELP = "a CheckpointManager's directory, a step, or an item in it; a local path or s3://bucket/..."


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """While a command looks at a path: s3:// works, and what is wrong with the path is told in one line."""
    enabled = storage.is_s3(path) and not storage.s3_enabled()
    if enabled:
        storage.enable_s3()
    try:
        yield
    except inspection.UnfinishedError as error:
        raise cli.UserError(f"{error}. Give a committed step; `orbax-ext inspect` on the parent lists them.") from None
    except (inspection.NotACheckpointError, ImportError) as error:
        raise cli.UserError(str(error)) from None
    except OSError as error:
        raise cli.UserError(f"{path} can't be read: {error}") from None
    finally:
        if enabled:
            storage.disable_s3()
