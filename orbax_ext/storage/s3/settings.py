"""Where the S3 store is and how to address it: from arguments, then the environment, then AWS's own files."""

from __future__ import annotations

import configparser
import dataclasses
import os
import pathlib
import urllib.parse
from collections.abc import Mapping
from typing import Any, Literal, get_args

from orbax_ext.storage.connections import STALL_RATE

Addressing = Literal["auto", "path", "virtual"]
_DEFAULT_REGION = "us-east-1"  # stores without regions expect it


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to reach a store. Credentials are not part of it: they are looked up when they are needed."""

    endpoint: str | None = None  # None is AWS
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False
    addressing: Addressing = "auto"
    retries: int = 8
    stall_seconds: int = 60
    stall_rate: int = STALL_RATE
    share_metadata: bool = True
    ca_bundle: str | None = None  # a file with the only certificate authorities to trust

    def __post_init__(self) -> None:
        if self.addressing not in get_args(Addressing):
            raise ValueError(f"addressing is one of {', '.join(get_args(Addressing))}; got {self.addressing!r}.")
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)
        for name in ("retries", "stall_seconds", "stall_rate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    @property
    def virtual_host(self) -> bool:
        """Whether the bucket is part of the host name: if asked for, and by default on AWS."""
        return self.addressing == "virtual" or (self.addressing == "auto" and self.endpoint is None)


def resolve(given: Settings, environ: Mapping[str, str] = os.environ) -> Settings:
    """Returns the settings with gaps filled from AWS_* variables and the profile's configuration."""
    profile = given.profile or environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE")
    config = _profile_config(environ, profile or "default")
    ignore = environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    endpoint = given.endpoint
    if endpoint is None and not ignore:
        endpoint = (
            environ.get("AWS_ENDPOINT_URL_S3")
            or environ.get("AWS_ENDPOINT_URL")
            or config.get("s3.endpoint_url")
            or config.get("endpoint_url")
        )
    region = given.region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or config.get("region")
    if region is None and endpoint is not None:
        region = _DEFAULT_REGION
    addressing: Any = given.addressing
    if addressing == "auto" and config.get("s3.addressing_style") in get_args(Addressing):
        addressing = config["s3.addressing_style"]
    return dataclasses.replace(
        given,
        endpoint=endpoint.rstrip("/") if endpoint else None,
        region=region,
        profile=profile,
        addressing=addressing,
        ca_bundle=given.ca_bundle or environ.get("AWS_CA_BUNDLE") or config.get("ca_bundle"),
    )


def kvstore(settings: Settings, bucket: str, path: str) -> dict[str, Any]:
    """Returns TensorStore's spec for a path in a bucket. It holds no secret, so it may be logged and stored."""
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    if settings.endpoint is not None or settings.addressing == "path":
        if settings.endpoint is None and settings.region is None:
            raise ValueError("addressing='path' on AWS needs a region: pass region= or set AWS_REGION.")
        spec["endpoint"], in_host_name = bucket_endpoint(settings, bucket, settings.region or _DEFAULT_REGION)
        if in_host_name:
            spec["bucket"] = ""  # TensorStore takes an empty bucket to mean that the endpoint already names it
    if settings.endpoint is not None:
        # Swift refuses conditional writes, and on Ceph's radosgw (16.2) a save with them does not end. Nothing is lost:
        # each object of a checkpoint has one writer.
        spec["use_conditional_write"] = False
    if settings.region is not None:
        spec["aws_region"] = settings.region
    if settings.anonymous:
        spec["aws_credentials"] = {"type": "anonymous"}
    else:
        # TensorStore reads no profile that is not named, not even the default one.
        spec["aws_credentials"] = {"type": "default", "profile": settings.profile or "default"}
    spec["s3_request_retries"] = {"max_retries": settings.retries, "initial_delay": "200ms", "max_delay": "10s"}
    return spec


def bucket_endpoint(settings: Settings, bucket: str, region: str) -> tuple[str, bool]:
    """Returns the URL that requests for a bucket go to, and whether its host name holds the bucket."""
    endpoint = settings.endpoint or f"https://{aws_host(region)}"
    # The certificates of AWS are valid for one more name before the host's, so not for a bucket with a dot.
    if not settings.virtual_host or (settings.endpoint is None and "." in bucket):
        return endpoint, False
    parsed = urllib.parse.urlsplit(endpoint)
    return parsed._replace(netloc=f"{bucket}.{parsed.netloc}").geturl(), True


def aws_host(region: str) -> str:
    return f"s3.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")


def _check_endpoint(endpoint: str) -> None:
    parsed = urllib.parse.urlsplit(endpoint)
    if parsed.scheme not in ("http", "https") or not parsed.hostname or parsed.query or parsed.fragment:
        shown = parsed._replace(netloc=parsed.netloc.rpartition("@")[2]).geturl()  # without a password
        raise ValueError(f"endpoint must be a URL such as https://minio.example.com:9000; got {shown!r}.")
    if parsed.username or parsed.password:
        raise ValueError("endpoint must not hold a user name or password: use AWS_* variables or a profile for those.")


def _profile_config(environ: Mapping[str, str], profile: str) -> dict[str, str]:
    """Returns the profile's section of AWS's config file, with nested settings as "s3.name"."""
    path = pathlib.Path(environ.get("AWS_CONFIG_FILE") or pathlib.Path.home() / ".aws" / "config").expanduser()
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}  # the clients report what is wrong with it
    config = _section(parser, config_section(parser, profile))
    return config | _section(parser, f"services {config.get('services')}")


def config_section(parser: configparser.RawConfigParser, profile: str) -> str:
    """Returns the name of a profile's section in AWS's config file. The default one's has two spellings."""
    section = f"profile {profile}"
    return profile if profile == "default" and not parser.has_section(section) else section


def _section(parser: configparser.RawConfigParser, section: str) -> dict[str, str]:
    """Returns a section, empty if it is missing. A nested setting is a line of its parent's value: "parent.name"."""
    settings = {}
    for name, value in parser.items(section) if parser.has_section(section) else ():
        if not value.startswith("\n"):
            settings[name] = value.strip()
            continue
        for line in value.strip().splitlines():
            inner, _, setting = line.partition("=")
            settings[f"{name}.{inner.strip()}"] = setting.strip()
    return settings
