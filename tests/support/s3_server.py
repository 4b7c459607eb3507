"""Runs moto's S3-compatible server for tests, over loopback HTTP, from an environment of its own.

`make test` builds that environment in .venv/s3server; ORBAX_EXT_S3_SERVER names another moto_server.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator

ACCESS_KEY = "AKIDORBAXEXTTEST"
SECRET_KEY = "the-secret-key-of-the-tests"  # no error and no log may hold it
SESSION_TOKEN = "the-session-token-of-the-tests"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_SESSION_TOKEN": SESSION_TOKEN,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
_START_LIMIT = 60.0  # seconds


def command() -> pathlib.Path:
    """Returns the path where moto_server is expected."""
    named = os.environ.get("ORBAX_EXT_S3_SERVER")
    return pathlib.Path(named or pathlib.Path(__file__).parents[2] / ".venv" / "s3server" / "bin" / "moto_server")


@contextlib.contextmanager
def running() -> Iterator[int]:
    """Runs a server and yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(command()), "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _wait_for(port, process)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def make_bucket(port: int, name: str) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    request.add_header("Authorization", f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request")
    urllib.request.urlopen(request, timeout=10).close()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_LIMIT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the S3 server ended with exit code {process.returncode} before it answered")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=5).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"the S3 server did not answer within {_START_LIMIT:g} s")
