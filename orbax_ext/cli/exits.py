"""How a command ends: its exit code, and errors that the user can fix."""

from __future__ import annotations

EXIT_OK = 0
EXIT_BAD_VERDICT = 1  # the command ran, and its answer is bad
EXIT_CANNOT_RUN = 2  # bad arguments, missing files
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # the reader of the output has gone, as `head` does


class UserError(Exception):
    """Something that the user can fix: shown in one line, without a traceback."""
