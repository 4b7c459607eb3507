"""`orbax-ext plan`: what it counts is what every device would do, counted one by one; meshes and models as written."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import random
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest

from orbax_ext.cli import exits, main
from orbax_ext.options import Options
from orbax_ext.plan import LaneBatch, Leaf, MeshInfo, Pack, RestorePlan, Sum, make_plan, traffic, volumes
from orbax_ext.plan.cost import Rates
from orbax_ext.plan.forecast import described, forecast, notation
from tests.support import checkpoints

pytestmark = pytest.mark.once

RATES = Rates(1e9, 1e10)
MODEL = """
# a model in a few lines
embed           bfloat16  1024x512  P(tp)         128x512
layers.{0..3}.w bfloat16  512x2048  P(None, tp)
layers.{0..3}.b float32   512
step            int32     ()
"""


# Meshes, specs and models as people write them.


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("P()", ()),
        ("P(None,tp)", ((), ("tp",))),
        ("P('dp', None, (\"pp\", tp))", (("dp",), (), ("pp", "tp"))),
        ("PartitionSpec((dp,tp),)", (("dp", "tp"),)),
    ],
)
def test_specs_are_read_as_they_are_written(text: str, spec: notation.Spec) -> None:
    assert notation.parse_spec(text) == spec
    assert notation.parse_spec(notation.spec_text(spec)) == spec


@pytest.mark.parametrize(
    "text", ["tp", "P(tp", "P(tp dp)", "P(1)", "P(f(x))", "P(__import__('os').system('x'))", "P((tp))x"]
)
def test_what_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"spec|axis"):
        notation.parse_spec(text)


@pytest.mark.parametrize("text", ["", "dp", "dp=0", "dp=4,dp=2", "dp=4,,tp=2", "4=dp", "dp=-1"])
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"pp=1,dp=4,tp=8|named twice"):
        notation.parse_mesh(text)


def test_the_first_rule_that_matches_counts_and_must_fit() -> None:
    rules = [notation.parse_rule("*.w=P(None,tp)"), notation.parse_rule("*=P(tp)")]
    mesh = {"dp": 2, "tp": 4}
    assert described.choose_spec("a.w", (8, 8), (), rules, mesh) == (((), ("tp",)), "")
    assert described.choose_spec("a.b", (8,), (("dp",),), rules, mesh) == ((("tp",),), "")
    with pytest.raises(ValueError, match=r"does not fit a\.b of shape \(6,\).*size 6 into 4"):
        described.choose_spec("a.b", (6,), (), rules, mesh)


@pytest.mark.parametrize(
    ("known", "why"),
    [((("ep",),), "'ep', which the mesh"), ((("tp",), ("tp",)), "twice"), (((), (), ("tp",)), "3 entries for 2")],
)
def test_a_saved_spec_that_does_not_fit_becomes_copies(known: notation.Spec, why: str) -> None:
    spec, reason = described.choose_spec("w", (8, 8), known, [], {"dp": 2, "tp": 4})
    assert spec == ()
    assert why in reason


def test_a_model_is_the_same_in_lines_and_in_json() -> None:
    in_lines = described.parse_shapes(MODEL)
    assert [each.name for each in in_lines[:3]] == ["embed", "layers.0.w", "layers.1.w"]
    assert len(in_lines) == 10
    as_json = [
        {
            "name": each.name,
            "shape": each.shape,
            "dtype": each.dtype,
            **({"spec": notation.spec_text(each.spec)} if each.spec is not None else {}),
            **({"chunk": each.chunk} if each.chunk else {}),
        }
        for each in in_lines
    ]
    assert described.parse_shapes(json.dumps(as_json)) == in_lines


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("w bfloat16", "line 1: expected NAME DTYPE SHAPE"),
        ("a int8 4\nw float17 4", "line 2: 'float17' is not a dtype"),
        ("w int8 4 P(", "line 1: expected"),
        ("w int8 4x4 P() 4", "line 1: the chunk"),
        ("w int8 0", "line 1: sizes must be 1 or more"),
        ("w.{3..1} int8 4", "line 1: {3..1}"),
        ("w int8 4\nw int8 4", "'w' is described twice"),
        ("# nothing", "it describes no arrays"),
        ('[{"name": "w"}]', "entry 1: expected an object with name, shape, dtype"),
        ("[{]", "Expecting"),
    ],
)
def test_what_is_wrong_with_a_described_model_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        described.parse_shapes(text)
    assert told in str(caught.value)


# Volumes, against a count of every device's own boxes and chunks.


MESHES = {
    "a replica on each process": MeshInfo(("pp", "dp", "tp"), (1, 4, 4), tuple(i // 4 for i in range(16))),
    "replicas across processes": MeshInfo(("dp", "tp"), (2, 8), tuple(i // 4 for i in range(16))),
    "copies within a process": MeshInfo(("tp", "dp"), (4, 4), tuple(i // 4 for i in range(16))),
    "one device each": MeshInfo(("dp", "tp"), (4, 2), tuple(range(8))),
    "more replicas than leaves": MeshInfo(("dp", "tp"), (32, 2), tuple(i // 2 for i in range(64))),
    "processes in another order": MeshInfo(("dp", "tp"), (4, 2), (1, 1, 0, 0, 3, 3, 2, 2)),
}
SPECS = ["P()", "P(tp)", "P(None,tp)", "P(dp)", "P((dp,tp))", "P(dp,tp)"]


def some_leaves(mesh: MeshInfo) -> list[Leaf]:
    """Leaves of many kinds, small and large, with chunks that fit and chunks that do not."""
    chosen = random.Random(str(mesh))
    found = []
    for number, spec in enumerate(SPECS * 3):
        shape = (64 * chosen.choice([1, 16, 64]), 64 * chosen.choice([1, 8]))
        found.append(described.Described(f"leaf{number}", shape, "float32", notation.parse_spec(spec)))
    placed = described.place(found, mesh, [])[0]
    chunks = [[chosen.choice([block, max(1, block // 4), 48, 64]) for block in leaf.block] for leaf in placed]
    with_chunks = zip(found, placed, chunks, strict=True)
    again = [
        described.Described(each.name, each.shape, each.dtype, each.spec, tuple(map(min, chunk, leaf.shape)))
        for each, leaf, chunk in with_chunks
    ]
    return described.place(again, mesh, [])[0]


@pytest.mark.parametrize("strategy", ["auto", "single", "direct"])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_volumes_are_what_every_device_does_counted_one_by_one(mesh: MeshInfo, strategy: Any) -> None:
    leaves = some_leaves(mesh)
    processes = max(mesh.processes) + 1
    axis = "dp" if strategy == "single" else None
    plan = make_plan(
        leaves, [mesh], Options(strategy=strategy, replica_axis=axis), processes=processes, group_bytes=1 << 22
    )
    found = volumes.count(plan, leaves, [mesh], processes)
    chunks = [touched(plan, mesh, process) for process in range(processes)]
    assert found.read.tolist() == [sum(sizes.values()) for sizes in chunks]
    for index in range(len(leaves)):
        by_hand = sum(size for sizes in chunks for (leaf, _), size in sizes.items() if leaf == index)
        assert found.leaf_read[index] == by_hand
        assert found.leaf_needed[index] <= by_hand
    moved = [traffic.of_process(plan, [mesh], process) for process in range(processes)]
    assert found.received.tolist() == [sum(group.received for group in groups) for groups in moved]


def test_bundles_of_every_kind_are_among_those_that_are_counted() -> None:
    kinds: set[Any] = set()
    for mesh in MESHES.values():
        made = make_plan(some_leaves(mesh), [mesh], Options(), processes=max(mesh.processes) + 1, group_bytes=1 << 22)
        bundles = [bundle for group in made.groups for bundle in group.bundles]
        kinds |= {(type(bundle), getattr(bundle, "summed", False)) for bundle in bundles}
        kinds |= {"slice" for item in made.leaves if item.slice}
    assert kinds == {(Sum, False), (LaneBatch, False), (Pack, False), (Pack, True), "slice"}


def touched(plan: RestorePlan, mesh: MeshInfo, process: int) -> dict[tuple[int, tuple[int, ...]], int]:
    """The chunks that a process reads, by leaf and place, with their bytes: a chunk that is cut off at the end less."""
    sizes: dict[tuple[int, tuple[int, ...]], int] = {}
    for device, owner in enumerate(mesh.processes):
        if owner != process:
            continue
        at = dict(zip(mesh.axis_names, np.unravel_index(device, mesh.axis_sizes), strict=True))
        for item, cuts in reads(plan, mesh, at):
            leaf = plan.leaves[item]
            source = leaf.slice.leaf if leaf.slice else item
            for place, size in chunks_of(plan.leaves[source], leaf, cuts, at, mesh):
                sizes[source, place] = size
    return sizes


def reads(plan: RestorePlan, mesh: MeshInfo, at: dict[str, Any]) -> list[tuple[int, list[list[str]]]]:
    """What a device reads: items, and by which axes each dimension of them is cut."""
    found: list[tuple[int, list[list[str]]]] = []
    for index in plan.direct:
        found.append((index, [list(axes) for axes in plan.leaves[index].spec]))
    for group in plan.groups:
        replica = 0
        for axis in group.axes:
            replica = replica * mesh.sizes[axis] + at[axis]
        for bundle in group.bundles:
            if isinstance(bundle, LaneBatch):
                lane = 0
                for axis in bundle.lanes:
                    lane = lane * mesh.sizes[axis] + at[axis]
                cuts = [list(axes) for axes in plan.leaves[bundle.leaves[lane]].spec]
                for axis, dim in bundle.splits:
                    cuts[dim].append(axis)
                found.append((bundle.leaves[lane], cuts))
                continue
            shares = {bundle.reader: bundle.leaves} if isinstance(bundle, Sum) else dict(enumerate(bundle.shares))
            found += [(leaf, [list(axes) for axes in plan.leaves[leaf].spec]) for leaf in shares.get(replica, ())]
    return found


def chunks_of(
    whole: Leaf, item: Leaf, cuts: list[list[str]], at: dict[str, Any], mesh: MeshInfo
) -> list[tuple[tuple[int, ...], int]]:
    ranges, chunk = [], whole.chunk or whole.block
    for dim, axes in enumerate(cuts):
        place, pieces = 0, 1
        for axis in axes:
            place, pieces = place * mesh.sizes[axis] + int(at[axis]), pieces * mesh.sizes[axis]
        width = item.shape[dim] // pieces
        start = place * width
        if item.slice and item.slice.dim == dim:  # the same rows of every device's block
            block = start // item.block[dim]
            start = block * whole.block[dim] + item.slice.start + start % item.block[dim]
        ranges.append(range(start // chunk[dim], -(-(start + width) // chunk[dim])))
    return [
        (
            place,
            math.prod(min(c, s - p * c) for p, c, s in zip(place, chunk, whole.shape, strict=True)) * whole.itemsize,
        )
        for place in itertools.product(*ranges)
    ]


def test_chunks_that_do_not_fit_are_blamed_on_their_leaf() -> None:
    mesh = forecast.mesh_on((("dp", 2), ("tp", 4)), 2)
    model = "good float32 4096x4096 P(None,tp) 4096x1024\nbad float32 4096x4096 P(tp) 4096x512"
    leaves, _ = described.place(described.parse_shapes(model), mesh, [])
    found = forecast.forecast(leaves, mesh, 2, RATES, 10**9, "direct")
    assert forecast.to_blame(found.volumes, leaves) == []  # each process has all of it anyway
    mesh = forecast.mesh_on((("dp", 2), ("tp", 4)), 8)
    found = forecast.forecast(leaves, mesh, 8, RATES, 10**9, "direct")
    (blame,) = forecast.to_blame(found.volumes, leaves)
    assert (blame.leaf.name, blame.read / blame.needed) == ("bad", 4)
    assert "chunks (4096, 512) do not fit blocks (1024, 4096) in dimension 0" in str(blame)
    good = forecast.forecast(leaves[:1], mesh, 8, RATES, 10**9, "direct")
    assert found.seconds > 4 * good.seconds  # what chunks bring along takes time too


def test_auto_is_not_slower_than_the_others_and_says_why() -> None:
    mesh = forecast.mesh_on((("dp", 8), ("tp", 4)), 8)
    leaves, _ = described.place(described.parse_shapes("w.{0..15} bfloat16 8192x8192 P(None,tp) 1024x2048"), mesh, [])
    slow_storage, fast_storage = Rates(1e8, 1e10), Rates(1e10, 1e8)
    found = forecast.forecast(leaves, mesh, 8, slow_storage, 10**10, "auto")
    (reason,) = forecast.reasons(found, leaves)
    assert reason.startswith("spread: ")
    assert found.volumes.total_read == sum(leaf.block_bytes * 4 for leaf in leaves)
    found = forecast.forecast(leaves, mesh, 8, fast_storage, 10**10, "auto")
    (reason,) = forecast.reasons(found, leaves)
    assert reason.startswith("direct: ")
    assert found.volumes.total_received == 0


# The command.


def plan(capsys: pytest.CaptureFixture[str], *args: Any, code: int = exits.EXIT_OK) -> Any:
    assert main.main(["plan", "--json", *map(str, args)]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "model.txt"
    path.write_text(MODEL)
    return path


def test_a_described_model_is_planned(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--shapes", model, "--mesh", "pp=1,dp=4,tp=8", "--processes", 4)
    assert found["leaves"] == 10
    size = 2 * 1024 * 512 + 4 * (2 * 512 * 2048 + 4 * 512) + 4
    assert found["logical_bytes"] == size
    assert found["strategies"]["direct"]["read_by_process"] == [size] * 4
    assert found["strategies"]["spread"]["bytes_read"] == size
    single = found["strategies"]["single"]
    assert single["read_by_process"] == [size, 0, 0, 0]
    assert single["received_by_process"][0] == 0
    assert sum(group["leaves"] for group in single["groups"]) == 10


def test_a_checkpoint_is_planned_with_the_specs_that_it_was_saved_with(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints.save(tmp_path / "run")
    args = [tmp_path / "run", "--mesh", "dp=2,tp=4", "--processes", 2]
    found = plan(capsys, *args)
    large = checkpoints.LARGE
    assert large / 4 < found["bytes_per_device"] < large / 3  # P(None, tp)
    because = found["strategies"]["auto"]["because"]
    assert because["direct: it is a typed PRNG key"] == ["key"]
    assert because["direct: it was saved as a np.ndarray, not as an array on devices"] == ["table"]
    found = plan(capsys, *args, "--spec", "params.large=P()", "--spec", "nobody=P(tp)")
    assert large < found["bytes_per_device"]
    assert found["notes"] == ["--spec 'nobody' matches no leaf"]
    found = plan(capsys, tmp_path / "run", "--mesh", "x=8", "--processes", 8)
    assert "taken as copies" in found["notes"][0]
    assert "params.large" in found["notes"][0]


def test_the_text_tells_what_auto_picks_and_who_reads(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "--shapes", str(model), "--mesh", "dp=4,tp=8", "--processes", "4"]) == exits.EXIT_OK
    shown = capsys.readouterr().out
    assert "10 leaves" in shown
    for strategy in forecast.STRATEGIES:
        assert f"\n  {strategy} " in shown
    assert "auto picks\n  " in shown
    assert "MB/s a process, assumed" in shown
    assert "who reads what" in shown


def test_thousands_of_processes_are_planned_and_drawn(
    tmp_path: pathlib.Path, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    args = ["--shapes", model, "--mesh", "pp=16,dp=256,tp=8", "--processes", 4096, "--storage-total-gbps", 100]
    found = plan(capsys, *args, "--svg", picture)
    assert len(found["strategies"]["auto"]["read_by_process"]) == 4096
    assert len(ElementTree.parse(picture).findall(".//{*}title")) == 3 * 256


def test_the_picture_shows_the_bytes_of_every_process(
    tmp_path: pathlib.Path, model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    found = plan(capsys, "--shapes", model, "--mesh", "dp=4,tp=8", "--processes", 4, "--svg", picture)
    bars = ElementTree.parse(picture).findall(".//{*}g")
    heights = [[float(bar.get("height", "nan")) for bar in group.findall("{*}rect")] for group in bars]
    names = ["spread", "single", "direct"]
    for column, key in enumerate(["read_by_process", "received_by_process"]):
        drawn = [pair[column] for pair in heights]
        told = [value for name in names for value in found["strategies"][name][key]]
        assert [round(height / max(drawn), 2) for height in drawn] == [round(value / max(told), 2) for value in told]


def test_a_state_that_does_not_fit_is_a_bad_verdict(model: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--shapes", model, "--mesh", "dp=4,tp=8", "--processes", 4, "--memory", 0.001]
    assert "DOES NOT FIT" in plan(capsys, *args, code=exits.EXIT_BAD_VERDICT)["notes"][-1]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--mesh", "dp=4,tp=8", "--processes", "3"], "32 devices of the mesh do not divide over 3 processes"),
        (["--mesh", "dp:4", "--processes", "4"], "as in pp=1,dp=4,tp=8"),
        (["--mesh", "dp=4", "--processes", "4", "--spec", "embed=P(tp)"], "the mesh (dp=4) lacks"),
        (["--mesh", "dp=4", "--processes", "4", "--storage-gbps", "0"], "--storage-gbps must be above 0"),
        (["--mesh", "dp=4", "--processes", "4", "--replica-axis", "tp"], "'tp' is not an axis of the mesh"),
        (["--mesh", "dp=4", "--processes", "4", "--svg", "{tmp}/no/where.svg"], "No such file or directory"),
    ],
)
def test_what_can_not_be_planned_is_told_in_one_line(
    args: list[str], told: str, model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--shapes", str(model), *(word.format(tmp=tmp_path) for word in args)]
    assert main.main(words) == exits.EXIT_CANNOT_RUN
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


def test_predictions_are_compared_with_what_the_benchmark_measured() -> None:
    from bench import predictions, results, scenarios

    dense = next(iter(scenarios.scenarios()))
    runs = [results.Run(seconds, True, 0, 0, 0, 0.0, 0.0) for seconds in (100.0, 100.0)]
    failed = [results.Run(0.0, False, 0, 0, 0, 0.0, 0.0, error="no")]
    found = [results.result(dense, "spread", runs), results.result(dense, "single", failed)]
    predicted = predictions.predict(dense, "spread")
    assert dense.limit() < predicted < 2 * dense.limit()
    assert predictions.table(found).splitlines()[2:] == [
        f"| dense | spread | {predicted:.2f} | 100.00 | {predicted / 100 - 1:+.0%} |",
        "",
        f"Error: {1 - predicted / 100:.0%} in the middle, {1 - predicted / 100:.0%} at worst.",
    ]
