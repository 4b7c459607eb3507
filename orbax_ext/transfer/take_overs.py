"""Takes readers out of a group: who could not read what, why, and when nobody can."""

from __future__ import annotations

import builtins
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping

from absl import logging

from orbax_ext import errors, text
from orbax_ext.meeting.wire import failure_to_json
from orbax_ext.plan.course import Course, Share
from orbax_ext.report.recorder import Recorder
from orbax_ext.report.take_over import TakeOver

_LATE = "late: the other replicas have been asked to read its part"
_LATE_TWICE = "late, twice: the other replicas have been asked to read its part"
# What TensorStore says if a store does not let this process read, or not now.
_ACCESS = re.compile(r"PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED|ABORTED")
_VARYING = re.compile(r"""\d+|"[^"]*"|'[^']*'""")  # in messages: names, offsets, addresses


class TakeOvers:
    """The take-overs of a restore; the same on all processes."""

    def __init__(self, course: Course, recorder: Recorder) -> None:
        self.alone: frozenset[int] = frozenset()  # nobody else can read what is late: these are waited for
        self._course = course
        self._recorder = recorder
        # By group: who has failed to read it, or was late.
        self._failures: dict[int, dict[int, errors.ProcessFailure]] = {}
        self._reasons: dict[int, str] = {}

    def reason(self, number: int) -> str:
        """Returns why a group was added, or an empty string."""
        return self._reasons.get(number, "")

    def explain(self, error: BaseException | None) -> None:
        """Adds who else could not read the next group, and why, to an error that names only those who have it now."""
        if not isinstance(error, errors.RestoreTimeoutError) or not self._course.groups_left:
            return
        tried = sorted(self._failures.get(self._course.order[self._course.ends.front], {}).items())
        lines = [f"{text.process(process, {process: one.host})}: {one.error}" for process, one in tried]
        remark = "\n  ".join(["Others had to read the same before:", *lines])
        if lines and remark not in str(error):  # as it is where another process has passed its error on
            errors.add_remark(error, remark)

    def failure(self, error: BaseException | None) -> Mapping[str, str] | None:
        """Returns the error of a read for the other processes."""
        return None if error is None else failure_to_json(error)

    def of_share(self, shares: Mapping[int, Share], hosts: Mapping[int, str], phase: str) -> list[int] | None:
        """Takes processes that are not ready out of the readers of the next group; returns the groups that this adds.

        Returns None if those can't read it who have neither failed nor are late. Raises `RestoreFailedError` if all
        have failed, or if two have found that the data can't be read.
        """
        late_for = self._course.late_for(shares)
        front = self._course.order[self._course.ends.front]
        return self._take_over([front], self._course.take_over, shares, hosts, phase, late_for)

    def of_direct(self, shares: Mapping[int, Share], hosts: Mapping[int, str], phase: str) -> list[int] | None:
        """Does the same for groups that processes should have read directly."""
        numbers = sorted({number for share in shares.values() for number in share.lacks})
        late_for = {n: {process for process, share in shares.items() if n in share.lacks} for n in numbers}
        return self._take_over(numbers, self._course.take_over_direct, shares, hosts, phase, late_for)

    def _take_over(
        self,
        numbers: list[int],
        take_over: Callable[[Mapping[int, Share], Collection[int]], list[int] | None],
        shares: Mapping[int, Share],
        hosts: Mapping[int, str],
        phase: str,
        late_for: Mapping[int, Collection[int]],
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
        others = [failure for process, failure in failed.items() if process not in before]
        if any(_of_the_data(one, other) for one in before.values() for other in others):
            raise _restore_failed(before | failed)
        # Who was late gets it once more, if it reads again or nobody else is left: else two could take turns for ever.
        nobody_reads = len(failed) == len(late)
        tried = [
            process
            for process, failure in before.items()
            if failure.error != _LATE or (shares[process].rate == 0 and not nobody_reads)
        ]
        added = take_over(shares, tried)
        if added is None:
            if nobody_reads:
                raise _restore_failed(before | failed)
            self.alone = frozenset(late.keys() - failed.keys())
            return None
        for process, share in late.items():
            why = share.failed["error"] if share.failed is not None else "late"
            lacks = [number for number, processes in late_for.items() if process in processes]
            for number in lacks:
                self._recorder.took_over(TakeOver(number, process, hosts[process], why))
            what = text.listing([str(number + 1) for number in lacks])
            logging.warning(
                "orbax_ext: the other replicas read group %s in place of %s: %s",
                what,
                text.process(process, hosts),
                why,
            )
        waited_for = {p: errors.ProcessFailure(hosts[p], phase, _LATE_TWICE if p in before else _LATE) for p in late}
        for number in added:
            self._failures[number] = before | waited_for | failed
            self._reasons[number] = f"in place of {text.processes(sorted(late), hosts)}"
        return added


def _of_the_data(one: errors.ProcessFailure, other: errors.ProcessFailure) -> bool:
    """Returns whether two processes that have read the same have found that the data is broken, or is not there."""
    kind = getattr(builtins, one.kind, None)  # comes from another process
    if isinstance(kind, type) and issubclass(kind, OSError) and kind is not FileNotFoundError:
        return False
    if one.kind != other.kind or _ACCESS.search(one.error):
        return False
    return _VARYING.sub("", one.error) == _VARYING.sub("", other.error)


def _restore_failed(tried: Mapping[int, errors.ProcessFailure]) -> errors.RestoreFailedError:
    """Returns the error that names all who have tried; its built-in type is that of those who have failed."""
    kind = next((failure.kind for failure in tried.values() if failure.kind), "")
    named = {process: dataclasses.replace(one, kind=one.kind or kind) for process, one in tried.items()}
    return errors.restore_failed(named)
