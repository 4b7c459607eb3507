"""Builds the sdist and the wheel of orbax_ext, checks them, and uses the wheel in an environment of its own.

python -m tools.dist --builder PYTHON [--dest dist]
"""

from __future__ import annotations

import argparse
import email.message
import email.parser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Collection, Sequence

from orbax_ext import version

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "orbax_ext"
_LIMIT = 900.0  # seconds of a command; the longest installs JAX from a slow registry
_SDIST_FILES = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
_SDIST_FOLDERS = {PACKAGE, f"{PACKAGE}.egg-info"}
_ABSOLUTE = re.compile(r"[a-z][a-z+.-]*:")  # a target that leads somewhere without the repository
_INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
_SAVE = """
import sys, jax, orbax.checkpoint as ocp
state = {"weights": jax.numpy.arange(1 << 20, dtype="float32"), "step": jax.numpy.int32(7)}
with ocp.CheckpointManager(sys.argv[1]) as manager:
    manager.save(0, args=ocp.args.StandardSave(state))
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dest", type=pathlib.Path, default=ROOT / "dist", help="where the two files go")
    parser.add_argument("--builder", required=True, metavar="PYTHON", help="an interpreter that has build and twine")
    args = parser.parse_args(argv)
    sdist, wheel = build(args.dest.absolute(), args.builder)
    _run([args.builder, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    found = sdist_problems(names, tracked())
    with zipfile.ZipFile(wheel) as zipped:
        metadata = email.parser.Parser().parsestr(zipped.read(f"{_info()}/METADATA").decode())
        found += wheel_problems(zipped.namelist(), tracked()) + metadata_problems(metadata)
    found += readme_problems(*described(metadata, args.builder))
    found += changelog_problems((ROOT / "CHANGELOG.md").read_text())
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    use(wheel)
    print(f"{sdist}\n{wheel}\nready to be published")
    return 0


def build(dest: pathlib.Path, builder: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Builds the sdist from what is tracked, and the wheel from the sdist; returns their paths."""
    with tempfile.TemporaryDirectory(prefix="orbax_ext_dist_") as folder:
        source = pathlib.Path(folder, "source")
        for name in tracked():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
        readme = source / "README.md"
        readme.write_text(standalone(readme.read_text()))
        _run([builder, "-m", "build", "--quiet", "--outdir", str(dest), str(source)])
    stem = f"{PACKAGE}-{version.__version__}"
    return dest / f"{stem}.tar.gz", dest / f"{stem}-py3-none-any.whl"


def tracked() -> list[str]:
    """Returns the files of the repository: what else lies in a checkout does not belong into a release."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    return [name for name in listed.stdout.splitlines() if os.path.lexists(ROOT / name)]


def package_files(names: Collection[str]) -> set[str]:
    """Returns the files that an installed orbax_ext has, from those of the repository."""
    patches = {name for name in names if re.fullmatch(r"patches/[\d.]+/(series|.+\.patch)", name)}
    package = {name for name in names if name.startswith(f"{PACKAGE}/") and name != f"{PACKAGE}/patches"}
    return package | {f"{PACKAGE}/{name}" for name in patches}  # orbax_ext/patches is a link


def sdist_problems(names: Collection[str], repository: Collection[str]) -> list[str]:
    """Returns what is missing in an sdist, and what does not belong there: tests, benchmarks, tools."""
    prefix = f"{PACKAGE}-{version.__version__}/"
    files = {name.removeprefix(prefix) for name in names}
    extra = {name for name in files - _SDIST_FILES if name.split("/")[0] not in _SDIST_FOLDERS}
    return _different("sdist", (package_files(repository) | _SDIST_FILES) - files, extra)


def wheel_problems(names: Collection[str], repository: Collection[str]) -> list[str]:
    """Returns what is missing in a wheel, and what does not belong there."""
    wanted = package_files(repository) | {f"{_info()}/{name}" for name in _INFO}
    return _different("wheel", wanted - set(names), set(names) - wanted)


def metadata_problems(metadata: email.message.Message) -> list[str]:
    """Returns the fields of a wheel's metadata that are not as they have to be."""
    wanted = {
        "Name": "orbax-ext",
        "Version": version.__version__,
        "License-Expression": "Apache-2.0",
        "License-File": "LICENSE",
        "Requires-Python": ">=3.11",
        "Description-Content-Type": "text/markdown",
    }
    wrong = {key: value for key, value in wanted.items() if metadata[key] != value}
    found = [f"metadata: {key} is {metadata[key]!r}, not {value!r}" for key, value in wrong.items()]
    if f"orbax-checkpoint>={version.OLDEST_ORBAX}" not in metadata.get_all("Requires-Dist", []):
        found.append(f"metadata: orbax-checkpoint>={version.OLDEST_ORBAX} is not required")
    return found


def standalone(readme: str) -> str:
    """Returns a readme that can be shown without the repository: no relative pictures, relative links as plain text."""

    def unlink(link: re.Match[str]) -> str:
        return link[0] if _ABSOLUTE.match(link["target"]) else link["text"]

    text = re.sub(r"<picture>.*?</picture>\s*", "", readme, flags=re.DOTALL)
    text = re.sub(r"!\[[^]]*\]\((?![a-z]+:)[^)]*\)\s*", "", text)
    return re.sub(r"\[(?P<text>[^]]*)\]\((?P<target>[^)\s]+)\)", unlink, text)


def described(metadata: email.message.Message, builder: str) -> tuple[str, str]:
    """Returns the long description of a wheel, and how the package index shows it.

    This is not `twine check`'s work, because it renders only reStructuredText.
    """
    text = str(metadata.get_payload())
    with tempfile.TemporaryDirectory(prefix="orbax_ext_dist_") as folder:
        readme, page = pathlib.Path(folder, "README.md"), pathlib.Path(folder, "readme.html")
        readme.write_text(text)
        _run([builder, "-m", "readme_renderer", str(readme), "-o", str(page)])
        return text, page.read_text()


def readme_problems(text: str, html: str) -> list[str]:
    """Returns the kinds of element that the rendered readme has lost, and what it refers to but can't reach."""
    counts = {
        "tables": (len(re.findall(r"^\|[-|]+\|$", text, re.MULTILINE)), html.count("<table")),
        "blocks of code": (len(re.findall(r"^```", text, re.MULTILINE)) // 2, html.count("<pre")),
        "pictures": (len(re.findall(r"!\[|<img", text)), html.count("<img")),
    }
    lost = {what: (wanted, found) for what, (wanted, found) in counts.items() if found != wanted}
    targets = re.findall(r"""\b(?:src|srcset|href)=["']([^"']*)""", html)
    headings = {f"#{name}" for name in re.findall(r"""\bid=["']([^"']*)""", html)}  # they have links to themselves
    return [
        *(f"readme: {found} of {wanted} {what} rendered" for what, (wanted, found) in lost.items()),
        *(
            f"readme: {target} is relative"
            for target in targets
            if target not in headings and not _ABSOLUTE.match(target)
        ),
    ]


def changelog_problems(text: str) -> list[str]:
    newest = re.search(r"^## (\S+)", text, re.MULTILINE)
    if newest is not None and newest[1] == version.__version__:
        return []
    return [f"CHANGELOG.md does not begin with {version.__version__}"]


def use(wheel: pathlib.Path) -> None:
    """Installs the wheel into a new environment; runs the doctor and restores there, away from the checkout."""
    with tempfile.TemporaryDirectory(prefix="orbax_ext_dist_") as folder:
        venv.create(folder, with_pip=True)
        bin_folder = pathlib.Path(folder, "bin")
        pins = ROOT / "constraints" / "newest.txt"
        _run([f"{bin_folder}/python", "-m", "pip", "install", "--quiet", "-c", str(pins), str(wheel)], folder)
        _run([f"{bin_folder}/orbax-ext", "doctor", "--registered"], folder)
        restore(bin_folder, folder)


def restore(bin_folder: pathlib.Path, folder: str) -> None:
    """Saves a checkpoint with plain Orbax, and restores it on two processes, where digests show that it is exact."""
    checkpoint = f"{folder}/checkpoint"
    _run([f"{bin_folder}/python", "-c", _SAVE, checkpoint], folder)
    _run([f"{bin_folder}/orbax-ext", "verify", "--write", checkpoint], folder)
    _run([f"{bin_folder}/orbax-ext", "check", checkpoint, "--local", "2x2", "--strategy", "spread"], folder)


def _info() -> str:
    return f"{PACKAGE}-{version.__version__}.dist-info"


def _different(what: str, missing: Collection[str], extra: Collection[str]) -> list[str]:
    return [
        *(f"{what}: {name} is missing" for name in sorted(missing)),
        *(f"{what}: {name} does not belong there" for name in sorted(extra)),
    ]


def _run(command: Sequence[str], folder: str | None = None) -> None:
    print("$", *command, flush=True)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}  # which could hide the wheel
    subprocess.run(command, cwd=folder, env=env, check=True, timeout=_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
