"""Damages the files of a checkpoint before a restore. Run in the test process, not on the cluster."""

from __future__ import annotations

import pathlib
import shutil
from collections import defaultdict
from collections.abc import Callable


def data_files(path: str) -> list[pathlib.Path]:
    """Returns the files that hold arrays, without those that hold metadata."""
    return [file for file in pathlib.Path(path).rglob("*") if file.is_file() and file.parent.name == "d"]


def corrupt(path: str) -> None:
    for file in data_files(path):
        file.write_bytes(_changed(file.read_bytes(), every=97))


def truncate(path: str) -> None:
    for file in data_files(path):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def truncate_largest(path: str) -> None:
    """Damages the data of some leaves, and not the tree of keys that leads to all of them."""
    largest = max(data_files(path), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


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


DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "missing": None,
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "changed": lambda content: _changed(content, every=7),
    "without members": lambda content: b"{}",
}


def damaged_copies(checkpoint: str, directory: str, leaf: str) -> dict[str, str]:
    """Copies a checkpoint once for each kind of file and each damage to it; returns the copies by what was done.

    `leaf` is the array whose own files are damaged where arrays have files of their own.
    """
    copies: dict[str, str] = {}
    for kind, files in _kinds_of_files(pathlib.Path(checkpoint), leaf).items():
        for name, change in DAMAGES.items():
            copy = pathlib.Path(directory, str(len(copies)))
            shutil.copytree(checkpoint, copy)
            for file in files:
                if change is None:
                    (copy / file).unlink()
                else:
                    (copy / file).write_bytes(change((copy / file).read_bytes()))
            copies[f"{kind} {name}"] = str(copy)
    return copies


def _kinds_of_files(checkpoint: pathlib.Path, leaf: str) -> dict[str, list[pathlib.Path]]:
    """Returns the files of a checkpoint that a restore may read, by what they hold."""
    kinds: dict[str, list[pathlib.Path]] = defaultdict(list)
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        file = path.relative_to(checkpoint)
        if file.parts[0] == leaf:
            kinds["metadata of one array" if file.name in (".zarray", "zarr.json") else "chunks of one array"].append(
                file
            )
            kinds["all files of one array"].append(file)
        elif file.parent.name == "d":
            kinds["data of one process" if len(file.parts) > 2 else "data"].append(file)
        elif file.parent.name == "array_metadatas":
            kinds["array_metadatas"].append(file)
        elif file.name == "manifest.ocdbt":
            kinds["manifest of one process" if len(file.parts) > 1 else "manifest"].append(file)
        elif len(file.parts) == 1:
            kinds[file.name].append(file)
    return kinds


def _changed(content: bytes, every: int) -> bytes:
    changed = bytearray(content)
    for place in range(len(content) // 3, len(content), every):
        changed[place] ^= 0xFF
    return bytes(changed)
