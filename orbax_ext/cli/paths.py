"""What several commands are given: paths of checkpoints, and specs of their leaves."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from orbax_ext.cli import exits
from orbax_ext.storage import checkpoint, s3

HELP = "a CheckpointManager's directory, a step, or an item in it; a local path or s3://bucket/..."


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """While a command looks at a path: s3:// works, and what is wrong with the path is told in one line."""
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


def add_spec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--spec",
        metavar="PATTERN=SPEC",
        action="append",
        default=[],
        help="the spec of leaves by name, such as '*.kernel=P(None,tp)'; the first of several that matches counts",
    )
