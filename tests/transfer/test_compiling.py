"""Programs are compiled beside reads, and nothing goes on being compiled that nobody needs."""

from __future__ import annotations

import asyncio
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
