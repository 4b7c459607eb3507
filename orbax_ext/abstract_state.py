"""Restores a checkpoint that nobody described: its tree, shapes, dtypes and specs come from its own metadata.

    abstract = orbax_ext.abstract(path, mesh)  # jax.ShapeDtypeStructs, to compile with or to restore into
    state = orbax_ext.restore(path, mesh)      # that, and the restore

One process reads the metadata and sends it to the others over the coordination service.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  makes bfloat16 and similar dtypes known to numpy by name
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from orbax_ext import errors, options
from orbax_ext import mesh as mesh_lib
from orbax_ext import text as text_lib
from orbax_ext.handler import HandlerKnobs
from orbax_ext.meeting.once import SharedResults
from orbax_ext.meeting.session import Limits, open_session
from orbax_ext.meeting.wire import failure_to_json, failures_from_json
from orbax_ext.plan.forecast import notation
from orbax_ext.plan.planner import digest
from orbax_ext.registration import pytree_handler, restore_args
from orbax_ext.storage import checkpoint, counters, s3
from orbax_ext.storage.checkpoint import LeafFacts, MappedSpecs, StoredTree
from orbax_ext.storage.stall import while_answered
from orbax_ext.upstream.runtime import coordination_client

Path = str | os.PathLike[str]
SpecRules = Mapping[str, PartitionSpec | str]  # by pattern of leaf names; the first pattern that matches counts
Cast = Callable[[np.dtype], np.dtype]  # from a stored dtype to the one to restore

_SUBJECT = "abstract"
_PHASE = "read the metadata"
_LONGEST = 200  # characters of an argument in a message
_EMPTY_SCALARS: dict[str, Any] = {"b": False, "i": 0, "u": 0, "f": 0.0, "V": 0.0, "c": 0j}  # by numpy's kind of dtype


def abstract(
    path: Path,
    mesh: Mesh | None = None,
    *,
    step: int | None = None,
    item: str | None = None,
    specs: SpecRules | None = None,
    dtype: Any = None,
) -> Any:
    """Returns the tree that is stored at a path as `jax.ShapeDtypeStruct`s with shardings on a mesh.

    Reads metadata only. In a job of several processes, all of them must call it: one reads for all.

    A leaf keeps the spec that it was saved with, without the axes that the mesh lacks, and unsharded in dimensions that
    do not divide. It is replicated if its spec is not known. Typed PRNG keys are replicated, also where `specs` says
    otherwise. Leaves that Orbax does not restore onto devices are what Orbax takes for them in an abstract tree: an
    array of zeros that takes no memory for a numpy array, and 0, 0.0, False or "" for a scalar or a string.

    Args:
      path: A `CheckpointManager`'s directory, a step, or an item in it; a local path or s3://.
      mesh: The mesh of the result. None: everything on this process's first device.
      step: The step of a manager's directory; by default the newest that is committed.
      item: The name of the item, if a step has several with arrays.
      specs: Specs by pattern of leaf names, as `{"*.kernel": P(None, "tp")}`; the first match counts. They must fit.
      dtype: The dtype of all floating-point arrays on devices; by default the stored one.

    Raises:
      ValueError: There is no complete checkpoint at the path, or a spec does not fit. In a job of several processes
        an error in reading is a `RestoreFailedError` that is a `ValueError` too, on all of them.
    """
    with s3.enabled_for(path):
        return _describe(_read(path, step, item, Limits(), specs, dtype), mesh, specs, dtype)


@options.with_knobs_in_signature
def restore(
    path: Path,
    mesh: Mesh | None = None,
    *,
    step: int | None = None,
    item: str | None = None,
    specs: SpecRules | None = None,
    dtype: Any = None,
    **knobs: Unpack[HandlerKnobs],
) -> Any:
    """Restores what is stored at a path onto a mesh, without a description of it: for notebooks, evaluation, serving.

    Takes the arguments of `abstract` and the knobs of `BroadcastArrayHandler`. Nothing has to be registered. All
    processes of the job must call it; without `jax.distributed` that is this process alone. If the mesh is not of all
    processes, an error in reading arrays may be that of one process alone.
    """
    limits = Limits(knobs.get("stall_timeout", options.Options.stall_timeout), knobs.get("timeout"))
    handler, waiting = pytree_handler(**knobs), _who_waits(mesh)
    with (
        s3.enabled_for(path),
        s3.waiting_within(limits),
        ocp.Checkpointer(handler, multiprocessing_options=waiting) as checkpointer,
    ):
        tree = _read(path, step, item, limits, specs, dtype)
        target = _describe(tree, mesh, specs, dtype)
        args = ocp.args.PyTreeRestore(target, restore_args=restore_args(target))
        return checkpointer.restore(tree.path, args=args)


def _who_waits(mesh: Mesh | None) -> ocp.options.MultiprocessingOptions:
    """Returns which processes wait for each other after the restore, in a barrier of Orbax without a time limit.

    Where a process restores by itself, it does not wait: the others would not come if they failed.
    """
    here = jax.process_index()
    processes = {here} if not isinstance(mesh, Mesh) else {device.process_index for device in mesh.devices.flat}
    if len(processes) == jax.process_count():
        return ocp.options.MultiprocessingOptions()
    return ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})


# Reading: one process for all.


def _read(
    path: Path, step: int | None, item: str | None, limits: Limits, specs: SpecRules | None, dtype: Any
) -> StoredTree:
    """Returns what is stored at a path. An error of one process is raised on all of them.

    Raises `PlanMismatchError` if the processes were given different arguments.
    """
    if step is not None and not isinstance(step, (int, np.integer)):
        raise ValueError(f"step must be an integer or None; found {step!r}.")
    step = None if step is None else int(step)

    def read() -> StoredTree:
        return while_answered(lambda: checkpoint.read_tree(path, step, item), _requests, limits.stall)

    if jax.process_count() == 1:
        return read()
    with open_session(_SUBJECT, limits) as session:
        arrivals = session.arrive({"asked": [os.fspath(path), step, item, _short(specs), _short(dtype)]})
        _require_same(arrivals)
        home = f"{session.home}/once"  # removed with the session
        shared = SharedResults(coordination_client(), home, jax.process_index(), limits.stall)
        text, failure = "", {}
        try:
            text = shared.once(_PHASE, lambda: read().to_json())
        except Exception as error:
            failure = failure_to_json(error)
        if failed := failures_from_json(session.meet(_PHASE, failure), session.hosts, _PHASE):
            raise errors.restore_failed(failed)
    return StoredTree.from_json(text)


def _requests() -> int:
    return counters.requests() + s3.s3_usage().metadata_requests


def _short(argument: Any) -> str | None:
    """Returns an argument as a short text that differs if the argument does."""
    if argument is None:
        return None
    if isinstance(argument, Mapping):
        text = ", ".join(f"{pattern!r}: {spec}" for pattern, spec in argument.items())  # the first match counts
    else:
        text = getattr(argument, "__name__", None) or str(argument)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... with digest {digest(text)}"


def _require_same(arrivals: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises `PlanMismatchError` if the processes ask for different checkpoints, specs or dtypes."""
    asked = {process: ", ".join(map(str, arrival["asked"])) for process, arrival in arrivals.items()}
    if len(set(asked.values())) > 1:
        texts = [f"process {process} asks for {text}" for process, text in sorted(asked.items())]
        raise errors.PlanMismatchError(
            "the processes ask for different checkpoints (path, step, item, specs, dtype): "
            f"{text_lib.listing(texts, 4)}",
            asked,
        )


# Describing: pure, but for the devices that the shardings name.


def _describe(tree: StoredTree, mesh: Mesh | None, specs: SpecRules | None, dtype: Any) -> Any:
    """Returns the abstract tree, and logs how specs were mapped onto the mesh."""
    rules, cast = _rules(mesh, specs), _cast(dtype)
    mapped = checkpoint.map_specs(tree.leaves, rules, None if mesh is None else dict(mesh.shape))
    if jax.process_index() == 0:
        _log(tree, mesh, mapped)
    leaves = {leaf.name: _abstract_leaf(leaf, mesh, mapped.specs[leaf.name], cast) for leaf in tree.leaves}
    return jax.tree.map(leaves.__getitem__, tree.names())


def _log(tree: StoredTree, mesh: Mesh | None, mapped: MappedSpecs) -> None:
    where = "one device" if mesh is None else f"mesh {text_lib.mesh(dict(mesh.shape))}"
    logging.info("orbax_ext: %s on %s: %s", tree.path, where, "; ".join(mapped.lines()))
    for pattern in mapped.unused:
        logging.warning("orbax_ext: the pattern %r of specs matches no leaf", pattern)
    wide = [leaf.name for leaf in tree.leaves if leaf.kind == "jax.Array" and _is_too_wide(leaf.dtype)]
    if wide:
        logging.warning(
            "orbax_ext: JAX cuts %s with 64 bits to 32, as plain Orbax does, because jax_enable_x64 is off: %s",
            text_lib.count(len(wide), "leaf"),
            text_lib.listing(wide),
        )


def _is_too_wide(dtype: str) -> bool:
    """Returns whether JAX does not make arrays of this dtype now."""
    return bool(jax.dtypes.canonicalize_dtype(dtype) != np.dtype(dtype))


def _rules(mesh: Mesh | None, specs: SpecRules | None) -> list[notation.Rule]:
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh or None; found a {type(mesh).__name__}.")
    if specs is not None and not isinstance(specs, Mapping):
        raise ValueError(f"specs must map patterns to specs, as {{'*.kernel': 'P(tp)'}}; found {specs!r}.")
    if mesh is None and specs:
        raise ValueError(f"specs need a mesh: found specs for {text_lib.listing(specs)}, and mesh=None.")
    return [notation.Rule(pattern, _spec(spec)) for pattern, spec in (specs or {}).items()]


def _spec(spec: PartitionSpec | str) -> notation.Spec:
    if isinstance(spec, str):
        return notation.parse_spec(spec)
    if not isinstance(spec, PartitionSpec):
        raise ValueError(f"specs must have a PartitionSpec, or text such as 'P(None, tp)'; found {spec!r}.")
    return mesh_lib.normalized_spec(spec, len(spec))


def _cast(dtype: Any) -> Cast:
    if dtype is None:
        return lambda stored: stored
    try:
        wanted = jnp.dtype(dtype)
    except TypeError:
        wanted = None
    if wanted is None or not jnp.issubdtype(wanted, jnp.floating):
        found = wanted or repr(dtype)
        raise ValueError(f"dtype must be a floating-point type, which only floating-point arrays get; found {found}.")
    return lambda stored: wanted if jnp.issubdtype(stored, jnp.floating) else stored


def _sharding(mesh: Mesh | None, spec: notation.Spec) -> Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(mesh, PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in spec)))


def _abstract_leaf(leaf: LeafFacts, mesh: Mesh | None, spec: notation.Spec, cast: Cast) -> Any:
    """Returns what a leaf is in an abstract tree."""
    if leaf.kind == "string":
        return ""
    stored = np.dtype(leaf.dtype)
    if leaf.kind == "scalar":
        return _EMPTY_SCALARS[stored.kind]
    if leaf.kind == "np.ndarray":  # a view of one zero: it takes no memory
        return np.broadcast_to(np.zeros((), stored), leaf.shape)
    if leaf.kind != "jax.Array":
        raise ValueError(f"{leaf.name} was saved as a {leaf.kind}, by a type handler that orbax_ext does not know.")
    if leaf.key_type:
        wrap = functools.partial(jax.random.wrap_key_data, impl=leaf.key_type)
        key = jax.eval_shape(wrap, jax.ShapeDtypeStruct(leaf.shape, stored))
        return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=_sharding(mesh, spec))
    return jax.ShapeDtypeStruct(leaf.shape, cast(stored), sharding=_sharding(mesh, spec))
