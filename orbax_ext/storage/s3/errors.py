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

# What obstore says of a store's answer. Its text also repeats the whole request and answer, in several forms.
_CODE = re.compile(r"<Code>\s*([\w.-]+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_STATUS = re.compile(r"status code: (\d+ [A-Za-z ]*[A-Za-z])")
_DENIED_STATUS = re.compile(r"status code: 40[13] ")
_INSTANCE_SERVICE = re.compile(r"://[^/\s]+/latest/(?:api/token|meta-data/iam/)")  # asked after all other places
_PROVIDER = re.compile(r"credential provider: DeniedError: (.*)")  # raised by our own provider
_DEBUG = re.compile(r"\s*Debug source:.*", re.DOTALL)

NO_CREDENTIALS = (
    "No credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile, or give anonymous=True for "
    "a public bucket."
)
_DENIED = "these credentials may not do this: check the bucket policy and which credentials are in use"
_ELSEWHERE = "the bucket is in another region: give region=, or set AWS_REGION"
_THROTTLED = "the store throttles: try again later, with fewer hosts at once"
_BROKEN = "the store had an internal error: try again later"
_REMEDIES = {
    "PermanentRedirect": _ELSEWHERE,
    "AuthorizationHeaderMalformed": _ELSEWHERE,
    "incorrectly configured region": _ELSEWHERE,  # what obstore says of a redirection
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
    "SlowDown": _THROTTLED,
    "TooManyRequests": _THROTTLED,
    "Too Many Requests": _THROTTLED,
    "ServiceUnavailable": "the store did not answer in time: try again later",
    "Service Unavailable": _THROTTLED,  # the status alone, which is all that the answer to a HEAD says
    "InternalError": _BROKEN,
    "Internal Server Error": _BROKEN,
    "CURL error": "the connection failed again and again: check the endpoint and the network",
    "error sending request": "no answer: check the endpoint and the network",
    "HTTP error": "the connection failed again and again: check the endpoint and the network",
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
    """Replaces errors of obstore by ones that name bucket, key and remedy, and hold no secret."""
    try:
        yield
    except (FileExistsError, ImportError, ExplainedError):
        raise
    except Exception as error:
        raise _explained(error, os.fspath(path)) from None


def _explained(error: Exception, path: str) -> Exception:
    text = str(error)
    if words := _PROVIDER.search(text):
        return DeniedError(explanation(path, words[1]))
    if _INSTANCE_SERVICE.search(text):
        reason = without_secrets(_reason(error)).strip()
        return DeniedError(f"{path}: {NO_CREDENTIALS} This machine's instance role gave none either: {reason}")
    if is_missing_bucket(error):
        return MissingBucketError(explanation(path, _reason(error)))
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{path} does not exist.")
    denied = isinstance(error, PermissionError) or _DENIED_STATUS.search(text)
    return (DeniedError if denied else StoreError)(explanation(path, _reason(error)))


def is_missing_bucket(error: Exception) -> bool:
    return "NoSuchBucket" in str(error)


def _reason(error: Exception) -> str:
    """Returns the store's error code and message, or its status, or what the client says without an answer."""
    text = str(error)
    if code := _CODE.search(text):
        message = _MESSAGE.search(text)
        return f"{code[1]}: {' '.join(message[1].split())}" if message else code[1]
    if status := _STATUS.search(text):
        return status[1]
    return f"{type(error).__name__}: {_DEBUG.sub('', text)}"


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
