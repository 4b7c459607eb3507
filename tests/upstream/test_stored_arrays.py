"""Arrays are opened once more, to be read once more, in the same way."""

from __future__ import annotations

import tensorstore as ts

from orbax_ext.upstream.stored_arrays import reopening


def test_an_array_is_opened_once_more_with_the_same_credentials_and_limits() -> None:
    settings = {"endpoint": "http://127.0.0.1:1", "aws_region": "us-east-1", "aws_credentials": {"type": "anonymous"}}
    kvstore = {"driver": "s3", "bucket": "bucket", "path": "leaf/", **settings}
    spec = {"driver": "zarr", "kvstore": kvstore, "metadata": {"shape": [8, 8], "chunks": [8, 8], "dtype": "<i4"}}
    limits = ts.Context({"s3_request_concurrency": {"limit": 7}})
    store = ts.open(spec, open=True, assume_metadata=True, context=limits).result()
    found = reopening()(store[2:4, ::2]).spec(unbind_context=True).to_json()
    assert settings.items() <= found["kvstore"].items()
    assert found["context"]["s3_request_concurrency"] == {"limit": 7}
    assert found["transform"] == store[2:4, ::2].spec().to_json()["transform"]
