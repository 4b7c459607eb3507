"""The rules of the house (BUILD.md). They read the source; no module is exempt."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

import orbax_ext
from tests.support.package_source import PACKAGE, modules, sources

pytestmark = pytest.mark.once

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
    {
        "registration",
        "spec_reader",
        "v1",
        "latest",
        "emergency",
        "background",
        "abstract_state",
        "orbax_ext",
    },  # orbax_ext is __init__.py
    {"lab"},
    {"cli", "__main__"},
)
LAYER_OF = {room: number for number, layer in enumerate(LAYERS) for room in layer}
PURE = {"numpy", "orbax_ext", "__future__"} | set(sys.stdlib_module_names)
LIGHT = (
    "--help",
    "doctor --help",
    "plan --help",
    "report --help",
    "patch --help",
    "run --help",
)  # commands that do not need JAX
PROTOCOL_MODULES = ("terms", "actions", "keys", "arrivals", "protocol", "leader", "follower", "wire")
PROTOCOL = tuple(f"orbax_ext.meeting.{name}" for name in PROTOCOL_MODULES)
MOST_FILES, MOST_LINES, MOST_METHODS = 17, 350, 20


def room(module: str) -> str:
    """Returns the part of a module's name that LAYERS lists."""
    return module.split(".")[1] if "." in module else module


def imported_names(module: str) -> Iterator[str]:
    """Yields the full name of everything that a module imports, wherever the import stands."""
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module: str) -> set[str]:
    """Returns the modules of the package that a module imports from."""
    names = {name for name in imported_names(module) if name.split(".")[0] == "orbax_ext"}
    return {name if name in modules() else name.rpartition(".")[0] for name in names}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yields every class with its module."""
    for module, tree in modules().items():
        yield from ((module, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_every_module_is_in_a_layer() -> None:
    assert {room(module) for module in modules()} <= set(LAYER_OF)
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_FILES


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_from_its_own_layer_and_lower_ones(module: str) -> None:
    assert {name for name in own_imports(module) if LAYER_OF[room(name)] > LAYER_OF[room(module)]} == set()


def test_no_room_has_an_import_cycle() -> None:
    imports = {module: {name for name in own_imports(module) if room(name) == room(module)} for module in modules()}
    while free := [module for module, needed in imports.items() if not needed & imports.keys()]:
        for module in free:
            del imports[module]
    assert imports == {}, "these modules import each other, or import one that does"


@pytest.mark.parametrize("module", [*(module for module in modules() if room(module) == "plan"), *PROTOCOL])
def test_planning_and_protocol_are_pure(module: str) -> None:
    assert {name.split(".")[0] for name in imported_names(module)} <= PURE
    assert {LAYER_OF[room(name)] for name in own_imports(module)} <= {0, LAYER_OF[room(module)]}


@pytest.mark.parametrize("module", PROTOCOL)
def test_protocol_modules_import_only_each_other_and_the_first_layer(module: str) -> None:
    assert {name for name in own_imports(module) if LAYER_OF[room(name)] > 0} <= set(PROTOCOL)


@pytest.mark.parametrize("module", [module for module in modules() if room(module) != "upstream"])
def test_only_upstream_imports_private_names_of_others(module: str) -> None:
    assert [name for name in imported_names(module) if not name.startswith("orbax_ext") and is_private(name)] == []


def test_only_upstream_touches_private_attributes_of_others() -> None:
    """A private attribute that no module of ours defines belongs to Orbax, JAX or etils."""
    trees = {module: tree for module, tree in modules().items() if room(module) != "upstream"}
    ours = {name for tree in trees.values() for name in _defined_names(tree)}
    ours |= {"_exit", "_replace"}  # documented functions of os and of named tuples
    wrong = {
        f"{module}: .{name}"
        for module, tree in trees.items()
        for name in _attributes(tree)
        if is_private(name) and name not in ours
    }
    assert wrong == set()


def _defined_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _attributes(tree: ast.Module) -> Iterator[str]:
    """Yields the attributes that a module reads, sets or names in getattr and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def test_no_module_and_no_class_is_too_large() -> None:
    modules_too_large = {module for module, text in sources().items() if len(text.splitlines()) > MOST_LINES}
    classes_too_large = {f"{module}.{node.name}" for module, node in classes() if _methods(node) > MOST_METHODS}
    assert modules_too_large | classes_too_large == set()


def _methods(node: ast.ClassDef) -> int:
    return sum(isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) for part in node.body)


def test_public_class_names_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for module, node in classes():
        if not is_private(node.name):
            homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_the_public_namespace_is_all() -> None:
    for name in orbax_ext.__all__:
        assert getattr(orbax_ext, name) is not None
    submodules = {room(module) for module in modules()}
    names = {name for name in vars(orbax_ext) if not name.startswith("_")} | {"__version__"}
    assert names - submodules == set(orbax_ext.__all__) - submodules
    assert orbax_ext.__all__ == sorted(orbax_ext.__all__, key=lambda name: (name.islower(), name))


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
