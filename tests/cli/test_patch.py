"""`orbax-ext patch` on a copy of the installed Orbax."""

from __future__ import annotations

import json
import pathlib

import pytest

from orbax_ext.cli import exits, main
from tests.support.installed_orbax import files_to_patch

pytestmark = pytest.mark.once


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    for path, data in files_to_patch().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return tmp_path


def snapshot(tree: pathlib.Path) -> dict[pathlib.Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tree.rglob("*") if path.is_file()}


def contents(tree: pathlib.Path) -> dict[pathlib.Path, bytes]:
    return {path: data for path, (data, _) in snapshot(tree).items()}


def patch(tree: pathlib.Path, *how: str) -> int:
    return main.main(["patch", "--to", str(tree), *how])


def test_patches_are_applied_checked_and_removed(tree: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    released = contents(tree)
    assert patch(tree, "--check") == exits.EXIT_BAD_VERDICT
    assert contents(tree) == released
    assert patch(tree) == exits.EXIT_OK
    assert contents(tree) != released
    assert patch(tree, "--check") == exits.EXIT_OK
    capsys.readouterr()
    assert patch(tree, "--reverse", "--json") == exits.EXIT_OK
    assert json.loads(capsys.readouterr().out)["state"] == "original"
    assert contents(tree) == released


def test_applying_twice_changes_nothing_the_second_time(tree: pathlib.Path) -> None:
    assert patch(tree, "--reverse") == exits.EXIT_OK
    assert patch(tree) == exits.EXIT_OK
    patched = snapshot(tree)
    assert patch(tree) == exits.EXIT_OK
    assert snapshot(tree) == patched


@pytest.mark.parametrize("how", [[], ["--check"], ["--reverse"]])
@pytest.mark.parametrize("state", ["released", "patched"])
def test_one_edited_file_keeps_all_files_untouched(
    tree: pathlib.Path, state: str, how: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if state == "patched":
        assert patch(tree) == exits.EXIT_OK
    edited = tree / sorted(files_to_patch())[-1]
    edited.write_bytes(edited.read_bytes() + b"# ours\n")
    before = snapshot(tree)
    assert patch(tree, *how) == exits.EXIT_CANNOT_RUN
    assert snapshot(tree) == before
    message = capsys.readouterr().err
    assert "Nothing was changed" in message
    assert "changed by someone, or another release" in message
    assert f"as {state}" in message  # the state of the other file


def test_a_half_patched_tree_is_refused(tree: pathlib.Path) -> None:
    first = tree / sorted(files_to_patch())[0]
    original = first.read_bytes()
    assert patch(tree) == exits.EXIT_OK
    first.write_bytes(original)
    before = snapshot(tree)
    assert patch(tree) == exits.EXIT_CANNOT_RUN
    assert snapshot(tree) == before


def test_a_directory_without_orbax_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert patch(tmp_path) == exits.EXIT_CANNOT_RUN
    assert "holds no orbax/checkpoint" in capsys.readouterr().err
