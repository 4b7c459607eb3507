"""The messages of a local cluster."""

from __future__ import annotations

import pathlib
import sys

import pytest

from orbax_ext.lab import Failure, Outcome, protocol
from orbax_ext.lab.protocol import Job

pytestmark = pytest.mark.once


class Nested:
    @staticmethod
    def three() -> int:
        return 3


@pytest.mark.parametrize("function", [pathlib.Path.cwd, Nested.three], ids=["a class method", "a static method"])
def test_a_function_is_found_by_its_name(function: object) -> None:
    assert callable(function)
    found = protocol.find_function(Job(*protocol.describe_function(function), args=(), kwargs={}))
    assert found == function


def test_a_function_of_a_script_is_found_without_running_its_main_part(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "__orbax_ext_lab_main__", raising=False)  # and again after the test
    script = tmp_path / "mine.py"
    script.write_text("def four():\n    return 4\nif __name__ == '__main__':\n    raise SystemExit('it ran')\n")
    assert protocol.find_function(Job("__main__", "four", str(script), (), {}))() == 4


def test_a_function_without_a_module_level_name_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a module's own function"):
        protocol.describe_function(lambda: None)


def test_a_failure_keeps_type_message_and_traceback() -> None:
    try:
        raise KeyError("missing")
    except KeyError as error:
        failure = Failure.of(error)
    assert str(failure) == "KeyError: 'missing'"
    assert "test_a_failure_keeps" in failure.traceback


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome(3, "returned", 1), "process 3 returned"),
        (Outcome(3, "raised", failure=Failure("OSError", "no", "")), "process 3 raised OSError: no"),
        (Outcome(3, "died", exit_code=-9), "process 3 died with exit code -9"),
        (Outcome(3, "timed out"), "process 3 timed out"),
    ],
)
def test_an_outcome_names_its_process(outcome: Outcome, text: str) -> None:
    assert str(outcome) == text
    assert outcome.ok == (outcome.state == "returned")
