"""Random damages to any file of a checkpoint: what plain Orbax restores is restored, everything else is refused by all.

`make test` tries 40 damages; `make fuzz DAMAGES=500` more, and `make fuzz SEED=17` one of them again.

"Only what plain Orbax restores" means, for the same files:
- If plain Orbax restores them on all processes, orbax_ext does, and each leaf has the same bytes.
- If plain Orbax fails on any process, orbax_ext fails on all of them, with a built-in type of plain's errors.
  Where several files are damaged, the two may find another one first, so that the types may differ.
"""

from __future__ import annotations

import os
import pathlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import Mesh

import orbax_ext
from orbax_ext import lab
from tests.support import plain_orbax, random_damage, states
from tests.support.plain_orbax import Comparison
from tests.support.states import P, Spec

ONLY = os.environ.get("ORBAX_EXT_SEED")
SEEDS = [int(ONLY)] if ONLY else range(int(os.environ.get("ORBAX_EXT_DAMAGES", "40")))

SPECS = {
    "weights": Spec((256, 64), "float32", P("tp")),  # large enough to be read in slices
    "other": Spec((256, 64), "float32", P("tp")),  # whose files fit in the place of those
    "everywhere": Spec((16, 8), "bfloat16", P(("dp", "tp"))),  # of which each process reads its own part
    "whole": Spec((7, 3), "int8"),
    "step": Spec((), "int32"),
}
FORMS = [(ocdbt, zarr3) for ocdbt in (True, False) for zarr3 in (False, True)]
CALLS = ["complete args", "only shardings", "no args"]
STRATEGIES = ["auto", "spread", "single", "direct"]
KNOBS: dict[str, Any] = {"replica_axis": "dp", "broadcast_memory_limit_bytes": 1 << 15, "stall_timeout": 20}
LIMIT = 60  # seconds for both restores


@pytest.fixture(scope="module")
def pair() -> Iterator[lab.Cluster]:
    with lab.Cluster(processes=2, devices=2, timeout=LIMIT) as running:
        yield running


@pytest.fixture(scope="module")
def checkpoints(pair: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A checkpoint in each form."""
    paths = [str(tmp_path_factory.mktemp("fuzz") / "checkpoint") for _ in FORMS]
    for path, (ocdbt, zarr3) in zip(paths, FORMS, strict=True):
        pair.run(save, path, ocdbt, zarr3)
    return paths


@pytest.mark.parametrize("seed", SEEDS)
def test_a_damaged_checkpoint_ends_alike_and_as_in_plain_orbax(
    pair: lab.Cluster, checkpoints: list[str], tmp_path: pathlib.Path, seed: int
) -> None:
    copy, choice = str(tmp_path / "damaged"), random.Random(seed)
    done = random_damage.damaged_copy(checkpoints[seed % len(FORMS)], copy, seed)
    call, knobs = choice.choice(CALLS), {"strategy": choice.choice(STRATEGIES), "verify": choice.random() < 0.2}
    outcomes = pair.outcomes(compare, copy, call, knobs)
    what = f"seed {seed}, ocdbt and zarr3 {FORMS[seed % len(FORMS)]}, {call}, {knobs}: {'; '.join(done)}"
    assert [str(outcome) for outcome in outcomes if not outcome.ok] == [], what
    problems = _problems([outcome.value for outcome in outcomes], done)
    problems += [f"left on the service: {key}" for key in pair.run(keys_left)[0]]
    assert problems == [], what


def _problems(comparisons: list[Comparison], done: list[str]) -> list[str]:
    problems = [text for comparison in comparisons for text in comparison.differences]
    plain, ours = zip(*(comparison.errors for comparison in comparisons), strict=True)
    messages = [comparison.messages for comparison in comparisons]
    if len(set(ours)) > 1 or len({text for _, text in messages if "restore failed" in text}) > 1:
        problems.append(f"the processes end differently: {messages}")
    if any(plain) != any(ours):
        problems.append(f"plain Orbax: {plain}, orbax_ext: {ours}; {messages}")
    if len(done) == 1 and any(plain) and any(ours) and not any(set(kinds) & set(ours[0]) for kinds in plain):
        problems.append(f"other types: plain Orbax: {plain}, orbax_ext: {ours}; {messages}")
    return problems


# Run on the processes.


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2), ("dp", "tp"))


def save(path: str, ocdbt: bool, zarr3: bool) -> None:
    state = {**states.make_state(SPECS, mesh()), "count": 3}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state))


def compare(path: str, call: str, knobs: Mapping[str, Any]) -> Comparison:
    """Restores the damaged files with both."""

    def plain() -> Any:  # without a Checkpointer, whose barrier waits for a process that failed
        return ocp.PyTreeCheckpointHandler().restore(epath.Path(path), args=arguments(call))

    def ours() -> Any:
        with orbax_ext.registered(**KNOBS, **knobs), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path, args=arguments(call))

    return plain_orbax.compare(plain, {}, ours)


def keys_left() -> list[str]:
    """Returns the keys of processes that still wait. Keys of a session that was left are removed by the next one."""
    return [key for key in states.coordination_keys() if "/session/" not in key]


def arguments(call: str) -> ocp.args.PyTreeRestore:
    abstract = {**states.abstract_state(SPECS, mesh()), "count": 0}
    if call == "complete args":
        return ocp.args.PyTreeRestore(abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))
    if call == "only shardings":
        shardings = {name: ocp.ArrayRestoreArgs(sharding=abstract[name].sharding) for name in SPECS}
        return ocp.args.PyTreeRestore(restore_args={**shardings, "count": ocp.RestoreArgs(restore_type=int)})
    return ocp.args.PyTreeRestore()
