from __future__ import annotations

from orbax_ext.storage.s3.usage import RequestCounter, Usage


def test_the_difference_of_two_usages_is_what_happened_between() -> None:
    difference = Usage(5, 50, 7, 700) - Usage(2, 20, 3, 300)
    assert difference == Usage(3, 30, 4, 400)
    assert (difference.requests, difference.bytes) == (7, 430)


def test_a_counter_counts_metadata_apart_from_arrays() -> None:
    counter = RequestCounter()
    before = counter.usage()
    counter.add(requests=1)
    counter.add(requests=1)
    counter.add(read=10)
    assert counter.usage() - before == Usage(metadata_requests=2, metadata_bytes=10)
