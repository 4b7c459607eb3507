"""Takes readers out of a group: who could not read what, why, and when nobody can."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from absl import logging

from orbax_ext import errors, text
from orbax_ext.meeting.wire import failure_to_json
from orbax_ext.plan.course import Course, Share
from orbax_ext.report.recorder import Recorder
from orbax_ext.report.take_over import TakeOver


class TakeOvers:
    """The take-overs of a restore; the same on all processes."""

    def __init__(self, course: Course, recorder: Recorder) -> None:
        self.alone = False  # nobody else can read what is late: it is waited for
        self._course = course
        self._recorder = recorder
        self._failures: dict[int, dict[int, errors.ProcessFailure]] = {}  # by group: who has failed to read it before
        self._reasons: dict[int, str] = {}

    def reason(self, number: int) -> str:
        """Returns why a group was added, or an empty string."""
        return self._reasons.get(number, "")

    def failure(self, error: BaseException | None) -> Mapping[str, str] | None:
        """Returns the error of a read for the other processes."""
        return None if error is None else failure_to_json(error)

    def of_share(self, shares: Mapping[int, Share], hosts: Mapping[int, str], phase: str) -> list[int] | None:
        """Takes processes that are not ready out of the readers of the next group; returns the groups that this adds.

        Returns None if nobody else can read it. Raises `RestoreFailedError` if it was tried twice, or if nobody can
        read it because all have failed.
        """
        number = self._course.order[self._course.ends.front]
        return self._take_over([number], self._course.take_over, shares, hosts, phase)

    def of_direct(self, shares: Mapping[int, Share], hosts: Mapping[int, str], phase: str) -> list[int] | None:
        """Does the same for groups that processes should have read directly."""
        numbers = sorted({number for share in shares.values() for number in share.lacks})
        return self._take_over(numbers, self._course.take_over_direct, shares, hosts, phase)

    def _take_over(
        self,
        numbers: list[int],
        take_over: Callable[[Mapping[int, Share]], list[int] | None],
        shares: Mapping[int, Share],
        hosts: Mapping[int, str],
        phase: str,
    ) -> list[int] | None:
        late = {process: share for process, share in shares.items() if not share.ready}
        failed = {
            process: errors.ProcessFailure(
                hosts[process], phase, share.failed["error"], share.failed["traceback"], share.failed["kind"]
            )
            for process, share in late.items()
            if share.failed is not None
        }
        before = {process: failure for number in numbers for process, failure in self._failures.get(number, {}).items()}
        if before and failed.keys() - before.keys():
            raise errors.restore_failed(before | failed)
        added = take_over(shares)
        if added is None:
            if len(failed) == len(late):
                raise errors.restore_failed(failed)
            self.alone = True
            return None
        for process, share in late.items():
            why = share.failed["error"] if share.failed is not None else "late"
            for number in share.lacks or numbers:
                self._recorder.took_over(TakeOver(number, process, hosts[process], why))
            what = text.listing([str(number + 1) for number in share.lacks or numbers])
            logging.warning(
                "orbax_ext: the other replicas read group %s in place of %s: %s",
                what,
                text.process(process, hosts),
                why,
            )
        for number in added:
            self._failures[number] = before | failed
            self._reasons[number] = f"in place of {text.processes(sorted(late), hosts)}"
        return added
