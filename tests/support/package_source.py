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
WAITING |= {"recv_fds", "recvmsg", "recv_bytes", "accept", "waitpid", "readline", "select"}
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


# Where locks are made: threading's, asyncio's.
_LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}


@functools.cache
def locks() -> set[str]:
    """Returns the names of the variables and attributes of the package that hold locks."""
    return {name for tree in modules().values() for name in locks_in(tree)}


def locks_in(tree: ast.Module) -> set[str]:
    """Returns the names of the variables and attributes of a module that hold locks."""
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        called = {name_of(call.func) for call in ast.walk(node.value) if isinstance(call, ast.Call)}
        if called & _LOCKS:
            names |= {name_of(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])}
    return names


def name_of(node: ast.expr) -> str:
    """Returns the last part of a name: `lock` of `self.lock`; "" of what is not a name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
