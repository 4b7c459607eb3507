from __future__ import annotations

import json

import pytest

from tests.faults import table

pytestmark = pytest.mark.once


def test_a_row_shows_what_was_before() -> None:
    rows = [
        table.Row("a", "all hang", "all restored", "all RestoreFailedError"),
        table.Row("b", "all hang", "all dead"),
    ]
    assert table.table(rows).splitlines()[2:] == [
        "| a | all hang | all RestoreFailedError | all restored |",
        "| b | all hang | all dead | all dead |",
    ]


def test_rows_that_were_measured_earlier_are_kept() -> None:
    for rows in json.loads(table._data().read_text()).values():
        assert [table.Row(*row).fault for row in rows] == [row[0] for row in rows]
