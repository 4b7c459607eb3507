from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from orbax_ext.storage.s3 import sharing
from orbax_ext.storage.s3.errors import DeniedError, MissingBucketError, StoreError
from orbax_ext.storage.s3.objects import Listing, ObjectStore
from orbax_ext.storage.s3.paths import PathLike
from orbax_ext.storage.s3.sharing import Snapshot

pytestmark = pytest.mark.once

ROOT = "s3://bucket/run/0"
DIRECTORIES = {
    ROOT: Listing({"commit_success.txt": (3, 100)}, ("default",), exists=True),
    f"{ROOT}/default": Listing({"_METADATA": (12, 100), "large": (1 << 30, 100)}, (), exists=True),
}
FILES = {f"{ROOT}/default/_METADATA": b"\0not text\xff", f"{ROOT}/default/large": None}


class FakeStore(ObjectStore):
    """A store with two directories, which records what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def list_directory(self, path: PathLike) -> Listing:
        self.asked.append(f"list {path}")
        return DIRECTORIES.get(os.fspath(path), Listing({}, (), exists=False))

    def fetch(self, path: PathLike) -> bytes | None:
        self.asked.append(f"read {path}")
        if os.fspath(path).endswith("commit_success.txt"):
            raise DeniedError(f"{path}: AccessDenied")
        return FILES[os.fspath(path)]


class FakeBoard:
    """Does each piece of work once for all snapshots that share it."""

    def __init__(self) -> None:
        self.results: dict[str, str] = {}

    def once(self, name: str, work: Callable[[], str]) -> str:
        if name not in self.results:
            self.results[name] = work()
        return self.results[name]


def test_each_question_is_asked_once_by_all_processes_together() -> None:
    store, board = FakeStore(), FakeBoard()
    for _ in range(3):
        snapshot = Snapshot(f"{ROOT}/", store, board.once)
        for _ in range(2):
            assert snapshot.is_directory(ROOT)
            assert snapshot.is_directory(f"{ROOT}/default/")
            assert snapshot.listing(f"{ROOT}/default") == DIRECTORIES[f"{ROOT}/default"]
            assert snapshot.file(f"{ROOT}/default/_METADATA") == (12, 100)
            assert snapshot.content(f"{ROOT}/default/_METADATA") == b"\0not text\xff"
    assert store.asked == [f"list {ROOT}", f"list {ROOT}/default", f"read {ROOT}/default/_METADATA"]


def test_existence_is_answered_from_the_listing_of_the_parent() -> None:
    store = FakeStore()
    snapshot = Snapshot(ROOT, store, FakeBoard().once)
    assert snapshot.file(ROOT) is None
    assert snapshot.file(f"{ROOT}/default") is None
    assert not snapshot.is_directory(f"{ROOT}/commit_success.txt")
    assert not snapshot.is_directory(f"{ROOT}/none")
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        snapshot.content(f"{ROOT}/none")
    assert store.asked == [f"list {ROOT}"]


def test_a_large_file_is_not_shared() -> None:
    assert Snapshot(ROOT, FakeStore(), FakeBoard().once).content(f"{ROOT}/default/large") is None


@pytest.mark.parametrize(
    ("path", "covered"),
    [(ROOT, True), (f"{ROOT}/", True), (f"{ROOT}/default/d", True), (f"{ROOT}1", False), ("s3://bucket/run", False)],
)
def test_a_snapshot_covers_its_root_and_what_is_below(path: str, covered: bool) -> None:
    assert Snapshot(ROOT, FakeStore(), FakeBoard().once).covers(path) is covered


def test_an_error_of_the_store_is_asked_for_once_and_raised_by_all() -> None:
    store, board = FakeStore(), FakeBoard()
    for _ in range(2):
        with pytest.raises(DeniedError, match=f"{ROOT}/commit_success.txt: AccessDenied"):
            Snapshot(ROOT, store, board.once).content(f"{ROOT}/commit_success.txt")
    assert store.asked.count(f"read {ROOT}/commit_success.txt") == 1


@pytest.mark.parametrize("answer", [None, 7, "text", {"files": {"a": [1, 2]}}, [{"shape": []}]])
def test_an_answer_survives_its_text(answer: Any) -> None:
    assert sharing.decode_answer(sharing.encode_answer(lambda: answer)) == answer


@pytest.mark.parametrize("error", [FileNotFoundError("a"), DeniedError("b"), MissingBucketError("c"), StoreError("d")])
def test_an_error_survives_its_text_with_its_type(error: Exception) -> None:
    def ask() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        sharing.decode_answer(sharing.encode_answer(ask))
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)


def test_an_error_that_is_not_of_the_store_is_not_shared() -> None:
    def ask() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sharing.encode_answer(ask)
