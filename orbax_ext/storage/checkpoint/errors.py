"""What looking at a path can raise. Both are `ValueError`s in one line, with what to do."""

from __future__ import annotations


class NotACheckpointError(ValueError):
    """There is no checkpoint at this path, or one that can't be understood."""


class UnfinishedError(ValueError):
    """The checkpoint was never committed: its save was interrupted, or is under way."""
