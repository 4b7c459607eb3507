"""`read_arrays` on real processes: TensorStore specs in, arrays out."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import jax
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, SingleDeviceSharding

import orbax_ext
from orbax_ext import lab
from orbax_ext.options import Knobs
from orbax_ext.report.report import publish
from tests.support import states
from tests.support.states import MeshSpec, P, Spec

MESH = MeshSpec((4, 2), ("dp", "tp"))
STATE = {
    "layers.0": Spec((512, 1024), "float32", P("tp")),
    "layers.1": Spec((512, 1024), "bfloat16", P(None, "tp")),
    "layers.2": Spec((512, 1024), "float32", P()),
    "bias": Spec((24,), "float32"),
    "mask": Spec((8, 4), "bool", P("tp")),
    "step": Spec((), "int32"),
}
DRIVERS = ["zarr", "zarr3"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The arrays of `STATE` in files of zarr and zarr3, in chunks, and in an OCDBT database."""
    path = tmp_path_factory.mktemp("stored")
    for kind in (*DRIVERS, "ocdbt"):
        for name, data in states.host_data(STATE).items():
            chunk = {"chunk_layout": {"read_chunk": {"shape": [min(64, size) for size in data.shape]}}}
            store = ts.open(
                spec_of(path, kind, name),
                create=True,
                dtype=ts.dtype(data.dtype),
                shape=data.shape,
                schema=ts.Schema(chunk),
            ).result()
            store.write(data).result()
    return path


def spec_of(path: pathlib.Path, kind: str, name: str) -> dict[str, Any]:
    if kind == "ocdbt":
        kvstore: Any = {"driver": "ocdbt", "base": f"file://{path}/ocdbt/", "path": f"{name}/"}
        return {"driver": "zarr3", "kvstore": kvstore}
    return {"driver": kind, "kvstore": {"driver": "file", "path": f"{path}/{kind}/{name}/"}}


@pytest.mark.parametrize("kind", [*DRIVERS, "ocdbt"])
def test_arrays_are_read_once_and_exactly(small_cluster: lab.Cluster, stored: pathlib.Path, kind: str) -> None:
    results = small_cluster.run(read_all, stored, kind)
    assert [texts for texts, _, _ in results] == [[]] * 4
    assert results[0][1] == ["spread"]
    stored_bytes = sum(data.nbytes for data in states.host_data(STATE).values())
    assert sum(count for _, _, count in results) < 1.2 * stored_bytes


def test_dtypes_trees_and_other_shardings(small_cluster: lab.Cluster, stored: pathlib.Path) -> None:
    assert small_cluster.run(read_otherwise, stored) == [[]] * 4


def test_an_error_is_the_same_on_all_processes(small_cluster: lab.Cluster, stored: pathlib.Path) -> None:
    outcomes = small_cluster.outcomes(read_what_one_process_lacks, stored)
    texts = {str(outcome.failure) for outcome in outcomes}
    assert len(texts) == 1, texts
    assert "RestoreFailedError" in (text := texts.pop())
    assert "process 2 (" in text
    assert "missing" in text


def test_what_does_not_fit_together_is_refused(stored: pathlib.Path) -> None:
    one = SingleDeviceSharding(jax.local_devices()[0])
    spec = spec_of(stored, "zarr", "bias")
    assert orbax_ext.read_arrays([], []) == []
    with pytest.raises(ValueError, match="specs must have the structure of shardings"):
        orbax_ext.read_arrays([spec], [one, one])
    with pytest.raises(ValueError, match=r"a: expected a jax.sharding.Sharding, found None"):
        orbax_ext.read_arrays({"a": spec}, {"a": None})
    with pytest.raises(ValueError, match="a: expected a TensorStore spec, found 'file'"):
        orbax_ext.read_arrays({"a": "file"}, {"a": one})
    with pytest.raises(TypeError, match="did you mean 'strategy'"):
        orbax_ext.read_arrays([spec], [one], strateg="auto")  # type: ignore[call-arg]


def test_one_process_needs_no_cluster(stored: pathlib.Path) -> None:
    one = SingleDeviceSharding(jax.local_devices()[0])
    missing = stored / "nothing"
    array = orbax_ext.read_arrays(ts.Spec(spec_of(stored, "zarr", "bias")), one, progress=False)
    assert states.bits(array) == states.bits(states.host_data(STATE)["bias"])
    create = {
        **spec_of(missing, "zarr", "bias"),
        "create": True,
        "dtype": "float32",
        "schema": {"domain": {"shape": [3]}},
    }
    with pytest.raises(ValueError, match="nothing"):
        orbax_ext.read_arrays([create], [one], progress=False)
    assert not missing.exists()


# Run on the processes.


def read_all(stored: pathlib.Path, kind: str) -> tuple[list[str], list[str], int]:
    """Returns what differs, the strategies of the large leaves, and the bytes that this process has read."""
    mesh = MESH.make()
    publish(None)
    specs = {name: spec_of(stored, kind, name) for name in STATE}
    shardings = states.shardings(STATE, mesh)
    knobs: Knobs = {"strategy": "spread", "stall_timeout": 30, "late_seconds": math.inf}  # take-overs read again
    arrays = orbax_ext.read_arrays(specs, shardings, **knobs)
    report = orbax_ext.last_report()
    assert report is not None
    kinds = {text for name, text in report.strategy.items() if name.startswith("layers")}
    return states.differences(arrays, STATE, mesh), states.strategy_names(kinds), report.own.bytes_read


def read_otherwise(stored: pathlib.Path) -> list[str]:
    mesh = MESH.make()
    sharding = NamedSharding(mesh, P(None, "tp"))
    local = SingleDeviceSharding(jax.local_devices()[1])
    names = ["layers.0", "layers.1", "layers.2", "bias"]
    first, second, bias = (ts.Spec(spec_of(stored, "zarr3", name)) for name in ("layers.0", "layers.1", "bias"))
    transform = {
        "input_inclusive_min": [0, 0],
        "input_exclusive_max": [200, 1024],
        "output": [{"input_dimension": 0, "offset": 100}, {"input_dimension": 1}],
    }
    rows = {**spec_of(stored, "zarr3", "layers.2"), "transform": transform}
    asked = ([first, {"b": second}], rows, bias)
    shardings = ([sharding, {"b": sharding}], sharding, local)
    dtypes = ([None, {"b": jax.numpy.float32}], None, None)
    (a, b), view, small = orbax_ext.read_arrays(asked, shardings, dtypes, stall_timeout=30, verify=True)
    data = states.host_data(STATE)
    expected = [data["layers.0"], data["layers.1"].astype(jax.numpy.float32), data["layers.2"][100:300], data["bias"]]
    wrong = []
    for name, array, whole in zip(names, [a, b["b"], view, small], expected, strict=True):
        if any(states.bits(shard.data) != states.bits(whole[shard.index]) for shard in array.addressable_shards):
            wrong.append(name)
    return wrong + [str(array.sharding) for array in (a, b["b"], view) if array.sharding != sharding]


def read_what_one_process_lacks(stored: pathlib.Path) -> None:
    mesh = MESH.make()
    specs = {name: spec_of(stored, "zarr", name) for name in STATE}
    if jax.process_index() == 2:
        specs["bias"] = spec_of(stored, "zarr", "missing")
    orbax_ext.read_arrays(specs, states.shardings(STATE, mesh), stall_timeout=20, progress=False)
