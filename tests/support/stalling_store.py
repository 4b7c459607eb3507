"""A file server that does not answer the first request for a chunk, as over a connection that is stuck."""

from __future__ import annotations

import contextlib
import http.server
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

CHUNK = 16 << 10  # bytes; what is smaller is metadata, and is answered at once


class StallingStore(http.server.ThreadingHTTPServer):
    """Serves the files of a directory, whole or ranges of them."""

    daemon_threads = True

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.directory = directory
        self.chunks: list[str] = []  # file and range of each request for a chunk
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(http.server.BaseHTTPRequestHandler):
    server: StallingStore
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        file = self.server.directory / self.path.lstrip("/")
        data = file.read_bytes() if file.is_file() else b""
        self.send_response(404 if not file.is_file() else 206 if wanted else 200)
        if data and wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = (int(first), int(last or len(data) - 1) + 1) if first else (len(data) - int(last), len(data))
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
            data = data[start:end]
        if len(data) >= CHUNK:
            self.server.chunks.append(f"{self.path} {wanted}")
            if len(self.server.chunks) == 1:
                self.server.ended.wait()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def serving(directory: pathlib.Path) -> Iterator[StallingStore]:
    """Serves a directory; answers what was not answered at the end."""
    with StallingStore(directory) as store:
        threading.Thread(target=store.serve_forever, daemon=True).start()
        try:
            yield store
        finally:
            store.ended.set()
            store.shutdown()
