"""Where credentials come from. The server is a real one that checks signatures."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from etils import epath

from orbax_ext.storage import s3 as s3_lib
from orbax_ext.storage.s3 import credentials
from orbax_ext.storage.s3.errors import DeniedError
from orbax_ext.storage.s3.settings import Settings
from tests.support import s3_checkpoints, s3_server, s3_stores
from tests.support.aws_services import AUTHORIZATION, NothingThere, Service, serving
from tests.support.s3_proxy import FaultProxy

pytestmark = pytest.mark.once

KEYS = f"aws_access_key_id = {s3_server.ACCESS_KEY}\naws_secret_access_key = {s3_server.SECRET_KEY}\n"
NEEDS_TOKENS = pytest.mark.skipif(
    not s3_server.STORES[s3_server.STORE].takes_any_session_token,
    reason="the credentials of these services have a session token, which this store refuses",
)

NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes certificates")

# boto3 is beside moto, in an environment of its own: all other tests show that nothing needs it.
BOTO3 = next(iter(s3_stores.ROOT.glob(".venv/s3server/lib/python*/site-packages/boto3")), None)
NEEDS_BOTO3 = pytest.mark.skipif(BOTO3 is None, reason=".venv/s3server has no boto3; `make test` puts it there")


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with serving(Service) as url:
        yield url


def in_a_profile(home: pathlib.Path, service: str) -> dict[str, str]:
    del service
    (home / "credentials").write_text(f"[default]\naws_access_key_id = wrong\n[lab]\n{KEYS}")
    return {"AWS_SHARED_CREDENTIALS_FILE": str(home / "credentials"), "AWS_PROFILE": "lab"}


def in_the_default_profile(home: pathlib.Path, service: str) -> dict[str, str]:
    del service
    (home / "config").write_text(f"[default]\n{KEYS}")
    return {"AWS_CONFIG_FILE": str(home / "config")}


def of_a_process_that_boto3_starts(home: pathlib.Path, service: str) -> dict[str, str]:
    del service
    names = ("Version", "AccessKeyId", "SecretAccessKey")
    keys = dict(zip(names, (1, s3_server.ACCESS_KEY, s3_server.SECRET_KEY), strict=True))
    (home / "keys").write_text(json.dumps(keys))
    (home / "config").write_text(f"[profile lab]\ncredential_process = cat {home / 'keys'}\n")
    return {"AWS_CONFIG_FILE": str(home / "config"), "AWS_PROFILE": "lab"}


def in_the_other_spelling_of_the_default_profile(home: pathlib.Path, service: str) -> dict[str, str]:
    del service
    (home / "config").write_text(f"[default]\naws_access_key_id = wrong\n[profile default]\n{KEYS}")
    return {"AWS_CONFIG_FILE": str(home / "config")}


def in_the_environment_before_a_profile(home: pathlib.Path, service: str) -> dict[str, str]:
    del service
    (home / "credentials").write_text("[lab]\naws_access_key_id = wrong\naws_secret_access_key = wrong\n")
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(home / "credentials"),
        "AWS_PROFILE": "lab",
        "AWS_ACCESS_KEY_ID": s3_server.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": s3_server.SECRET_KEY,
    }


def of_a_container(home: pathlib.Path, service: str) -> dict[str, str]:
    (home / "token").write_text(AUTHORIZATION)
    return {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{service}/role",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(home / "token"),
    }


def of_a_container_with_the_token_in_a_variable(home: pathlib.Path, service: str) -> dict[str, str]:
    del home
    return {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{service}/role",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": AUTHORIZATION,
    }


def of_an_instance(home: pathlib.Path, service: str) -> dict[str, str]:
    del home
    return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": service, "AWS_EC2_METADATA_DISABLED": "false"}


@pytest.mark.parametrize(
    "place",
    [
        *(in_a_profile, in_the_default_profile, in_the_other_spelling_of_the_default_profile),
        in_the_environment_before_a_profile,
        pytest.param(of_a_process_that_boto3_starts, marks=NEEDS_BOTO3),
        *(
            pytest.param(place, marks=NEEDS_TOKENS)
            for place in (of_a_container, of_a_container_with_the_token_in_a_variable, of_an_instance)
        ),
    ],
    ids=lambda place: place.__name__.replace("_", " "),
)
def test_files_and_arrays_are_stored_with_the_credentials(
    place: Callable[[pathlib.Path, str], dict[str, str]],
    service: str,
    s3: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_keys(monkeypatch)
    for name, value in place(tmp_path, service).items():
        monkeypatch.setenv(name, value)
    with importable_boto3() if place is of_a_process_that_boto3_starts else contextlib.nullcontext():
        store_and_load(s3)


@NEEDS_TOKENS
@NEEDS_OPENSSL
def test_the_token_of_a_web_identity_is_exchanged_over_https(
    s3: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_keys(monkeypatch)
    (tmp_path / "token").write_text("identity")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/trainer")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    with serving(Service, certificate(tmp_path)) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        (epath.Path(s3) / "file").write_text("content")
    assert (epath.Path(s3) / "file").read_text() == "content"


def in_the_environment(bundle: pathlib.Path) -> dict[str, str]:
    return {"AWS_CA_BUNDLE": str(bundle)}


def in_the_profile(bundle: pathlib.Path) -> dict[str, str]:
    config = bundle.parent / "config"
    config.write_text(f"[default]\nca_bundle = {bundle}\n")
    return {"AWS_CONFIG_FILE": str(config)}


@NEEDS_OPENSSL
@pytest.mark.parametrize("place", [in_the_environment, in_the_profile], ids=lambda place: place.__name__)
def test_files_and_arrays_go_over_https_to_a_store_with_a_certificate_of_its_own(
    place: Callable[[pathlib.Path], dict[str, str]], s3_port: int, bucket: str, tmp_path: pathlib.Path
) -> None:
    program = (
        "import sys; from orbax_ext import storage; from tests.support.s3_checkpoints import check, restore, save; "
        "storage.enable_s3(retries=1); save(sys.argv[1], 1); check(restore(sys.argv[1]))"
    )
    with FaultProxy(s3_port, certificate(tmp_path)) as proxy:
        environ = {name: value for name, value in os.environ.items() if "CA_BUNDLE" not in name}
        environ |= {**s3_server.ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url, **place(tmp_path / "ca.pem")}
        # A process of its own, because TensorStore reads its variables once.
        command = [sys.executable, "-c", program, f"s3://{bucket}/run"]
        done = subprocess.run(
            command, env=environ, cwd=s3_stores.ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert any("/d/" in request.line for request in proxy.requests)


def test_a_certificate_file_that_is_missing_is_named(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/such/ca.pem")
    with pytest.raises(OSError, match=r"AWS_CA_BUNDLE.*can't be read.*'/no/such/ca.pem'"):
        epath.Path(s3).exists()


def test_no_credentials_is_an_error_that_says_where_they_may_be(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_keys(monkeypatch)
    with pytest.raises(PermissionError, match=r"No credentials found: set AWS_ACCESS_KEY_ID .* anonymous=True"):
        (epath.Path(s3) / "file").exists()
    s3_lib.enable_s3("http://127.0.0.1:1", profile="none")
    with pytest.raises(PermissionError, match=r"The profile 'none' is neither in ~/.aws/config nor"):
        (epath.Path(s3) / "file").exists()


@pytest.mark.parametrize("answers", [False, True])
def test_an_instance_without_a_role_has_no_credentials(s3: str, monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    """Off AWS nobody listens where instances ask; an instance without a role is answered with 404."""
    without_keys(monkeypatch)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    with serving(NothingThere) as url:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url if answers else "http://127.0.0.1:1")
        with pytest.raises(PermissionError, match=f"{s3}/file: No credentials found: set AWS_ACCESS_KEY_ID") as error:
            (epath.Path(s3) / "file").exists()
    assert ("404" in str(error.value)) == answers
    assert "check the endpoint" not in str(error.value)


def test_a_container_s_service_without_credentials_is_named(
    s3: str, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_keys(monkeypatch)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service}/role")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "a-wrong-token\n")
    with pytest.raises(PermissionError, match=r"file: The service that AWS_CONTAINER_CREDENTIALS_FULL_URI") as error:
        (epath.Path(s3) / "file").exists()
    assert "a-wrong-token" not in str(error.value)
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "a-wrong-token")
    with pytest.raises(PermissionError, match="gave no credentials: HTTP Error 401"):
        (epath.Path(s3) / "file").exists()


def test_a_role_of_a_profile_comes_before_keys_beside_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(f"[default]\nrole_arn = x\n{KEYS}")
    environ = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(DeniedError, match="The profile 'default' has role_arn, which needs boto3"):
        credentials.provider(Settings(), environ)


def test_a_profile_that_needs_boto3_uses_it_or_names_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text(
        f"[profile sso]\nsso_session = x\n[profile process]\ncredential_process = {sys.executable} -c 0\n"
    )
    environ = {"AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    monkeypatch.setitem(sys.modules, "boto3", None)
    for profile, setting in (("sso", "sso_session"), ("process", "credential_process")):
        with pytest.raises(DeniedError, match=f"The profile '{profile}' has {setting}, which needs boto3"):
            credentials.provider(Settings(profile=profile), environ)


def test_keys_in_a_file_are_read_again_after_a_while(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = one\naws_secret_access_key = s\naws_session_token = t\n")
    environ = {"AWS_CONFIG_FILE": str(tmp_path / "none"), "AWS_SHARED_CREDENTIALS_FILE": str(file)}
    provider = credentials.provider(Settings(), environ)
    assert provider is not None
    assert (provider()["access_key_id"], provider()["token"]) == ("one", "t")
    file.write_text("[default]\naws_access_key_id = two\naws_secret_access_key = s\n")
    assert (provider()["access_key_id"], provider()["token"]) == ("two", None)
    file.write_text("[default]\n")
    with pytest.raises(DeniedError, match="The profile 'default' had keys"):
        provider()


def test_a_file_that_is_not_valid_is_named_without_its_text(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("aws_secret_access_key = hidden-secret\n")
    with pytest.raises(DeniedError, match=r"credentials can't be read: MissingSectionHeaderError") as error:
        credentials.provider(Settings(), {"AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_CONFIG_FILE": "/dev/null"})
    assert "hidden-secret" not in str(error.value)


def certificate(folder: pathlib.Path) -> ssl.SSLContext:
    """Makes an authority, ca.pem, and a certificate for 127.0.0.1."""
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    for arguments in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem",
        "req -newkey rsa:2048 -nodes -subj /CN=service -keyout service.key -out service.csr",
        "x509 -req -in service.csr -CA ca.pem -CAkey ca.key -days 2 -extfile extensions -out service.pem",
    ):
        subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "service.pem", folder / "service.key")
    return context


def store_and_load(path: str) -> None:
    """Stores files by the client for metadata and arrays by TensorStore, and reads them again."""
    s3_checkpoints.save(path, 1)
    s3_checkpoints.check(s3_checkpoints.restore(path))


@contextlib.contextmanager
def importable_boto3() -> Iterator[None]:
    assert BOTO3 is not None
    sys.path.append(str(BOTO3.parent))
    try:
        yield
        assert "boto3" in sys.modules
    finally:
        sys.path.remove(str(BOTO3.parent))
        for name in [name for name in sys.modules if name.partition(".")[0] in ("boto3", "botocore")]:
            del sys.modules[name]


def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
