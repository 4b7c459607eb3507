"""Lets Python collect garbage less often while thousands of small leaves are restored."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence

from orbax_ext.plan import Leaf

_MANY = 1000  # leaves
_SMALL = 256 << 10  # bytes on a device, on average; garbage of larger leaves would keep too much memory
_OBJECTS = 10_000  # new objects after which garbage is collected: those of some hundred leaves; Python's number is 700


@contextlib.contextmanager
def collected_seldom(leaves: Sequence[Leaf]) -> Iterator[None]:
    """Raises Python's threshold during a `with` block if there are thousands of small leaves.

    A restore makes many objects for each leaf and keeps most, so Python looks through all of them again and again: with
    thousands of small leaves that took a sixth of the time. A threshold, unlike `gc.disable` or `gc.freeze`, changes
    nothing of what a program has set up, and still lets JAX free memory that it holds until garbage is collected.
    Restores of one process take turns, so no other one raises it meanwhile.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _OBJECTS or not _many_small(leaves):
        yield
        return
    raised = (_OBJECTS, *before[1:])
    gc.set_threshold(*raised)
    try:
        yield
    finally:
        if gc.get_threshold() == raised:  # else the program has set another one meanwhile
            gc.set_threshold(*before)


def _many_small(leaves: Sequence[Leaf]) -> bool:
    return len(leaves) >= _MANY and sum(leaf.block_bytes for leaf in leaves) < _SMALL * len(leaves)
