"""Checks the patches of every release: the committed files are those generated, and they apply, compile and reverse.

python -m tools.check_patches
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from orbax_ext.cli import main as cli
from orbax_ext.upstream import patching
from tools import generate_patches, releases


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.check_patches", description=(__doc__ or "").splitlines()[0])
    parser.parse_args(argv)
    if generate_patches.main(["--check"]):
        return 1
    known = patching.load_all(releases.PATCHES)
    if [series.release for series in known] != list(releases.RELEASES):
        print("patches/ does not hold exactly the supported releases; run: make patches", file=sys.stderr)
        return 1
    for series in known:
        with tempfile.TemporaryDirectory() as directory:
            check(series, Path(directory))
        print(f"{series.release}: {len(series.patches)} patches verified, applied, compiled, reversed", flush=True)
    return 0


def check(series: patching.Series, root: Path) -> None:
    """Applies the patches to the released wheel with `orbax-ext patch`, compiles the result, and reverses them."""
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
        raise AssertionError(f"{series.release}: reversing the patches does not give the released files")


def run_patch(root: Path, *flags: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(["patch", "--to", str(root), *flags])
    if code:
        raise AssertionError(f"orbax-ext patch --to {root} {' '.join(flags)} exited with {code}")


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.glob("**/*") if path.is_file()}


if __name__ == "__main__":
    sys.exit(main())
