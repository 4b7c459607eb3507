"""How long a meeting takes, and how many messages, with many real clients of JAX's coordination service.

No devices: a few operating-system processes with a thread for each client, all on this machine, so that the service
and all its clients share its processors. Progress is published meanwhile, as in a restore.

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
from tools import docs, releases

_CLIENTS = (16, 64, 256, 1000)
_WORKERS = 8
_LIMIT = 600  # seconds that one size may take


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
    parser.add_argument("--clients", type=int, nargs="+", default=_CLIENTS, help="how many, one after the other")
    parser.add_argument("--meetings", type=int, default=10, help="meetings of a session (10)")
    parser.add_argument("--write", action="store_true", help="write the table into BUILD.md")
    parser.add_argument("--worker", nargs=3, metavar=("ADDRESS", "FIRST", "LAST"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        address, first, last = args.worker
        print(json.dumps(_work(address, range(int(first), int(last)), args.clients[0], args.meetings)))
        sys.stdout.flush()
        os._exit(0)  # clients that go one by one would wait for each other
    rows = []
    for clients in args.clients:
        rows.append(_measure(clients, args.meetings))
        print(json.dumps(rows[-1]), flush=True)
    table = _table(rows)
    print(table)
    if args.write:
        docs.update(releases.ROOT / "BUILD.md", "meetings", table)
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
        found = [json.loads(worker.communicate(timeout=deadline - time.monotonic())[0]) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        del service  # its clients are gone without a word: a polite shutdown would wait for them
    results = [result for part in found for result in part]
    return {
        "clients": clients,
        "arrive": max(result["arrive"] for result in results),
        "meeting": statistics.median(second for result in results for second in result["meetings"]),
        "slowest": max(second for result in results for second in result["meetings"]),
        "leader": results[0]["messages"],
        "others": statistics.mean(result["messages"] for result in results[1:]),
        "most": max(result["messages"] for result in results[1:]),
    }


def _work(address: str, numbers: range, clients: int, meetings: int) -> list[dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    sys.setswitchinterval(0.5)  # hundreds of threads that ask for the interpreter every 5 ms would measure just that

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
                    session.meet("bench")  # with nothing to say, as after a read that went well
                    seconds.append(time.monotonic() - began)
            messages = (client.messages - before) / meetings
        results[number] = {"arrive": arrived, "meetings": seconds, "messages": messages}

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT)
    return [results[number] for number in numbers]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| clients | arrive, s | meeting, s (median) | slowest, s | messages per process (mean, most) | of process 0 |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['clients']} | {row['arrive']:.2f} | {row['meeting']:.3f} | {row['slowest']:.3f} | "
            f"{row['others']:.1f}, {row['most']:.1f} | {row['leader']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
