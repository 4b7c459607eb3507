"""`orbax-ext check --local`: one result from the outcomes of all processes."""

from __future__ import annotations

import pytest

from orbax_ext.cli.check import command
from orbax_ext.cli.check.verdict import CheckResult, ProcessResult
from orbax_ext.lab import Failure, Outcome

pytestmark = pytest.mark.once

RESULT = CheckResult("/ckpt", {0: ProcessResult("a", 8, {})})
RETURNED = Outcome(0, "returned", RESULT)


def test_all_processes_return_the_same_result() -> None:
    assert command.result_of("/ckpt", [RETURNED, RETURNED]) == RESULT


def test_a_process_that_died_is_the_error() -> None:
    result = command.result_of("/ckpt", [RETURNED, Outcome(1, "died", exit_code=-9)])
    assert result.error == "process 1 died with exit code -9"
    assert result.processes == RESULT.processes


def test_an_error_of_the_restore_comes_before_a_lost_process() -> None:
    failed = CheckResult("/ckpt", {}, error="the disk is gone")
    outcomes = [Outcome(0, "returned", failed), Outcome(1, "timed out")]
    assert command.result_of("/ckpt", outcomes) == failed


def test_only_the_first_line_of_each_failure_is_shown() -> None:
    outcomes = [Outcome(0, "timed out"), Outcome(1, "raised", failure=Failure("OSError", "one\ntwo", ""))]
    assert command.result_of("/ckpt", outcomes).error == "process 0 timed out; process 1 raised OSError: one"
