from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbax_ext import errors
from orbax_ext.meeting import wire
from orbax_ext.meeting.terms import MAX_VALUE

HOSTS = {0: "host0", 1: "host1"}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-9, 9),
    st.sampled_from(["", "x", "yz"]),
    st.lists(st.integers(0, 2), max_size=2),
)


def sent(value: Any) -> Any:
    """The value as another process receives it."""
    return json.loads(json.dumps(value, ensure_ascii=False))


# Contributions.


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.integers(0, 20), st.dictionaries(st.sampled_from("abc"), VALUES), min_size=1))
def test_packed_contributions_are_unpacked_unchanged(contributions: dict[int, dict[str, object]]) -> None:
    assert wire.unpack(sent(wire.pack(contributions))) == contributions


def test_a_value_that_all_processes_share_is_sent_once() -> None:
    contributions = {process: {"facts": "x" * 1000} for process in range(1000)}
    assert len(json.dumps(wire.pack(contributions))) < 10_000


def test_values_that_differ_are_sent_by_process() -> None:
    assert wire.pack({0: {"a": 1, "b": 2}, 1: {"a": 1, "b": 3}, 2: {"a": 1, "b": 2}, 4: {"b": 2}}) == {
        "processes": [0, 1, 2, 4],
        "usual": {"a": 1, "b": 2},
        "others": {"1": {"b": 3}},
        "lacking": {"4": ["a"]},
    }


# Failures.


def test_a_failure_keeps_message_traceback_and_type() -> None:
    try:
        raise FileNotFoundError("no such leaf")
    except FileNotFoundError as error:
        contribution = sent(wire.failure_to_json(error))
    assert wire.failures_from_json({0: {}, 1: contribution}, HOSTS, "read").keys() == {1}
    failure = wire.failures_from_json({1: contribution}, HOSTS, "read")[1]
    assert (failure.host, failure.phase, failure.kind) == ("host1", "read", "FileNotFoundError")
    assert failure.error == "FileNotFoundError: no such leaf"
    assert 'raise FileNotFoundError("no such leaf")' in failure.traceback


def test_a_failure_of_a_derived_type_keeps_its_built_in_type() -> None:
    class LeafError(KeyError):
        pass

    contribution = sent(wire.failure_to_json(LeafError("bias")))
    assert contribution["error"] == "LeafError: 'bias'"
    failures = wire.failures_from_json({0: contribution}, HOSTS, "read")
    assert isinstance(errors.restore_failed(failures), KeyError)


def test_a_failure_names_what_a_bare_exception_was_raised_from() -> None:
    cause = OSError('Error reading "bias/0" at local file "/checkpoint/"')
    for error, named in {
        Exception("a page about an array"): f"OSError: {cause}",
        RuntimeError("more specific"): "RuntimeError: more specific",
    }.items():
        error.__cause__ = cause
        contribution = wire.failure_to_json(error)
        assert contribution["error"] == named
        assert contribution["kind"] == type(error).__name__  # as without orbax_ext
        assert str(error) in contribution["traceback"]
    error = Exception("reading was cancelled")
    error.__cause__ = asyncio.CancelledError()
    assert wire.failure_to_json(error)["error"] == "Exception: reading was cancelled"


def test_a_long_failure_fits_into_a_contribution() -> None:
    try:
        raise OSError('"\n' * 100_000 + "the end")
    except OSError as error:
        contribution = wire.failure_to_json(error)
    assert len(contribution["error"]) == wire.MAX_ERROR
    assert contribution["error"].startswith('OSError: "')
    assert contribution["traceback"].endswith("the end\n")  # the end of a traceback is what matters
    assert len(json.dumps(contribution)) < MAX_VALUE


def test_a_failure_has_no_secrets_and_no_characters_that_the_service_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBAX_EXT_TEST_TOKEN", "tops3cret-value")
    try:
        raise OSError("denied: tops3cret-value\x00\udc80")
    except OSError as error:
        contribution = wire.failure_to_json(error)
    assert "tops3cret" not in str(contribution)
    assert contribution["error"] == "OSError: denied: <ORBAX_EXT_TEST_TOKEN>??"


def test_a_secret_that_would_be_cut_in_half_is_removed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBAX_EXT_TEST_TOKEN", "tops3cret-value")
    filler = "x" * (wire.MAX_ERROR - len("OSError: ") - 4)
    assert "tops" not in wire.failure_to_json(OSError(f"{filler}tops3cret-value"))["error"]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit()])
def test_an_interruption_has_a_message(error: BaseException) -> None:
    assert wire.failure_to_json(error)["error"] == f"{type(error).__name__}: the restore was interrupted"


@pytest.mark.parametrize(
    "contribution", [{"error": 7}, {"error": None, "traceback": 3}, {"error": "x", "kind": ["ValueError"], "more": 1}]
)
def test_a_damaged_failure_is_still_a_failure(contribution: dict[str, Any]) -> None:
    failure = wire.failures_from_json({0: contribution}, HOSTS, "read")[0]
    assert failure.error == str(contribution["error"])
    assert type(errors.restore_failed({0: failure})) is errors.RestoreFailedError


# Errors that one process raises on behalf of all.


def test_a_failed_restore_is_raised_with_the_same_message_and_type() -> None:
    failures = {3: errors.ProcessFailure("host3", "read", "ValueError: no", "Traceback ...", "ValueError")}
    error = wire.restore_error_from_json(sent(wire.restore_error_to_json(errors.restore_failed(failures))))
    assert isinstance(error, errors.RestoreFailedError)
    assert isinstance(error, ValueError)
    assert error.failures == failures


def test_a_time_out_is_raised_with_the_same_message_and_processes() -> None:
    original = errors.RestoreTimeoutError("gave up", [2, 1], {1: "last in phase 'read'"})
    error = wire.restore_error_from_json(sent(wire.restore_error_to_json(original)))
    assert isinstance(error, errors.RestoreTimeoutError)
    assert (str(error), error.missing, error.phases) == ("gave up", (1, 2), {1: "last in phase 'read'"})


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"failures": []},
        {"failures": {"x": ["host", "read", "error"]}},
        {"failures": {"0": ["host"]}},
        {"message": "gave up", "missing": ["x"], "phases": {}},
        {"message": "gave up", "missing": [1]},
    ],
)
def test_a_damaged_error_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        wire.restore_error_from_json(value)


def test_an_error_of_another_process_chooses_only_among_built_in_exceptions() -> None:
    error = wire.restore_error_from_json({"failures": {"0": ["host", "read", "error", "", "eval"]}})
    assert type(error) is errors.RestoreFailedError
