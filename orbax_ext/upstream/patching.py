"""Reads, applies and reverses the patches for Orbax. Pure: bytes in, bytes out.

A patch is a zero-context unified diff that only adds lines, below a DEP-3 header. Before each file's diff, two lines
give the SHA-256 of the file before and after the patch, so a patch is never applied to a file that it was not made
for, and reversing it is as safe as applying it. `patch -p1` and `git apply --unidiff-zero` read the same files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence

from orbax_ext import version

_HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@$")

Tree = Mapping[str, bytes]  # the files that matter, by path relative to the tree's root


class PatchError(Exception):
    """A patch is malformed, or a file is not the one that the patch was made for."""


@dataclasses.dataclass(frozen=True)
class Hunk:
    """Lines to add after line `after` of the unpatched file."""

    after: int
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FilePatch:
    """The lines that one patch adds to one file."""

    path: str
    before: str  # SHA-256 of the unpatched file
    result: str  # SHA-256 of the patched file
    hunks: tuple[Hunk, ...]


@dataclasses.dataclass(frozen=True)
class Patch:
    """The fix of one defect: a DEP-3 header and the changes to one or more files."""

    name: str
    header: str
    files: tuple[FilePatch, ...]


@dataclasses.dataclass(frozen=True)
class Series:
    """All patches for one release, in the order in which they apply."""

    release: str
    patches: tuple[Patch, ...]

    @property
    def originals(self) -> dict[str, str]:
        """SHA-256 by path of the files as released."""
        hashes: dict[str, str] = {}
        for change in self._changes():
            hashes.setdefault(change.path, change.before)
        return hashes

    @property
    def results(self) -> dict[str, str]:
        """SHA-256 by path of the files with the whole series applied."""
        return {change.path: change.result for change in self._changes()}

    def _changes(self) -> Iterable[FilePatch]:
        return (change for patch in self.patches for change in patch.files)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def patches_directory() -> pathlib.Path:
    """Returns the folder of the patches, in a checkout and in an installed package."""
    return pathlib.Path(__file__).parents[1] / "patches"


def load_all(directory: pathlib.Path | None = None) -> list[Series]:
    """Returns the series of every release, oldest first."""
    directory = directory or patches_directory()
    series = [load_series(path.parent) for path in directory.glob("*/series")]
    return sorted(series, key=lambda series: version.numbers(series.release))


def load_series(directory: pathlib.Path) -> Series:
    """Returns the series in `directory`, whose name is the release."""
    names = [line.strip() for line in (directory / "series").read_text().splitlines()]
    patches = [parse(name, (directory / name).read_text()) for name in names if name and not name.startswith("#")]
    return Series(directory.name, tuple(patches))


def parse(name: str, text: str) -> Patch:
    """Parses one patch; raises PatchError if it does anything but add lines to named files."""
    header, separator, body = text.partition("\n---\n")
    if not separator:
        raise PatchError(f"{name}: no line `---` ends the header.")
    files: list[FilePatch] = []
    lines = body.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at]:
            at += 1
            continue
        try:
            before = _field(lines[at], "sha256-before: ")
            result = _field(lines[at + 1], "sha256-after: ")
            path = _field(lines[at + 2], "--- a/")
            if _field(lines[at + 3], "+++ b/") != path:
                raise PatchError("the two paths differ")
        except (PatchError, IndexError) as error:
            raise PatchError(
                f"{name}: line {at + 1} after the header does not begin a file's changes: {error}"
            ) from None
        hunks, at = _parse_hunks(name, lines, at + 4)
        files.append(FilePatch(path, before, result, hunks))
    if not files:
        raise PatchError(f"{name}: changes no file.")
    return Patch(name, header, tuple(files))


def _field(line: str, prefix: str) -> str:
    if not line.startswith(prefix):
        raise PatchError(f"expected {prefix!r}, found {line!r}")
    return line[len(prefix) :]


def _parse_hunks(name: str, lines: Sequence[str], at: int) -> tuple[tuple[Hunk, ...], int]:
    hunks: list[Hunk] = []
    while at < len(lines) and lines[at].startswith("@@"):
        match = _HUNK.match(lines[at])
        if not match:
            raise PatchError(f"{name}: hunk {lines[at]!r} does not only add lines.")
        count = int(match[3] or 1)
        added = lines[at + 1 : at + 1 + count]
        if len(added) != count or not all(line.startswith("+") for line in added):
            raise PatchError(f"{name}: hunk {lines[at]!r} is not followed by {count} added lines.")
        hunks.append(Hunk(int(match[1]), tuple(line[1:] for line in added)))
        at += 1 + count
    if not hunks:
        raise PatchError(f"{name}: a file without changes.")
    if [hunk.after for hunk in hunks] != sorted({hunk.after for hunk in hunks}):
        raise PatchError(f"{name}: the hunks are not in the order of their lines.")
    return tuple(hunks), at


def render(patch: Patch) -> str:
    """Returns the text that `parse` reads."""
    parts = [patch.header, "---"]
    for change in patch.files:
        parts += ["", f"sha256-before: {change.before}", f"sha256-after: {change.result}"]
        parts += [f"--- a/{change.path}", f"+++ b/{change.path}"]
        added = 0
        for hunk in change.hunks:
            parts.append(f"@@ -{hunk.after},0 +{hunk.after + added + 1},{len(hunk.lines)} @@")
            parts += [f"+{line}" for line in hunk.lines]
            added += len(hunk.lines)
    return "\n".join(parts) + "\n"


def add_lines(data: bytes, hunks: Iterable[Hunk]) -> bytes:
    """Returns the file with the lines of the hunks added."""
    lines = data.splitlines(keepends=True)
    for hunk in sorted(hunks, key=lambda hunk: hunk.after, reverse=True):
        if hunk.after > len(lines):
            raise PatchError(f"a hunk adds lines after line {hunk.after} of a file of {len(lines)} lines.")
        lines[hunk.after : hunk.after] = [f"{line}\n".encode() for line in hunk.lines]
    return b"".join(lines)


def remove_lines(data: bytes, hunks: Iterable[Hunk]) -> bytes:
    """Returns the file without the lines of the hunks: undoes `add_lines`."""
    lines = data.splitlines(keepends=True)
    for hunk in sorted(hunks, key=lambda hunk: hunk.after):  # lines of earlier hunks are removed already
        added = slice(hunk.after, hunk.after + len(hunk.lines))
        if lines[added] != [f"{line}\n".encode() for line in hunk.lines]:
            raise PatchError(f"the lines added after line {hunk.after} are no longer there.")
        del lines[added]
    return b"".join(lines)


def apply(series: Series, tree: Tree) -> dict[str, bytes]:
    """Returns the files of `tree` that the series changes, patched."""
    files = dict(tree)
    for patch in series.patches:
        for change in patch.files:
            _expect(patch, change, files[change.path], change.before)
            files[change.path] = add_lines(files[change.path], change.hunks)
            _expect(patch, change, files[change.path], change.result)
    return {path: files[path] for path in series.results}


def reverse(series: Series, tree: Tree) -> dict[str, bytes]:
    """Returns the files of `tree` that the series changed, as released."""
    files = dict(tree)
    for patch in reversed(series.patches):
        for change in reversed(patch.files):
            _expect(patch, change, files[change.path], change.result)
            files[change.path] = remove_lines(files[change.path], change.hunks)
            _expect(patch, change, files[change.path], change.before)
    return {path: files[path] for path in series.results}


def _expect(patch: Patch, change: FilePatch, data: bytes, wanted: str) -> None:
    found = sha256(data)
    if found != wanted:
        raise PatchError(f"{patch.name}: {change.path} should have SHA-256 {wanted}, found {found}.")


def state(series: Series, tree: Tree) -> str:
    """Returns "original" or "patched" if the tree's files are those of this release, otherwise "other"."""
    hashes = {path: sha256(tree[path]) for path in series.originals if path in tree}
    if hashes == series.originals:
        return "original"
    return "patched" if hashes == series.results else "other"
