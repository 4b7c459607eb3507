"""The patch format: what is parsed and refused, and that reversing a patch is exact."""

from __future__ import annotations

import importlib.metadata
import pathlib
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_ext import version
from orbax_ext.upstream import patching
from tests.support.installed_orbax import files_to_patch

pytestmark = pytest.mark.once

HEADER = "Description: adds a line\nOrigin: vendor, orbax_ext"
OLD, NEW = b"one\ntwo\n", b"one\nadded\ntwo\n"
TEXT = f"""{HEADER}
---

sha256-before: {patching.sha256(OLD)}
sha256-after: {patching.sha256(NEW)}
--- a/some/file.py
+++ b/some/file.py
@@ -1,0 +2,1 @@
+added
"""


def series() -> patching.Series:
    return patching.Series("1.0.0", (patching.parse("01-adds.patch", TEXT),))


def test_a_patch_is_written_as_it_was_read() -> None:
    assert patching.render(series().patches[0]) == TEXT


def test_a_series_can_be_applied_and_reversed() -> None:
    patched = patching.apply(series(), {"some/file.py": OLD})
    assert patched == {"some/file.py": NEW}
    assert patching.reverse(series(), patched) == {"some/file.py": OLD}


@pytest.mark.parametrize("found", [b"one\ntwo", b"one\r\ntwo\n", b"one\ntwo\n ", b"", NEW])
def test_a_series_is_not_applied_to_another_file(found: bytes) -> None:
    with pytest.raises(patching.PatchError, match=r"01-adds.patch: some/file.py should have SHA-256"):
        patching.apply(series(), {"some/file.py": found})


def test_a_series_is_not_reversed_in_a_file_edited_since() -> None:
    with pytest.raises(patching.PatchError, match="should have SHA-256"):
        patching.reverse(series(), {"some/file.py": NEW + b"edited\n"})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@@ -1,0 +2,1 @@", "@@ -1 +2,1 @@"),
        ("@@ -1,0 +2,1 @@", "@@ -1,1 +2,1 @@"),
        ("+added", "-one"),
        ("+added", " one"),
        ("+added\n", "+added\n-one\n"),
        ("+added\n", ""),
        ("sha256-before: ", "sha256: "),
        ("+++ b/some/file.py", "+++ b/other/file.py"),
        ("\n---\n", "\n"),
    ],
)
def test_a_patch_that_does_more_than_add_lines_to_a_named_file_is_refused(old: str, new: str) -> None:
    with pytest.raises(patching.PatchError, match=r"^bad\.patch: "):
        patching.parse("bad.patch", TEXT.replace(old, new))


lines = st.lists(st.text("ab \t#", max_size=3), max_size=6)


@given(file=lines, last=st.sampled_from(["", "no newline at the end"]), data=st.data())
def test_removing_lines_undoes_adding_them(file: list[str], last: str, data: st.DataObject) -> None:
    before = ("".join(f"{line}\n" for line in file) + last).encode()
    places = data.draw(st.sets(st.integers(0, len(file))))
    hunks = [patching.Hunk(place, tuple(data.draw(lines.filter(bool)))) for place in places]
    after = patching.add_lines(before, hunks)
    assert len(after.splitlines()) == len(before.splitlines()) + sum(len(hunk.lines) for hunk in hunks)
    assert patching.remove_lines(after, hunks) == before


def test_every_supported_release_has_patches() -> None:
    releases = [series.release for series in patching.load_all()]
    assert releases[0] == version.OLDEST_ORBAX
    assert releases[-1] == version.NEWEST_ORBAX


@pytest.mark.parametrize("series", patching.load_all(), ids=lambda series: series.release)
def test_every_patch_has_a_header_and_marks_the_files_that_it_changes(series: patching.Series) -> None:
    for patch in series.patches:
        fields = [line.split(":")[0] for line in patch.header.splitlines() if not line.startswith(" ")]
        assert fields == ["Description", "Origin", "Bug", "Forwarded", "Last-Update"]
        for change in patch.files:
            assert change.hunks[0].lines[0] == f"# Changed by orbax_ext: {patch.name.removesuffix('.patch')}."


def test_the_installed_orbax_can_be_patched_and_reversed() -> None:
    tree = files_to_patch()
    release = importlib.metadata.version("orbax-checkpoint")
    (series,) = [series for series in patching.load_all() if series.release == release]
    patched = patching.apply(series, tree)
    for path, data in patched.items():
        compile(data, path, "exec")
        assert data != tree[path]
    assert patching.reverse(series, patched) == tree


def test_git_reads_the_same_patches(tmp_path: pathlib.Path) -> None:
    tree = files_to_patch()
    release = importlib.metadata.version("orbax-checkpoint")
    for path, data in tree.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    directory = patching.patches_directory() / release
    for patch in patching.load_series(directory).patches:
        command = ["git", "apply", "--unidiff-zero", str(directory / patch.name)]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    wanted = patching.apply(patching.load_series(directory), tree)
    assert {path: (tmp_path / path).read_bytes() for path in wanted} == wanted
