"""What plain Orbax refuses is refused with the same built-in type of error, and what it restores is restored."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

from orbax_ext import lab
from tests.support import file_damage, plain_orbax, states
from tests.support.plain_orbax import Comparison
from tests.support.states import P, Spec

SPECS = {
    "weights": Spec((256, 512), "float32", P("tp")),  # large enough to be read in slices
    "whole": Spec((7, 3), "int8"),
    "step": Spec((), "int32"),
}
KNOBS = {"replica_axis": "dp", "broadcast_memory_limit_bytes": 1 << 17, "stall_timeout": 20}
CALLS = ["complete args", "only shardings", "no args"]


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[lab.Cluster]:
    """One process with 8 devices, or four with 2 each."""
    with lab.Cluster(request.param, 8 // request.param) as running:
        yield running


def _cases() -> Iterator[Any]:
    """One process shows every format; four show two, of each kind of metadata and of files, and each damage once."""
    forms = [
        (f"zarr{3 if zarr3 else 2}-{'ocdbt' if ocdbt else 'files'}", ocdbt, zarr3)
        for ocdbt in (True, False)
        for zarr3 in (False, True)
    ]
    for form, ocdbt, zarr3 in forms:
        yield pytest.param(1, ocdbt, zarr3, True, id=f"1-{form}", marks=pytest.mark.once if ocdbt != zarr3 else ())
    for form, ocdbt, zarr3 in forms:
        if ocdbt != zarr3:
            yield pytest.param(4, ocdbt, zarr3, False, id=f"4-{form}")
        yield pytest.param(4, ocdbt, zarr3, True, id=f"4-{form}-every-call", marks=pytest.mark.long)


@pytest.mark.parametrize(("processes", "ocdbt", "zarr3", "every_call"), list(_cases()), indirect=["processes"])
def test_damage_of_every_file_is_refused_with_plain_orbax_s_type(
    processes: lab.Cluster, tmp_path: pathlib.Path, ocdbt: bool, zarr3: bool, every_call: bool
) -> None:
    whole = str(tmp_path / "checkpoint")
    processes.run(save, whole, ocdbt, zarr3)
    copies = file_damage.damaged_copies(whole, str(tmp_path / "copies"), leaf="weights")
    by_process = processes.run(compare_all, copies, every_call, timeout=600)
    assert [text for comparisons in by_process for text in _differing(comparisons)] == []
    errors = {comparison.errors for comparison in by_process[0].values()}
    assert ((), ()) in errors  # not every damage is noticed
    assert {kinds[0] for kinds, _ in errors if kinds} >= {"ValueError"} | (set() if ocdbt else {"FileNotFoundError"})


@pytest.mark.parametrize("saver", [0, 1, 5])
def test_a_damaged_list_of_any_saving_process_is_refused(small_cluster: lab.Cluster, path: str, saver: int) -> None:
    """Plain Orbax reads the lists of all processes that saved everywhere, orbax_ext each of them on one process."""
    small_cluster.run(save, path, True, False)
    lists = pathlib.Path(path, "array_metadatas")
    content = (lists / "process_0").read_text()
    for number in range(6):  # as if more processes had saved than restore
        (lists / f"process_{number}").write_text("{" if number == saver else content)
    for comparisons in small_cluster.run(compare_all, {"list of one process": path}):
        for comparison in comparisons.values():
            assert comparison.errors == (("ValueError",), ("ValueError",))


def _differing(comparisons: dict[str, Comparison]) -> list[str]:
    return [
        f"{case}: plain Orbax {comparison.errors[0]}, orbax_ext {comparison.errors[1]}, {comparison.differences}"
        for case, comparison in comparisons.items()
        if comparison.differences or comparison.errors[0] != comparison.errors[1]
    ]


# Run on the processes.


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "tp"))


def save(path: str, ocdbt: bool, zarr3: bool) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(states.make_state(SPECS, mesh())))


def compare_all(copies: dict[str, str], every_call: bool = True) -> dict[str, Comparison]:
    """Restores each copy by each call or by one, with plain Orbax and with orbax_ext."""
    comparisons = {}
    for number, (damage, path) in enumerate(copies.items()):
        strategy = states.STRATEGIES[number % 2]
        for call in CALLS if every_call else [CALLS[number % len(CALLS)]]:
            comparison = plain_orbax.compare(_restore(path, call), {**KNOBS, "strategy": strategy})
            comparisons[f"{damage}, {call}, {strategy}"] = comparison
    return comparisons


def _restore(path: str, call: str) -> Callable[[], Any]:
    abstract = states.abstract_state(SPECS, mesh())
    args = {
        "complete args": (abstract, ocp.checkpoint_utils.construct_restore_args(abstract)),
        "only shardings": (abstract, jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding), abstract)),
        "no args": (None, None),
    }[call]

    def restore() -> Any:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path, args=ocp.args.PyTreeRestore(args[0], restore_args=args[1]))

    return restore
