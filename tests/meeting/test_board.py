from __future__ import annotations

import json
import time
import types

import pytest

from orbax_ext.meeting import board as board_lib
from orbax_ext.meeting.board import STOPPED, Board, ClosedError, LocalClient
from orbax_ext.meeting.terms import MAX_VALUE
from tests.support.coordination import SharedClient

pytestmark = pytest.mark.once


@pytest.fixture
def client() -> LocalClient:
    return LocalClient()


@pytest.fixture
def board(client: LocalClient) -> Board:
    return Board(client)


def test_values_are_read_by_the_rest_of_their_keys(board: Board) -> None:
    board.put("home/0", {"text": "äöü"})
    board.put("home/12/in", {"number": 1})
    board.put("homes/1", {})
    assert board.read("home") == {"0": {"text": "äöü"}, "12/in": {"number": 1}}


def test_a_value_can_be_replaced(board: Board) -> None:
    board.put("home/0", {"text": "a"})
    board.put("home/0", {"text": "b"})
    assert board.get("home/0") == {"text": "b"}


def test_a_value_that_is_put_once_stays(board: Board) -> None:
    assert board.put("home/0", {"text": "a"}, once=True)
    assert not board.put("home/0", {"text": "b"}, once=True)
    assert board.get("home/0") == {"text": "a"}


def test_a_key_that_is_not_set_has_no_value(board: Board) -> None:
    assert board.get("home/0") is None


def test_an_error_of_the_service_is_raised(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LocalClient, key: str) -> str:
        raise RuntimeError(f"UNAVAILABLE: {key}")

    monkeypatch.setattr(LocalClient, "key_value_try_get", fail)
    with pytest.raises(RuntimeError, match="UNAVAILABLE"):
        board.get("home/0")


def test_a_value_that_is_too_long_is_not_sent(board: Board, client: LocalClient) -> None:
    with pytest.raises(ValueError, match=rf"A message of \d+ characters is too long .* {MAX_VALUE} are allowed"):
        board.put("home/0", {"text": "x" * MAX_VALUE})
    assert client.key_value_dir_get("") == []


def test_values_that_are_too_long_are_not_parsed(board: Board, client: LocalClient) -> None:
    client.key_value_set("home/0", json.dumps("x" * MAX_VALUE))
    client.key_value_set("home/2", "{}")
    assert board.read("home") == {"0": None, "2": {}}


def test_a_value_that_is_not_json_is_refused(board: Board, client: LocalClient) -> None:
    client.key_value_set("home/0", "__import__('os')")
    with pytest.raises(json.JSONDecodeError):
        board.read("home")
    with pytest.raises(json.JSONDecodeError):
        board.get("home/0")


def test_a_wait_returns_the_value_or_none_when_the_time_is_over() -> None:
    board = Board(SharedClient())
    assert board.wait("home/0", 0.01, MAX_VALUE) is None
    board.put("home/0", {"text": "a"})
    assert board.wait("home/0", 0.01, MAX_VALUE) == {"text": "a"}


def test_a_wait_refuses_a_value_that_is_too_long(board: Board) -> None:
    board.put("home/0", {"text": "abc"})
    with pytest.raises(ValueError, match=r"home/0 has 14 characters; expected at most 5\."):
        board.wait("home/0", 1.0, 5)


def test_a_count_includes_the_call(board: Board) -> None:
    assert [board.count("home/gone"), board.count("home/gone"), board.count("other")] == [1, 2, 1]


def test_a_key_is_deleted_with_all_keys_under_it(board: Board, client: LocalClient) -> None:
    for key in ("home", "home/0", "home/in/1", "homes/0"):
        board.put(key, {})
    board.delete("home")
    assert client.key_value_dir_get("") == [("homes/0", "{}")]


def test_a_closed_board_refuses_every_call(board: Board) -> None:
    board.close()
    for call in (
        lambda: board.put("home/0", {}),
        lambda: board.read("home"),
        lambda: board.get("home/0"),
        lambda: board.wait("home/0", 1.0, 5),
        lambda: board.count("home"),
        lambda: board.delete("home"),
    ):
        with pytest.raises(ClosedError):
            call()


def test_only_an_answer_of_the_service_moves_the_time_of_the_last_answer() -> None:
    board = Board(SharedClient())
    board.answered = before = time.monotonic() - 100
    board.wait("home/0", 0.01, MAX_VALUE)
    assert board.answered == before
    board.get("home/0")
    assert board.answered > before


def test_a_process_that_was_stopped_begins_to_wait_again(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    board.answered = before = time.monotonic() - 100
    assert board.last_answer() == before
    later = time.monotonic() + 2 * STOPPED
    monkeypatch.setattr(board_lib, "time", types.SimpleNamespace(monotonic=lambda: later))
    assert board.last_answer() == later
    monkeypatch.setattr(board_lib, "time", types.SimpleNamespace(monotonic=lambda: later + STOPPED / 2))
    assert board.last_answer() == later
