"""Which leaves are read with TensorStore alone, and which through Orbax: the report says it."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_ext
from orbax_ext.options import Strategy
from orbax_ext.report.report import RestoreReport


@pytest.mark.parametrize("strategy", ["direct", "spread"])
def test_only_what_has_to_be_changed_is_read_through_orbax(tmp_path: pathlib.Path, strategy: Strategy) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("dp",)), P())
    state = {
        "as stored": jnp.arange(6.0),
        "cast": jnp.arange(6.0),
        "key": jax.random.key(1),
        "small": jnp.arange(3, dtype=jnp.int4),
    }
    abstract = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for name, leaf in state.items()}
    abstract["cast"] = jax.ShapeDtypeStruct((6,), jnp.bfloat16, sharding=sharding)
    args = ocp.args.PyTreeRestore(abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "step", args=ocp.args.PyTreeSave(state))
        with orbax_ext.registered(strategy=strategy):
            restored = checkpointer.restore(tmp_path / "step", args=args)
    assert (restored["cast"].dtype, restored["as stored"].tolist()) == (jnp.bfloat16, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    report = orbax_ext.last_report()
    assert report is not None
    assert report.through_orbax == ["cast", "key", "small"]
    assert "read through Orbax: 3 leaves: cast, key, small" in str(report)
    assert RestoreReport.from_json(report.to_json()).through_orbax == report.through_orbax
