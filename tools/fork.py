"""Builds an installable wheel of a patched Orbax from the released one, as version <release>+ext.<N>.

python -m tools.fork 0.11.33 [--dest dist]
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import pathlib
import sys
import zipfile

from orbax_ext.upstream import patching
from tools import releases

FORK = 1  # raise it when the patches of an already forked release change
_EPOCH = (1980, 1, 1, 0, 0, 0)  # a fixed date, so that the same input makes the same wheel


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fork", description=__doc__.splitlines()[0])
    parser.add_argument("release", choices=releases.RELEASES, metavar="RELEASE", help="for example 0.11.33")
    parser.add_argument("--dest", type=pathlib.Path, default=releases.ROOT / "dist", help="where the wheel goes")
    args = parser.parse_args(argv)
    print(build(args.release, args.dest))
    return 0


def build(release: str, dest: pathlib.Path) -> pathlib.Path:
    """Writes the fork's wheel into `dest` and returns its path."""
    version = f"{release}+ext.{FORK}"
    series = patching.load_series(releases.PATCHES / release)
    with zipfile.ZipFile(releases.wheel(release)) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    files |= patching.apply(series, files)
    files = rename(files, f"orbax_checkpoint-{release}.dist-info", f"orbax_checkpoint-{version}.dist-info")
    info = f"orbax_checkpoint-{version}.dist-info"
    files[f"{info}/METADATA"] = fork_metadata(files[f"{info}/METADATA"], release, version)
    files[f"{info}/licenses/NOTICE"] = notice(series, version).encode()
    files.pop(f"{info}/RECORD")
    files[f"{info}/RECORD"] = record(files, f"{info}/RECORD").encode()
    dest.mkdir(parents=True, exist_ok=True)
    path = dest / f"orbax_checkpoint-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return path


def rename(files: dict[str, bytes], old: str, new: str) -> dict[str, bytes]:
    return {new + name.removeprefix(old) if name.startswith(f"{old}/") else name: data for name, data in files.items()}


def fork_metadata(metadata: bytes, release: str, version: str) -> bytes:
    """Returns the released METADATA with the fork's version, summary and licence files; everything else stays."""
    head, blank, description = metadata.decode().partition("\n\n")
    lines = []
    for line in head.splitlines():
        if line == f"Version: {release}":
            line = f"Version: {version}"
        elif line.startswith("Summary: "):
            line += " (with the patches of orbax_ext, not a release of the Orbax authors)"
        lines.append(line)
        if line.startswith("License-File: "):
            lines.append("License-File: NOTICE")
    if f"Version: {version}" not in lines or "License-File: NOTICE" not in lines:
        raise ValueError(
            f"METADATA of {release} has no `Version: {release}` or no `License-File`; a fork of it can't be made."
        )
    return ("\n".join(lines) + blank + description).encode()


def notice(series: patching.Series, version: str) -> str:
    """Returns the notice of changed files that section 4 of the Apache License asks for."""
    lines = [
        f"orbax-checkpoint {version}",
        "",
        f"This is orbax-checkpoint {series.release} by the Orbax Authors, under the Apache License, Version 2.0",
        "(LICENSE beside this file), with patches by the orbax_ext project under the same licence. It is not a",
        "release of the Orbax Authors. All copyright notices of the original are kept. Changed files:",
        "",
        *(f"  {path}" for path in series.results),
        "",
        "Each carries a notice of the change. Applied patches:",
        "",
    ]
    for patch in series.patches:
        title = patch.header.splitlines()[0].removeprefix("Description: ")
        lines.append(f"  {patch.name.removesuffix('.patch')}: {title}")
    return "\n".join(lines) + "\n"


def record(files: dict[str, bytes], itself: str) -> str:
    """Returns the RECORD of the wheel: path, hash and size of every file but RECORD itself."""
    rows = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*rows, f"{itself},,"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
