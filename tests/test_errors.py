from __future__ import annotations

import pickle

import pytest

from orbax_ext import errors
from orbax_ext.errors import PlanMismatchError, ProcessFailure, RestoreError, RestoreFailedError, RestoreTimeoutError


def test_every_error_of_a_restore_is_a_restore_error() -> None:
    for kind in (RestoreFailedError, RestoreTimeoutError, PlanMismatchError):
        assert issubclass(kind, RestoreError)


def test_a_failure_names_process_host_phase_and_cause() -> None:
    error = RestoreFailedError({3: ProcessFailure("node7", "read group 1 of 2", "OSError: disk gone")})
    assert str(error) == (
        "restore failed on 1 process:\n  process 3 (node7), in phase 'read group 1 of 2': OSError: disk gone"
    )


def test_processes_with_the_same_error_share_a_line() -> None:
    failures = {number: ProcessFailure(f"node{number}", "compile", "ValueError: no") for number in range(100)}
    text = str(RestoreFailedError(failures))
    assert text.startswith("restore failed on 100 processes:\n")
    assert text.count("ValueError") == 1
    assert "0 (node0)" in text
    assert "7 (node7) and 92 more, in phase" in text


def failure(kind: str) -> ProcessFailure:
    return ProcessFailure("host", "read", f"{kind}: no such leaf", "", kind)


@pytest.mark.parametrize(
    "kind", [ValueError, KeyError, FileNotFoundError, RuntimeError, TypeError, NotImplementedError]
)
def test_a_failure_can_be_caught_as_the_built_in_type_that_was_raised(kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"process 1 .*no such leaf") as caught:
        raise errors.restore_failed({1: failure(kind.__name__)})
    assert isinstance(caught.value, RestoreFailedError)
    assert str(caught.value).startswith("restore failed on 1 process")


def test_a_type_that_needs_more_than_a_message_is_replaced_by_its_base() -> None:
    kinds = type(errors.restore_failed({0: failure("UnicodeDecodeError")})).__mro__
    assert UnicodeError in kinds
    assert UnicodeDecodeError not in kinds


def test_failures_of_related_types_share_the_type_that_they_have_in_common() -> None:
    kinds = type(errors.restore_failed({0: failure("FileNotFoundError"), 1: failure("PermissionError")})).__mro__
    assert OSError in kinds
    assert not {FileNotFoundError, PermissionError} & set(kinds)


@pytest.mark.parametrize("kind", ["ExceptionGroup", "Exception", "KeyboardInterrupt", "eval", ""])
def test_a_name_of_no_usable_built_in_type_makes_a_plain_failure(kind: str) -> None:
    assert type(errors.restore_failed({0: failure(kind)})) is RestoreFailedError


def test_failures_of_different_types_make_a_plain_failure() -> None:
    assert type(errors.restore_failed({0: failure("ValueError"), 1: failure("OSError")})) is RestoreFailedError


def test_a_failure_of_a_built_in_type_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(errors.restore_failed({2: failure("ValueError")})))
    assert isinstance(again, ValueError)
    assert isinstance(again, RestoreFailedError)
    assert again.failures == {2: failure("ValueError")}


def test_the_kind_of_an_error_is_its_nearest_built_in_type() -> None:
    class TopologyError(FileNotFoundError):
        pass

    assert errors.builtin_kind(TopologyError()) == "FileNotFoundError"


@pytest.mark.parametrize(
    "error",
    [
        errors.restore_failed({1: errors.ProcessFailure("host", "read", "KeyError: 'a'", kind="KeyError")}),
        errors.RestoreTimeoutError("nobody came", [1], {}),
        errors.PlanMismatchError("no agreement", {}),
    ],
)
def test_a_remark_is_part_of_the_message(error: errors.RestoreError) -> None:
    before = str(error)
    errors.add_remark(error, "The old state is gone.")
    assert str(error) == f"{before}\nThe old state is gone."
    if isinstance(error, errors.RestoreFailedError):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_remark_about_another_error_is_a_note() -> None:
    error = ValueError("bad")
    errors.add_remark(error, "The old state is gone.")
    assert error.__notes__ == ["The old state is gone."]
