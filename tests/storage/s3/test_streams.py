from __future__ import annotations

import io

import pytest

from orbax_ext.storage.s3.streams import LargeFile, TextFile, Upload

pytestmark = pytest.mark.once

CONTENT = bytes(range(256)) * 4


def test_an_upload_is_stored_once_when_it_is_closed() -> None:
    stored: list[bytes] = []
    with Upload(stored.append, b"one") as file:
        file.write(b", two")
        assert stored == []
    file.close()
    assert stored == [b"one, two"]


@pytest.mark.parametrize("text", [False, True])
def test_an_upload_that_an_error_closes_is_not_stored(text: bool) -> None:
    stored: list[bytes] = []
    upload = Upload(stored.append, b"")
    with pytest.raises(ZeroDivisionError), TextFile(upload) if text else upload:
        raise ZeroDivisionError
    assert stored == []


def test_a_text_file_stores_its_encoded_text() -> None:
    stored: list[bytes] = []
    with TextFile(Upload(stored.append, b""), encoding="utf-8") as file:
        file.write("naïve")
    assert stored == ["naïve".encode()]


@pytest.mark.parametrize(("offset", "whence"), [(300, io.SEEK_SET), (-724, io.SEEK_END)])
def test_a_large_file_reads_only_the_ranges_asked_for(offset: int, whence: int) -> None:
    ranges: list[tuple[int, int]] = []

    def read_range(start: int, end: int) -> bytes:
        ranges.append((start, end))
        return CONTENT[start:end]

    file = LargeFile(read_range, len(CONTENT))
    assert file.seek(offset, whence) == 300
    assert file.read(100) == CONTENT[300:400]
    assert file.seek(600, io.SEEK_CUR) == 1000
    assert file.read(100) == CONTENT[1000:]
    assert file.read(100) == b""
    assert ranges == [(300, 400), (1000, 1024)]
    file.seek(10)
    assert io.BufferedReader(file).read() == CONTENT[10:]
    assert ranges[2:] == [(10, 1024)]
