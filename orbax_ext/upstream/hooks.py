"""Functions of Orbax, JAX and etils that are replaced for a while, as data; how they are replaced and put back.

Several replacements of one function make layers. Each can be taken away in any order, and the function is the original
again when the last one is gone. A function that other code has replaced since is left alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_served_by: contextvars.ContextVar[str] = contextvars.ContextVar("orbax_ext_served_by", default="")
_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Hook:
    """A function that is replaced."""

    owner: Any  # a module or a class
    name: str
    why: str
    replacement: Callable[[Any, Any], Any]  # made from the function, and from what `install` was given
    releases: str = "all"  # of Orbax that have the function

    @property
    def label(self) -> str:
        """The function as reports and messages name it, such as "CheckpointManager.restore"."""
        return f"{getattr(self.owner, '__name__', self.owner).rpartition('.')[2]}.{self.name}"

    @property
    def exists(self) -> bool:
        """Whether the installed release has the function."""
        return self.owner is not None and self.name in self.owner.__dict__


@dataclasses.dataclass(eq=False)
class _Layer:
    hook: Hook
    given: Any


@dataclasses.dataclass(eq=False)
class _Replaced:
    """A function that was replaced: the original, and what stands there now."""

    original: Any
    current: Any
    layers: list[_Layer] = dataclasses.field(default_factory=list)

    def rebuilt(self) -> Any:
        function = self.original
        for layer in self.layers:
            function = layer.hook.replacement(function, layer.given)
        return function


_replaced: dict[tuple[Any, str], _Replaced] = {}


def install(hooks: Sequence[Hook], given: Any) -> Callable[[], None]:
    """Replaces the functions, passing `given` to each replacement; returns a function that undoes it."""
    layers = [_Layer(hook, given) for hook in hooks]

    def undo() -> None:
        with _lock:
            for layer in reversed(layers):
                _remove(layer)

    with _lock:
        try:
            for layer in layers:
                _add(layer)
        except BaseException:
            undo()
            raise
    return undo


def _add(layer: _Layer) -> None:
    owner, name = layer.hook.owner, layer.hook.name
    there = owner.__dict__[name]
    replaced = _replaced.get((owner, name))
    if replaced is None or replaced.current is not there:  # other code has replaced it since
        replaced = _replaced[owner, name] = _Replaced(there, there)
    replaced.layers.append(layer)
    replaced.current = replaced.rebuilt()
    setattr(owner, name, replaced.current)


def _remove(layer: _Layer) -> None:
    owner, name = layer.hook.owner, layer.hook.name
    replaced = _replaced.get((owner, name))
    if replaced is None:
        return
    if layer in replaced.layers:
        replaced.layers.remove(layer)
    if owner.__dict__[name] is replaced.current:  # otherwise other code has replaced it since
        replaced.current = replaced.rebuilt()
        setattr(owner, name, replaced.current)
        if not replaced.layers:
            del _replaced[owner, name]


@contextlib.contextmanager
def serving(hook: str) -> Iterator[None]:
    """Notes which hook a restore comes from, for its report, as long as a `with` block lasts."""
    token = _served_by.set(hook)
    try:
        yield
    finally:
        _served_by.reset(token)


def served_by() -> str:
    """Returns the hook that the restore under way came through; empty if it came to orbax_ext's own handler."""
    return _served_by.get()
