"""The source of the package, for tests that read it."""

from __future__ import annotations

import ast
import functools
import pathlib

import orbax_ext

PACKAGE = pathlib.Path(orbax_ext.__file__).parent

# Names of functions and methods that wait for something.
WAITING = {"result", "join", "wait", "acquire", "communicate", "recv", "get", "block_until_ready", "wait_at_barrier"}
WAITING |= {"blocking_key_value_get", "check_call", "check_output", "shutdown", "urlopen", "wait_for"}
WAITING |= {"exception", "initialize", "process_allgather", "run_until_complete", "wait_until_finished"}


@functools.cache
def sources() -> dict[str, str]:
    """Returns the text of every module of the package."""
    texts = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        texts[".".join(["orbax_ext", *parts]).removesuffix(".__init__")] = path.read_text()
    return texts


@functools.cache
def modules() -> dict[str, ast.Module]:
    return {module: ast.parse(text) for module, text in sources().items()}
