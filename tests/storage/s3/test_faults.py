"""A store that fails, on one process: passing faults are retried, lasting ones are clear errors."""

from __future__ import annotations

import socket
import time
import traceback

import pytest
from etils import epath

from orbax_ext.storage import s3 as s3_lib
from tests.support import s3_server
from tests.support.s3_checkpoints import check, restore, save
from tests.support.s3_proxy import SILENCE, Fault, FaultProxy

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def saved(s3_port: int, _proxy: FaultProxy) -> str:
    """A checkpoint of `STATE` as step 0, saved once. No test may write to it."""
    s3_server.make_bucket(s3_port, "faults")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.ENVIRONMENT.items():
            patch.setenv(name, value)
        s3_lib.enable_s3(_proxy.url, stall_seconds=2)
        save("s3://faults/run", 0)
        s3_lib.disable_s3()
    return "s3://faults/run"


PASSING = {
    "a burst of 500": [Fault("500", times=2)],
    "a burst of 503": [Fault("503", times=2)],
    "500 on array data": [Fault("500", "GET .*/d/", times=2)],
    "503 on the manifest": [Fault("503", "GET .*manifest", times=2)],
    "resets in mid-body of metadata": [Fault("reset", "GET .*_METADATA", times=2)],
    "resets in mid-body of data": [Fault("reset", "GET .*/d/", times=2)],
    "short metadata": [Fault("short", "GET .*_METADATA", times=2)],
    "short data": [Fault("short", "GET .*/d/", times=2)],
    "slow bytes": [Fault("slow", "GET ")],
    "a silent connection, arrays": [Fault("stall", "GET .*/d/", times=1)],
    "a silent connection, metadata": [Fault("stall", "GET .*_METADATA", times=1)],
    "no answer, metadata": [Fault("hold", "GET .*_METADATA", times=1)],
    "429 on metadata": [Fault("429", "GET .*_METADATA", times=2)],
    "429 on the manifest": [Fault("429", "GET .*manifest", times=2)],
}


@pytest.mark.parametrize("faults", PASSING.values(), ids=PASSING.keys())
def test_passing_faults_are_retried_and_the_state_is_complete(
    saved: str, s3: str, proxy: FaultProxy, faults: list[Fault]
) -> None:
    del s3
    proxy.faults += [Fault(fault.kind, fault.match, fault.times) for fault in faults]
    begin = time.monotonic()
    check(restore(saved))
    assert all(fault.hits for fault in proxy.faults)
    assert time.monotonic() - begin < SILENCE / 2  # it was the client that gave up a silent connection


PASSING_FOR_WRITES = {
    "503 on metadata": Fault("503", "PUT .*_METADATA", times=2),
    "503 on array data": Fault("503", "PUT .*/d/", times=2),
    "429 on the manifest": Fault("429", "PUT .*manifest", times=2),
    "429 on an upload in parts": Fault("429", r"POST .*\?uploads", times=2),
    "503 on a part": Fault("503", "PUT .*uploadId", times=2),
    "no answer, metadata": Fault("hold", "PUT .*_METADATA", times=1),
    "no answer, array data": Fault("hold", "PUT .*/d/", times=1),
    "no answer, an upload in parts": Fault("hold", r"POST .*\?uploads", times=1),
    "no answer, a part": Fault("hold", "PUT .*uploadId", times=1),
    "no answer, commit file": Fault("hold", "PUT .*commit_success", times=1),
}


@pytest.mark.once
@pytest.mark.parametrize("fault", PASSING_FOR_WRITES.values(), ids=PASSING_FOR_WRITES.keys())
def test_what_is_written_through_passing_faults_is_complete(s3: str, proxy: FaultProxy, fault: Fault) -> None:
    proxy.faults.append(Fault(fault.kind, fault.match, fault.times))
    large = bytes(range(256)) * (40 << 10)  # is sent in parts
    begin = time.monotonic()
    save(s3, 0)
    (epath.Path(s3) / "large").write_bytes(large)
    assert time.monotonic() - begin < SILENCE / 2  # it was the client that gave up a silent connection
    assert proxy.faults[0].hits == fault.times
    proxy.calm()
    check(restore(s3))
    assert (epath.Path(s3) / "large").read_bytes() == large


LASTING = {
    "expired credentials, metadata": (Fault("expired", "GET .*_METADATA"), "renew the credentials"),
    "expired credentials, arrays": (Fault("expired", "GET .*manifest"), "renew the credentials"),
    "expired credentials, listing": (Fault("expired", "GET /[^/]*\\?"), "renew the credentials"),
    "redirection to another region, metadata": (Fault("elsewhere", "GET .*_METADATA"), "give region="),
    "redirection to another region, arrays": (Fault("elsewhere", "GET .*manifest"), "give region="),
    "signed for another region, metadata": (Fault("other region", "GET .*_METADATA"), "give region="),
    "signed for another region, arrays": (Fault("other region", "GET .*manifest"), "give region="),
    "access denied, metadata": (Fault("denied", "GET .*_METADATA"), "bucket policy"),
    "access denied, arrays": (Fault("denied", "GET .*/d/"), "bucket policy"),
    "throttled for good, arrays": (Fault("503", "GET .*manifest"), "try again later"),
    "throttled for good by 429, arrays": (Fault("429", "GET .*manifest"), "with fewer hosts at once"),
    "throttled for good by 429, metadata": (Fault("429", "GET .*_METADATA"), "with fewer hosts at once"),
    "throttled for good, without a reason": (Fault("503", "HEAD "), "with fewer hosts at once"),
    "broken for good, arrays": (Fault("500", "GET .*manifest"), "try again later"),
    "broken for good, metadata": (Fault("500", "GET .*_METADATA"), "try again later"),
    "short for good, metadata": (Fault("short", "GET .*_METADATA"), "check the endpoint"),
    "short for good, arrays": (Fault("short", "GET .*manifest"), "check the endpoint"),
}


@pytest.mark.parametrize(("fault", "remedy"), LASTING.values(), ids=LASTING.keys())
def test_lasting_faults_are_errors_that_name_the_place_and_the_remedy_but_no_secret(
    saved: str, s3: str, proxy: FaultProxy, fault: Fault, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    del s3
    proxy.faults.append(Fault(fault.kind, fault.match))
    with pytest.raises((OSError, ValueError)) as error:
        restore(saved, 0)
    assert saved in str(error.value)
    assert remedy in str(error.value)
    output = "".join(traceback.format_exception(error.value)) + caplog.text
    assert s3_server.SECRET_KEY not in output
    assert s3_server.SESSION_TOKEN not in output


def test_an_error_while_saving_holds_no_secret(s3: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture) -> None:
    proxy.faults.append(Fault("expired", "PUT .*/(d/|manifest)"))
    with pytest.raises((OSError, ValueError), match="renew the credentials") as error:
        save(s3, 0)
    output = "".join(traceback.format_exception(error.value)) + caplog.text
    assert s3_server.SECRET_KEY not in output
    assert s3_server.SESSION_TOKEN not in output


def test_a_deletion_without_an_answer_is_repeated(s3: str, proxy: FaultProxy) -> None:
    (epath.Path(s3) / "file").write_text("x")
    proxy.faults.append(Fault("hold", r"POST .*\?delete", times=1))
    begin = time.monotonic()
    epath.Path(s3).rmtree()
    assert proxy.faults[0].hits == 1
    assert not epath.Path(s3).exists()
    assert time.monotonic() - begin < SILENCE / 2


def test_a_missing_bucket_is_named(s3: str) -> None:
    del s3
    with pytest.raises(FileNotFoundError, match=r"s3://no-such-bucket.*create the bucket"):
        save("s3://no-such-bucket/run", 0)


def test_an_endpoint_where_nothing_listens_is_named(s3: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        s3_lib.enable_s3(f"http://127.0.0.1:{unused.getsockname()[1]}", "us-east-1", retries=1)
        with pytest.raises(OSError, match=f"{s3}/0.*check the endpoint and the network"):
            (epath.Path(s3) / "0").exists()
