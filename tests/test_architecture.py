"""The import rule of the house (BUILD.md), held by reading the source: no module is exempt."""

from __future__ import annotations

import ast
import functools
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

import orbax_ext

pytestmark = pytest.mark.once

PACKAGE = pathlib.Path(orbax_ext.__file__).parent

# Lowest first: a module imports from its own line and from lines above it.
LAYERS = (
    {"version", "redact", "text", "errors", "options"},
    {"plan"},
    {"upstream"},
    {"mesh"},
    {"meeting"},
    {"storage"},
    {"placement", "report"},
    {"request"},
    {"transfer"},
    {"handler"},
    {"registration", "v1", "latest", "emergency", "background", "orbax_ext"},
    {"lab"},
    {"cli"},
)
LAYER_OF = {room: number for number, layer in enumerate(LAYERS) for room in layer}
PURE = {"numpy", "orbax_ext", "__future__"} | set(sys.stdlib_module_names)
LIGHT = ("--help", "plan --help", "report --help", "patch --help")  # commands that must not wait for JAX


@functools.cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if relative.parts[0] != "patches":
            name = ".".join(["orbax_ext", *relative.with_suffix("").parts]).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text())
    return found


def imports(module: str) -> Iterator[str]:
    """Yields the full name of every module that a module imports, wherever the import stands."""
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in modules() else str(node.module)


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "orbax_ext"


def own_imports(module: str) -> set[str]:
    return {name for name in imports(module) if name in modules()}


def test_every_module_has_its_place() -> None:
    assert {room(module) for module in modules()} <= set(LAYER_OF)
    assert len(list(PACKAGE.glob("*.py"))) <= 16


@pytest.mark.parametrize("module", sorted(set(modules()) - {"orbax_ext"}))
def test_imports_point_to_the_same_line_or_above(module: str) -> None:
    wrong = {name for name in own_imports(module) if LAYER_OF[room(name)] > LAYER_OF[room(module)]}
    assert not wrong


def test_no_cycle_inside_a_room() -> None:
    edges = {module: {n for n in own_imports(module) if room(n) == room(module)} for module in modules()}
    while free := [module for module, needed in edges.items() if not needed & edges.keys()]:
        for module in free:
            del edges[module]
    assert not edges


@pytest.mark.parametrize("module", [m for m in modules() if room(m) == "plan" or m == "orbax_ext.meeting.protocol"])
def test_planning_and_protocol_are_pure(module: str) -> None:
    assert {name.split(".")[0] for name in imports(module)} <= PURE
    assert {LAYER_OF[room(name)] for name in own_imports(module)} <= {0, LAYER_OF[room(module)]}


@pytest.mark.parametrize("module", [m for m in modules() if room(m) != "upstream"])
def test_only_upstream_imports_private_modules(module: str) -> None:
    wrong = [name for name in imports(module) if name not in modules() and "._" in f".{name}".replace(".__", ".")]
    assert not wrong


def test_only_upstream_touches_private_attributes_of_others() -> None:
    """A private attribute that no class or module of ours defines belongs to Orbax, JAX or etils."""
    ours = {"_exit", "_replace"}  # of os, and of named tuples
    for module, tree in modules().items():
        if room(module) != "upstream":
            ours |= set(_defined(tree))
    wrong = {
        f"{module}: .{node.attr}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if room(module) != "upstream"
        and isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in ours
    }
    assert not wrong


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_no_file_and_no_class_is_too_large() -> None:
    large = {module for module in modules() if len(_source(module).splitlines()) > 350}
    many = {
        f"{module}.{node.name}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) for part in node.body) > 20
    }
    assert (large, many) == ({"orbax_ext.meeting.session"}, {"orbax_ext.meeting.session.Session"})


def _source(module: str) -> str:
    path = PACKAGE.parent / (module.replace(".", "/") + ".py")
    return (path if path.exists() else path.with_suffix("") / "__init__.py").read_text()


def test_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_the_public_namespace_is_all() -> None:
    assert orbax_ext.__all__ == sorted(orbax_ext.__all__, key=lambda name: (name.islower(), name))
    for name in orbax_ext.__all__:
        assert getattr(orbax_ext, name) is not None
    submodules = {module.split(".")[1] for module in modules() if module.count(".")}
    public = {name for name in vars(orbax_ext) if not name.startswith("_")} | {"__version__"}
    assert public - submodules == set(orbax_ext.__all__) - submodules
    assert set(orbax_ext.__all__) <= public


@pytest.mark.parametrize("command", LIGHT)
def test_light_commands_do_not_import_jax(command: str) -> None:
    script = (
        "import contextlib, sys; from orbax_ext.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "print(sorted({'jax', 'orbax.checkpoint', 'tensorstore'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split()], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
