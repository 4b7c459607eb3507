from __future__ import annotations

import pathlib
import re

import orbax_ext

PACKAGE = pathlib.Path(orbax_ext.__file__).parent


def test_all_is_sorted_and_complete() -> None:
    assert orbax_ext.__all__ == sorted(orbax_ext.__all__, key=lambda name: (name.islower(), name))
    for name in orbax_ext.__all__:
        assert hasattr(orbax_ext, name), name


def test_only_compat_touches_private_modules_of_orbax_and_jax() -> None:
    private = re.compile(r"(orbax\.checkpoint|jax)\S*\._src")
    found = [path.name for path in PACKAGE.rglob("*.py") if private.search(path.read_text())]
    assert found == ["compat.py"]


def test_the_plan_needs_neither_jax_nor_orbax() -> None:
    for path in (PACKAGE / "plan").glob("*.py"):
        assert not re.search(r"^\s*(import|from) (jax|orbax\.|tensorstore)", path.read_text(), re.MULTILINE), path.name
