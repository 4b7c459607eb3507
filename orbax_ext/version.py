"""The versions of orbax_ext and of the Orbax releases that it supports. Imports neither JAX nor Orbax."""

from __future__ import annotations

import importlib.metadata
import re
import warnings

__version__ = "0.2.0"

OLDEST_ORBAX = "0.11.33"
NEWEST_ORBAX = "0.12.8"  # the newest release that the tests run with


def orbax_version() -> str:
    """Returns the version of the installed Orbax."""
    return importlib.metadata.version("orbax-checkpoint")


def check_orbax_version(found: str) -> None:
    """Raises ImportError if Orbax is too old; warns if it is newer than the newest tested release."""
    if numbers(found) < numbers(OLDEST_ORBAX):
        raise ImportError(
            f"orbax_ext needs orbax-checkpoint {OLDEST_ORBAX} or newer, found {found}. "
            f"Upgrade with: pip install 'orbax-checkpoint>={OLDEST_ORBAX}'"
        )
    if numbers(found) > numbers(NEWEST_ORBAX):
        warnings.warn(f"orbax_ext is tested with orbax-checkpoint up to {NEWEST_ORBAX}, found {found}.", stacklevel=3)


def numbers(release: str) -> tuple[int, ...]:
    """Returns the release numbers of a version, such as (0, 11, 33) for "0.11.33+ext.1"."""
    return tuple(int(part) for part in re.findall(r"\d+", release.split("+")[0])[:3])
