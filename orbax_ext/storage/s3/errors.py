"""Words for what an object store answers: what failed, on which object, what to do; never a secret."""

from __future__ import annotations

import logging
import os
import re

# A store may repeat in its answer what it was sent: AWS puts an expired session token into its error document.
_DETAIL = r"\s*\[(?:http_response_body|tensorstore_spec)="
_LONG_DETAIL = re.compile(_DETAIL + r"'(?:[^'\\]|\\.)*'\]", re.DOTALL)
_UNCLEAR_DETAIL = re.compile(_DETAIL + r".*", re.DOTALL)  # not quoted as expected: what follows goes too
_SECRET_ELEMENT = re.compile(
    r"<(Token-\d+|AWSAccessKeyId|StringToSign|StringToSignBytes|CanonicalRequest|CanonicalRequestBytes|SignatureProvided)>"
    r".*?</\1>",
    re.DOTALL,
)
_SECRET_PARAMETER = re.compile(r"(X-Amz-(?:Credential|Security-Token|Signature)=)[^&\s'\"]+", re.IGNORECASE)
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
_WITHHELD = "[withheld]"

_REMEDIES = {
    "NoSuchBucket": "create the bucket, or check its name, the endpoint and the region",
    "NoSuchKey": "the object is missing: was the checkpoint deleted, or never finished?",
    "AccessDenied": "these credentials may not do this: check the bucket policy and which credentials are in use",
    "Forbidden": "these credentials may not do this: check the bucket policy and which credentials are in use",
    "PERMISSION_DENIED": "these credentials may not do this: check the bucket policy and which credentials are in use",
    "ExpiredToken": "the session has expired: renew the credentials and restart",
    "InvalidToken": "the session token is not valid: renew the credentials and restart",
    "InvalidAccessKeyId": "the endpoint does not know this access key: check endpoint and credentials",
    "SignatureDoesNotMatch": "the secret key or the region is wrong, or a proxy changes requests",
    "Bad Request": "the store gave no reason; expired credentials are the usual one",
    "SlowDown": "the store throttles: try again later, with fewer hosts at once",
    "ServiceUnavailable": "the store did not answer in time: try again later",
    "InternalError": "the store failed inside: try again later",
    "CURL error": "the connection failed again and again: check the endpoint and the network",
    "EndpointConnectionError": "nothing answers there: check the endpoint and the network",
}


def cleaned(text: str) -> str:
    """The text without the store's answer in full, without credentials, and without anything secret of ours."""
    text = _UNCLEAR_DETAIL.sub("", _LONG_DETAIL.sub("", text))
    text = _SECRET_ELEMENT.sub(lambda match: f"<{match[1]}>{_WITHHELD}</{match[1]}>", text)
    text = _SECRET_PARAMETER.sub(lambda match: match[1] + _WITHHELD, text)
    for name in _SECRET_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= 4:
            text = text.replace(value, _WITHHELD)
    return text


def explain(what: str, text: str) -> str:
    """One line about a failure on `what`, such as "s3://bucket/key", with the remedy if there is one."""
    said = cleaned(text).strip()
    remedy = next((remedy for code, remedy in _REMEDIES.items() if code in text), None)
    head = said if what in said else f"{what}: {said}"
    return f"{head} ({remedy})" if remedy else head


def is_from_a_store(text: str) -> bool:
    """Whether TensorStore's words are about an answer over HTTP, and so may hold what the store repeated."""
    return "http_response_" in text or "CURL error" in text or "curl_code" in text


class CleanLog(logging.Filter):
    """For a logger that prints errors as they come, as asyncio's does with those nobody waited for any more."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if is_from_a_store(said + (record.exc_text or "")):
            record.msg, record.args = cleaned(said), None
            record.exc_info, record.exc_text = None, cleaned(record.exc_text or "")
        return True


class ExplainedError(Exception):
    """What has been put into words already."""


class StoreError(ExplainedError, OSError):
    """The store could not do it, or could not be reached."""


class DeniedError(ExplainedError, PermissionError):
    """The store refused."""


class MissingBucketError(ExplainedError, FileNotFoundError):
    """There is no such bucket."""
