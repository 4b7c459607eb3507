"""A restore fails only if nobody can read something, and then names all who have tried."""

from __future__ import annotations

import pytest

from orbax_ext import errors
from orbax_ext.plan.course import Course, Share
from orbax_ext.report.recorder import Recorder
from orbax_ext.transfer.take_overs import TakeOvers
from tests.support.courses import make_course

pytestmark = pytest.mark.once

HOSTS = {process: f"host-{process}" for process in range(4)}
DENIED = ("PermissionError", "PermissionError: [Errno 13] Permission denied: '/data/d/7'")
REFUSED = ("ValueError", 'ValueError: PERMISSION_DENIED: Error reading "gs://bucket/x": HTTP 403')
THROTTLED = ("ValueError", "ValueError: UNAVAILABLE: HTTP 503")
GONE = ("OSError", "OSError: the disk is gone")
LATE = "late: the other replicas have been asked to read its part"


def failed(kind: str, error: str) -> Share:
    return Share(1, 1e6, failed={"error": error, "traceback": "", "kind": kind})


class Restore:
    """The meetings of a restore in which the group at the front was added for somebody, or is the first one."""

    def __init__(self, strategy: str = "single") -> None:
        self.course: Course = make_course(strategy)
        self.recorder = Recorder()
        self.take_overs = TakeOvers(self.course, self.recorder)
        self.stuck: set[int] = set()

    def meet(self, troubles: dict[int, Share]) -> list[int] | None:
        """Meets with these shares, those of the others are ready; the group that this adds is the next one."""
        shares = {
            process: troubles.get(process, Share(1, 0.0 if process in self.stuck else 1e6)) for process in range(4)
        }
        self.stuck |= {process for process, share in troubles.items() if share.late}
        added = self.take_overs.of_share(shares, HOSTS, "read")
        self.course.next()
        while added and self.course.order[self.course.ends.front] not in added:
            self.course.next()
        return added

    @property
    def reader(self) -> int:
        (reader,) = {
            bundle.reader for bundle in self.course.group(self.course.ends.front).bundles if bundle.reader is not None
        }
        return reader


@pytest.mark.parametrize("error", [DENIED, REFUSED, THROTTLED, GONE])
def test_all_replicas_try_what_some_may_not_read(error: tuple[str, str]) -> None:
    restore, tried = Restore(), []
    for _ in range(3):
        tried.append(restore.reader)
        assert restore.meet({restore.reader: failed(*error)})
    assert len({*tried, restore.reader}) == 4
    with pytest.raises(errors.RestoreFailedError) as caught:
        restore.meet({restore.reader: failed(*error)})
    assert sorted(caught.value.failures) == [0, 1, 2, 3]


def test_who_has_failed_is_not_asked_again_for_the_same() -> None:
    restore = Restore("spread")
    assert restore.meet({1: failed(*DENIED)})
    assert restore.meet({2: failed(*DENIED)})
    readers = {bundle.reader for bundle in restore.course.group(restore.course.ends.front).bundles}
    assert not readers & {1, 2}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ValueError", 'ValueError: DATA_LOSS: in "d/1"'), ("ValueError", 'ValueError: DATA_LOSS: in "d/2"')),
        (("FileNotFoundError", "FileNotFoundError: 'a'"), ("FileNotFoundError", "FileNotFoundError: 'b'")),
    ],
)
def test_broken_data_ends_the_restore_after_two_readers(one: tuple[str, str], other: tuple[str, str]) -> None:
    restore = Restore()
    first = restore.reader
    assert restore.meet({first: failed(*one)})
    second = restore.reader
    with pytest.raises(errors.RestoreFailedError) as caught:
        restore.meet({second: failed(*other)})
    assert sorted(caught.value.failures) == sorted([first, second])
    assert isinstance(caught.value, ValueError if one[0] == "ValueError" else FileNotFoundError)


def test_two_different_errors_do_not_mean_that_the_data_is_broken() -> None:
    restore = Restore()
    assert restore.meet({restore.reader: failed("ValueError", "ValueError: DATA_LOSS")})
    assert restore.meet({restore.reader: failed("ValueError", "ValueError: NOT_FOUND")})


def test_who_was_late_is_the_last_to_try() -> None:
    restore = Restore()
    late = restore.reader
    assert restore.meet({late: Share(1, 0.0, late=True)})
    for _ in range(3):
        assert restore.reader != late
        assert restore.meet({restore.reader: failed(*DENIED)})
    assert restore.reader == late
    assert restore.meet({late: Share(1, 0.0, late=True)}) is None
    assert restore.take_overs.alone


def test_who_has_failed_is_not_waited_for() -> None:
    restore = Restore("spread")
    late = Share(1, 0.0, late=True)
    assert restore.meet({0: failed(*DENIED), 1: late, 2: late, 3: late}) is None
    assert restore.take_overs.alone == {1, 2, 3}


@pytest.mark.parametrize("fails", [True, False])
def test_late_processes_do_not_hand_a_group_to_each_other_for_ever(fails: bool) -> None:
    restore = Restore()
    tried = [restore.reader]
    assert restore.meet({restore.reader: failed(*GONE) if fails else Share(1, 0.0, late=True)})
    for _ in range(2):
        tried.append(restore.reader)
        assert restore.meet({restore.reader: Share(1, 0.0, late=True)})
    assert len({*tried, restore.reader}) == 4
    assert restore.meet({restore.reader: Share(1, 0.0, late=True)}) is None
    assert restore.take_overs.alone


def test_who_was_late_and_reads_again_gets_a_group_once_more_and_then_never() -> None:
    restore, late = Restore(), []
    while True:
        late.append(restore.reader)
        restore.stuck.clear()  # all read again
        if restore.meet({restore.reader: Share(1, 0.0, late=True)}) is None:
            break
    assert sorted(set(late)) == [0, 1, 2, 3]
    assert max(map(late.count, late)) == 2


def test_the_error_names_earlier_readers_that_were_late() -> None:
    restore = Restore()
    late = restore.reader
    assert restore.meet({late: Share(1, 0.0, late=True)})
    assert restore.meet({(second := restore.reader): failed("ValueError", "ValueError: DATA_LOSS")})
    with pytest.raises(ValueError, match=rf"process {late} \(host-{late}\), in phase 'read': late") as caught:
        restore.meet({(third := restore.reader): failed("ValueError", "ValueError: DATA_LOSS")})
    assert isinstance(caught.value, errors.RestoreFailedError)
    assert sorted(caught.value.failures) == sorted([late, second, third])


def test_a_timeout_names_those_who_have_tried_before() -> None:
    restore = Restore()
    first = restore.reader
    assert restore.meet({first: failed(*GONE)})
    assert restore.meet({(second := restore.reader): Share(1, 0.0, late=True)})
    error = errors.RestoreTimeoutError("missing: process 9", [9], {})
    for _ in range(2):  # it says so once
        restore.take_overs.explain(error)
        message, *remark = str(error).splitlines()
        assert message == "missing: process 9"
        assert sorted(remark[1:]) == sorted(
            [f"  process {first} (host-{first}): {GONE[1]}", f"  process {second} (host-{second}): {LATE}"]
        )


def test_other_errors_stay_as_they_are() -> None:
    restore = Restore()
    assert restore.meet({restore.reader: failed(*GONE)})
    error = errors.restore_failed({3: errors.ProcessFailure("host-3", "read", "MemoryError: no room")})
    restore.take_overs.explain(error)
    restore.take_overs.explain(None)
    assert "before" not in str(error)
