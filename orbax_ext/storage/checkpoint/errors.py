"""The errors of looking at a path. Both are `ValueError`s of one line, with what to do."""

from __future__ import annotations


class NotACheckpointError(ValueError):
    """There is no checkpoint at this path, or its metadata can't be understood."""


class UnfinishedError(ValueError):
    """The checkpoint was never committed: its save was interrupted, or is under way."""
