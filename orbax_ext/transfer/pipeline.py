"""The effects of a plan, in the order that the handler asks for: a group travels while the next ones are read."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
from orbax.checkpoint import type_handlers

from orbax_ext.meeting.protocol import MORE, TOOK
from orbax_ext.options import Options
from orbax_ext.plan import RestorePlan
from orbax_ext.plan.boundary import (
    Progress,
    bytes_of_groups,
    everything_is_read,
    meet_again_after,
    next_boundary,
    part_of_first_share,
    seconds_direct,
)
from orbax_ext.plan.course import Course, Share
from orbax_ext.plan.memory import ahead_bytes
from orbax_ext.report.recorder import Recorder
from orbax_ext.request import Request
from orbax_ext.transfer.compiling import Compiling
from orbax_ext.transfer.exchanges import AgreedExchange, Exchanges
from orbax_ext.transfer.executor import Executor
from orbax_ext.transfer.held_blocks import taking
from orbax_ext.transfer.rates import LinkRates
from orbax_ext.transfer.read_ahead import succeeded
from orbax_ext.transfer.reads import Reads
from orbax_ext.transfer.take_overs import TakeOvers
from orbax_ext.transfer.waiting import Waiting

_MOSTLY = 0.5  # if the fabric is busy for less of the time, exchanges wait for reads


class Pipeline:
    """Reads and exchanges group by group from the front, and reads other leaves directly.

    For strategy `auto` it also reads groups from the back directly, and the boundary between the two moves.
    Used in a `with` block, at the end of which it gives up what is still under way.
    """

    def __init__(
        self,
        handler: type_handlers.ArrayHandler,
        request: Request,
        plan: RestorePlan,
        recorder: Recorder,
        options: Options,
        arrived: Callable[[Mapping[int, jax.Array]], None] | None = None,
        memory_limit: int | None = None,
    ) -> None:
        """`arrived` is called with arrays, by index of their leaf, as soon as they are complete.

        `memory_limit`: what all have agreed on, in bytes per device.
        """
        self.course = Course(plan, request.mesh_infos)
        self.boundary_moves = options.strategy == "auto"
        self.done = False  # everything is there, on all processes
        self._request = request
        self._recorder = recorder
        self._strict = options.strict_readers
        self._arrived = arrived or (lambda arrays: None)
        self._executor = Executor(
            handler, request, plan.leaves, options.stall_timeout, recorder.through_orbax, memory_limit
        )
        self._bytes = bytes_of_groups(plan, request.mesh_infos, jax.process_count()) if self.boundary_moves else []
        self._rates = LinkRates(self._bytes)
        self._take_overs = TakeOvers(self.course, recorder)
        self._held = taking().claim(request, plan)  # what was read before this restore began
        self._reads = Reads(
            self._executor,
            self.course,
            recorder,
            self._rates,
            boundary_moves=self.boundary_moves,
            room=ahead_bytes(memory_limit or 0, options.strategy) if plan.strategy == "spread" else 0,
            reason=self._take_overs.reason,
            held=self._held,
            arrived=self._arrived,
        )
        self.ask = self._reads.ask  # the others do not want to wait any longer for what this process reads
        self._compiling = Compiling(self._executor, self.course, recorder, may_be_needless=self.boundary_moves)
        self._patience: float | None = None  # seconds, after which all meet again if they read nothing
        self._connected: set[tuple[int, tuple[str, ...]]] = set()
        self._began = self._began_phase = time.monotonic()
        self._read_at_meeting = (0, 0, False)  # `Reads.so_far` at the last meeting
        self._at_work = False  # not at a meeting, where all have just told what they have begun to read
        self._exchanges = Exchanges(
            self._executor, recorder, self._rates, begun=self._begin_more_reads, arrived=self._arrived
        )
        executor = functools.partial(Executor, handler, request, limit=options.stall_timeout)
        self._waiting = Waiting(
            self.course, self._reads, self._exchanges, self._compiling, executor, request.mesh_infos
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        self._take_overs.explain(error)
        self._waiting.end()
        self._reads.give_up()
        self._compiling.give_up()
        self._exchanges.give_up()
        self._executor.direct.give_up()
        self._executor.kept.end()

    @property
    def phase(self) -> str:
        """What is read next, for messages."""
        if not self.course.groups_left:
            return "hand over"
        return f"read group {self.course.order[self.course.ends.front] + 1} of {len(self.course.plan.groups)}"

    @property
    def connected(self) -> bool:
        """Whether all groups that will travel have their communicators."""
        return self._kinds() <= self._connected

    async def connect(self) -> None:
        """Opens communicators while all processes are together; reads go on meanwhile.

        A communicator that is opened later gives a late reader little time (google/orbax #3181).
        """
        ends = self.course.ends
        self._reads.begin()
        if exchanges := self._exchanges.under_way:  # all take part in collectives in the same order
            await _ended(exchanges, exchanges)
        groups = [self.course.group(place) for place in range(ends.front, ends.back)]
        await self._recorder.timed("connect", self._executor.connect(groups))
        self._connected |= self._kinds()

    async def read(self) -> None:
        """Reads this process's share of the next group. Meanwhile the group before it travels, or the one before that.

        Ends when all can meet for the group's exchange, or when it is known that others have to read the share. If the
        boundary moves, it also ends when all is read that may be read: then there is time to move it. If no group is
        left, waits for all that is read directly.
        """
        self._began_phase, alone = time.monotonic(), len(self._take_overs.alone)
        self._at_work = True
        if not self.course.groups_left:
            self._reads.begin_direct()
            await self._reads.first_of(self._everything_arrived(), alone=alone)
            if self._strict:
                self._reads.back.raise_errors()
            return
        self._begin_more_reads()
        self._compiling.begin(part_of_first_share(self._bytes), lambda: bool(self._reads.shares.groups_done))
        if self._reads.is_stuck and not alone:
            return  # the others know already: they need not wait for it once more
        prepared = self._prepared
        awaited: list[asyncio.Future[Any]] = [self._reads.share, *prepared]
        works = [_ended(awaited, awaited if self._strict else prepared)]
        if self.boundary_moves:
            works.append(self._reads.everything_read(self._read_at_meeting, strict=self._strict))
            if self._patience is not None:
                works.append(self._patience_ends(self._began + self._patience))
        await self._reads.first_of(*works, alone=alone)

    def progress(self) -> dict[str, Any]:
        """Returns what this process tells the others at the meeting that begins now."""
        self._at_work = False
        reads, shares = self._reads, self._reads.shares
        if not self.course.groups_left:
            lacks = reads.back.lacking
            error = next(iter(reads.back.failed.values()), None)
            share = Share(
                reads.upto,
                shares.rate,
                late=bool(lacks),
                failed=self._take_overs.failure(error),
                lacks=lacks,
                long=shares.long,
                busy=bool(self._exchanges.under_way) or not all(map(succeeded, reads.kept)),
            )
            return {TOOK: round(time.monotonic() - self._began_phase, 3), **share.to_json()}
        late = not reads.share.done()
        error = None if late else reads.share.exception()
        failed = self._take_overs.failure(error)
        upto = reads.upto
        lacks = reads.further.lacking(upto) if late else ()
        begun = max(shares.begun, self._held.groups)
        share = Share(upto, shares.rate, late=late, failed=failed, lacks=lacks, long=shares.long, begun=begun)
        took = shares.took.get(self.course.ends.front, 0.0)
        told = {TOOK: round(took, 3), MORE: reads.further.seconds, **share.to_json()}
        if not late:
            self._waiting.begin()
        if not self.boundary_moves:
            return told
        self._read_at_meeting = reads.so_far
        progress = Progress(
            begun=begun,
            direct=reads.back.done,
            ready=all(task.done() for task in self._prepared),
            idle=reads.idle,
            waiting=time.monotonic() - self._began,
            storage=self._rates.storage,
            fabric=self._rates.fabric,
            unused=reads.unused(self.course.ends.front),
            held=self._held.whole_groups,
        )
        return {**told, **progress.to_json()}

    def agree(self, told: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> bool:
        """Decides by what all processes have told who reads what, and where the boundary is.

        Returns whether the next exchange begins.
        """
        self._waiting.end()
        shares = {process: Share.from_json(one) for process, one in told.items()}
        if not self.course.groups_left:
            self._agree_on_the_rest(shares, hosts)
            return False
        progress = {process: Progress.from_json(one) for process, one in told.items()} if self.boundary_moves else {}
        ready = all(one.ready for process, one in progress.items() if shares[process].ready)
        if ready and not all(share.ready for share in shares.values()):
            added = self._take_overs.of_share(shares, hosts, self.phase)
            if added is None:
                return False
            self._changed(added, added=True)
            self._reads.further.leave_to_others()
        if ready and (slow := self.course.leave_slow(shares)):
            self._changed(slow, added=True)
            self._reads.further.leave_to_others()
        self._take_overs.alone = frozenset()
        self._patience = None
        self._changed(self.course.deal(shares))
        if self.boundary_moves and not self.course.catching_up:
            self._move_boundary([*progress.values()])
            self._compiling.decide(seconds_direct(self._bytes, self.course.ends, [*progress.values()]))
        else:
            self._compiling.decide()
        return ready and self.course.groups_left

    def start_exchange(self) -> None:
        """Starts the next group's exchange, or lets it wait for the end of the one before."""
        place = self.course.ends.front
        group, number = self.course.group(place), self.course.order[place]
        contributions = self._reads.shares.take(place) if self._reads.shares.has(place) else None
        # What has been agreed on has to travel. The later all agree, the better they know where the boundary should be.
        meet_after = self._rates.half_of_exchange(place) if self.boundary_moves else 0.0
        self._exchanges.start(AgreedExchange(group, number, contributions, meet_after, lambda: self._reads.back.leaves))
        self.course.next()
        self._reads.probe(number, compare=self._rates.fabric_busy.part < _MOSTLY)

    def arrays(self) -> list[jax.Array]:
        """Returns all arrays in the order of the request, when everything is there."""
        assert self._reads.direct is not None
        arrays = self._exchanges.arrays | self._reads.back.arrays() | self._reads.direct.result()
        return [arrays[index] for index in range(len(self._request.leaf_requests))]

    def _agree_on_the_rest(self, shares: Mapping[int, Share], hosts: Mapping[int, str]) -> None:
        lacking = {number for share in shares.values() for number in share.lacks}
        added = self._take_overs.of_direct(shares, hosts, self.phase) if lacking else []
        if added is not None:
            self._take_overs.alone = frozenset()
            self._changed(added, added=True)
            self._reads.back.drop(lacking)
            # Who was asked to come may wait for an exchange still. The next time nobody is asked: nothing is lacking.
            self.done = not lacking and not any(share.busy for share in shares.values())

    def _changed(self, numbers: Sequence[int], *, added: bool = False) -> None:
        """Prepares groups that were added to the course, or dealt again."""
        if not numbers and not added:
            return
        self._executor.extend(self.course.plan.leaves)
        for number in sorted(numbers, key=self.course.order.index):
            self._compiling.again(number)
            if added and self.boundary_moves:
                plan = dataclasses.replace(self.course.plan, groups=(self.course.plan.groups[number],))
                (counted,) = bytes_of_groups(plan, self._request.mesh_infos, jax.process_count())
                self._bytes.insert(self.course.order.index(number), counted)
        self._note_plan()

    def _move_boundary(self, progress: Sequence[Progress]) -> None:
        ends = self.course.ends
        boundary = next_boundary(self._bytes, ends, progress)
        if boundary == ends.back:
            again = meet_again_after(self._bytes, ends, progress)
            if not self._exchanges.started and not all(one.ready for one in progress):
                if everything_is_read(self._bytes, ends, progress):
                    again = min(again, 0.05 + 1.1 * seconds_direct(self._bytes, ends, progress))
                else:  # somebody still reads, or could not: nobody knows when to meet, so there are few meetings
                    again = 0.1 + 2 * max(one.waiting for one in progress)
            self._patience = again if math.isfinite(again) else None
            return
        shares = self._reads.shares
        if shares.begun > boundary:  # nothing travels any more, it has read more at the meeting, or all hold the group
            kept = self._executor.kept.bytes if boundary == ends.front else 0
            self._recorder.unused(self._reads.unused(boundary) - kept)
            shares.give_up(boundary)
        self._reads.back.begin(self.course.move_boundary(boundary))
        self._note_plan()

    async def _patience_ends(self, until: float) -> None:
        """Waits until all is read that may be read, and until a time: it may be better not to wait for programs."""
        await self._reads.everything_read(None, strict=self._strict)
        await asyncio.sleep(max(0.0, until - time.monotonic()))

    def _note_plan(self) -> None:
        self._recorder.planned(len(self._request.leaves), self._request.mesh_infos, self.course.carried_out)

    async def _everything_arrived(self) -> None:
        """Waits for the last exchanges and for all direct reads."""
        await _ended([*self._reads.kept, *self._reads.back.under_way, *self._exchanges.under_way], ())
        ended: list[asyncio.Future[Any]] = [*self._reads.kept, *self._exchanges.under_way]
        for task in ended:  # more is handed over now than there was before
            task.result()

    @property
    def _prepared(self) -> list[asyncio.Future[Any]]:
        """What the next exchange waits for on this process, beside the share."""
        return [*self._compiling.of(self.course.order[self.course.ends.front]), *self._exchanges.before_meeting]

    def _kinds(self) -> set[tuple[int, tuple[str, ...]]]:
        ends = self.course.ends
        groups = [self.course.group(place) for place in range(ends.front, ends.back)]
        return {(group.mesh, group.axes) for group in groups}

    def _begin_more_reads(self) -> None:
        """Begins to read what the memory limit has room for."""
        if self._at_work and self.course.groups_left:
            self._reads.begin(self._exchanges.waiting)


async def _ended(tasks: Sequence[asyncio.Future[Any]], raised: Sequence[asyncio.Future[Any]]) -> None:
    """Waits for tasks and raises the errors of some. Can be given up: that cancels none of them."""
    await asyncio.wait(tasks)
    for task in raised:
        task.result()
