"""A step that donates its state reuses the memory of leaves that Orbax reads, and of those that are read ahead."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_ext
from orbax_ext.transfer.donation import donatable
from tests.support import states

# Many small leaves of each kind: by chance one of four is at an address that JAX does not copy from.
STATE: dict[str, Any] = {
    **{f"stored_{number:02}": jnp.arange(64.0) + number for number in range(16)},
    **{f"cast_{number:02}": jnp.arange(64.0) - number for number in range(16)},
    **{f"one_device_{number:02}": jnp.arange(96, dtype=jnp.int32) for number in range(16)},
    **{f"int4_{number:02}": jnp.arange(64).astype(jnp.int4) for number in range(4)},
    **{f"key_{number:02}": jax.random.split(jax.random.key(number), 16) for number in range(16)},
}


def abstract() -> dict[str, Any]:
    mesh = jax.make_mesh((1,), ("dp",))
    tree = {}
    for name, leaf in STATE.items():
        sharding = SingleDeviceSharding(jax.devices()[0]) if name.startswith("one") else NamedSharding(mesh, P())
        dtype = jnp.bfloat16 if name.startswith("cast") else leaf.dtype
        tree[name] = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)
    return tree


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("donation")
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.StandardSave(STATE))
    return path


def data(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def leaves_that_move(restored: dict[str, Any]) -> list[str]:
    """Donates a state; returns the leaves whose memory is not used again."""
    state = {name: data(leaf) for name, leaf in restored.items()}
    before = {name: leaf.unsafe_buffer_pointer() for name, leaf in state.items()}
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), state), donate_argnums=0)
    after = jax.block_until_ready(step(state))
    return [name for name in after if after[name].unsafe_buffer_pointer() != before[name]]


@pytest.mark.parametrize("begin", ["at once", "ahead"])
@pytest.mark.parametrize("strategy", ["auto", "direct"])
def test_the_memory_of_every_leaf_is_reused(saved: pathlib.Path, begin: str, strategy: Any) -> None:
    args = ocp.args.StandardRestore(abstract())
    with orbax_ext.registered(strategy=strategy), ocp.CheckpointManager(saved) as manager:
        if begin == "ahead":
            pending = orbax_ext.restore_async(manager, 0, args=args)
            deadline = time.monotonic() + 60
            while not pending.done():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert pending.progress().done >= 16 * (256 + 384)
            restored = pending.result()
        else:
            restored = manager.restore(0, args=args)
    for name, leaf in abstract().items():
        expected = STATE[name] if name.startswith("key") else STATE[name].astype(leaf.dtype)
        assert states.bits(data(restored[name])) == states.bits(data(expected)), name
        assert (restored[name].dtype, restored[name].sharding) == (leaf.dtype, leaf.sharding), name
    assert leaves_that_move(restored) == []


def test_the_memory_of_arrays_without_a_checkpoint_is_reused(tmp_path: pathlib.Path) -> None:
    names = [f"array_{number:02}" for number in range(16)]
    specs = {name: {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/{name}"}} for name in names}
    for number, name in enumerate(names):
        ts.open(specs[name], create=True, dtype=ts.float32, shape=[64]).result().write(
            np.full(64, number, np.float32)
        ).result()
    shardings = dict.fromkeys(names, NamedSharding(jax.make_mesh((1,), ("dp",)), P()))
    dtypes = {name: jnp.bfloat16 if number % 2 else None for number, name in enumerate(names)}
    restored = orbax_ext.read_arrays(specs, shardings, dtypes)
    assert [int(restored[name][0]) for name in names] == [*range(16)]
    assert leaves_that_move(restored) == []


def test_an_array_without_elements_is_returned_as_it_is() -> None:
    empty = jnp.zeros((0, 3))
    assert donatable(empty) is empty
