"""The order of collectives."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import pytest

from orbax_ext.transfer.turns import in_turn

pytestmark = pytest.mark.once


def started(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_functions_run_in_the_order_in_which_they_were_passed() -> None:
    done: list[int] = []
    first, second, third = (in_turn(functools.partial(done.append, number), 30) for number in range(3))
    later = [started(third), started(second)]
    for thread in later:
        thread.join(0.1)
    assert not done
    first()
    for thread in later:
        thread.join(30)
    assert done == [0, 1, 2]


def test_a_failure_does_not_keep_others_from_their_turn() -> None:
    def fail() -> None:
        raise MemoryError("no room")

    first, second = in_turn(fail, 30), in_turn(lambda: "done", 30)
    with pytest.raises(MemoryError):
        first()
    assert second() == "done"


def test_nobody_waits_for_ever_and_nobody_overtakes() -> None:
    done: list[str] = []
    first = in_turn(lambda: done.append("first"), 30)
    second, third = (in_turn(lambda: done.append("too early"), 0.05) for _ in range(2))
    fourth = in_turn(lambda: done.append("fourth"), 30)
    for late in (second, third):
        with pytest.raises(TimeoutError, match="an earlier exchange of this process has not ended"):
            late()
    waiting = started(fourth)
    waiting.join(0.1)
    assert done == []  # the first one is still under way
    first()
    waiting.join(30)
    assert done == ["first", "fourth"]
