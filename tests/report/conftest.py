"""A checkpoint, and a restore of it by this process alone."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext
from orbax_ext.report.report import publish


def _state() -> dict[str, jax.Array]:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("dp",)), PartitionSpec())
    state = {"weights": np.arange(100_000, dtype=np.float32), "bias": np.ones(3, np.float32)}
    return {name: jax.device_put(value, sharding) for name, value in state.items()}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, _state())
    return path


@pytest.fixture
def restore(saved: pathlib.Path) -> Iterator[Callable[..., orbax_ext.RestoreReport]]:
    """A function that restores the checkpoint with the knobs it is given and returns the report."""

    def restore_with(**knobs: Any) -> orbax_ext.RestoreReport:
        with orbax_ext.registered(**knobs), ocp.StandardCheckpointer() as checkpointer:
            checkpointer.restore(saved, _state())
        report = orbax_ext.last_report()
        assert report is not None
        return report

    publish(None)
    yield restore_with
    publish(None)
