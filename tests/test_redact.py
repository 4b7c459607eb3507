from __future__ import annotations

import pytest

from orbax_ext.meeting.wire import failure_to_json
from orbax_ext.redact import redact, sendable

pytestmark = pytest.mark.once


def test_values_of_variables_that_speak_of_secrets_are_taken_out() -> None:
    environ = {
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "HF_TOKEN": "hf_abcdef",
        "HOME": "/home/me",
        "DB_PASSWORD": "pässwörd",
    }
    text = "no access with wJalrXUtnFEMI or hf_abcdef or pässwörd in /home/me"
    expected = "no access with <AWS_SECRET_ACCESS_KEY> or <HF_TOKEN> or <DB_PASSWORD> in /home/me"
    assert redact(text, environ) == expected


def test_a_secret_inside_another_does_not_give_the_rest_away() -> None:
    assert redact("abcdef123456", {"A_KEY": "abcdef", "B_KEY": "abcdef123456"}) == "<B_KEY>"


def test_short_values_are_left_alone() -> None:
    assert redact("it is true", {"USE_TOKEN": "true", "EMPTY_KEY": ""}) == "it is true"


def test_credentials_in_addresses_and_headers_are_taken_out() -> None:
    found = redact(
        "GET https://user:pw@host/x?X-Amz-Signature=abc123&y=1 "
        "Authorization: Bearer abcdefghij for AKIAIOSFODNN7EXAMPLE",
        {},
    )
    expected = (
        "GET https://<credentials>@host/x?X-Amz-Signature=<hidden>&y=1 Authorization: Bearer <token> for <access key>"
    )
    assert found == expected


def test_what_an_error_tells_the_others_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORBAX_EXT_TEST_TOKEN", "tops3cret-value")
    payload = failure_to_json(OSError("denied: tops3cret-value"))
    assert "tops3cret" not in str(payload)
    assert payload["error"] == "OSError: denied: <ORBAX_EXT_TEST_TOKEN>"


def test_text_becomes_what_the_service_takes() -> None:
    assert sendable("ä\udc80\x00\n\t") == "ä??\n\t"
