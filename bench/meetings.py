"""Measures how long a meeting takes, and how many messages it needs, with many clients of the coordination service.

There are no devices: a few operating-system processes run a thread for each client, all on this machine, so that the
service and its clients share the processors. Progress is published at the same time, as in a restore.

Then it holds meetings beside exchanges that take longer than a meeting: for each group a meeting and a sleep. As in a
restore, all meet for a group when the exchange of the group before it has begun; for comparison, when it has ended.

    python -m bench.meetings --clients 16 64 [--write]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from orbax_ext.meeting.session import Limits, Session
from orbax_ext.upstream.runtime import join_coordination_service, start_coordination_service
from tools import markdown, releases

PAGE = markdown.Page(
    "bench/results/meetings.md",
    "Meetings, measured",
    f"""Ten meetings of a session with progress reports, by real clients of JAX's coordination service without devices:
    a thread for each client in eight processes, on one machine with {os.cpu_count()} cores that the service and all
    clients share, so that seconds grow with their number. A message is one call to the service. Then eight groups whose
    exchange, a sleep, takes three times as long as the slowest meeting of the client in the middle. The last columns
    are the seconds that meetings add for each group, on the client where they add most: if all meet while the group
    before travels, as in a restore, and if they meet when it has arrived.""",
    "make bench-meetings",
)
_CLIENTS = (16, 64, 256, 1000)
_WORKERS = 8
_LIMIT = 600  # seconds that one size may take
_GROUPS = 8
_LONGER = 3  # than a meeting: an exchange
_SHORTEST = 0.2  # seconds of an exchange


class Counting:
    """A client that counts the messages it sends."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.messages = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.messages += 1
            return function(*args, **kwargs)

        return call


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.meetings", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=_CLIENTS, help="numbers of clients")
    parser.add_argument("--meetings", type=int, default=10, help="meetings per session (10)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.path}")
    parser.add_argument("--worker", nargs=3, metavar=("ADDRESS", "FIRST", "LAST"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        address, first, last = args.worker
        print(json.dumps(_work(address, range(int(first), int(last)), args.clients[0], args.meetings)))
        sys.stdout.flush()
        os._exit(0)  # an orderly exit would make the clients wait for each other
    rows = []
    for clients in args.clients:
        rows.append(_measure(clients, args.meetings))
        print(json.dumps(rows[-1]), flush=True)
    table = _table(rows)
    print(table)
    if args.write:
        PAGE.write(table)
    return 0


def _measure(clients: int, meetings: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    service = start_coordination_service(address, clients)
    bounds = [clients * number // _WORKERS for number in range(_WORKERS + 1)]
    command = [sys.executable, "-m", "bench.meetings", "--clients", str(clients), "--meetings", str(meetings)]
    workers = [
        subprocess.Popen(
            [*command, "--worker", address, str(first), str(last)], cwd=releases.ROOT, stdout=subprocess.PIPE, text=True
        )
        for first, last in itertools.pairwise(bounds)
    ]
    deadline = time.monotonic() + _LIMIT
    try:
        by_worker = [json.loads(worker.communicate(timeout=deadline - time.monotonic())[0]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        del service  # its clients did not sign off: an orderly shutdown would wait for them
    results = [result for part in by_worker for result in part]
    return {
        "clients": clients,
        "arrive": max(result["arrive"] for result in results),
        "meeting": statistics.median(second for result in results for second in result["meetings"]),
        "slowest": max(second for result in results for second in result["meetings"]),
        "leader": results[0]["messages"],
        "others": statistics.mean(result["messages"] for result in results[1:]),
        "most": max(result["messages"] for result in results[1:]),
        "exchange": results[0]["exchange"],
        "added": max(result["added"] for result in results),
        "added_between": max(result["added_between"] for result in results),
    }


def _work(address: str, numbers: range, clients: int, meetings: int) -> list[dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    sys.setswitchinterval(0.5)  # with the default of 5 ms, hundreds of threads would measure thread switches

    def run(number: int) -> None:
        client = Counting(join_coordination_service(address, number, _LIMIT))
        started = time.monotonic()
        session = Session(client, number, clients, "bench", Limits(120), time.monotonic_ns)
        with session:
            session.arrive({"number": number})
            arrived, before, seconds = time.monotonic() - started, client.messages, []
            with session.reporting():
                for _ in range(meetings):
                    began = time.monotonic()
                    session.meet("bench")  # without a failure to report, as after a good read
                    seconds.append(time.monotonic() - began)
            messages = (client.messages - before) / meetings
            told = session.meet("bench", {"slowest": max(seconds)})  # all have to agree on the length of an exchange
            exchange = max(_SHORTEST, _LONGER * statistics.median(one["slowest"] for one in told.values()))
            with session.reporting():
                added = _added_by_meetings(session, exchange, beside=True)
                added_between = _added_by_meetings(session, exchange, beside=False)
        results[number] = {
            "arrive": arrived,
            "meetings": seconds,
            "messages": messages,
            "exchange": exchange,
            "added": added,
            "added_between": added_between,
        }

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT)
    return [results[number] for number in numbers]


def _added_by_meetings(session: Session, exchange: float, *, beside: bool) -> float:
    """Returns the seconds for each group that are not exchanges, from the first exchange to the end of the last one.

    With `beside` all meet for a group as soon as the exchange of the group before it has begun.
    """
    session.meet("bench")
    first = begun = time.monotonic()
    ended = begun + exchange
    for _ in range(1, _GROUPS):
        time.sleep(max(0.0, (begun if beside else ended) - time.monotonic()))
        session.meet("bench")
        begun = max(ended, time.monotonic())
        ended = begun + exchange
    time.sleep(max(0.0, ended - time.monotonic()))
    session.meet("bench")
    return (ended - first - _GROUPS * exchange) / (_GROUPS - 1)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        *("clients", "arrive, s", "meeting, s (median)", "slowest, s"),
        *("messages per process (mean, most)", "of process 0"),
        *("an exchange, s", "added per group, s", "if between exchanges, s"),
    )
    cells = [
        (
            row["clients"],
            f"{row['arrive']:.2f}",
            f"{row['meeting']:.3f}",
            f"{row['slowest']:.3f}",
            f"{row['others']:.1f}, {row['most']:.1f}",
            f"{row['leader']:.1f}",
            f"{row['exchange']:.2f}",
            f"{row['added']:.3f}",
            f"{row['added_between']:.3f}",
        )
        for row in rows
    ]
    return markdown.table(head, cells)


if __name__ == "__main__":
    sys.exit(main())
