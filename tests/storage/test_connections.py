from __future__ import annotations

import os

import pytest

from orbax_ext.storage import connections
from tests.support import states

TIME = "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS"
VARIABLES = (TIME, "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS")
TRUST = ("TENSORSTORE_CA_BUNDLE", "TENSORSTORE_CA_PATH")


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *TRUST):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)


def test_a_limit_is_set_unless_the_user_has_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIME, "7")
    assert connections.limit_silence(60) == {VARIABLES[1]: "4096", VARIABLES[2]: "30"}
    assert os.environ[TIME] == "7"
    assert connections.limit_silence(60) == {}


@pytest.mark.parametrize(
    ("path", "given", "seconds"),
    [
        ("gs://bucket/run", None, "60"),
        ("gs://bucket/run", 7.0, "7"),
        ("/data/run", 7.0, None),
        ("s3://bucket/x", None, "60"),
        ("s3://bucket/x", 7.0, "7"),
    ],
)
def test_a_restore_limits_silence_to_a_part_of_its_own_limit(
    path: str, given: float | None, seconds: str | None
) -> None:
    connections.limit_silence_in([path], given, 1000, 300.0)
    assert os.environ.get(TIME) == seconds
    assert os.environ.get(VARIABLES[1]) == (None if seconds is None else "1000")


@pytest.mark.parametrize(
    ("seconds", "rate", "expected"),
    [(None, 4096, ("20", "300")), (None, 1000, ("20", "1000")), (7.0, 4096, ("7", "300")), (7.0, 1000, ("7", "1000"))],
)
def test_what_the_knobs_leave_open_is_as_s3_was_enabled(
    seconds: float | None, rate: int, expected: tuple[str, str]
) -> None:
    connections.limit_silence_in(["/data/x", "s3://bucket/x"], seconds, rate, 300.0, enabled=(20, 300))
    assert tuple(os.environ[name] for name in VARIABLES[:2]) == expected


def test_other_stores_do_not_take_the_limits_of_s3() -> None:
    connections.limit_silence_in(["gs://bucket/x"], None, 4096, 300.0, enabled=(20, 300))
    assert tuple(os.environ[name] for name in VARIABLES[:2]) == ("60", "4096")


def test_authorities_are_trusted_unless_the_user_has_said_whom_to_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connections.trust(None) == {}
    assert connections.trust("ca.pem") == {"TENSORSTORE_CA_BUNDLE": "ca.pem"}
    assert connections.trust("other.pem") == {}
    assert os.environ["TENSORSTORE_CA_BUNDLE"] == "ca.pem"
    monkeypatch.delenv("TENSORSTORE_CA_BUNDLE")
    monkeypatch.setenv("TENSORSTORE_CA_PATH", "/certificates")
    assert connections.trust("ca.pem") == {}


def test_a_knob_that_comes_too_late_is_named_once() -> None:
    connections._warn.cache_clear()
    connections.limit_silence_in(["gs://bucket/x"], None, 4096, 300.0)
    with states.logged() as lines:
        connections.limit_silence_in(["gs://bucket/x"], None, 4096, 100.0)  # what is no knob is no promise
        connections.limit_silence_in(["gs://bucket/x"], 60.0, 4096, 300.0)
        for _ in range(2):
            connections.limit_silence_in(["gs://bucket/x"], 7.0, 1000, 300.0)
    assert lines == [
        f"orbax_ext: stall_seconds=7 has no effect: {TIME} is 60 in this process already, and TensorStore reads it "
        "only once",
        f"orbax_ext: stall_rate=1000 has no effect: {VARIABLES[1]} is 4096 in this process already, and TensorStore "
        "reads it only once",
    ]
