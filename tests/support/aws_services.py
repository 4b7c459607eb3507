"""Stand-ins on loopback for services of AWS that hand out credentials or tell the region of a bucket."""

from __future__ import annotations

import contextlib
import http.server
import json
import ssl
import threading
from collections.abc import Iterator

from tests.support import s3_server

ANSWER = {
    "AccessKeyId": s3_server.ACCESS_KEY,
    "SecretAccessKey": s3_server.SECRET_KEY,
    "Token": s3_server.SESSION_TOKEN,
    "Expiration": "2099-01-01T00:00:00Z",
    "Code": "Success",
}
STS = (
    "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
    f"<AccessKeyId>{s3_server.ACCESS_KEY}</AccessKeyId><SecretAccessKey>{s3_server.SECRET_KEY}</SecretAccessKey>"
    f"<SessionToken>{s3_server.SESSION_TOKEN}</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>"
    "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
)
AUTHORIZATION = "the-authorization-of-the-tests"  # what a container shows to get credentials


class Service(http.server.BaseHTTPRequestHandler):
    """Hands out credentials as a container's and an instance's service and as AWS's token service do."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.dumps(ANSWER)
        if self.path.endswith("/security-credentials/"):
            body = "role"
        elif self.path.endswith("/api/token"):
            body = "token"
        elif self.command == "POST":
            body = STS
        allowed = self.path != "/role" or self.headers.get("Authorization") == AUTHORIZATION
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_PUT = do_POST = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler], context: ssl.SSLContext | None = None) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"{'https' if context else 'http'}://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


class NothingThere(http.server.BaseHTTPRequestHandler):
    """Finds nothing, as the service of an instance without a role."""

    def answer(self) -> None:
        self.send_error(404)

    do_GET = do_PUT = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def region_service(*statuses: int) -> type[http.server.BaseHTTPRequestHandler]:
    """Returns a service that answers with one status after the other, and then always with the last."""
    remaining = list(statuses)

    class Region(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            status = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            self.send_response(status)
            if status not in (429, 503):
                self.send_header("x-amz-bucket-region", "eu-west-1")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Region
