"""A list that process 0 makes for all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from orbax_ext import errors
from orbax_ext.meeting.session import Limits, open_session
from orbax_ext.meeting.threads import within
from orbax_ext.meeting.wire import Contribution, failure_to_json, failures_from_json

_PART = 2000  # numbers of a contribution to a meeting, which holds 65,536 characters
# Of the time after which the others give up process 0: it reports that storage is silent before that.
_SHARE = 0.9


def from_process_0(list_numbers: Callable[[], Sequence[int]], limits: Limits, subject: str = "steps") -> list[int]:
    """Returns what `list_numbers` returns on process 0; the other processes do not call it.

    Raises on all processes: `RestoreFailedError` if it fails there or does not end, `RestoreTimeoutError` if processes
    do not arrive.
    """
    numbers: list[int] = []
    mine: Contribution = {}
    if jax.process_index() == 0:
        try:
            listed = within(_SHARE * limits.silence, f"list {subject}", list_numbers)
            numbers = [int(number) for number in listed]
            mine = {"count": len(numbers), "numbers": numbers[:_PART]}
        except Exception as error:
            mine = failure_to_json(error)
    with open_session(subject, limits) as session:
        arrivals = session.arrive(mine)
        if failed := failures_from_json(arrivals, session.hosts, f"list {subject}"):
            raise errors.restore_failed(failed)
        received = list(arrivals[0]["numbers"])
        while len(received) < arrivals[0]["count"]:
            part = numbers[len(received) : len(received) + _PART]
            received += session.meet(f"list {subject}", {"numbers": part})[0]["numbers"]
    return received
