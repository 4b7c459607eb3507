"""Which leaves differ, when processes ask for different trees."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from orbax_ext.meeting.session import Session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.plan import Leaf, MeshInfo

_MOST = 3  # differences that one process tells
_ROOM = 48_000  # characters of a tree that goes to the other processes
_LONGEST = 200  # characters of one difference


async def find(session: Session, process: int, mine: Mapping[str, str]) -> dict[int, list[str]]:
    """How each process's tree differs from that of process 0, in words. All processes must call it together."""
    shown = await in_thread(session.meet, "compare trees", {"leaves": _that_fit(mine)} if process == 0 else {})
    reference = {str(name): str(text) for name, text in shown[0]["leaves"]}
    told = await in_thread(session.meet, "tell differences", {"differences": compare(mine, reference)})
    return {number: [str(line) for line in payload["differences"]] for number, payload in told.items()}


def describe(leaves: Sequence[Leaf], meshes: Sequence[MeshInfo]) -> dict[str, str]:
    """Each leaf in a few words: all that must be the same on every process."""
    return {leaf.name: _text(leaf, meshes) for leaf in leaves}


def compare(mine: Mapping[str, str], reference: Mapping[str, str], most: int = _MOST) -> list[str]:
    """The first few differences, one line each; `reference` may end before the tree does."""
    complete = len(reference) >= len(mine) or set(reference) - set(mine)
    changed = [name for name in mine if name in reference and mine[name] != reference[name]]
    lines = [f"has {name!r} as {mine[name]}, not {reference[name]}" for name in changed]
    lines += [f"lacks {name!r}" for name in reference if name not in mine]
    if complete:
        lines += [f"has {name!r}, which process 0 lacks" for name in mine if name not in reference]
    if not lines and list(mine)[: len(reference)] != list(reference):
        lines = ["has the same leaves in another order"]
    if not lines and mine != reference:
        lines = ["differs in leaves that are not shown here"]
    more = len(lines) - most
    return [line[:_LONGEST] for line in lines[:most]] + ([f"and {more} more differences"] if more > 0 else [])


def _text(leaf: Leaf, meshes: Sequence[MeshInfo]) -> str:
    kind = f"{leaf.dtype}{list(leaf.shape)}"
    if leaf.mesh is None:
        return f"{kind} ({leaf.direct_because})"
    spec = ", ".join("+".join(axes) or "-" for axes in leaf.spec)
    return f"{kind} sharded ({spec}) on mesh {meshes[leaf.mesh]}"


def _that_fit(mine: Mapping[str, str]) -> list[tuple[str, str]]:
    room, chosen = _ROOM, []
    for name, text in mine.items():
        room -= len(json.dumps([name, text]))
        if room < 0:
            break
        chosen.append((name, text))
    return chosen
