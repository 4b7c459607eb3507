"""A process that fails before the first meeting comes to it all the same, to say so: the others wait there."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import jax

from orbax_ext import errors
from orbax_ext.meeting.session import Limits, open_session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.meeting.wire import failures, to_payload
from orbax_ext.options import Options


@contextlib.asynccontextmanager
async def failing_together(options: Options) -> AsyncIterator[None]:
    """Makes one process's failure that of all; one that all have alike is raised as it is, a `ValueError` say."""
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1 or options.strategy == "direct":
            raise
        limits = Limits(options.stall_timeout, options.timeout)
        with open_session("restore", limits) as session:
            try:
                arrivals = await in_thread(session.arrive, {"failure": to_payload(error)})
            except errors.RestoreError:
                raise error from None  # the others have troubles of their own
        if not _all_alike(arrivals):
            raise_failures(arrivals, session.hosts)
        raise


def raise_failures(arrivals: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> None:
    """Raises if a process has come to say that it failed."""
    told = {process: arrival["failure"] for process, arrival in arrivals.items() if "failure" in arrival}
    if told:
        raise errors.restore_failed(failures(told, hosts, "describe"))


def _all_alike(arrivals: Mapping[int, Mapping[str, Any]]) -> bool:
    return len({arrival.get("failure", {}).get("error") for arrival in arrivals.values()}) == 1
