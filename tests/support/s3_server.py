"""A real S3 server for tests, over loopback HTTP, and the credentials that it accepts.

`ORBAX_EXT_S3_STORE` names one of `STORES`; without it, rclone's.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import urllib.error
import urllib.request
from collections.abc import Iterator

from tests.support import s3_stores
from tests.support.s3_radosgw import Radosgw
from tests.support.s3_stores import Rclone, Store
from tests.support.s3_swift import Swift

STORES: dict[str, Store] = {"rclone": Rclone(), "radosgw": Radosgw(), "swift": Swift()}
STORE = os.environ.get("ORBAX_EXT_S3_STORE", "rclone")
ACCESS_KEY, SECRET_KEY = STORES[STORE].access_key, s3_stores.SECRET_KEY
SESSION_TOKEN = "the-session-token-of-the-tests"  # no error and no log may hold it, nor the secret key
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    **({"AWS_SESSION_TOKEN": SESSION_TOKEN} if STORES[STORE].takes_any_session_token else {}),
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


def missing() -> str | None:
    """Returns why the server can't run here, or None if it can."""
    return STORES[STORE].missing()


@contextlib.contextmanager
def running(bucket_in_host_name: bool = False) -> Iterator[int]:
    """Runs the server and yields its port."""
    with STORES[STORE].running(bucket_in_host_name) as port:
        yield port


def make_bucket(port: int, name: str, host: str = "") -> None:
    """Makes a bucket that does not exist yet; `host` if its name is part of the host name."""
    path = "/" if host else f"/{name}"
    headers = _signed(host or f"127.0.0.1:{port}", path)
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method="PUT", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever the environment says
    try:
        opener.open(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"bucket {name} was not made: {error} {error.read()[:500]!r}") from None


def _signed(host: str, path: str) -> dict[str, str]:
    """Returns the headers of a PUT without a body, signed as AWS documents it for version 4."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    empty = hashlib.sha256(b"").hexdigest()
    headers = {"host": host, "x-amz-content-sha256": empty, "x-amz-date": now}
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = "\n".join(["PUT", path, "", lines, names, empty])
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{SECRET_KEY}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={ACCESS_KEY}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "Authorization": f"AWS4-HMAC-SHA256 {credential}"}
