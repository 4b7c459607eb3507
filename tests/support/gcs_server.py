"""An emulated Google Cloud Storage for tests, on loopback, and a proxy that adds what the emulator leaves out."""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import importlib.util
import json
import pathlib
import sys
import urllib.parse
from collections.abc import Iterator
from typing import Any

from tests.support import s3_stores
from tests.support.s3_proxy import FaultProxy

BUCKET = "emulated-bucket"
_PROGRAM = pathlib.Path(sys.executable).parent / "gcp-storage-emulator"
Answer = tuple[int, list[tuple[str, str]], bytes]


def missing() -> str | None:
    """Returns why the emulator can't run here, or None if it can."""
    if not _PROGRAM.exists():
        return f"{_PROGRAM} is missing; the extra `stores` has it"
    return None if importlib.util.find_spec("gcsfs") else "gs:// paths of etils need gcsfs, of the extra `stores`"


def version() -> str:
    """Returns the version of the emulator, which is not missing."""
    return importlib.metadata.version("gcp-storage-emulator")


def environment(url: str) -> dict[str, str]:
    """Returns the variables by which TensorStore and gcsfs find the emulator and need no account."""
    return {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "STORAGE_EMULATOR_HOST": url,
    }


@contextlib.contextmanager
def running() -> Iterator[FaultProxy]:
    """Runs an emulator with one bucket, and yields the proxy in front of it."""
    port = s3_stores.free_port()
    command = [str(_PROGRAM), "start", "--port", str(port), "-H", "127.0.0.1", "-M", "-q", "--default-bucket", BUCKET]
    with s3_stores.serving(command, port), GcsProxy(port) as proxy:
        yield proxy


class GcsProxy(FaultProxy):
    """Answers as GCS does where the emulator ignores generations, which tell TensorStore whether an object changed."""

    def forward(self, method: str, path: str, headers: Any, body: bytes) -> Answer:
        parsed = urllib.parse.urlsplit(path)
        query = urllib.parse.parse_qs(parsed.query)
        if method == "GET" and query.get("alt") == ["media"]:
            generation = self._generation(parsed.path.removeprefix("/download"))
            if query.get("ifGenerationNotMatch") == [generation]:
                return 304, [], b""
            status, answered, content = super().forward(method, path, headers, body)
            return status, [*answered, ("x-goog-generation", generation)], content
        if method == "POST" and "ifGenerationMatch" in query:
            folder = parsed.path.removeprefix("/upload")
            if query["ifGenerationMatch"] != [self._generation(f"{folder}/{urllib.parse.quote(query['name'][0], '')}")]:
                return 412, [], b""
        return super().forward(method, path, headers, body)

    def _generation(self, path: str) -> str:
        """Returns the generation of an object; "0" if there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return str(json.loads(answer.read())["generation"]) if answer.status == 200 else "0"
