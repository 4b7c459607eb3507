from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from orbax_ext import version


def test_an_orbax_that_is_too_old_is_refused() -> None:
    with pytest.raises(ImportError, match=r"orbax-checkpoint 0\.11\.33 or newer, found 0\.11\.32"):
        version.check_orbax_version("0.11.32")


@pytest.mark.parametrize("release", ["0.11.33", "0.11.40", "0.12.8", "0.12.8+ext.1"])
def test_supported_releases_do_not_warn(release: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        version.check_orbax_version(release)


def test_a_newer_orbax_than_tested_warns() -> None:
    with pytest.warns(UserWarning, match=r"up to 0\.12\.8, found 0\.13\.0"):
        version.check_orbax_version("0.13.0")


def test_an_orbax_that_is_too_old_is_refused_at_import() -> None:
    script = "import importlib.metadata as m; m.version = lambda name: '0.10.0'; import orbax_ext"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ImportError: orbax_ext needs orbax-checkpoint 0.11.33 or newer, found 0.10.0" in done.stderr
