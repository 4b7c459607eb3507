"""Generates patches/<release>/ from patches/source/: the same additions, at the line numbers of each release.

A source file is a patch whose hunks name a place instead of a line number, so that it holds none of upstream's text:

    before X                  above the function or class X (and its decorators); X may be nested, as in Class.method
    start of X                before the first statement of X that is not its docstring
    end of X                  after the last statement of X
    before call F in X        above the first statement in X that calls F
    before assigning N in X   above the first statement in X that assigns the name N
    after imports             below the module's last import

A place may begin with the releases that it applies to: `0.12.7 - 0.12.8: start of X`. `{name}` alone on a line stands
for the text below `=== define name`. Every changed file also gets a line that says so, as its licence requires.

    python -m tools.generate_patches [--check]
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import pathlib
import sys
from collections.abc import Callable

from orbax_ext.upstream import patching
from tools import releases


@dataclasses.dataclass(frozen=True)
class Addition:
    """Lines to add at one place of one file, in some releases."""

    path: str
    place: str
    releases: tuple[str, ...]
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """One file of patches/source."""

    name: str
    header: str
    releases: tuple[str, ...]
    additions: tuple[Addition, ...]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.generate_patches", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether patches/ is up to date")
    check = parser.parse_args(argv).check
    generated = generate()
    committed = {path: path.read_text() for path in releases.PATCHES.glob("[0-9]*/*")}
    stale = sorted(
        str(path.relative_to(releases.ROOT))
        for path in generated.keys() | committed.keys()
        if generated.get(path) != committed.get(path)
    )
    if check:
        print(f"patches/: {len(generated)} files, {len(stale)} differ from patches/source", *stale, sep="\n  ")
        return 1 if stale else 0
    for path in committed.keys() - generated.keys():
        path.unlink()
    for path, text in generated.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    print(f"patches/: {len(generated)} files written, {len(stale)} of them changed")
    return 0


def generate() -> dict[pathlib.Path, str]:
    """Returns the text of every file below patches/<release>/."""
    sources = [parse_source(path) for path in sorted((releases.PATCHES / "source").glob("*.in"))]
    paths = tuple(sorted({addition.path for source in sources for addition in source.additions}))
    texts = {}
    for release in releases.RELEASES:
        files = releases.read(release, paths)
        names = []
        for source in sources:
            if release in source.releases:
                patch = make_patch(source, release, files)
                names.append(patch.name)
                texts[releases.PATCHES / release / patch.name] = patching.render(patch)
        texts[releases.PATCHES / release / "series"] = "".join(f"{name}\n" for name in names)
    return texts


def make_patch(source: Source, release: str, files: dict[str, bytes]) -> patching.Patch:
    """Returns the patch for one release, and applies it to `files`."""
    changes = []
    for path in sorted({addition.path for addition in source.additions if release in addition.releases}):
        before = files[path]
        module = ast.parse(before)
        at = {line_before(module.body[0]): [f"# Changed by orbax_ext: {source.name}.", ""]}
        for addition in source.additions:
            if addition.path == path and release in addition.releases:
                at.setdefault(find(module, addition.place), []).extend(addition.lines)
        hunks = tuple(patching.Hunk(line, tuple(lines)) for line, lines in sorted(at.items()))
        files[path] = patching.add_lines(before, hunks)
        ast.parse(files[path])
        changes.append(patching.FilePatch(path, patching.sha256(before), patching.sha256(files[path]), hunks))
    return patching.Patch(f"{source.name}.patch", source.header, tuple(changes))


def parse_source(path: pathlib.Path) -> Source:
    header, _, body = path.read_text().partition("\n\n")
    fields = header.splitlines()
    covered = releases.between(*fields.pop().removeprefix("Releases: ").split(" - "))
    definitions: dict[str, list[str]] = {}
    blocks: list[tuple[str, str, list[str]]] = []
    file = ""
    lines: list[str] = []
    for line in body.splitlines():
        if line.startswith("=== define "):
            lines = definitions.setdefault(line.split()[-1], [])
        elif line.startswith("=== "):
            file = line[4:]
        elif line.startswith("@@ "):
            lines = []
            blocks.append((file, line[3:], lines))
        else:
            lines.append(line)
    additions = []
    for file, place, block in blocks:
        span, colon, rest = place.partition(": ")
        lines = [line for entry in block for line in definitions.get(entry.strip("{}"), [entry])]
        where = releases.between(*span.split(" - ")) if colon else covered
        additions.append(Addition(file, rest if colon else place, where, tuple(lines)))
    return Source(path.stem, "\n".join(fields), covered, tuple(additions))


def find(module: ast.Module, place: str) -> int:
    """Returns how many lines of the module come before the place."""
    match place.split():
        case ["after", "imports"]:
            return max(end(node) for node in module.body if isinstance(node, ast.Import | ast.ImportFrom))
        case ["before", "call", function, "in", scope]:
            return line_before(first(scope_of(module, scope), lambda node: calls(node, function), place))
        case ["before", "assigning", name, "in", scope]:
            return line_before(first(scope_of(module, scope), lambda node: assigns(node, name), place))
        case ["before", name]:
            return line_before(scope_of(module, name))
        case ["start", "of", name]:
            scope_node = scope_of(module, name)
            return line_before(scope_node.body[1 if ast.get_docstring(scope_node) else 0])
        case ["end", "of", name]:
            return end(scope_of(module, name).body[-1])
    raise ValueError(f"Unknown place {place!r}; the docstring of {__name__} lists the known places.")


Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def scope_of(module: ast.Module, dotted: str) -> Scope:
    node: ast.AST = module
    for name in dotted.split("."):
        matches = [child for child in ast.walk(node) if isinstance(child, Scope) and child.name == name]
        if not matches:
            raise ValueError(f"There is no {dotted!r}: {name!r} not found.")
        node = matches[0]
    assert isinstance(node, Scope)
    return node


def first(scope: Scope, wanted: Callable[[ast.stmt], bool], place: str) -> ast.stmt:
    """Returns the first wanted statement, among those that contain no other statements."""
    matches = [
        node for node in ast.walk(scope) if isinstance(node, ast.stmt) and not hasattr(node, "body") and wanted(node)
    ]
    if not matches:
        raise ValueError(f"There is no place {place!r}.")
    return min(matches, key=lambda node: node.lineno)


def calls(statement: ast.stmt, function: str) -> bool:
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) == function for node in ast.walk(statement))


def assigns(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Assign) and any(ast.unparse(target) == name for target in statement.targets)


def line_before(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min(child.lineno for child in (node, *decorators)) - 1


def end(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


if __name__ == "__main__":
    sys.exit(main())
