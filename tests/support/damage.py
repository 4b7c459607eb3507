"""Damage to the files of a checkpoint, done by the parent before the restore."""

from __future__ import annotations

import pathlib


def data_files(path: str) -> list[pathlib.Path]:
    """The files that hold arrays (not their metadata)."""
    return [file for file in pathlib.Path(path).rglob("*") if file.is_file() and file.parent.name == "d"]


def corrupt(path: str) -> None:
    for file in data_files(path):
        content = bytearray(file.read_bytes())
        for place in range(len(content) // 3, len(content), 97):
            content[place] ^= 0xFF
        file.write_bytes(content)


def truncate(path: str) -> None:
    for file in data_files(path):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def remove(path: str) -> None:
    for file in data_files(path):
        file.unlink()


def lock(path: str) -> None:
    """Nobody but root may read the arrays; all else may be read by everybody."""
    for file in pathlib.Path(path).rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    for file in data_files(path):
        file.chmod(0o000)


def mix_up_chunks(path: str) -> None:
    """A chunk of one array, stored as plain files, gets the content of another's: it reads without an error."""
    target = next(file for file in sorted(pathlib.Path(path).rglob("layer3/*")) if file.name[0].isdigit())
    target.write_bytes((target.parent.parent / "layer2" / target.name).read_bytes())
