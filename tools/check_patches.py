"""Checks the patches against every release: committed as generated, hashes right, apply, compile, reverse.

python -m tools.check_patches
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from orbax_ext.cli import main as exits
from orbax_ext.upstream import patching
from tools import generate_patches, releases


def main() -> int:
    if generate_patches.main(["--check"]):
        return 1
    known = patching.load_all(releases.PATCHES)
    if [series.release for series in known] != list(releases.RELEASES):
        print("patches/ and the releases held differ", file=sys.stderr)
        return 1
    for series in known:
        with tempfile.TemporaryDirectory() as directory:
            check(series, Path(directory))
        print(f"{series.release}: {len(series.patches)} patches verified, applied, compiled, taken back", flush=True)
    return 0


def check(series: patching.Series, root: Path) -> None:
    """Takes the released wheel through the command line, forth and back."""
    with zipfile.ZipFile(releases.wheel(series.release)) as archive:
        archive.extractall(root)
    released = snapshot(root)
    run_patch(root)
    changed = {path for path, data in snapshot(root).items() if released.get(path) != data}
    if changed != set(series.results):
        raise AssertionError(f"{series.release}: changed {sorted(changed)}, expected {sorted(series.results)}")
    targets = [str(root / path) for path in series.results]
    subprocess.run([sys.executable, "-W", "error", "-m", "py_compile", *targets], check=True, timeout=120)
    for path in root.glob("**/__pycache__/*"):
        path.unlink()
    run_patch(root, "--check")
    run_patch(root, "--reverse")
    if snapshot(root) != released:
        raise AssertionError(f"{series.release}: taking the patches back does not give the released files")


def run_patch(root: Path, *how: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        code = exits.main(["patch", "--to", str(root), *how])
    if code:
        raise AssertionError(f"orbax-ext patch --to {root} {' '.join(how)} exited with {code}")


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.glob("**/*") if path.is_file()}


if __name__ == "__main__":
    sys.exit(main())
