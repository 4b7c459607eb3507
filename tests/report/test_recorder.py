"""What one process records of a restore, and where else it shows: JAX's events, JAX's profiles."""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.monitoring
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext
from orbax_ext.report.report import publish

pytestmark = pytest.mark.core

STATE = {"weights": np.arange(100_000, dtype=np.float32), "bias": np.ones(3, np.float32)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, _state())
    return path


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    publish(None)
    yield
    publish(None)


def _state() -> dict[str, jax.Array]:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("dp",)), PartitionSpec())
    return {name: jax.device_put(value, sharding) for name, value in STATE.items()}


def _restore(path: pathlib.Path, **knobs: Any) -> orbax_ext.RestoreReport:
    with orbax_ext.registered(**knobs), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.restore(path, _state())
    found = orbax_ext.last_report()
    assert found is not None
    return found


def test_a_restore_on_one_process_leaves_a_report(saved: pathlib.Path) -> None:
    found = _restore(saved)
    assert (found.process, found.processes, found.leaves, found.error) == (0, 1, 2, "")
    assert {how.partition(":")[0] for how in found.strategy.values()} == {"direct"}
    phases = [span.phase for span in found.own.spans]
    assert phases == ["describe", "plan", "read"]
    assert all(span.end >= span.start >= 0 for span in found.own.spans)
    assert found.own.bytes_read > 0
    assert found.own.requests > 0
    assert found.own.host_peak_bytes > 10_000_000


def test_a_failed_restore_leaves_a_report_that_says_why(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="replica axis 'nope'"):
        _restore(saved, replica_axis="nope", strategy="single")
    found = orbax_ext.last_report()
    assert found is not None
    assert found.error.startswith("ValueError: replica axis 'nope'")
    assert "error: ValueError: replica axis 'nope'" in str(found)


def test_jax_gets_events_under_orbax_names_and_ours(saved: pathlib.Path) -> None:
    durations: dict[str, float] = {}
    scalars: dict[str, float] = {}
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, secs, **_: durations.update({name: secs}))
    jax.monitoring.register_scalar_listener(lambda name, value, **_: scalars.update({name: value}))
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
    found = _restore(saved)
    read = durations["/jax/checkpoint/read/primary_replica_deserialization_duration_secs"]
    assert read == durations["/orbax_ext/restore/read_duration_secs"] == found.own.seconds["read"]
    assert durations["/orbax_ext/restore/duration_secs"] >= read
    assert scalars["/orbax_ext/restore/bytes_read"] == found.own.bytes_read
    assert "/orbax_ext/restore/finished" in events


def test_phases_show_in_jax_profiles(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with jax.profiler.trace(str(tmp_path)):
        _restore(saved)
    (file,) = tmp_path.rglob("*.trace.json.gz")
    names = {event.get("name", "") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"orbax_ext.restore.describe", "orbax_ext.restore.plan", "orbax_ext.restore.read"} <= names
