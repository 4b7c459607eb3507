"""Requests to an object store that are under way at a time, counted by a store whose answers take a while."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorstore as ts
from etils import epath
from orbax.checkpoint import type_handlers

from orbax_ext.upstream.array_handler import array_context
from orbax_ext.upstream.stored_arrays import StoredSpec, with_request_concurrency


class Store(http.server.ThreadingHTTPServer):
    """Answers every request for an object with one byte, once `expected` have been under way at a time."""

    throttles = False  # refuses the first request for each object
    expected = 0

    request_queue_size = 200
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.lock = threading.Condition()
        self.under_way = self.most = 0
        self.refused: set[str] = set()
        self.answered = 0
        self.most_unanswered = 0  # objects that were asked for and not answered yet, because they were refused or wait


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Store
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.throttles:
            with self.server.lock:
                refuse = self.path not in self.server.refused
                self.server.refused.add(self.path)
                unanswered = len(self.server.refused) - self.server.answered
                self.server.most_unanswered = max(self.server.most_unanswered, unanswered)
                self.server.answered += not refuse
            if refuse:
                self.send_response(503)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        with self.server.lock:
            self.server.under_way += 1
            self.server.most = max(self.server.most, self.server.under_way)
            self.server.lock.notify_all()
            if not self.server.lock.wait_for(lambda: self.server.most >= self.server.expected, 10.0):
                self.server.expected = 0  # it does not happen: the others need not wait for it too
        time.sleep(0.2)  # in which requests above a limit would come
        with self.server.lock:
            self.server.under_way -= 1
        self.send_response(200)
        self.send_header("Content-Length", "1")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(b"x")

    def log_message(self, *args: Any) -> None:
        """Prints nothing."""


@pytest.fixture
def store() -> Iterator[Store]:
    with Store() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def info(path: str, context: ts.Context | None = None) -> type_handlers.ParamInfo:
    return type_handlers.ParamInfo(
        name="leaf", parent_dir=epath.Path(path), ts_context=context or array_context(True), is_ocdbt_checkpoint=True
    )


def most_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: int | None, count: int, expected: int = 0
) -> int:
    store.expected = expected
    for name, value in {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "something"}.items():
        monkeypatch.setenv(name, value)
    (raised,) = with_request_concurrency([info("gs://bucket/checkpoint")], limit)
    spec = {
        "driver": "s3",
        "bucket": "bucket",
        "endpoint": f"http://127.0.0.1:{store.server_port}",
        "aws_region": "us-east-1",
    }
    objects = ts.KvStore.open(spec, context=raised.ts_context).result()
    reads = [objects.read(f"object{number}") for number in range(count)]
    assert [read.result().value for read in reads] == [b"x"] * count
    return store.most


def test_more_requests_than_tensorstore_allows_are_under_way(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 32 < most_at_a_time(store, monkeypatch, None, 200, expected=33) <= 128


def test_no_more_requests_are_under_way_than_were_asked_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_at_a_time(store, monkeypatch, 4, 24, expected=4) == 4


def test_a_request_that_storage_has_refused_keeps_its_place_until_it_is_answered(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.throttles = True
    assert most_at_a_time(store, monkeypatch, 4, 8) <= 4
    assert len(store.refused) == 8
    assert store.most_unanswered <= 4  # so throttling leaves fewer requests under way


def test_what_the_user_has_set_for_tensorstore_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ts.Context({"gcs_request_concurrency": {"limit": 7}}, parent=array_context(True))
    monkeypatch.setenv("TENSORSTORE_S3_REQUEST_CONCURRENCY", "9")
    (kept,) = with_request_concurrency([info("gs://bucket/checkpoint", given)], None)
    assert kept.ts_context["gcs_request_concurrency"].to_json() == {"limit": 7}
    assert "s3_request_concurrency" not in kept.ts_context.spec.to_json()


def test_files_are_read_in_the_context_of_orbax() -> None:
    local = info("/checkpoint")
    assert with_request_concurrency([local], 4) == [local]


def test_one_array_in_a_bucket_is_enough() -> None:
    context = array_context(True)
    places = ("file:///data/a", "s3://bucket/b")
    arrays = [StoredSpec(place, {"driver": "zarr", "kvstore": place}, context, place) for place in places]
    raised = with_request_concurrency(arrays, 4)
    assert [one.ts_context["s3_request_concurrency"].to_json() for one in raised] == [{"limit": 4}] * 2
    assert with_request_concurrency(arrays[:1], 4) == arrays[:1]
