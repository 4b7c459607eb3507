"""The client's region and endpoint."""

from __future__ import annotations

import pytest

from orbax_ext.storage.s3 import client
from orbax_ext.storage.s3.errors import MissingBucketError, StoreError
from orbax_ext.storage.s3.settings import Settings
from tests.support.aws_services import region_service, serving


@pytest.mark.parametrize("statuses", [(200,), (301,), (403,), (503, 429, 200)])
def test_aws_is_asked_for_the_region_of_a_bucket(statuses: tuple[int, ...]) -> None:
    with serving(region_service(*statuses)) as url:
        assert client.bucket_region("some-bucket", Settings(), url) == "eu-west-1"


def test_a_region_that_aws_does_not_tell_is_not_guessed() -> None:
    settings = Settings(retries=1)
    with serving(region_service(503)) as url, pytest.raises(StoreError, match=r"s3://some-bucket: .*503.*pass region="):
        client.bucket_region("some-bucket", settings, url)
    with pytest.raises(StoreError, match=r"s3://some-bucket: .*refused.*check the network"):
        client.bucket_region("some-bucket", settings, url)  # nobody listens any more


def test_a_bucket_that_aws_does_not_know_is_missing() -> None:
    with serving(region_service(404)) as url, pytest.raises(MissingBucketError, match="s3://some-bucket: NoSuchBucket"):
        client.bucket_region("some-bucket", Settings(), url)


@pytest.mark.parametrize(
    ("settings", "bucket", "expected"),
    [
        (Settings(region="eu-west-1"), "bkt", ("https://bkt.s3.eu-west-1.amazonaws.com", True)),
        (Settings(region="eu-west-1"), "my.bkt", ("https://s3.eu-west-1.amazonaws.com", False)),
        (Settings(region="cn-north-1", addressing="path"), "bkt", ("https://s3.cn-north-1.amazonaws.com.cn", False)),
        (Settings("http://minio:9000", "x"), "bkt", ("http://minio:9000", False)),
        (Settings("https://cwobject.com", "x", addressing="virtual"), "bkt", ("https://bkt.cwobject.com", True)),
    ],
)
def test_the_client_is_told_its_endpoint_whatever_the_environment_says(
    settings: Settings, bucket: str, expected: tuple[str, bool]
) -> None:
    arguments = client.client_arguments(settings, bucket, {"AWS_ACCESS_KEY_ID": "x", "AWS_ENDPOINT_URL": "http://not"})
    assert (arguments["aws_endpoint_url_s3"], arguments["virtual_hosted_style_request"]) == expected
