"""Requests to an object store that are under way at a time, counted by a store whose answers take a while."""

from __future__ import annotations

import asyncio
import gc
import http.server
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import tensorstore as ts
from etils import epath
from orbax.checkpoint import type_handlers

from orbax_ext.transfer.requests import Requests
from orbax_ext.upstream import stored_arrays
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


class Throttling(http.server.ThreadingHTTPServer):
    """Answers requests for objects, and refuses what exceeds a number at a time."""

    request_queue_size = 500
    daemon_threads = True

    def __init__(self, most: int) -> None:
        super().__init__(("127.0.0.1", 0), _AnswerOrRefuse)
        self.free = threading.Semaphore(most)
        self.refused = 0


class _AnswerOrRefuse(http.server.BaseHTTPRequestHandler):
    server: Throttling
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        free = self.server.free.acquire(blocking=False)
        if free:
            time.sleep(0.02)
            self.server.free.release()
        else:
            self.server.refused += 1
        self.send_response(200 if free else 503)
        self.send_header("Content-Length", "1")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(b"x")

    def log_message(self, *args: Any) -> None:
        """Prints nothing."""


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


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")


def read_group(server: http.server.HTTPServer, context: ts.Context, count: int) -> None:
    port = server.server_address[1]
    spec = {"driver": "s3", "bucket": "bucket", "endpoint": f"http://127.0.0.1:{port}", "aws_region": "us-east-1"}
    objects = ts.KvStore.open(spec, context=context).result()
    for read in [objects.read(f"object{number}") for number in range(count)]:
        assert read.result(timeout=30).value == b"x"


@pytest.mark.usefixtures("keys")
def test_fewer_requests_are_under_way_after_storage_has_refused_some() -> None:
    """What TensorStore counts is what the limit follows."""
    requests = Requests(512)
    with Throttling(most=16) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        limits: list[int] = []

        async def restore() -> None:
            for _ in range(3):
                limits.append(requests.limit)
                context = ts.Context({"s3_request_concurrency": {"limit": requests.limit}})
                async with requests.reading():
                    read_group(server, context, 2 * requests.limit)

        asyncio.run(restore())
        server.shutdown()
    assert limits[:2] == [128, 64]
    assert server.refused
    assert limits[2] < 64


def test_a_group_is_read_in_the_context_with_the_number_of_requests_of_that_time() -> None:
    context = array_context(True)
    (followed,) = with_request_concurrency([info("gs://bucket/checkpoint", context)], None)
    contexts = [stored_arrays._with_requests(followed.ts_context, count) for count in (128, 64, 64, 256)]
    assert contexts[0] is followed.ts_context
    assert contexts[1] is contexts[2]  # so that groups share what is read of a database
    limits = [each["gcs_request_concurrency"].to_json() for each in contexts if each is not None]
    assert limits == [{"limit": 128}, {"limit": 64}, {"limit": 64}, {"limit": 256}]
    (fixed,) = with_request_concurrency([info("gs://bucket/checkpoint", context)], 7)
    assert stored_arrays._with_requests(fixed.ts_context, 64) is fixed.ts_context


def test_contexts_are_not_kept_after_the_restore() -> None:
    (followed,) = with_request_concurrency([info("gs://bucket/checkpoint")], None)
    stored_arrays._with_requests(followed.ts_context, 64)
    kept = weakref.ref(followed.ts_context)
    del followed
    gc.collect()
    assert kept() is None
