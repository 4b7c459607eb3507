from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from orbax_ext.transfer.held_blocks import HeldBlocks
from orbax_ext.transfer.host_reads import HostReads

pytestmark = pytest.mark.once

PATIENCE = 30.0  # seconds


@pytest.fixture
def our_threads() -> Callable[[], list[threading.Thread]]:
    """Returns the threads that have been started since the test began; another test may have left one."""
    before = {*threading.enumerate()}
    return lambda: [one for one in threading.enumerate() if one.name.startswith("orbax_ext") and one not in before]


def test_stopping_ends_the_compiling_too_and_the_interpreter_does_not_wait_for_it(
    our_threads: Callable[[], list[threading.Thread]],
) -> None:
    compiling, compiled, given_up = threading.Event(), [], []

    def compile_programs(stop: threading.Event) -> None:
        compiling.set()
        given_up.append(stop.wait(PATIENCE))

    held = HeldBlocks(None, (), compile_programs)
    next_held = HeldBlocks(None, (), lambda stop: compiled.append(stop))
    reads = HostReads([lambda: held, lambda: next_held], 1 << 20, lambda: None)
    assert compiling.wait(PATIENCE)
    threads = our_threads()
    assert len(threads) == 2
    assert all(thread.daemon for thread in threads)
    reads.stop()
    reads.join()
    assert reads.ended
    assert (given_up, compiled) == ([True], [])
    assert our_threads() == []


def test_what_compiles_for_long_is_not_waited_for_with_what_reads(
    our_threads: Callable[[], list[threading.Thread]],
) -> None:
    """A restore that has read all directly does not need the programs of the exchange."""
    compiling, compiled = threading.Event(), threading.Event()

    def compile_programs(stop: threading.Event) -> None:
        compiling.set()
        compiled.wait(PATIENCE)

    reads = HostReads([lambda: HeldBlocks(None, (), compile_programs)], 1 << 20, lambda: None)
    assert compiling.wait(PATIENCE)
    reads.stop()
    reads.join_reading()
    assert reads.ended
    assert len(our_threads()) == 1
    compiled.set()
    reads.join()
    assert our_threads() == []


def test_an_error_in_compiling_is_left_to_the_restore() -> None:
    def compile_programs(stop: threading.Event) -> None:
        raise ValueError("does not compile")

    reads = HostReads([lambda: HeldBlocks(None, (), compile_programs)], 1 << 20, lambda: None)
    deadline = time.monotonic() + PATIENCE
    while not reads.ended:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert reads.error is None
