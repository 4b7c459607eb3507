"""Damages the files of a checkpoint before a restore. Run in the test process, not on the cluster."""

from __future__ import annotations

import pathlib


def data_files(path: str) -> list[pathlib.Path]:
    """Returns the files that hold arrays, without those that hold metadata."""
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
    """Lets only root read the arrays. Everybody can read all other files."""
    for file in pathlib.Path(path).rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    for file in data_files(path):
        file.chmod(0o000)


def mix_up_chunks(path: str) -> None:
    """Overwrites a chunk of one array with a chunk of another, which reads without an error. Not for OCDBT."""
    target = next(file for file in sorted(pathlib.Path(path).rglob("layer3/*")) if file.name[0].isdigit())
    target.write_bytes((target.parent.parent / "layer2" / target.name).read_bytes())
