"""The lines of Python that restore a checkpoint on a mesh: `orbax-ext inspect --code`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from orbax_ext.plan.forecast import notation
from orbax_ext.storage import checkpoint


def restore_code(
    path: str, step: int | None, mesh: notation.Axes | None, rules: Sequence[notation.Rule], items: Sequence[str]
) -> str:
    """Returns a program; of several items with arrays it restores each. Raises `ValueError` if a rule does not fit."""
    path = path if "://" in path else os.path.abspath(path)
    arguments = [repr(path), *(["mesh"] if mesh else [])]
    arguments += [f"step={step}"] if step is not None else []
    arguments += ["specs=specs"] if rules else []
    if len(items) > 1:
        call = f"orbax_ext.restore({', '.join([*arguments, 'item=item'])})"
        restore = f"state = {{item: {call} for item in {tuple(items)!r}}}"
    else:
        restore = f"state = orbax_ext.restore({', '.join(arguments)})"
    notes = [line for item in items for line in _notes(checkpoint.read_tree(path, step, item), mesh, rules)]
    return "\n".join([*_imports(mesh, rules), "", *_mesh_lines(mesh), *_spec_lines(rules), restore, "", *notes])


def _imports(mesh: notation.Axes | None, rules: Sequence[notation.Rule]) -> list[str]:
    lines = ["import jax", "import numpy as np", "from jax.sharding import Mesh"] if mesh else []
    lines += ["from jax.sharding import PartitionSpec as P"] if rules else []
    return [*lines, *([""] if lines else []), "import orbax_ext"]


def _mesh_lines(mesh: notation.Axes | None) -> list[str]:
    if not mesh:
        return []
    names, sizes = tuple(name for name, _ in mesh), ", ".join(str(size) for _, size in mesh)
    return [
        "# In a job of several processes, call jax.distributed.initialize() before this, and run it on all of them.",
        f"mesh = Mesh(np.array(jax.devices()).reshape({sizes}), {names!r})",
    ]


def _spec_lines(rules: Sequence[notation.Rule]) -> list[str]:
    if not rules:
        return []
    return ["specs = {", *(f"    {rule.pattern!r}: {_spec_code(rule.spec)}," for rule in rules), "}"]


def _spec_code(spec: notation.Spec) -> str:
    return f"P({', '.join(repr(axes[0] if len(axes) == 1 else axes or None) for axes in spec)})"


def _notes(tree: checkpoint.StoredTree, mesh: notation.Axes | None, rules: Sequence[notation.Rule]) -> list[str]:
    """Returns comments that say how the leaves of a tree are placed."""
    mapped = checkpoint.map_specs(tree.leaves, rules, dict(mesh) if mesh else None)
    lines = [f"# {tree.path}", *(f"#   {line}" for line in mapped.lines())]
    return [*lines, *(f"#   the pattern {pattern!r} matches no leaf" for pattern in mapped.unused)]
