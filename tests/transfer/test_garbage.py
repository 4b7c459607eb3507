"""How often Python collects garbage during a restore."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from orbax_ext.plan import Leaf
from orbax_ext.transfer import garbage

pytestmark = pytest.mark.once

SMALL = [Leaf("small", (1024,), "float32", 4, (1024,))] * 1000
LARGE = [Leaf("large", (1 << 20,), "float32", 4, (1 << 20,))] * 1000
BEFORE = (701, 11, 9)


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*BEFORE)
    yield
    gc.set_threshold(*before)


def test_it_is_collected_less_often_while_small_leaves_are_restored() -> None:
    with garbage.collected_seldom(SMALL):
        assert gc.get_threshold()[0] > BEFORE[0]
    assert gc.get_threshold() == BEFORE


def test_it_is_collected_as_before_after_an_error() -> None:
    def restore() -> None:
        with garbage.collected_seldom(SMALL):
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        restore()
    assert gc.get_threshold()[0] == BEFORE[0]


@pytest.mark.parametrize("leaves", [SMALL[:10], LARGE], ids=["few", "large"])
def test_it_is_collected_as_often_where_that_costs_little(leaves: list[Leaf]) -> None:
    with garbage.collected_seldom(leaves):
        assert gc.get_threshold()[0] == BEFORE[0]


@pytest.mark.parametrize("threshold", [0, 50_000], ids=["off", "less often"])
def test_what_the_program_has_set_is_kept(threshold: int) -> None:
    gc.set_threshold(threshold)
    with garbage.collected_seldom(SMALL):
        assert gc.get_threshold()[0] == threshold
    assert gc.get_threshold()[0] == threshold


def test_what_the_program_sets_meanwhile_is_kept() -> None:
    with garbage.collected_seldom(SMALL):
        gc.set_threshold(5000)
    assert gc.get_threshold()[0] == 5000
