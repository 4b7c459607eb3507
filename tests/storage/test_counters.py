from __future__ import annotations

import pathlib

import pytest
import tensorstore as ts

from orbax_ext.storage import counters


@pytest.mark.parametrize("ocdbt", [False, True])
def test_each_byte_read_is_counted_once(tmp_path: pathlib.Path, ocdbt: bool) -> None:
    content = bytes(100_000)
    base = {"driver": "file", "path": f"{tmp_path}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base} if ocdbt else base).result()
    store.write("key", content).result()
    bytes_before, requests_before = counters.bytes_read(), counters.requests()
    assert len(store.read("key").result().value) == len(content)
    assert len(content) <= counters.bytes_read() - bytes_before < 1.5 * len(content)
    assert counters.requests() > requests_before


def test_each_driver_has_counters_of_its_own(tmp_path: pathlib.Path) -> None:
    store = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    store.write("key", b"1234").result()
    file, s3 = counters.of_driver("file", "bytes_read"), counters.of_driver("s3", "bytes_read")
    store.read("key").result()
    assert counters.of_driver("file", "bytes_read") - file == 4
    assert counters.of_driver("s3", "bytes_read") == s3
    assert counters.of_driver("no such driver", "bytes_read") == 0
