"""The list of supported releases."""

from __future__ import annotations

import pytest

from orbax_ext import version
from tools import releases

pytestmark = pytest.mark.once


def test_the_releases_are_those_that_the_package_supports() -> None:
    assert releases.RELEASES[0] == version.OLDEST_ORBAX
    assert releases.RELEASES[-1] == version.NEWEST_ORBAX
    assert list(releases.RELEASES) == sorted(releases.RELEASES, key=version.numbers)


def test_a_span_of_releases_includes_both_ends() -> None:
    assert releases.between("0.11.39", "0.12.1") == ("0.11.39", "0.11.40", "0.12.0", "0.12.1")
