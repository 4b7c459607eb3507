"""Removes secrets from text that leaves the process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSW|PWD$|CREDENTIAL|AUTH|SIGNATURE", re.IGNORECASE)
_SHORTEST = 6  # characters: shorter values, such as "true", are no secrets and occur everywhere
_SHORTEST_KEY = 4  # of the variables below, which never hold such words
_KEYS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
_PATTERNS = (
    (re.compile(r"(?<=://)[^/\s@]+@"), "<credentials>@"),  # https://user:password@host
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), "<access key>"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), r"\1 <token>"),
    (re.compile(r"(?i)(x-amz-(?:signature|credential|security-token)=)[^&\s]+"), r"\1<hidden>"),
)


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the text without credentials and without the values of environment variables named like secrets."""
    secrets = {
        value: name
        for name, value in environ.items()
        if _SECRET_NAME.search(name) and len(value) >= (_SHORTEST_KEY if name in _KEYS else _SHORTEST)
    }
    for value in sorted(secrets, key=len, reverse=True):  # one may be part of another
        text = text.replace(value, f"<{secrets[value]}>")
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def sendable(text: str) -> str:
    """Returns the text as the coordination service accepts it: without lone surrogates and control characters."""
    encodable = text.encode("utf-8", "replace").decode()
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in encodable)
