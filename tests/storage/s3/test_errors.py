from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from orbax_ext.storage.s3 import errors
from tests.support import s3_server

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    "text",
    [
        "PERMISSION_DENIED: no [http_response_code='403'] [http_response_body='<a>&SECRET</a>']",
        "ABORTED: no [http_response_body='<a>SECRET\n[x=\\'y\\']</a>'] [http_response_code='500']",
        "ABORTED: no [http_response_body='<a>SECRET\n[x='y']SECRET</a>'] [http_response_code='500']",
        "failed: https://h/k?X-Amz-Credential=SECRET&X-Amz-Signature=SECRET",
        "<Error><Token-0>SECRET</Token-0><StringToSign>SECRET</StringToSign></Error>",
    ],
)
def test_secrets_are_withheld_wherever_they_are(text: str) -> None:
    assert "SECRET" not in errors.explanation("s3://bucket/key", text)


ANSWER = (
    f"ExpiredToken: [http_response_body='<Error><Token-0>{s3_server.SESSION_TOKEN}</Token-0></Error>'] [more='...']"
)


async def abandon_a_failed_read() -> None:
    """As Orbax does after another read has failed: asyncio logs errors that are never retrieved."""

    async def read() -> None:
        try:
            raise OSError(ANSWER)
        except OSError as cause:
            raise ValueError(ANSWER) from cause

    asyncio.gather(read())
    for _ in range(5):
        await asyncio.sleep(0)
    gc.collect()


def test_abandoned_reads_are_logged_without_a_secret(
    s3: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    del s3
    asyncio.run(abandon_a_failed_read())
    assert "never retrieved" in caplog.text
    assert "ExpiredToken" in caplog.text
    assert s3_server.SESSION_TOKEN not in caplog.text
    caplog.clear()
    monkeypatch.setattr(logging.getLogger("asyncio"), "filters", [])
    asyncio.run(abandon_a_failed_read())
    assert s3_server.SESSION_TOKEN in caplog.text  # what asyncio logs without the filter


ANSWERED = (
    "GET http://h/k - Server returned non-2xx status code: 403 Forbidden: "
    "<Error><Code>AccessDenied</Code><Message>Not\n you</Message></Error>"
)


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (FileNotFoundError("x"), FileNotFoundError, "s3://bucket/key does not exist."),
        (FileNotFoundError("<Code>NoSuchBucket</Code>"), errors.MissingBucketError, "NoSuchBucket (create the bucket"),
        (RuntimeError(ANSWERED), errors.DeniedError, "s3://bucket/key: AccessDenied: Not you (these credentials"),
        (
            RuntimeError("status code: 403 Forbidden: \n\nDebug source:\n..."),
            errors.DeniedError,
            "key: 403 Forbidden (",
        ),
        (RuntimeError("HTTP error: x\n\nDebug source: y"), errors.StoreError, "RuntimeError: HTTP error: x (the"),
        (PermissionError("Forbidden"), errors.DeniedError, "s3://bucket/key: PermissionError: Forbidden (these"),
        (OSError("SlowDown"), errors.StoreError, "s3://bucket/key: OSError: SlowDown (the store throttles"),
        (RuntimeError("status code: 429 Too Many Requests: "), errors.StoreError, "key: 429 Too Many Requests (the"),
        (RuntimeError("status code: 503 Service Unavailable: "), errors.StoreError, "Unavailable (the store throttles"),
        (RuntimeError("status code: 500 Internal Server Error: "), errors.StoreError, "500 Internal Server Error (the"),
        (OSError("PUT http://h:1/latest/api/token: HTTP error"), errors.DeniedError, "s3://bucket/key: No credentials"),
        (OSError("GET http://h/latest/meta-data/iam/x"), errors.DeniedError, "s3://bucket/key: No credentials"),
        (OSError("AWS credential provider: DeniedError: a\nb"), errors.DeniedError, "s3://bucket/key: a"),
        (RuntimeError("odd"), errors.StoreError, "s3://bucket/key: RuntimeError: odd"),
        (FileExistsError("as it is"), FileExistsError, "as it is"),
        (errors.DeniedError("as it is"), errors.DeniedError, "as it is"),
    ],
)
def test_errors_of_obstore_name_path_and_remedy(raised: Exception, expected: type[Exception], message: str) -> None:
    with pytest.raises(expected) as error, errors.explained("s3://bucket/key"):
        raise raised
    assert type(error.value) is expected
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (ValueError("NOT_FOUND: no chunk"), "s3://bucket/key"),  # not an answer of a store
        (ValueError("ABORTED: CURL error in gcs"), "gs://bucket/key"),
        (ValueError("ABORTED: CURL error"), ""),
    ],
)
def test_errors_that_are_not_about_s3_are_left_alone(error: Exception, path: str) -> None:
    assert errors.explain(error, path) is error


@pytest.mark.parametrize("kind", [ValueError, OSError])
def test_errors_of_tensorstore_keep_their_type(kind: type[Exception]) -> None:
    better = errors.explain(kind("ABORTED: CURL error"), "s3://bucket/key")
    assert type(better) is kind
    assert str(better).startswith("s3://bucket/key: ABORTED: CURL error (the connection failed")


def test_reads_raise_the_explained_error_and_leave_others_alone() -> None:
    with (
        pytest.raises(ValueError, match=r"s3://bucket/key: ABORTED: CURL error \(the connection failed"),
        errors.reads_explained("s3://bucket/key"),
    ):
        raise ValueError("ABORTED: CURL error")
    missing = ValueError("NOT_FOUND: no chunk")
    with pytest.raises(ValueError, match="NOT_FOUND") as caught, errors.reads_explained("/disk/key"):
        raise missing
    assert caught.value is missing
