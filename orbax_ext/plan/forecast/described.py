"""Arrays described by name, shape, dtype and spec, without devices: from a file, or from a checkpoint's metadata.

A described model is JSON, a list of objects, or a line for each array (`#` begins a comment):

    [{"name": "embed", "shape": [129280, 7168], "dtype": "bfloat16", "spec": "P(tp)", "chunk": [16160, 7168]}]

    embed                  bfloat16  129280x7168    P(tp)          16160x7168
    layers.{0..60}.experts bfloat16  256x7168x2048  P(ep,None,tp)
    step                   int32     ()

`{0..60}` stands for 61 arrays. Without a spec, a rule gives it, or else every device has a copy. Without a chunk, it is
what one device of the mesh holds, as a save from that mesh would store it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orbax_ext.plan.forecast import notation
from orbax_ext.plan.leaves import Leaf, itemsize
from orbax_ext.plan.topology import MeshInfo

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_FIELDS = {"name", "shape", "dtype", "spec", "chunk"}
_MOST = 1_000_000  # arrays that one description may stand for; more is a typing error


@dataclasses.dataclass(frozen=True)
class Described:
    """One described array."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: notation.Spec | None = None  # None where none is given
    chunk: tuple[int, ...] | None = None
    direct_because: str = ""  # why every process reads it directly; empty if it can travel


def parse_shapes(text: str) -> list[Described]:
    """Returns the arrays of a described model. Raises `ValueError` with the line or entry and what was expected."""
    arrays: list[Described] = []
    if text.lstrip().startswith("["):
        for number, entry in enumerate(json.loads(text), 1):
            arrays += _numbered(f"entry {number}", _from_json, entry)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if words := line.partition("#")[0].strip():
                arrays += _numbered(f"line {number}", _from_line, words)
    if not arrays:
        raise ValueError("it describes no arrays")
    names = [array.name for array in arrays]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is described twice")
    return arrays


def place(
    described: Sequence[Described], mesh: MeshInfo, rules: Sequence[notation.Rule]
) -> tuple[list[Leaf], dict[str, str]]:
    """Returns the arrays as leaves on a mesh, and by name why some have less than the spec they were saved with."""
    leaves, unfit = [], {}
    for array in described:
        spec, reason = choose_spec(array.name, array.shape, array.spec or (), rules, mesh.sizes)
        if reason:
            unfit[array.name] = reason
        block = notation.block_shape(spec, array.shape, mesh.sizes)
        leaves.append(
            Leaf(
                array.name,
                array.shape,
                array.dtype,
                itemsize(array.dtype),
                block,
                mesh=0,
                spec=notation.padded(spec, len(array.shape)),
                chunk=array.chunk or block,
                divisible=True,
                direct_because=array.direct_because,
            )
        )
    return leaves, unfit


def choose_spec(
    name: str, shape: Sequence[int], known: notation.Spec, rules: Sequence[notation.Rule], mesh: Mapping[str, int]
) -> tuple[notation.Spec, str]:
    """Returns the spec of a leaf: of the first rule that matches, else what fits of the known one and why that is less.

    Raises `ValueError` if the spec of a rule does not fit.
    """
    rule = next((rule for rule in rules if rule.matches(name)), None)
    if rule is None:
        return notation.fitted(known, shape, mesh)
    if reason := notation.why_not(rule.spec, shape, mesh):
        raise ValueError(f"the spec for {rule.pattern!r} does not fit {name} of shape {tuple(shape)}: {reason}")
    return rule.spec, ""


def _numbered(where: str, parse: Any, entry: Any) -> list[Described]:
    try:
        array = parse(entry)
        return [dataclasses.replace(array, name=name) for name in _names(array.name)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: {error if isinstance(error, ValueError) else repr(error)}") from None


def _from_json(entry: Any) -> Described:
    if not isinstance(entry, dict) or not {"name", "shape", "dtype"} <= set(entry) <= _FIELDS:
        raise ValueError(f"expected an object with name, shape, dtype and optionally spec and chunk; found {entry!r}")
    return _checked(entry["name"], entry["shape"], entry["dtype"], entry.get("spec"), entry.get("chunk"))


def _from_line(line: str) -> Described:
    fields = re.fullmatch(r"(\S+)\s+(\w+)\s+(\(\)|[\dx]+)(?:\s+(P\(.*\)))?(?:\s+([\dx]+))?", line)
    if not fields:
        raise ValueError(
            f"expected NAME DTYPE SHAPE [SPEC] [CHUNK], as in 'w bfloat16 64x128 P(None,tp)'; found {line!r}"
        )
    name, dtype, shape, spec, chunk = fields.groups()
    return _checked(name, () if shape == "()" else shape.split("x"), dtype, spec, chunk and chunk.split("x"))


def _checked(name: object, shape: Iterable[Any], dtype: object, spec: Any, chunk: Iterable[Any] | None) -> Described:
    """Returns the described array. Raises if there is no such dtype or spec, or if a size is impossible."""
    array = Described(
        str(name),
        tuple(map(int, shape)),
        str(dtype),
        notation.parse_spec(spec) if spec else None,
        tuple(map(int, chunk)) if chunk else None,
    )
    itemsize(array.dtype)  # raises if there is no such dtype
    if any(size < 1 for size in (*array.shape, *(array.chunk or ()))):
        raise ValueError(f"sizes must be 1 or more; found shape {array.shape} and chunk {array.chunk}")
    if array.chunk is not None and len(array.chunk) != len(array.shape):
        raise ValueError(f"the chunk {array.chunk} must have as many dimensions as the shape {array.shape}")
    return array


def _names(pattern: str) -> list[str]:
    """Returns a name for each number of every {first..last} in the pattern."""
    names = [pattern]
    while numbers := _RANGE.search(names[0]):
        first, last = int(numbers[1]), int(numbers[2])
        if not 0 <= last - first < _MOST:
            raise ValueError(f"{numbers[0]} in {pattern!r} is not a range such as {{0..60}}")
        if len(names) * (last - first + 1) > _MOST:
            raise ValueError(f"{pattern!r} stands for more than {_MOST} arrays")
        names = [_RANGE.sub(str(number), name, count=1) for name in names for number in range(first, last + 1)]
    return names
