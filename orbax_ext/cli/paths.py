"""Paths of checkpoints that commands read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from orbax_ext.cli import exits
from orbax_ext.storage import checkpoint, s3


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Enables s3:// while a command reads `path`; raises `UserError` if the path can't be read."""
    enabled = s3.is_s3(path) and not s3.s3_enabled()
    if enabled:
        s3.enable_s3()
    try:
        yield
    except checkpoint.UnfinishedError as error:
        raise exits.UserError(
            f"{error}. Give a committed step; `orbax-ext inspect` on the parent lists them."
        ) from None
    except (checkpoint.NotACheckpointError, ImportError) as error:
        raise exits.UserError(str(error)) from None
    except OSError as error:
        raise exits.UserError(f"{path} can't be read: {error}") from None
    finally:
        if enabled:
            s3.disable_s3()
