"""Meetings on real processes: outcomes, who is missing, drift, a silent service, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import pytest

from orbax_ext import lab
from orbax_ext.meeting.session import Limits, gather, open_session, tell_absent, withdraw_absent
from orbax_ext.upstream.runtime import coordination_client

STALL = 4.0
LIMITS = Limits(stall=STALL)


@pytest.fixture(scope="module")
def team(small_cluster: lab.Cluster) -> lab.Cluster:
    return small_cluster


def test_all_hear_what_each_brought(team: lab.Cluster) -> None:
    for arrivals, numbers in team.run(exchange):
        assert arrivals == {process: f"here is {process}" for process in range(4)}
        assert numbers == {process: process**2 for process in range(4)}


def test_one_process_error_is_raised_by_all_and_names_it(team: lab.Cluster) -> None:
    outcomes = team.outcomes(fail_on, 2)
    texts = {str(outcome.failure) for outcome in outcomes}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert text.startswith("RestoreFailedError: restore failed on 1 process:\n  process 2 (")
    assert "in phase 'work': OSError: disk gone" in text
    assert team.run(keys_left) == [[]] * 4


@pytest.fixture(scope="module")
def waits(team: lab.Cluster) -> dict[str, list[str]]:
    """What came of each of `WAITS` on each process: "" or an error. They mostly wait, and do so at the same time."""
    team.run(exchange)  # so that the hosts are known
    found = team.run(wait_all)
    return {name: [ended[name] for ended in found] for name in WAITS}


@pytest.mark.once
def test_a_process_that_does_not_come_is_named_by_all(waits: dict[str, list[str]]) -> None:
    *others, absent = waits["3 stays away"]
    assert absent == ""
    for text in others:
        assert text.startswith("RestoreTimeoutError")
        assert "process 3 (" in text
        assert "has not arrived at this restore" in text
        assert "process 1" not in text


@pytest.mark.once
def test_the_gathering_process_not_coming_is_named_by_all(waits: dict[str, list[str]]) -> None:
    absent, *others = waits["0 stays away"]
    assert absent == ""
    for text in others:
        assert text.startswith("RestoreTimeoutError")
        assert "missing:\n  process 0 (" in text
        assert text.count("process ") == 1


@pytest.mark.once
@pytest.mark.parametrize("slow", [0, 2])
def test_a_process_that_stops_advancing_is_named_with_phase_bytes_and_seconds(
    waits: dict[str, list[str]], slow: int
) -> None:
    for rank, text in enumerate(waits[f"{slow} stops advancing"]):
        if rank != slow:
            assert text.startswith("RestoreTimeoutError")
            assert f"process {slow} (" in text
            assert "last in phase 'work', 500 bytes done, " in text


@pytest.mark.once
@pytest.mark.parametrize("slow", [0, 2])
def test_a_process_that_is_slow_but_advances_is_waited_for(waits: dict[str, list[str]], slow: int) -> None:
    assert waits[f"{slow} is slow"] == [""] * 4


@pytest.mark.once
def test_a_limit_in_all_ends_even_what_advances(waits: dict[str, list[str]]) -> None:
    for text in waits["2 takes too long in all"]:
        assert text.startswith("RestoreTimeoutError")
        assert f", timeout={STALL:g}" in text


@pytest.mark.once
@pytest.mark.parametrize("eager", [0, 3])
def test_a_process_that_comes_more_often_than_the_others_meets_them_next_time(
    waits: dict[str, list[str]], eager: int
) -> None:
    for rank, text in enumerate(waits[f"{eager} comes once more"]):
        assert text.startswith("RestoreTimeoutError" if rank == eager else "")
        assert bool(text) == (rank == eager)


@pytest.mark.once
def test_waits_that_were_given_up_leave_nothing_behind(team: lab.Cluster, waits: dict[str, list[str]]) -> None:
    del waits
    team.run(exchange)
    assert team.run(keys_left) == [[]] * 4


def test_an_interrupted_process_does_not_keep_the_others_waiting(team: lab.Cluster) -> None:
    for rank in (0, 1):
        outcomes = team.outcomes(interrupt, rank)
        assert "KeyboardInterrupt" in str(outcomes[rank])
        for outcome in outcomes:
            if outcome.rank != rank:
                assert f"process {rank} (" in str(outcome)
                assert "KeyboardInterrupt" in str(outcome)
        assert team.run(keys_left) == [[]] * 4


def test_an_absent_process_is_told_apart_from_a_late_one(team: lab.Cluster) -> None:
    outcomes = team.outcomes(be_absent, 1)
    assert outcomes[1].ok
    for outcome in (outcomes[0], *outcomes[2:]):
        assert "RestoreFailedError" in str(outcome)
        assert "process 1 (" in str(outcome)
        assert "FileNotFoundError: no such step" in str(outcome)
    assert team.run(keys_left) == [[]] * 4
    team.run(exchange)


def test_an_absence_that_was_not_withdrawn_ends_when_the_process_comes_again(team: lab.Cluster) -> None:
    team.run(forget_to_withdraw, 1)
    assert team.run(keys_left) == [[]] * 4


def test_what_is_too_long_for_a_meeting_is_refused_and_the_others_told(team: lab.Cluster) -> None:
    outcomes = team.outcomes(bring_too_much, 2)
    assert "ValueError: A message of" in str(outcomes[2])
    for outcome in outcomes:
        if outcome.rank != 2:
            assert "process 2 (" in str(outcome)
            assert "ValueError: A message of" in str(outcome)


def test_errors_of_any_length_and_any_characters_arrive(team: lab.Cluster) -> None:
    for outcome in team.outcomes(fail_at_length):
        assert "process 1 (" in str(outcome)
        assert "äöü" in str(outcome)


@pytest.mark.once
def test_a_thousand_sessions_leave_the_service_as_it_was(team: lab.Cluster) -> None:
    assert team.run(meet_often, 1000, timeout=300) == [[]] * 4


def test_secrets_of_one_process_do_not_reach_the_others(team: lab.Cluster) -> None:
    for outcome in team.outcomes(fail_with_secret):
        assert outcome.failure is not None
        assert "<MY_API_TOKEN>" in outcome.failure.message
        assert "hunter2" not in outcome.failure.message
        assert "hunter2" not in outcome.failure.traceback


@pytest.mark.once
def test_a_service_that_falls_silent_ends_the_wait(tmp_path: pathlib.Path) -> None:
    with lab.Cluster(3, 1) as trio:
        run = trio.submit(meet_after, 1.0, str(tmp_path))
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.05)
        trio.signal(0, signal.SIGSTOP)
        outcomes = run.outcomes(grace=5)  # those who live give up together; process 0 never does
    for outcome in outcomes[1:]:
        assert "RestoreTimeoutError" in str(outcome)
        assert "process 0 (" in str(outcome)
        assert "the coordination service, which runs there, does not answer" in str(outcome)


# Run on the processes.


def exchange(subject: str = "test") -> tuple[dict[int, Any], dict[int, Any]]:
    here = jax.process_index()
    with open_session(subject, LIMITS) as session:
        arrivals = session.arrive({"text": f"here is {here}"})
        numbers = session.meet("numbers", {"number": here**2})
    return {p: each["text"] for p, each in arrivals.items()}, {p: each["number"] for p, each in numbers.items()}


def fail_on(rank: int) -> None:
    async def work() -> None:
        if jax.process_index() == rank:
            raise OSError("disk gone")

    with open_session("test", LIMITS) as session:
        session.arrive({})
        asyncio.run(session.together("work", work()))


def stay_away(subject: str, rank: int) -> None:
    if jax.process_index() != rank:
        # Not all at once: one that gave up before must not be called missing by those who wait longer.
        time.sleep(0.5 * jax.process_index())
        gather(subject, {}, LIMITS)


def work_slowly(subject: str, rank: int, progress: Any, pause: float, total: float | None = None) -> None:
    done = 0

    async def work() -> None:
        nonlocal done
        if jax.process_index() == rank:
            for each in progress:
                done = each
                await asyncio.sleep(pause)

    with open_session(subject, Limits(STALL, total), lambda: done) as session:
        session.arrive({})
        asyncio.run(session.together("work", work()))


def come_once_more(subject: str, rank: int) -> None:
    exchange(subject)
    if jax.process_index() == rank:
        exchange(subject)


WAITS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "0 stays away": (stay_away, (0,)),
    "3 stays away": (stay_away, (3,)),
    "0 stops advancing": (work_slowly, (0, [500], 4 * STALL)),
    "2 stops advancing": (work_slowly, (2, [500], 4 * STALL)),
    "0 is slow": (work_slowly, (0, range(8), STALL / 3)),
    "2 is slow": (work_slowly, (2, range(8), STALL / 3)),
    "2 takes too long in all": (work_slowly, (2, range(10), STALL / 4, STALL)),
    "0 comes once more": (come_once_more, (0,)),
    "3 comes once more": (come_once_more, (3,)),
}


def wait_all() -> dict[str, str]:
    """Holds sessions on different subjects at the same time; returns the error of each, or ""."""

    def ended(name: str) -> str:
        function, args = WAITS[name]
        try:
            function(name, *args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with futures.ThreadPoolExecutor(len(WAITS)) as pool:
        return dict(zip(WAITS, pool.map(ended, WAITS), strict=True))


def interrupt(rank: int) -> None:
    async def work() -> None:
        if jax.process_index() == rank:
            raise KeyboardInterrupt

    with open_session("test", LIMITS) as session:
        session.arrive({})
        asyncio.run(session.together("work", work()))


def be_absent(rank: int) -> None:
    if jax.process_index() == rank:
        tell_absent("test", FileNotFoundError("no such step"))
        gather("afterwards", {}, Limits(30))
        withdraw_absent("test")
        return
    try:
        gather("test", {}, Limits(60))
    finally:
        gather("afterwards", {}, Limits(30))


def forget_to_withdraw(rank: int) -> None:
    if jax.process_index() == rank:
        tell_absent("test", FileNotFoundError("no such step"))
    gather("before", {}, Limits(30))
    gather("test", {}, LIMITS)
    if jax.process_index() == rank:  # all others are waiting for it, and look for absences
        time.sleep(1.5)
    gather("test", {}, LIMITS)


def bring_too_much(rank: int) -> None:
    with open_session("test", LIMITS) as session:
        session.arrive({})
        session.meet("much", {"text": "x" * (1 << 17) if jax.process_index() == rank else ""})


def fail_at_length() -> None:
    async def work() -> None:
        if jax.process_index() == 1:
            raise OSError("äöü\x00\udc80\u2028" * 10000)

    with open_session("test", LIMITS) as session:
        session.arrive({})
        asyncio.run(session.together("work", work()))


def fail_with_secret() -> None:
    async def work() -> None:
        if jax.process_index() == 1:
            os.environ["MY_API_TOKEN"] = "hunter2-hunter2"
            raise OSError(f"denied for {os.environ['MY_API_TOKEN']}")

    with open_session("test", LIMITS) as session:
        session.arrive({})
        asyncio.run(session.together("work", work()))


def meet_often(times: int) -> list[str]:
    limits = Limits(60)
    for _ in range(times):
        with open_session("often", limits) as session:
            session.arrive({})
            session.meet("one")
    return keys_left()


def meet_after(seconds: float, arrived: str) -> None:
    with open_session("test", LIMITS) as session:
        session.arrive({})
        (pathlib.Path(arrived) / str(jax.process_index())).touch()
        time.sleep(seconds if jax.process_index() else 10 * seconds)  # process 0 is stopped before all have met
        session.meet("later")


def keys_left() -> list[str]:
    """What is left on the service once all are through; another process may be a moment behind."""
    deadline = time.monotonic() + 10
    while True:
        left = [key for key, _ in coordination_client().key_value_dir_get("orbax_ext/")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
