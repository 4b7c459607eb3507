"""Arrays described by name, shape, dtype and spec, without devices: from a file, or from a checkpoint's metadata. Pure.

A described model is JSON, a list of objects, or a line for each array (`#` begins a comment):

    [{"name": "embed", "shape": [129280, 7168], "dtype": "bfloat16", "spec": "P(tp)", "chunk": [16160, 7168]}]

    embed                  bfloat16  129280x7168    P(tp)          16160x7168
    layers.{0..60}.experts bfloat16  256x7168x2048  P(ep,None,tp)
    step                   int32     ()

`{0..60}` stands for 61 arrays. The spec may be left out (a rule, or copies everywhere), the chunk too (what one device
of the mesh holds, as a save from that mesh would store it).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  numpy knows bfloat16 and its like by name from here on
import numpy as np

from orbax_ext.plan.forecast import notation
from orbax_ext.plan.leaves import Leaf
from orbax_ext.plan.topology import MeshInfo

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_FIELDS = {"name", "shape", "dtype", "spec", "chunk"}
_MOST = 1_000_000  # arrays that a description may stand for


@dataclasses.dataclass(frozen=True)
class Described:
    """One array."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: notation.Spec | None = None  # None where it is not said
    chunk: tuple[int, ...] | None = None
    direct_because: str = ""  # why every process reads it for itself; empty if it need not

    @property
    def itemsize(self) -> int:
        return int(np.dtype(self.dtype).itemsize)


def parse_shapes(text: str) -> list[Described]:
    """The arrays of a described model; `ValueError` says which line or entry is wrong, and what was expected."""
    found: list[Described] = []
    if text.lstrip().startswith("["):
        for number, entry in enumerate(json.loads(text), 1):
            found += _numbered(f"entry {number}", _from_json, entry)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if words := line.partition("#")[0].strip():
                found += _numbered(f"line {number}", _from_line, words)
    if not found:
        raise ValueError("it describes no arrays")
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is described twice")
    return found


def place(
    described: Sequence[Described], mesh: MeshInfo, rules: Sequence[notation.Rule]
) -> tuple[list[Leaf], dict[str, str]]:
    """The arrays on a mesh, and by name why some of them could not have the spec that they were saved with."""
    leaves, unfit = [], {}
    for each in described:
        spec, reason = choose_spec(each.name, each.shape, each.spec or (), rules, mesh.sizes)
        if reason:
            unfit[each.name] = reason
        block = notation.block_shape(spec, each.shape, mesh.sizes)
        leaves.append(
            Leaf(
                each.name,
                each.shape,
                each.dtype,
                each.itemsize,
                block,
                mesh=0,
                spec=notation.padded(spec, len(each.shape)),
                chunk=each.chunk or block,
                divisible=True,
                direct_because=each.direct_because,
            )
        )
    return leaves, unfit


def choose_spec(
    name: str, shape: Sequence[int], known: notation.Spec, rules: Sequence[notation.Rule], mesh: Mapping[str, int]
) -> tuple[notation.Spec, str]:
    """The spec of a leaf: that of the first rule that matches, else the known one if it fits, else copies and why."""
    rule = notation.rule_for(name, rules)
    if rule is None:
        reason = notation.why_not(known, shape, mesh)
        return ((), reason) if reason else (known, "")
    if reason := notation.why_not(rule.spec, shape, mesh):
        raise ValueError(f"the spec for {rule.pattern!r} does not fit {name} of shape {tuple(shape)}: {reason}")
    return rule.spec, ""


def _numbered(where: str, parse: Any, entry: Any) -> list[Described]:
    try:
        return _expanded(parse(entry))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: {error if isinstance(error, ValueError) else repr(error)}") from None


def _from_json(entry: Any) -> Described:
    if not isinstance(entry, dict) or not {"name", "shape", "dtype"} <= set(entry) <= _FIELDS:
        raise ValueError(f"expected an object with name, shape, dtype and if need be spec and chunk; found {entry!r}")
    return _checked(
        str(entry["name"]),
        tuple(int(size) for size in entry["shape"]),
        str(entry["dtype"]),
        notation.parse_spec(entry["spec"]) if entry.get("spec") else None,
        tuple(int(size) for size in entry["chunk"]) if entry.get("chunk") else None,
    )


def _from_line(line: str) -> Described:
    found = re.fullmatch(r"(\S+)\s+(\w+)\s+(\(\)|[\dx]+)(?:\s+(P\(.*\)))?(?:\s+([\dx]+))?", line)
    if not found:
        raise ValueError(
            f"expected NAME DTYPE SHAPE [SPEC] [CHUNK], as in 'w bfloat16 64x128 P(None,tp)'; found {line!r}"
        )
    name, dtype, shape, spec, chunk = found.groups()
    return _checked(
        name,
        () if shape == "()" else _sizes(shape),
        dtype,
        notation.parse_spec(spec) if spec else None,
        _sizes(chunk) if chunk else None,
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def _checked(
    name: str, shape: tuple[int, ...], dtype: str, spec: notation.Spec | None, chunk: tuple[int, ...] | None
) -> Described:
    try:
        np.dtype(dtype)
    except TypeError:
        raise ValueError(f"{dtype!r} is not a dtype such as bfloat16, float32, int8") from None
    if any(size < 1 for size in (*shape, *(chunk or ()))):
        raise ValueError(f"sizes must be 1 or more; found shape {shape} and chunk {chunk}")
    if chunk is not None and len(chunk) != len(shape):
        raise ValueError(f"the chunk {chunk} has not as many dimensions as the shape {shape}")
    return Described(name, shape, dtype, spec, chunk)


def _expanded(described: Described) -> list[Described]:
    """One array for each number of every {first..last} in the name."""
    names = [described.name]
    while any(_RANGE.search(name) for name in names):
        names = [each for name in names for each in _expand(name)]
        if len(names) > _MOST:
            raise ValueError(f"{described.name!r} stands for more than {_MOST} arrays")
    return [dataclasses.replace(described, name=name) for name in names]


def _expand(name: str) -> list[str]:
    found = _RANGE.search(name)
    if not found:
        return [name]
    first, last = int(found[1]), int(found[2])
    if not 0 <= last - first < _MOST:
        raise ValueError(f"{found[0]} in {name!r} is not a range such as {{0..60}}")
    return [f"{name[: found.start()]}{number}{name[found.end() :]}" for number in range(first, last + 1)]
