"""Random damages to the files of a checkpoint. A seed decides what is done to which file, and so repeats it."""

from __future__ import annotations

import pathlib
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Callable

_NUMBER = re.compile(rb"\d+(\.\d+)?")
_JSON = (".zarray", "zarr.json", "_METADATA", "_CHECKPOINT_METADATA", "_sharding", "process_0", "process_1")


def damaged_copy(checkpoint: str, copy: str, seed: int) -> list[str]:
    """Copies a checkpoint and damages one to three of its files; returns what was done to each."""
    shutil.copytree(checkpoint, copy)
    choice = random.Random(f"damage {seed}")
    return [_damage(pathlib.Path(copy), choice) for _ in range(choice.choice([1, 1, 1, 1, 2, 3]))]


def _damage(checkpoint: pathlib.Path, choice: random.Random) -> str:
    files = choice.choice(_kinds(checkpoint))
    file = choice.choice(files)
    name = str(file.relative_to(checkpoint))
    operation = choice.choice([*_CHANGES, "deleted", "exchanged", "number"])
    if operation == "deleted":
        file.unlink()
        return f"{name} is deleted"
    if operation == "exchanged" and len(others := _others(checkpoint, files, file)):
        other = choice.choice(others)
        content, its = file.read_bytes(), other.read_bytes()
        file.write_bytes(its)
        other.write_bytes(content)
        return f"{name} and {other.relative_to(checkpoint)} are exchanged"
    content = file.read_bytes()
    if operation == "number" and file.name in _JSON and (numbers := list(_NUMBER.finditer(content))):
        number = choice.choice(numbers)
        new = choice.choice(_other_numbers(number[0]))
        file.write_bytes(content[: number.start()] + new + content[number.end() :])
        return f"{name}: {number[0].decode()} at byte {number.start()} becomes {new.decode()}"
    operation = operation if operation in _CHANGES else "bits flipped"
    file.write_bytes(_CHANGES[operation](content, choice))
    return f"{name}: {operation}"


def _kinds(checkpoint: pathlib.Path) -> list[list[pathlib.Path]]:
    """Returns the files by what they hold, so that one file of metadata is chosen as often as all chunks."""
    kinds: dict[tuple[str, int], list[pathlib.Path]] = defaultdict(list)
    for file in _files(checkpoint):
        depth = len(file.relative_to(checkpoint).parts)
        holds = file.parent.name if file.parent.name in ("d", "array_metadatas") else file.name
        kinds["chunk" if holds.replace(".", "").isdigit() else holds, min(depth, 2)].append(file)
    return list(kinds.values())


def _others(checkpoint: pathlib.Path, alike: list[pathlib.Path], file: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files to exchange a file with: those of the same kind, or all if there are none."""
    return [path for path in alike if path != file] or [path for path in _files(checkpoint) if path != file]


def _files(checkpoint: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files, those of a folder by size: the names of OCDBT's files are random."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: (path.parent, path.parent.name == "d" and path.stat().st_size, path))


def _other_numbers(number: bytes) -> list[bytes]:
    """Returns what a number may become; none is so large that reading as much could fill the memory."""
    if b"." in number:
        return [b"0", b"1e300", b"-1.5"]
    value = int(number)
    texts = {0, 1, -1, value + 1, max(value - 1, 0), 2 * value, 3 * value, 2**63} - {value}
    return [*(str(new).encode() for new in sorted(texts)), b"1.5", b"null", b'"x"']


def _flipped(content: bytes, choice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(choice.choice([1, 1, 2, 8])):
        if changed:
            changed[choice.randrange(len(changed))] ^= 1 << choice.randrange(8)
    return bytes(changed)


def _zeroed(content: bytes, choice: random.Random) -> bytes:
    """Returns the content without one page, as disks may lose one."""
    begin = choice.randrange(len(content) + 1)
    end = min(len(content), begin + choice.choice([1, 16, 512, 4096]))
    return content[:begin] + bytes(end - begin) + content[end:]


def _repeated(content: bytes, choice: random.Random) -> bytes:
    """Returns the content with a part of it twice, as a write that was repeated leaves it."""
    begin = choice.randrange(len(content) + 1)
    return content[: begin + choice.choice([1, 16, 512])] + content[begin:]


_CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits flipped": _flipped,
    "cut": lambda content, choice: content[: choice.randrange(len(content) + 1)],
    "without its beginning": lambda content, choice: content[choice.randrange(len(content) + 1) :],
    "emptied": lambda content, choice: b"",
    "bytes appended": lambda content, choice: content + choice.randbytes(choice.choice([1, 16, 512])),
    "zeros in the middle": _zeroed,
    "a part repeated": _repeated,
}
