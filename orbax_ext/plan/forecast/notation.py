"""Meshes and specs as people write them on a command line: `pp=1,dp=4,tp=8` and `*.kernel=P(None,tp)`."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Mapping, Sequence

from orbax_ext import text as text_lib

Spec = tuple[tuple[str, ...], ...]  # for each dimension, the mesh axes that it is sharded over
Axes = tuple[tuple[str, int], ...]  # a mesh: (name, size)

_NAME = re.compile(r"[A-Za-z_]\w*")
_ENTRY = re.compile(r"""\s*(?:\(([^()]*)\)|(["']?)([A-Za-z_]\w*)\2)\s*(,|$)""")


def parse_mesh(text: str) -> Axes:
    """Parses a mesh such as `pp=1,dp=4,tp=8`."""
    axes: dict[str, int] = {}
    for entry in text.split(","):
        name, _, size = (side.strip() for side in entry.partition("="))
        if not _NAME.fullmatch(name) or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"{entry.strip()!r} in the mesh {text!r} is not NAME=SIZE, as in pp=1,dp=4,tp=8")
        if name in axes:
            raise ValueError(f"the axis {name!r} is named twice in the mesh {text!r}")
        axes[name] = int(size)
    return tuple(axes.items())


def parse_spec(text: str) -> Spec:
    """Parses a spec such as `P(None, tp)`, `P(('dp', 'tp'))` or `P()`; axis names may be quoted."""
    spec = re.fullmatch(r"\s*(?:P|PartitionSpec)\((.*)\)\s*", text, re.DOTALL)
    if not spec:
        raise ValueError(f"{text!r} is not a spec such as P(None, tp), P((dp, tp)) or P()")
    entries: list[tuple[str, ...]] = []
    rest = spec[1].strip()
    while rest:
        entry = _ENTRY.match(rest)
        if not entry:
            raise ValueError(f"{rest!r} in the spec {text!r} is neither None nor an axis nor several as (dp, tp)")
        if entry[1] is not None:
            entries.append(tuple(_axis(name, text) for name in entry[1].split(",") if name.strip()))
        else:
            entries.append(() if entry[3] == "None" else (entry[3],))
        rest = rest[entry.end() :].strip()
    return tuple(entries)


def spec_text(spec: Spec) -> str:
    entries = ["None" if not axes else axes[0] if len(axes) == 1 else f"({', '.join(axes)})" for axes in spec]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


@dataclasses.dataclass(frozen=True)
class Rule:
    """The spec of the leaves whose names match a pattern such as `params.*.kernel`."""

    pattern: str
    spec: Spec

    def matches(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern)


def parse_rule(text: str) -> Rule:
    """Parses a rule such as `*.kernel=P(None,tp)`."""
    pattern, equals, spec = text.partition("=")
    if not equals or not pattern.strip():
        raise ValueError(f"{text!r} is not PATTERN=SPEC, as in '*.kernel=P(None,tp)'")
    return Rule(pattern.strip(), parse_spec(spec))


def why_not(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> str:
    """Returns why an array of this shape cannot have this spec on this mesh, or an empty string."""
    if len(spec) > len(shape):
        return f"{spec_text(spec)} has {len(spec)} entries for {len(shape)} dimensions"
    used: set[str] = set()
    for dim, axes in enumerate(spec):
        for axis in axes:
            if axis not in mesh:
                return f"{spec_text(spec)} names the axis {axis!r}, which the mesh {text_lib.mesh(mesh)} lacks"
            if axis in used:
                return f"{spec_text(spec)} names the axis {axis!r} twice"
            used.add(axis)
        pieces = math.prod(mesh[axis] for axis in axes)
        if shape[dim] % pieces:
            return f"{spec_text(spec)} cuts dimension {dim} of size {shape[dim]} into {pieces}"
    return ""


def fitted(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> tuple[Spec, str]:
    """Returns as much of a spec as an array of this shape can have on this mesh, and why that is less; "" if it is all.

    Axes that the mesh lacks are left out. A dimension that the remaining axes do not divide is not sharded.
    """
    lacking = dict.fromkeys(axis for axes in spec for axis in axes if axis not in mesh)
    reasons = [f"the mesh {text_lib.mesh(mesh)} lacks the axis {axis!r}" for axis in lacking]
    entries: list[tuple[str, ...]] = []
    for dim, axes in enumerate(spec):
        kept = tuple(axis for axis in axes if axis in mesh)
        pieces = math.prod(mesh[axis] for axis in kept)
        if dim < len(shape) and shape[dim] % pieces:
            reasons.append(f"dimension {dim} can't be cut into {pieces}")
            kept = ()
        entries.append(kept)
    if not reasons:
        entries = list(spec)
    elif not any(entries):
        entries = []
    if reason := why_not(tuple(entries), shape, mesh):
        return (), reason
    return tuple(entries), " and ".join(reasons)


def block_shape(spec: Spec, shape: Sequence[int], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of the block that one device holds."""
    pieces = [math.prod(mesh[axis] for axis in axes) for axes in padded(spec, len(shape))]
    return tuple(size // count for size, count in zip(shape, pieces, strict=True))


def padded(spec: Spec, ndim: int) -> Spec:
    """Returns the spec with an entry for every dimension."""
    return (*spec, *((),) * (ndim - len(spec)))


def _axis(name: str, text: str) -> str:
    bare = name.strip().strip("\"'")
    if not _NAME.fullmatch(bare):
        raise ValueError(f"{name.strip()!r} in the spec {text!r} is not the name of an axis")
    return bare
