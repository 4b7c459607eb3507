"""On one process; on several see `tests/multiprocess/test_step_listing.py`."""

from __future__ import annotations

import time

import pytest

from orbax_ext import errors
from orbax_ext.meeting import listing
from orbax_ext.meeting.session import Limits

pytestmark = pytest.mark.once


@pytest.mark.parametrize("count", [0, 1, 2000, 4001])
def test_the_list_arrives_whole(count: int) -> None:
    assert listing.from_process_0(lambda: range(count), Limits(5)) == list(range(count))


def test_an_error_keeps_its_built_in_type() -> None:
    def fail() -> list[int]:
        raise FileNotFoundError("no such bucket")

    with pytest.raises(FileNotFoundError, match="in phase 'list steps': FileNotFoundError: no such bucket") as caught:
        listing.from_process_0(fail, Limits(5))
    assert isinstance(caught.value, errors.RestoreFailedError)


def test_silent_storage_is_an_error() -> None:
    def wait() -> list[int]:
        time.sleep(60)
        return []

    with pytest.raises(TimeoutError, match=r"could not list steps within 0\.9 s") as caught:
        listing.from_process_0(wait, Limits(1))
    assert isinstance(caught.value, errors.RestoreFailedError)
