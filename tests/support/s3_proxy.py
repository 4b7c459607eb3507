"""A proxy in front of the S3 server that records requests and injects the faults of networks and stores."""

from __future__ import annotations

import dataclasses
import http.client
import http.server
import re
import socket
import ssl
import threading
import time
import urllib.parse
from typing import Any, Self

from tests.support import s3_server, s3_stores

SILENCE = 120.0  # seconds until a connection without an answer is closed: a client that waits so long has no limit
_DROPPED_HEADERS = ("connection", "transfer-encoding", "keep-alive", "proxy-connection", "expect")

# As on AWS, the answer to an expired session repeats the token.
_EXPIRED = (
    "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message>"
    f"<Token-0>{s3_server.SESSION_TOKEN}</Token-0></Error>"
)
_ANSWERS = {
    "429": (429, "<Error><Code>TooManyRequests</Code><Message>Please reduce your request rate.</Message></Error>"),
    "500": (500, "<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"),
    "503": (503, "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"),
    "expired": (400, _EXPIRED),
    "elsewhere": (301, "<Error><Code>PermanentRedirect</Code><Message>Send requests elsewhere.</Message></Error>"),
    "other region": (400, "<Error><Code>AuthorizationHeaderMalformed</Code><Message>Not here.</Message></Error>"),
    "denied": (403, "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"),
}


@dataclasses.dataclass
class Fault:
    """A fault of all requests that match, such as `Fault("503", "GET .*manifest", times=2)`."""

    kind: str  # one of _ANSWERS, "reset", "short", "slow", "stall", or "hold", which never reaches the store
    match: str = ""  # a regular expression, searched in "METHOD /bucket/key?query"
    times: int = 1 << 30
    skip: int = 0  # matching requests to let pass first
    hits: int = 0


@dataclasses.dataclass(frozen=True)
class Request:
    """One request that the proxy has answered."""

    line: str  # "METHOD /bucket/key?query"
    sent: int  # bytes of the answer's body


class FaultProxy:
    """Listens on loopback, with TLS if it has a context, and forwards to the server on port `upstream`."""

    def __init__(self, upstream: int, tls: ssl.SSLContext | None = None) -> None:
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self.upstream = upstream
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def calm(self) -> None:
        """Removes all faults and forgets all requests."""
        with self._lock:
            self.faults.clear()
            self.requests.clear()

    def fault_for(self, line: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if re.search(fault.match, line) and fault.hits < fault.times + fault.skip:
                    fault.hits += 1
                    return fault if fault.hits > fault.skip else None
        return None

    def record(self, line: str, sent: int) -> None:
        with self._lock:
            self.requests.append(Request(line, sent))

    def forward(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        try:
            # The host name stays, although it is not that of the server: it is signed.
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name.lower() not in _DROPPED_HEADERS:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            # rclone (1.75.2) sends a range with status 200, which TensorStore takes for a whole object. The library
            # that it is made with does it right since July 2026: https://github.com/johannesboyne/gofakes3/pull/121
            status = 206 if answer.status == 200 and answer.getheader("Content-Range") else answer.status
            return status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body waits 40 ms for the client to acknowledge the headers
    owner: FaultProxy

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        line = f"{self.command} {urllib.parse.unquote(self._path_style())}"
        fault = self.owner.fault_for(line)
        if fault is not None and fault.kind in _ANSWERS:
            status, text = _ANSWERS[fault.kind]
            self._send(line, status, [("Content-Type", "application/xml")], text.encode())
            return
        if fault is not None and fault.kind == "hold":
            time.sleep(SILENCE)
            self.close_connection = True
            return
        status, headers, content = self.owner.forward(self.command, self._without_host(), self.headers, body)
        self._send(line, status, headers, content, fault.kind if fault else "")

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer  # noqa: N815

    def _without_host(self) -> str:
        """Returns path and query, also of a request that a client sends to an HTTP proxy."""
        parsed = urllib.parse.urlsplit(self.path)
        return urllib.parse.urlunsplit(("", "", parsed.path or "/", parsed.query, ""))

    def _path_style(self) -> str:
        """Returns /bucket/key, also for a request in virtual-host style."""
        host = str(self.headers.get("Host", "")).partition(":")[0]
        bucket = host.removesuffix(f".{s3_stores.HOST}")
        return self._without_host() if bucket == host else f"/{bucket}{self._without_host()}"

    def _send(self, line: str, status: int, headers: list[tuple[str, str]], body: bytes, fault: str = "") -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value  # the answer to a HEAD has a length but no body
            elif name.lower() not in _DROPPED_HEADERS:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            body = b""
        self.owner.record(line, len(body))
        try:
            self._write(body, fault)
        except OSError:
            self.close_connection = True

    def _write(self, body: bytes, fault: str) -> None:
        if fault == "slow":
            step = max(1, len(body) // 8)
            for start in range(0, len(body), step):
                self.wfile.write(body[start : start + step])
                self.wfile.flush()
                time.sleep(0.05)
        elif fault in ("reset", "short", "stall"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            elif fault == "short":
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                time.sleep(SILENCE)
            self.close_connection = True
        else:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
