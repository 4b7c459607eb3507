"""obstore's client for a bucket, made from our settings."""

from __future__ import annotations

import datetime
import email.message
import os
import pathlib
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from orbax_ext.redact import redact
from orbax_ext.storage.s3 import credentials
from orbax_ext.storage.s3.errors import MissingBucketError, StoreError
from orbax_ext.storage.s3.settings import Settings, aws_host, bucket_endpoint

# AWS's variables for where credentials come from. obstore reads others.
_SERVICES = {"metadata_endpoint": "AWS_EC2_METADATA_SERVICE_ENDPOINT", "aws_endpoint_url_sts": "AWS_ENDPOINT_URL_STS"}
_CONNECT_LIMIT = 30  # seconds
_FIRST_PAUSE, _LONGEST_PAUSE = datetime.timedelta(seconds=0.1), datetime.timedelta(seconds=10)
_NO_LIMIT = datetime.timedelta(days=1)  # for a whole request: only silence ends one


def bucket_client(settings: Settings, bucket: str, environ: Mapping[str, str] = os.environ) -> Any:
    """Returns an `obstore.store.S3Store`. On AWS, the bucket's region is looked up if it is not known."""
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise ImportError(
            f"s3:// paths need the package obstore, and it can't be imported ({error}): pip install 'orbax-ext[s3]'."
        ) from None
    return S3Store(bucket, **client_arguments(settings, bucket, environ))


def open_upload(client: Any, key: str, part: int) -> Any:
    """Returns a file that is sent in parts of `part` bytes and becomes an object when it is closed."""
    import obstore

    return obstore.open_writer(client, key, buffer_size=part)


def client_arguments(settings: Settings, bucket: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of obstore's client. All are given, because it reads variables of the same names itself."""
    connection = _connection(settings)
    region = settings.region or bucket_region(bucket, settings)
    endpoint, virtual_host = bucket_endpoint(settings, bucket, region)
    arguments: dict[str, Any] = {
        "aws_endpoint_url_s3": endpoint,
        "region": region,
        "virtual_hosted_style_request": virtual_host,
        "skip_signature": settings.anonymous,
        "client_options": {**connection, "allow_http": endpoint.startswith("http://")},
        "retry_config": {
            "max_retries": settings.retries,
            "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": _LONGEST_PAUSE, "base": 2},
            "retry_timeout": (settings.retries + 1) * (_seconds(settings.stall_seconds) + _LONGEST_PAUSE),
        },
        "credential_provider": credentials.provider(settings, environ),
    }
    for argument, variable in _SERVICES.items():
        if url := environ.get(variable):
            arguments[argument] = url.rstrip("/")
    return arguments


def bucket_region(bucket: str, settings: Settings, service: str = f"https://{aws_host('us-east-1')}") -> str:
    """Asks AWS for the region of a bucket, which it tells without credentials."""
    request = urllib.request.Request(f"{service}/{bucket}", method="HEAD")
    context = ssl.create_default_context(cafile=settings.ca_bundle)
    limit = min(settings.stall_seconds, _CONNECT_LIMIT)
    for attempt in range(settings.retries + 1):
        try:
            with urllib.request.urlopen(request, timeout=limit, context=context) as answer:
                return _region_in(answer.headers) or "us-east-1"
        except urllib.error.HTTPError as error:
            if error.code == 404:
                remedy = "create the bucket, or check its name"
                raise MissingBucketError(f"s3://{bucket}: NoSuchBucket ({remedy})") from None
            if region := _region_in(error.headers):  # a redirection or a denial names the region too
                return region
            if error.code < 500 and error.code != 429:
                return "us-east-1"
            reason = str(error)
        except OSError as error:
            reason = str(error)
        if attempt < settings.retries:
            time.sleep(pause(attempt))
    raise StoreError(
        f"s3://{bucket}: AWS did not say in which region the bucket is: {redact(reason)} (pass region= or set "
        "AWS_REGION, or check the network)"
    )


def pause(attempt: int) -> float:
    """Returns the seconds to wait after a failed attempt, of which 0 is the first."""
    return min(_FIRST_PAUSE.total_seconds() * 2**attempt, _LONGEST_PAUSE.total_seconds())


def _region_in(headers: email.message.Message) -> str | None:
    return headers.get("x-amz-bucket-region")


def _connection(settings: Settings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "connect_timeout": _seconds(min(settings.stall_seconds, _CONNECT_LIMIT)),
        "read_timeout": _seconds(settings.stall_seconds),
        "timeout": _NO_LIMIT,
    }
    if settings.ca_bundle is not None:
        try:
            options["root_certificate"] = pathlib.Path(settings.ca_bundle).read_bytes()
        except OSError as error:
            raise StoreError(f"AWS_CA_BUNDLE, or ca_bundle of the profile, can't be read: {error}") from None
    return options


def _seconds(seconds: int) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
