from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from orbax_ext.upstream.hooks import Hook, install, served_by, serving


def _add(original: Callable[[], str], word: str) -> Callable[[], str]:
    return lambda: f"{original()} {word}"


@pytest.fixture
def owner() -> Any:
    module = types.ModuleType("owner")
    module.greet = lambda: "hello"  # type: ignore[attr-defined]
    return module


def test_replacements_make_layers_that_go_in_any_order(owner: Any) -> None:
    original, hook = owner.greet, Hook(owner, "greet", "for a test", _add)
    undo_first, undo_second = install([hook], "one"), install([hook], "two")
    assert owner.greet() == "hello one two"
    undo_first()
    assert owner.greet() == "hello two"
    undo_first()  # does nothing
    undo_second()
    assert owner.greet is original


def test_a_function_that_other_code_has_replaced_is_left_alone(owner: Any) -> None:
    hook = Hook(owner, "greet", "for a test", _add)
    undo = install([hook], "one")
    owner.greet = theirs = lambda: "theirs"
    undo()
    assert owner.greet is theirs


def test_a_layer_over_another_program_s_replacement_goes_without_it(owner: Any) -> None:
    hook = Hook(owner, "greet", "for a test", _add)
    undo_first = install([hook], "one")
    owner.greet = theirs = lambda: "theirs"
    undo_second = install([hook], "two")
    assert owner.greet() == "theirs two"
    undo_second()
    undo_first()
    assert owner.greet is theirs


def test_a_failing_replacement_leaves_nothing_behind(owner: Any) -> None:
    def fail(original: Callable[[], str], word: str) -> Callable[[], str]:
        raise RuntimeError(word)

    original = owner.greet
    with pytest.raises(RuntimeError):
        install([Hook(owner, "greet", "for a test", _add), Hook(owner, "greet", "for a test", fail)], "one")
    assert owner.greet is original


def test_the_hook_that_serves_a_restore_is_known_meanwhile() -> None:
    assert served_by() == ""
    with serving("Handler.deserialize"):
        assert served_by() == "Handler.deserialize"
    assert served_by() == ""


def test_hooks_are_named_by_owner_and_function() -> None:
    assert Hook(types, "prepare_class", "for a test", _add).label == "types.prepare_class"
    assert Hook(str, "upper", "for a test", _add).label == "str.upper"
