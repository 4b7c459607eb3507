from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_ext.storage.s3 import paths

pytestmark = pytest.mark.once

keys = st.lists(
    st.lists(st.sampled_from(["0", "default", "d", "commit_success.txt", "x"]), min_size=1, max_size=4).map("/".join),
    unique=True,
    max_size=40,
)


@given(keys)
def test_commit_files_are_deleted_first_and_nothing_is_forgotten(names: list[str]) -> None:
    order = [key for batch in paths.deletion_order(names) for key in batch]
    assert sorted(order) == sorted(names)
    is_commit = [key.rsplit("/", 1)[-1] == "commit_success.txt" for key in order]
    assert is_commit == sorted(is_commit, reverse=True)


@given(keys)
def test_commit_files_are_deleted_from_the_outside_in_one_depth_after_the_other(names: list[str]) -> None:
    """A store deletes the keys of one batch in any order."""
    batches = [batch for batch in paths.deletion_order(names) if batch[0].endswith("commit_success.txt")]
    depths = [{key.count("/") for key in batch} for batch in batches]
    assert all(len(found) == 1 for found in depths)
    assert depths == sorted(depths, key=min)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://bucket/run/0/", ("bucket", "run/0")),
        ("s3://bucket/run//0", ("bucket", "run//0")),
    ],
)
def test_a_path_is_a_bucket_and_a_key(path: str, expected: tuple[str, str]) -> None:
    assert paths.split(path) == expected


@pytest.mark.parametrize("path", ["/data/run", "gs://bucket/run", "s3:/bucket/run", "s3://", "s3:///run"])
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"begins with s3://|names a bucket"):
        paths.split(path)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://bucket/run", ["s3://bucket/run"]),
        ("s3://bucket/run/*/x?", ["s3://bucket/run", "*", "x?"]),
        ("s3://bucket/[ab]/default", ["s3://bucket", "[ab]", "default"]),
    ],
)
def test_a_pattern_is_split_at_its_first_wildcard(path: str, expected: list[str]) -> None:
    assert paths.split_at_wildcard(path) == expected


def test_a_batch_to_delete_fits_into_one_request() -> None:
    names = ["0/commit_success.txt", "0/default/commit_success.txt", *(f"0/d/{number}" for number in range(2500))]
    batches = paths.deletion_order(names)
    assert batches[:2] == [["0/commit_success.txt"], ["0/default/commit_success.txt"]]
    assert [len(batch) for batch in batches[2:]] == [1000, 1000, 500]
