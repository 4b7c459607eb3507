from __future__ import annotations

from orbax_ext.errors import PlanMismatchError, ProcessFailure, RestoreError, RestoreFailedError, RestoreTimeoutError


def test_every_error_is_a_restore_error() -> None:
    for kind in (RestoreFailedError, RestoreTimeoutError, PlanMismatchError):
        assert issubclass(kind, RestoreError)


def test_a_failure_names_process_host_phase_and_cause() -> None:
    error = RestoreFailedError({3: ProcessFailure("node7", "read group 1 of 2", "OSError: disk gone")})
    assert str(error) == (
        "restore failed on 1 process:\n  process 3 (node7), in phase 'read group 1 of 2': OSError: disk gone"
    )


def test_equal_failures_are_told_once() -> None:
    failures = {number: ProcessFailure(f"node{number}", "compile", "ValueError: no") for number in range(100)}
    text = str(RestoreFailedError(failures))
    assert text.startswith("restore failed on 100 processes:\n")
    assert text.count("ValueError") == 1
    assert "0 (node0)" in text
    assert "and others" in text
