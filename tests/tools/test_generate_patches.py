"""Finding the places in Orbax's code where the patches add lines."""

from __future__ import annotations

import ast

import pytest

from tools import generate_patches

pytestmark = pytest.mark.once

SOURCE = '''# licence
"""Docstring."""
import os

@decorator
def first(x):
  """Docstring."""
  if x:
    y = call(
        x)
  return y

class Second:
  @property
  def method(self):
    return super().method
'''


@pytest.mark.parametrize(
    ("place", "next_line"),
    [
        ("after imports", ""),
        ("before first", "@decorator"),
        ("before Second.method", "  @property"),
        ("start of first", "  if x:"),
        ("start of Second.method", "    return super().method"),
        ("end of first", ""),
        ("before call call in first", "    y = call("),
        ("before call super in Second.method", "    return super().method"),
        ("before assigning y in first", "    y = call("),
    ],
)
def test_places_are_found_in_the_code(place: str, next_line: str) -> None:
    assert SOURCE.splitlines()[generate_patches.find(ast.parse(SOURCE), place)] == next_line


@pytest.mark.parametrize("place", ["before third", "before call missing in first", "somewhere near first"])
def test_an_unknown_place_is_an_error(place: str) -> None:
    with pytest.raises(ValueError, match=r"There is no|Unknown place"):
        generate_patches.find(ast.parse(SOURCE), place)
