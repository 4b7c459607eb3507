"""A process of a restore on a real coordination service, for test_conformance.py to stop or kill.

python -m tests.simulation.real_process ADDRESS NUMBER PROCESSES STALL SECONDS

Process 0 has the service. Prints "arrived" when all are there, then works for some seconds and meets; at the end prints
the type of its error and the processes that it names, as JSON, and stays until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import sys

from orbax_ext import errors
from orbax_ext.meeting.session import Session
from orbax_ext.meeting.terms import Limits
from orbax_ext.upstream.runtime import join_coordination_service, start_coordination_service


def main(address: str, number: int, processes: int, stall: float, seconds: float) -> None:
    service = start_coordination_service(address, processes) if number == 0 else None
    client = join_coordination_service(address, number, 60)
    error: Exception | None = None
    try:
        with Session(client, number, processes, "restore", Limits(stall)) as session:
            session.arrive({})
            print("arrived", flush=True)
            asyncio.run(session.together("work 1", asyncio.sleep(seconds)))
    except Exception as raised:
        error = raised
    print(json.dumps([kind_of(error), named(error)]), flush=True)
    sys.stdin.read()  # JAX would end the others with process 0
    del service  # not before: it ends with its last reference


def kind_of(error: BaseException | None) -> str:
    """Returns the type of an error. Errors of JAX's client are of different types, each a kind of RuntimeError."""
    gone = isinstance(error, RuntimeError) and not isinstance(error, errors.RestoreError)
    return "RuntimeError" if gone else type(error).__name__


def named(error: BaseException | None) -> list[int]:
    """Returns the processes that an error names."""
    if isinstance(error, errors.RestoreFailedError):
        return sorted(error.failures)
    return sorted(error.missing) if isinstance(error, errors.RestoreTimeoutError) else []


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(float, sys.argv[4:]))
