"""Credentials from AWS's files, for obstore, which finds all others by itself.

The order is that of TensorStore, so that arrays and metadata files are read with the same credentials: the environment,
the profile, then what obstore finds: web identity, container, instance.
"""

from __future__ import annotations

import configparser
import datetime
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from orbax_ext.storage.s3.errors import DeniedError
from orbax_ext.storage.s3.settings import Settings

Provider = Callable[[], Mapping[str, Any]]

# Settings of a profile that have its credentials made by a program or a service. boto3 knows all of them.
_NEEDS_BOTO3 = ("role_arn", "sso_session", "sso_start_url", "credential_process", "login_session")
_ELSEWHERE = (
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_READ_AGAIN = datetime.timedelta(minutes=15)  # another program may write new keys to the file


def provider(settings: Settings, environ: Mapping[str, str]) -> Provider | None:
    """Returns what provides the credentials of a profile, or None if obstore finds credentials by itself.

    Raises DeniedError if it is clear that there are none.
    """
    if settings.anonymous or environ.get("AWS_ACCESS_KEY_ID"):
        return None
    name = settings.profile or "default"
    profile = _profile(environ, name)
    if profile is None and settings.profile is not None:
        raise DeniedError(f"The profile {name!r} is neither in ~/.aws/config nor in ~/.aws/credentials.")
    if profile and "aws_access_key_id" in profile and "aws_secret_access_key" in profile:
        return lambda: _static(_profile(environ, name) or {})
    if profile and (needs := next((setting for setting in _NEEDS_BOTO3 if setting in profile), None)):
        return _from_boto3(name, needs)
    disabled = environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if disabled and not any(environ.get(variable) for variable in _ELSEWHERE):
        raise DeniedError(
            "No credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile, or give "
            "anonymous=True for a public bucket. Instance roles are off (AWS_EC2_METADATA_DISABLED)."
        )
    return None


def _static(profile: Mapping[str, str]) -> dict[str, Any]:
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
    places = (
        ("AWS_CONFIG_FILE", "config", "default" if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    )
    sections = []
    for variable, file, section in places:
        parser = configparser.RawConfigParser()
        path = pathlib.Path(environ.get(variable) or pathlib.Path.home() / ".aws" / file).expanduser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise DeniedError(f"{path} can't be read: {type(error).__name__}.") from None  # the text may hold keys
        if parser.has_section(section):
            sections.append(dict(parser.items(section)))
    return {**sections[0], **sections[-1]} if sections else None
