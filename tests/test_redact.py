from __future__ import annotations

import pytest

from orbax_ext.redact import redact, sendable

pytestmark = pytest.mark.once


def test_values_of_variables_named_like_secrets_are_removed() -> None:
    environ = {
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "HF_TOKEN": "hf_abcdef",
        "HOME": "/home/me",
        "DB_PASSWORD": "pässwörd",
    }
    text = "no access with wJalrXUtnFEMI or hf_abcdef or pässwörd in /home/me"
    expected = "no access with <AWS_SECRET_ACCESS_KEY> or <HF_TOKEN> or <DB_PASSWORD> in /home/me"
    assert redact(text, environ) == expected


def test_a_secret_that_contains_another_is_removed_whole() -> None:
    assert redact("abcdef123456", {"A_KEY": "abcdef", "B_KEY": "abcdef123456"}) == "<B_KEY>"


def test_short_values_are_kept() -> None:
    assert redact("it is true", {"USE_TOKEN": "true", "EMPTY_KEY": ""}) == "it is true"


def test_short_keys_of_aws_are_removed() -> None:
    assert redact("denied: abcd", {"AWS_SESSION_TOKEN": "abcd"}) == "denied: <AWS_SESSION_TOKEN>"


def test_a_signed_parameter_is_removed_wherever_it_stands() -> None:
    assert redact("urlX-Amz-Signature=abc", {}) == "urlX-Amz-Signature=<hidden>"


def test_credentials_in_addresses_and_headers_are_removed() -> None:
    text = redact(
        "GET https://user:pw@host/x?X-Amz-Signature=abc123&y=1 "
        "Authorization: Bearer abcdefghij for AKIAIOSFODNN7EXAMPLE",
        {},
    )
    expected = (
        "GET https://<credentials>@host/x?X-Amz-Signature=<hidden>&y=1 Authorization: Bearer <token> for <access key>"
    )
    assert text == expected


def test_characters_that_the_service_refuses_are_replaced() -> None:
    assert sendable("ä\udc80\x00\n\t") == "ä??\n\t"
