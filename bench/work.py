"""The functions that the benchmark runs on every process, with whichever Orbax the process has."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import orbax_ext
from bench import memory, network
from bench.scenarios import Scenario
from bench.strategies import BASELINES, OTHER_CODE, PLAIN, SINGLE_REPLICA, VERIFIED, strategy_of
from orbax_ext.lab import handlers
from orbax_ext.options import Strategy
from orbax_ext.upstream.array_handler import ArrayMetadataStore
from orbax_ext.upstream.runtime import coordination_client

START_LIMIT = 120  # seconds for all processes to be ready
_REQUESTS = 128  # under way at a time: what orbax_ext sets for s3:// and gs://, which this storage stands for


@dataclasses.dataclass(frozen=True)
class Restore:
    """One restore, as one process measured it."""

    started: float
    ended: float
    exact: bool
    peak: int  # resident bytes above the start
    fabric_received: int
    idle_seconds: float  # of all cores of the machine during the restore
    processor_seconds: float  # of this process
    compile_seconds: float = 0.0
    report: str = ""


def save(scenario: Scenario, path: str) -> None:
    state = {name: make_leaf(scenario, number) for number, name in enumerate(leaf_names(scenario))}
    handler = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=scenario.replica_parallel, array_metadata_store=ArrayMetadataStore()
    )
    with handlers.installed(handler), ocp.CheckpointManager(path) as manager:
        save_args = {name: ocp.SaveArgs(chunk_byte_size=scenario.chunk_bytes or None) for name in state}
        manager.save(0, args=ocp.args.PyTreeSave(state, save_args))
        manager.wait_until_finished()


def restore(scenario: Scenario, path: str, strategy: str, url: str, started_file: str) -> Restore:
    """Restores with one strategy, for which it makes a file when it begins, and compares every byte afterwards."""
    handler = _handler(scenario, strategy)
    sharding = make_sharding(scenario)
    abstract = {
        name: jax.ShapeDtypeStruct(scenario.leaf, jnp.bfloat16, sharding=sharding) for name in leaf_names(scenario)
    }
    args = {
        name: ocp.ArrayRestoreArgs(sharding=sharding, global_shape=scenario.leaf, dtype=jnp.bfloat16)
        for name in abstract
    }
    if strategy in SINGLE_REPLICA:
        single = _replica_sharding(scenario)
        args = {
            name: ocp.type_handlers.SingleReplicaArrayRestoreArgs(
                sharding=sharding, single_replica_sharding=single, global_shape=scenario.leaf, dtype=jnp.bfloat16
            )
            for name in abstract
        }
    requests = None if strategy in OTHER_CODE else _REQUESTS
    with served_from(path, url, requests), handlers.installed(handler), ocp.CheckpointManager(path) as manager:
        # Not `sync_global_devices`: it runs a program, and the first restore of a process has to connect by itself.
        coordination_client().wait_at_barrier("bench", timeout_in_ms=START_LIMIT * 1000)
        if jax.process_index() == 0:
            pathlib.Path(started_file).touch()
        received_before, idle_before = received_bytes(), network.idle_seconds()
        moments: list[Any] = []

        def step() -> None:
            started, worked = time.monotonic(), time.process_time()
            state = manager.restore(0, args=ocp.args.PyTreeRestore(abstract, restore_args=args))
            jax.block_until_ready(state)
            worked = time.process_time() - worked
            moments.extend([started, time.monotonic(), network.idle_seconds(), worked, state])

        peak = memory.peak_growth(step)
        started, ended, idle_after, worked, state = moments
        received, idle = received_bytes() - received_before, idle_after - idle_before
    report = None if strategy in BASELINES else orbax_ext.last_report()
    compiled = report.seconds.get("compile", 0.0) if report is not None else 0.0
    return Restore(started, ended, is_exact(scenario, state), peak, received, idle, worked, compiled, str(report or ""))


def leaf_names(scenario: Scenario) -> list[str]:
    return [f"leaf_{number:04}" for number in range(scenario.leaves)]


def make_mesh(scenario: Scenario) -> Mesh:
    sizes = [size for _, size in scenario.mesh]
    return Mesh(np.array(jax.devices()).reshape(sizes), [axis for axis, _ in scenario.mesh])


def make_sharding(scenario: Scenario) -> NamedSharding:
    return NamedSharding(make_mesh(scenario), PartitionSpec(*scenario.spec))


def _replica_sharding(scenario: Scenario) -> NamedSharding:
    mesh = make_mesh(scenario)
    at = mesh.axis_names.index(scenario.replica_axis)
    here = next(
        where[at] for where, device in np.ndenumerate(mesh.devices) if device.process_index == jax.process_index()
    )
    part = np.take(mesh.devices, [here], axis=at)
    return NamedSharding(Mesh(part, mesh.axis_names), PartitionSpec(*scenario.spec))


def _handler(scenario: Scenario, strategy: str) -> Any:
    if strategy == PLAIN:
        return ocp.type_handlers.ArrayHandler(array_metadata_store=ArrayMetadataStore())
    if strategy in SINGLE_REPLICA:
        at = [axis for axis, _ in scenario.mesh].index(scenario.replica_axis)
        # With its defaults it takes seven times the state on every host, which can be more than the machine has.
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        needed = 7 * scenario.host_bytes * scenario.hosts
        limit = scenario.host_bytes // scenario.devices // 4 if needed > 0.8 * room else None
        return ocp.type_handlers.SingleReplicaArrayHandler(replica_axis_index=at, broadcast_memory_limit_bytes=limit)
    return orbax_ext.BroadcastArrayHandler(strategy=cast(Strategy, strategy_of(strategy)), verify=strategy == VERIFIED)


def _data(scenario: Scenario, number: int) -> np.ndarray:
    """Returns random bits: they do not compress, and NaN payloads, -0.0 and denormals are among them."""
    data = np.random.default_rng(number).bytes(2 * math.prod(scenario.leaf))
    return np.frombuffer(data, np.uint16).view(jnp.bfloat16).reshape(scenario.leaf)


def make_leaf(scenario: Scenario, number: int) -> jax.Array:
    data = _data(scenario, number)
    return jax.make_array_from_callback(scenario.leaf, make_sharding(scenario), lambda index: data[index])


def is_exact(scenario: Scenario, state: dict[str, jax.Array]) -> bool:
    for number, name in enumerate(leaf_names(scenario)):
        bits = _data(scenario, number).view(np.uint16)
        for shard in state[name].addressable_shards:
            if not np.array_equal(np.asarray(shard.data).view(np.uint16), bits[shard.index]):
                return False
    return True


def received_bytes() -> int:
    """Returns the bytes received over the fabric so far; over loopback they cannot be counted."""
    return sum(received for name, received, _ in network.interface_bytes() if name.startswith("f"))


@contextlib.contextmanager
def served_from(path: str, url: str, requests: int | None = None) -> Iterator[None]:
    """Makes TensorStore read the checkpoint's arrays from the storage server instead of from the disk.

    `requests` may be under way at a time; by default TensorStore's own number.
    """
    if not url:
        yield
        return
    root = os.path.realpath(pathlib.Path(path).parent) + "/"
    plain_open = ts.open

    @functools.cache  # a context counts the requests of all arrays that are opened in it
    def with_requests(parent: ts.Context | None) -> ts.Context | None:
        return ts.Context({"http_request_concurrency": {"limit": requests}}, parent=parent) if requests else parent

    def open_over_http(spec: Any, *args: Any, context: ts.Context | None = None, **kwargs: Any) -> Any:
        as_json = spec if isinstance(spec, dict) else spec.to_json()
        return plain_open(ts.Spec(_over_http(as_json, root, url)), *args, context=with_requests(context), **kwargs)

    def store_over_http(spec: Any, *args: Any, context: ts.Context | None = None, **kwargs: Any) -> Any:
        return plain_store(_over_http(spec, root, url), *args, context=with_requests(context), **kwargs)

    plain_store = ts.KvStore.open
    stores: Any = ts.KvStore
    ts.open, stores.open = open_over_http, staticmethod(store_over_http)
    try:
        yield
    finally:
        ts.open, stores.open = plain_open, plain_store


def _over_http(value: Any, root: str, url: str) -> Any:
    """Returns a TensorStore spec in which every file below `root` is at `url`."""
    if isinstance(value, list):
        return [_over_http(item, root, url) for item in value]
    if isinstance(value, str) and value.startswith(f"file://{root}"):
        return url + "/" + value.removeprefix(f"file://{root}")
    if isinstance(value, dict):
        if value.get("driver") == "file" and str(value.get("path", "")).startswith(root):
            return {"driver": "http", "base_url": url, "path": "/" + value["path"].removeprefix(root)}
        return {name: _over_http(item, root, url) for name, item in value.items()}
    return value
