"""Messages for what an object store answers: what failed, on which object, what to do; never a secret."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator

from orbax_ext.redact import redact

# A store may repeat in its answer what it was sent: AWS puts an expired session token into its error document.
_DETAIL = r"\s*\[(?:http_response_body|tensorstore_spec)="
_LONG_DETAIL = re.compile(_DETAIL + r"'(?:[^'\\]|\\.)*'\]", re.DOTALL)
_UNCLEAR_DETAIL = re.compile(_DETAIL + r".*", re.DOTALL)  # not quoted as expected: everything after it goes too
_SECRET_ELEMENT = re.compile(
    r"<(Token-\d+|AWSAccessKeyId|StringToSign|StringToSignBytes|CanonicalRequest|CanonicalRequestBytes|SignatureProvided)>"
    r".*?</\1>",
    re.DOTALL,
)

_DENIED = "these credentials may not do this: check the bucket policy and which credentials are in use"
_REMEDIES = {
    "NoSuchBucket": "create the bucket, or check its name, the endpoint and the region",
    "NoSuchKey": "the object is missing: was the checkpoint deleted, or never finished?",
    "AccessDenied": _DENIED,
    "Forbidden": _DENIED,
    "PERMISSION_DENIED": _DENIED,
    "ExpiredToken": "the session has expired: renew the credentials and restart",
    "InvalidToken": "the session token is not valid: renew the credentials and restart",
    "InvalidAccessKeyId": "the endpoint does not know this access key: check endpoint and credentials",
    "SignatureDoesNotMatch": "the secret key or the region is wrong, or a proxy changes requests",
    "Bad Request": "the store gave no reason; expired credentials are the usual one",
    "SlowDown": "the store throttles: try again later, with fewer hosts at once",
    "ServiceUnavailable": "the store did not answer in time: try again later",
    "InternalError": "the store had an internal error: try again later",
    "CURL error": "the connection failed again and again: check the endpoint and the network",
    "EndpointConnectionError": "nothing answers there: check the endpoint and the network",
}


class ExplainedError(Exception):
    """An error whose message is already an explanation."""


class StoreError(ExplainedError, OSError):
    """The store failed, or could not be reached."""


class DeniedError(ExplainedError, PermissionError):
    """The store denied access."""


class MissingBucketError(ExplainedError, FileNotFoundError):
    """There is no such bucket."""


@contextlib.contextmanager
def explained(path: str | os.PathLike[str]) -> Iterator[None]:
    """Replaces errors of s3fs by ones that name bucket, key and remedy, and hold no secret."""
    try:
        yield
    except (FileExistsError, ImportError, ExplainedError):
        raise
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error) or "bucket does not exist" in str(error):
            raise MissingBucketError(explanation(os.fspath(path), f"NoSuchBucket: {error}")) from None
        raise FileNotFoundError(f"{os.fspath(path)} does not exist.") from None
    except Exception as error:
        kind = DeniedError if isinstance(error, PermissionError) else StoreError
        raise kind(explanation(os.fspath(path), f"{_code(error)}: {error}")) from None


@contextlib.contextmanager
def reads_explained(path: str | os.PathLike[str]) -> Iterator[None]:
    """Replaces errors of TensorStore, as `explain` does, if they are about S3."""
    try:
        yield
    except Exception as error:
        better = explain(error, os.fspath(path))
        if better is error:
            raise
        raise better from None


def explain(error: Exception, path: str) -> Exception:
    """Returns an error of TensorStore with remedy and without secrets; the error itself if it is not about S3."""
    text = str(error)
    about_s3 = path.startswith("s3://") or (not path and "s3" in text)
    if not about_s3 or not _is_from_a_store(text):
        return error
    kind = ValueError if isinstance(error, ValueError) else OSError  # TensorStore raises ValueError
    return kind(explanation(path or "s3", text))


def explanation(path: str, text: str) -> str:
    """Returns one line about a failure at a path, such as "s3://bucket/key", with the remedy if one is known."""
    message = without_secrets(text).strip()
    remedy = next((remedy for code, remedy in _REMEDIES.items() if code in text), None)
    head = message if path in message else f"{path}: {message}"
    return f"{head} ({remedy})" if remedy else head


def without_secrets(text: str) -> str:
    """Returns the text without the body of the store's answer and without credentials."""
    text = _UNCLEAR_DETAIL.sub("", _LONG_DETAIL.sub("", text))
    return redact(_SECRET_ELEMENT.sub(r"<\1>[withheld]</\1>", text))


class SecretFilter(logging.Filter):
    """Removes secrets from the errors that a logger prints."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if _is_from_a_store(message + (record.exc_text or "")):
            record.msg, record.args = without_secrets(message), None
            record.exc_info, record.exc_text = None, without_secrets(record.exc_text or "")
        return True


def _is_from_a_store(text: str) -> bool:
    """Whether TensorStore's message quotes an answer over HTTP, which may repeat what the store was sent."""
    return "http_response_" in text or "CURL error" in text or "curl_code" in text


def _code(error: Exception) -> str:
    """Returns the store's error code; s3fs keeps it in the cause."""
    answer = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    return str(answer.get("Error", {}).get("Code") or type(error).__name__)
