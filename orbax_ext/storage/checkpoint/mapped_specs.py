"""The specs of a stored tree on another mesh, and how they were found. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from orbax_ext import text as text_lib
from orbax_ext.plan.forecast import described
from orbax_ext.plan.forecast.notation import Rule, Spec
from orbax_ext.storage.checkpoint.stored_tree import LeafFacts


@dataclasses.dataclass(frozen=True)
class MappedSpecs:
    """The spec of each leaf by name, and the names of the leaves by how their spec was found."""

    specs: Mapping[str, Spec]
    how: Mapping[str, Sequence[str]]
    unused: Sequence[str]  # patterns of rules that match no leaf

    def lines(self) -> list[str]:
        """Returns a line for each way in which a spec was found."""
        return [
            f"{text_lib.count(len(names), 'leaf')} {how}: {text_lib.listing(names)}" for how, names in self.how.items()
        ]


def map_specs(leaves: Sequence[LeafFacts], rules: Sequence[Rule], mesh: Mapping[str, int] | None) -> MappedSpecs:
    """Returns the specs of stored leaves on a mesh of these axes, or on one device if it is None.

    The first rule that matches a leaf counts. Raises `ValueError` if its spec does not fit.
    """
    specs: dict[str, Spec] = {}
    how: dict[str, list[str]] = {}
    for leaf in leaves:
        specs[leaf.name], way = _map_spec(leaf, rules, mesh)
        how.setdefault(way, []).append(leaf.name)
    unused = [rule.pattern for rule in rules if not any(map(rule.matches, specs))]
    return MappedSpecs(specs, how, unused)


def _map_spec(leaf: LeafFacts, rules: Sequence[Rule], mesh: Mapping[str, int] | None) -> tuple[Spec, str]:
    if leaf.kind != "jax.Array":
        return (), "not on devices"
    if mesh is None:
        return (), "on one device"
    given = next((rule for rule in rules if rule.matches(leaf.name)), None)
    if leaf.key_type:
        despite = " whatever the given specs say" if given is not None and any(given.spec) else ""
        return (), f"replicated{despite}, because they are typed PRNG keys"
    spec, reason = described.choose_spec(leaf.name, leaf.shape, leaf.spec or (), rules, mesh)
    if given is not None:
        return spec, "as the given specs say"
    if leaf.spec is None:
        return (), "replicated, because no spec is known"
    return spec, f"sharded less than saved, because {reason}" if reason else "as saved"
