"""Credentials from AWS's files and from one kind of container service, for obstore, which finds all others by itself.

The order is that of TensorStore, so that arrays and metadata files are read with the same credentials: the environment,
the profile, then what obstore finds: web identity, container, instance.
"""

from __future__ import annotations

import configparser
import datetime
import json
import pathlib
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from orbax_ext.redact import redact
from orbax_ext.storage.s3.errors import NO_CREDENTIALS, DeniedError
from orbax_ext.storage.s3.settings import Settings, config_section

Provider = Callable[[], Mapping[str, Any]]

# Settings of a profile that have its credentials made by a program or a service, beside role_arn. boto3 knows them all.
_NEEDS_BOTO3 = ("sso_session", "sso_start_url", "credential_process", "login_session")
_CONTAINER = "AWS_CONTAINER_CREDENTIALS_FULL_URI"
_CONTAINER_LIMIT = 5.0  # seconds for a service on the same machine
_BEFORE_CONTAINER = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
_ELSEWHERE = (*_BEFORE_CONTAINER, _CONTAINER)
_FOUND_BY_OBSTORE = (*_BEFORE_CONTAINER, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")  # with the last one, _CONTAINER too
_READ_AGAIN = datetime.timedelta(minutes=15)  # another program may write new keys to the file


def provider(settings: Settings, environ: Mapping[str, str]) -> Provider | None:
    """Returns what provides the credentials that obstore does not find, or None if it finds them by itself.

    Raises DeniedError if it is clear that there are none.
    """
    if settings.anonymous or environ.get("AWS_ACCESS_KEY_ID"):
        return None
    name = settings.profile or "default"
    profile = _profile(environ, name)
    if profile is None and settings.profile is not None:
        raise DeniedError(f"The profile {name!r} is neither in ~/.aws/config nor in ~/.aws/credentials.")
    if profile and "role_arn" in profile:  # its keys, if it has any, only serve to assume the role
        return _from_boto3(name, "role_arn")
    if profile and _has_keys(profile):
        return lambda: _static(name, _profile(environ, name))
    if profile and (needs := next((setting for setting in _NEEDS_BOTO3 if setting in profile), None)):
        return _from_boto3(name, needs)
    disabled = environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if disabled and not any(environ.get(variable) for variable in _ELSEWHERE):
        raise DeniedError(f"{NO_CREDENTIALS} Instance roles are off (AWS_EC2_METADATA_DISABLED).")
    if environ.get(_CONTAINER) and not any(environ.get(variable) for variable in _FOUND_BY_OBSTORE):
        return lambda: _of_a_container(settings, environ)
    return None


def _of_a_container(settings: Settings, environ: Mapping[str, str]) -> dict[str, Any]:
    """Asks the service of a container. obstore asks it only if the token that it wants is in a file."""
    token = environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN")
    try:
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # the service is on this machine, or next to it
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=settings.ca_bundle)),
        )
        request = urllib.request.Request(environ[_CONTAINER], headers={"Authorization": token} if token else {})
        with opener.open(request, timeout=_CONTAINER_LIMIT) as answer:
            keys = json.load(answer)
        return {
            "access_key_id": keys["AccessKeyId"],
            "secret_access_key": keys["SecretAccessKey"],
            "token": keys.get("Token"),
            "expires_at": datetime.datetime.fromisoformat(keys["Expiration"]),
        }
    except Exception as error:
        # The text of an error that is not about the connection may hold the token, or the keys.
        reason = redact(str(error)) if isinstance(error, OSError) else type(error).__name__
        raise DeniedError(f"The service that {_CONTAINER} names gave no credentials: {reason}.") from None


def _has_keys(profile: Mapping[str, str]) -> bool:
    return "aws_access_key_id" in profile and "aws_secret_access_key" in profile


def _static(name: str, profile: Mapping[str, str] | None) -> dict[str, Any]:
    if not profile or not _has_keys(profile):
        raise DeniedError(f"The profile {name!r} had keys when they were first read, and has none any more.")
    return {
        "access_key_id": profile["aws_access_key_id"],
        "secret_access_key": profile["aws_secret_access_key"],
        "token": profile.get("aws_session_token"),
        "expires_at": datetime.datetime.now(datetime.UTC) + _READ_AGAIN,
    }


def _from_boto3(name: str, needs: str) -> Provider:
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise DeniedError(f"The profile {name!r} has {needs}, which needs boto3: pip install boto3.") from None
    made: Provider = Boto3CredentialProvider(boto3.Session(profile_name=name))
    return made


def _profile(environ: Mapping[str, str], name: str) -> dict[str, str] | None:
    """Returns a profile from both files, where the credentials file comes first; None if neither has it."""
    sections = []
    for variable, file in (("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")):
        parser = configparser.RawConfigParser()
        path = pathlib.Path(environ.get(variable) or pathlib.Path.home() / ".aws" / file).expanduser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise DeniedError(f"{path} can't be read: {type(error).__name__}.") from None  # the text may hold keys
        section = config_section(parser, name) if file == "config" else name
        if parser.has_section(section):
            sections.append(dict(parser.items(section)))
    return {**sections[0], **sections[-1]} if sections else None
