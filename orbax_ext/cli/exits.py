"""How a command ends: exit codes, and the error that becomes one line."""

from __future__ import annotations

EXIT_OK = 0
EXIT_BAD_VERDICT = 1  # the command ran, and its answer is bad
EXIT_CANNOT_RUN = 2  # bad arguments, missing files
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader of the output, such as `head`, has ended


class UserError(Exception):
    """An error that the user can fix: printed as one line, without a traceback."""
