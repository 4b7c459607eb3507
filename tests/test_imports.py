"""No test module imports another: helpers are in tests/support/."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.once

TESTS = pathlib.Path(__file__).parent


def test_no_module_imports_a_test_or_a_conftest() -> None:
    offences = [
        f"{path.relative_to(TESTS)} imports {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name in _imports(path)
        if name.startswith("tests.") and any(_is_test(part) for part in name.split("."))
    ]
    assert offences == []


def _imports(path: pathlib.Path) -> Iterator[str]:
    """Yields the full name of everything that a module imports, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_test(name: str) -> bool:
    return name == "conftest" or name.startswith("test_")
