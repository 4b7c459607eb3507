"""Programs are compiled beside reads, and nothing goes on being compiled that nobody needs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, cast

import pytest

from orbax_ext.plan import Group
from orbax_ext.report.recorder import Recorder
from orbax_ext.transfer.compiling import Compiling
from tests.support.courses import make_course

pytestmark = pytest.mark.once


class SlowCompiler:
    """Stands in for the executor; notes what was begun and given up."""

    def __init__(self) -> None:
        self.begun = self.given_up = 0
        self.compiled = False  # by an earlier restore

    def is_compiled(self, groups: Sequence[Group]) -> bool:
        return self.compiled

    async def compile(self, groups: Sequence[Group]) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise


def test_a_group_that_is_dealt_again_is_not_compiled_as_it_was() -> None:
    async def case() -> None:
        compiler = SlowCompiler()
        compiling = Compiling(cast(Any, compiler), make_course("spread"), Recorder(), may_be_needless=False)
        compiling.again(1)
        await asyncio.sleep(0.01)
        compiling.again(1)
        await asyncio.sleep(0.01)
        assert (compiler.begun, compiler.given_up) == (2, 1)
        compiling.give_up()
        await asyncio.sleep(0.01)
        assert compiler.given_up == 2
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(case())


@pytest.mark.parametrize(
    ("direct", "begun"), [(math.inf, 1), (1.5, 1), (0.9, 0)], ids=["exchanges", "slow storage", "fast storage"]
)
def test_programs_are_put_off_where_reading_directly_takes_less_time(direct: float, begun: int) -> None:
    async def case() -> None:
        compiler = SlowCompiler()
        compiling = Compiling(cast(Any, compiler), make_course("spread"), Recorder(), may_be_needless=True)
        compiling.begin(1.0, lambda: False)
        compiling.decide(direct)
        for _ in range(10):
            await asyncio.sleep(0)
        assert compiler.begun == begun
        compiling.give_up()

    asyncio.run(case())


def test_programs_that_were_put_off_are_compiled_after_all() -> None:
    async def case() -> None:
        compiler = SlowCompiler()
        compiling = Compiling(cast(Any, compiler), make_course("spread"), Recorder(), may_be_needless=True)
        compiling.begin(1.0, lambda: False)
        compiling.decide(0.01)
        while not compiler.begun:
            await asyncio.sleep(0.01)
        compiling.give_up()

    asyncio.run(asyncio.wait_for(case(), 20))


@pytest.mark.parametrize(
    ("part", "any_share", "begun"),
    [(0.0, False, 1), (0.0, True, 0), (1e9, False, 0)],
    ids=["a small share is not read", "a share is read", "the share is all there is"],
)
def test_a_small_share_that_is_not_read_soon_is_enough_to_compile(part: float, any_share: bool, begun: int) -> None:
    async def case() -> None:
        compiler = SlowCompiler()
        compiling = Compiling(cast(Any, compiler), make_course("spread"), Recorder(), may_be_needless=True)
        compiling.begin(part, lambda: any_share)
        compiling._put_off_until = math.inf
        await asyncio.sleep(0.2)
        assert compiler.begun == begun
        compiling.give_up()

    asyncio.run(case())


def test_nothing_is_compiled_where_nothing_is_left_to_exchange() -> None:
    async def case() -> None:
        compiler, course = SlowCompiler(), make_course("spread")
        compiling = Compiling(cast(Any, compiler), course, Recorder(), may_be_needless=True)
        compiling.begin(1.0, lambda: False)
        course.move_boundary(0)
        compiling.decide()
        await asyncio.sleep(0.2)
        assert compiler.begun == 0
        assert all(task.done() for task in compiling.of(0))

    asyncio.run(case())


def test_what_an_earlier_restore_has_compiled_is_not_put_off() -> None:
    async def case() -> None:
        compiler = SlowCompiler()
        compiler.compiled = True
        compiling = Compiling(cast(Any, compiler), make_course("spread"), Recorder(), may_be_needless=True)
        compiling.begin(1.0, lambda: False)
        for _ in range(10):
            await asyncio.sleep(0)
        assert compiler.begun == 1
        compiling.give_up()

    asyncio.run(case())
