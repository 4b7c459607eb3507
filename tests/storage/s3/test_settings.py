from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tensorstore as ts

from orbax_ext.storage import s3 as s3_lib
from orbax_ext.storage.s3 import settings
from orbax_ext.storage.s3.settings import Settings

pytestmark = pytest.mark.once


def resolved(given: Settings, **environ: str) -> Settings:
    return settings.resolve(given, {"AWS_CONFIG_FILE": "/dev/null", **environ})


def test_arguments_come_before_the_environment_and_the_environment_before_the_profile(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[default]\nregion = r-default\n[profile lab]\nregion = r-lab\nendpoint_url = http://lab\n"
        "s3 =\n    addressing_style = virtual\n"
    )
    profile = {"AWS_CONFIG_FILE": str(config), "AWS_PROFILE": "lab"}
    by_profile = resolved(Settings(), **profile)
    assert (by_profile.endpoint, by_profile.region, by_profile.addressing) == ("http://lab", "r-lab", "virtual")
    environ = {**profile, "AWS_ENDPOINT_URL": "http://env/", "AWS_REGION": "r-env"}
    by_environ = resolved(Settings(), **environ)
    assert (by_environ.endpoint, by_environ.region) == ("http://env", "r-env")
    given = resolved(Settings("http://arg", "r-arg", addressing="path"), **environ)
    assert (given.endpoint, given.region, given.addressing) == ("http://arg", "r-arg", "path")


def test_the_default_profile_has_two_spellings_of_which_the_longer_one_comes_first(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "config"
    config.write_text("[default]\nregion = short\n[profile default]\nregion = long\n")
    assert resolved(Settings(), AWS_CONFIG_FILE=str(config)).region == "long"


@pytest.mark.parametrize(
    ("environ", "endpoint", "region"),
    [
        ({}, None, None),
        ({"AWS_DEFAULT_REGION": "b"}, None, "b"),
        ({"AWS_REGION": "a", "AWS_DEFAULT_REGION": "b"}, None, "a"),
        ({"AWS_ENDPOINT_URL": "http://all"}, "http://all", "us-east-1"),
        ({"AWS_ENDPOINT_URL": "http://all", "AWS_ENDPOINT_URL_S3": "http://s3"}, "http://s3", "us-east-1"),
        ({"AWS_ENDPOINT_URL": "http://all", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, None, None),
    ],
)
def test_endpoint_and_region_come_from_the_usual_variables(
    environ: dict[str, str], endpoint: str | None, region: str | None
) -> None:
    settings_in_full = resolved(Settings(), **environ)
    assert (settings_in_full.endpoint, settings_in_full.region) == (endpoint, region)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Settings(region="eu-west-1"), {"bucket": "bkt", "aws_region": "eu-west-1"}),
        (Settings("http://minio:9000", "x"), {"bucket": "bkt", "endpoint": "http://minio:9000"}),
        (Settings("http://minio:9000", "x"), {"use_conditional_write": False}),  # Swift refuses them
        (Settings("https://cwobject.com", "x", addressing="virtual"), {"endpoint": "https://bkt.cwobject.com"}),
        (Settings(None, "x", addressing="path"), {"bucket": "bkt", "endpoint": "https://s3.x.amazonaws.com"}),
        (Settings(region="x", profile="lab"), {"aws_credentials": {"type": "default", "profile": "lab"}}),
        (Settings(region="x", anonymous=True), {"aws_credentials": {"type": "anonymous"}}),
    ],
)
def test_the_spec_names_the_bucket_in_either_style(given: Settings, expected: dict[str, Any]) -> None:
    spec = settings.kvstore(given, "bkt", "run/")
    assert expected.items() <= spec.items()
    assert ts.KvStore.Spec(spec).to_json()["path"] == "run/"  # TensorStore accepts it


@pytest.mark.parametrize(
    "given",
    [
        {"endpoint": "minio:9000"},
        {"endpoint": "http://user:password@minio:9000"},
        {"endpoint": "http://minio/?x=1"},
        {"addressing": "dns"},
        {"retries": 0},
        {"stall_seconds": 0},
    ],
)
def test_bad_settings_are_refused_at_once_without_showing_a_password(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|is one of") as error:
        s3_lib.enable_s3(**given)
    assert "password@" not in str(error.value)
    assert not s3_lib.s3_enabled()
