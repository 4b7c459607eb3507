"""The message of what a process has."""

from __future__ import annotations

import base64
import zlib

import pytest

from orbax_ext.meeting import holdings
from orbax_ext.meeting.terms import MAX_VALUE


def test_entries_come_back_as_they_were() -> None:
    entries = {3: (0, 1), 5: (-1, -1), 8: (0, 1), 9: ()}
    assert holdings.unpack(holdings.pack(entries)) == entries


def test_many_leaves_on_many_devices_fit_into_one_message() -> None:
    entries = {leaf: tuple(range(8)) if leaf % 7 else (-1,) * 8 for leaf in range(100_000)}
    assert len(holdings.pack(entries)) < MAX_VALUE


def test_a_message_that_is_cut_short_is_refused() -> None:
    whole = zlib.compress(b"[[[0]],[0],[0]]")
    with pytest.raises(ValueError, match="cut short or too long"):
        holdings.unpack(base64.b85encode(whole[:-4]).decode())
