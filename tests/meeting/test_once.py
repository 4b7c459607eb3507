from __future__ import annotations

import threading

import pytest

from orbax_ext.meeting import once
from orbax_ext.meeting.once import SharedResults
from tests.support.coordination import SharedClient, on_processes

pytestmark = pytest.mark.once


class BrokenClient(SharedClient):
    """A service that accepts no value."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        raise RuntimeError("UNAVAILABLE: connection lost")


def results(client: SharedClient, process: int, limit: float = 30.0) -> SharedResults:
    return SharedResults(client, "test", process, limit)


def test_one_process_works_for_all() -> None:
    client, calls = SharedClient(), []

    def run(process: int) -> str:
        def work() -> str:
            calls.append(process)
            return f"by {process}"

        return results(client, process).once("list", work)

    outcomes = on_processes(4, run)
    assert len(calls) == 1
    assert outcomes == [f"by {calls[0]}"] * 4


def test_work_of_another_name_is_done_again() -> None:
    shared = results(SharedClient(), 0)
    assert shared.once("a", lambda: "first") == "first"
    assert shared.once("b", lambda: "second") == "second"
    assert shared.once("a", lambda: "third") == "first"


@pytest.mark.parametrize("result", ["", "long" * once._MAX_PART], ids=["empty", "in parts"])
def test_a_result_of_any_length_is_shared(result: str) -> None:
    client = SharedClient()
    assert results(client, 0).once("list", lambda: result) == result
    assert results(client, 1).once("list", lambda: "its own") == result
    assert all(len(value) <= once._MAX_PART for _, value in client.key_value_dir_get(""))


def test_an_error_of_the_work_is_raised_and_the_others_work_for_themselves() -> None:
    client = SharedClient()

    def fail() -> str:
        raise FileNotFoundError("no such file")

    with pytest.raises(FileNotFoundError, match="no such file"):
        results(client, 0).once("list", fail)
    assert results(client, 1).once("list", lambda: "its own") == "its own"


def test_a_process_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "_LOOK_EVERY", 0.01)
    client, started, end = SharedClient(), threading.Event(), threading.Event()

    def work_slowly() -> str:
        started.set()
        assert end.wait(30)
        return "late"

    def run(process: int) -> str:
        if process == 0:
            return results(client, 0).once("list", work_slowly)
        assert started.wait(30)
        try:
            return results(client, 1, limit=0.05).once("list", lambda: "its own")
        finally:
            end.set()

    assert on_processes(2, run) == ["late", "its own"]


def test_a_service_that_is_gone_costs_nothing_but_the_sharing() -> None:
    assert results(BrokenClient(), 0).once("list", lambda: "its own") == "its own"
