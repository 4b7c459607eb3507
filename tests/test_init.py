"""The public names, which are imported when they are first used."""

from __future__ import annotations

import ast
import importlib
import pathlib
import pickle
import subprocess
import sys

import pytest

import orbax_ext

pytestmark = pytest.mark.once


def imports_for_type_checkers() -> dict[str, str]:
    """Returns the module of each name that `orbax_ext/__init__.py` imports for type checkers."""
    tree = ast.parse(pathlib.Path(orbax_ext.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_type_checkers_see_all_public_names() -> None:
    assert set(imports_for_type_checkers()) == set(orbax_ext.__all__) - {"__version__"}


@pytest.mark.parametrize("name", imports_for_type_checkers())
def test_a_name_is_the_object_that_type_checkers_see(name: str) -> None:
    home = importlib.import_module(imports_for_type_checkers()[name])
    assert getattr(orbax_ext, name) is getattr(home, name)


def test_dir_lists_the_public_names() -> None:
    assert dir(orbax_ext) == sorted(orbax_ext.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    name = "registr"
    with pytest.raises(AttributeError, match="module 'orbax_ext' has no attribute 'registr'") as raised:
        getattr(orbax_ext, name)
    assert (raised.value.name, raised.value.obj) == (name, orbax_ext)  # Python suggests a name that is similar


def test_public_classes_can_be_pickled() -> None:
    for cls in (orbax_ext.RestoreError, orbax_ext.RestoreReport, orbax_ext.BroadcastArrayHandler):
        assert pickle.loads(pickle.dumps(cls)) is cls


def test_a_star_import_brings_all_names() -> None:
    script = "from orbax_ext import *; import orbax_ext; print(set(orbax_ext.__all__) <= set(globals()))"
    assert run(script) == "True"


@pytest.mark.parametrize(
    "statement", ["import orbax_ext", "import orbax_ext; orbax_ext.RestoreError", "from orbax_ext import text"]
)
def test_names_that_do_not_need_jax_do_not_import_it(statement: str) -> None:
    assert run(f"import sys; {statement}; print('jax' in sys.modules)") == "False"


@pytest.mark.parametrize("name", ["storage.enable_s3", "v1.context", "register", "barrier"])
def test_a_name_needs_no_other_import(name: str) -> None:
    assert run(f"import orbax_ext; print(callable(orbax_ext.{name}))") == "True"
