from __future__ import annotations

import pytest

from orbax_ext import text


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (1, "1 B"), (999, "999 B"), (17_300, "17.3 kB"), (999_999, "1.0 MB"), (2_000_000_000, "2.0 GB")],
)
def test_size_is_in_powers_of_1000(count: int, expected: str) -> None:
    assert text.size(count) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0001, "< 1 ms"),
        (0.0123, "12 ms"),
        (0.9999, "1.0 s"),
        (3.44, "3.4 s"),
        (125, "2 minutes and 5 seconds"),
        (3600, "1 hour"),
    ],
)
def test_seconds_fit_their_magnitude(value: float, expected: str) -> None:
    assert text.seconds(value) == expected


def test_counts_have_the_right_plural() -> None:
    assert [text.count(n, "process") for n in (0, 1, 2)] == ["0 processes", "1 process", "2 processes"]
    assert text.count(2000, "leaf") == "2,000 leaves"


def test_a_share_is_in_percent() -> None:
    assert text.share(1, 4) == "25%"
    assert text.share(1, 0) == "-"


def test_a_shape_lists_its_sizes() -> None:
    assert text.shape((8, 16)) == "8x16"
    assert text.shape(()) == "()"


def test_listing_says_how_many_are_left_out() -> None:
    assert text.listing("abc") == "a, b, c"
    assert text.listing("abcde", most=2) == "a, b and 3 more"


def test_a_listing_of_nothing_is_empty() -> None:
    assert text.listing([]) == ""


def test_processes_are_named_with_their_hosts() -> None:
    assert text.process(3, {3: "host3"}) == "process 3 (host3)"
    assert text.process(3, {}) == "process 3"
    assert text.processes([3], {3: "host3"}) == "process 3 (host3)"
    assert text.processes([1, 3, 4], {3: "host3"}, most=2) == "processes 1, 3 (host3) and 1 more"


def test_a_mesh_lists_its_axes() -> None:
    assert text.mesh({"dp": 4, "tp": 8}) == "(dp=4, tp=8)"
    assert text.mesh({}) == "()"


def test_a_table_has_columns_of_equal_width() -> None:
    assert text.table(["name", "n"], [["a", "10"], ["long name", "2"]], right=[1], indent="") == (
        "name        n\n---------  --\na          10\nlong name   2"
    )


def test_a_table_without_rows_has_its_head() -> None:
    assert text.table(["name", "n"], []) == "  name  n\n  ----  -"
