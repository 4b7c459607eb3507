"""Every Orbax call that restores, by name, on checkpoints saved by plain Orbax. Run on the processes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
from orbax.checkpoint.experimental.v1._src.serialization import array_leaf_handler

import orbax_ext
from tests.support import plain_orbax, states

KNOBS: dict[str, Any] = {"replica_axis": "dp", "strategy": "single"}


@dataclasses.dataclass(frozen=True)
class EntryPoint:
    """A restore as users write it, and the lines that make it use orbax_ext."""

    restore: Callable[..., Any]  # takes the path, and the handler or v1 Context that `enable` yields, if any
    enable: Callable[[], Any]  # returns a context manager that yields a handler, a v1 Context or None


ENTRY_POINTS: dict[str, EntryPoint] = {}


@contextlib.contextmanager
def registered() -> Iterator[None]:
    with orbax_ext.registered(**KNOBS):
        yield


@contextlib.contextmanager
def own_handler() -> Iterator[Any]:
    yield orbax_ext.pytree_handler(**KNOBS)


@contextlib.contextmanager
def own_registry() -> Iterator[Any]:
    handler = orbax_ext.BroadcastArrayHandler(**KNOBS)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    yield ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def entry_point(enable: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(restore: Callable[..., Any]) -> Callable[..., Any]:
        ENTRY_POINTS[restore.__name__] = EntryPoint(restore, enable)
        return restore

    return add


def abstract() -> dict[str, jax.ShapeDtypeStruct]:
    return states.abstract_state(states.STATE, states.REPORTED_MESH.make())


def abstract_args() -> Any:
    return ocp.checkpoint_utils.construct_restore_args(abstract())


# v0, with the global registry.


@entry_point(registered)
def pytree_restore_with_item_and_args(path: str) -> Any:
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args()))


@entry_point(registered)
def pytree_restore_with_args_alone(path: str) -> Any:
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=ocp.args.PyTreeRestore(restore_args=abstract_args()))


@entry_point(registered)
def pytree_restore_with_nothing(path: str) -> Any:
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=ocp.args.PyTreeRestore())


@entry_point(registered)
def partial_restore(path: str) -> Any:
    item = {name: abstract()[name] for name in ("weights", "step")}
    args = ocp.args.PyTreeRestore(
        item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=args)


@entry_point(registered)
def transforms(path: str) -> Any:
    item = {"kernel": abstract()["weights"], "bias": abstract()["bias"]}
    args = ocp.args.PyTreeRestore(
        item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        transforms={"kernel": ocp.Transform(original_key="weights")},
    )
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=args)


@entry_point(registered)
def standard_restore(path: str) -> Any:
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=ocp.args.StandardRestore(abstract()))


@entry_point(registered)
def standard_checkpointer(path: str) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(f"{path}/manager/0/default", abstract())


@entry_point(registered)
def composite_of_several_items(path: str) -> Any:
    with ocp.CheckpointManager(f"{path}/composite") as manager:
        items = manager.restore(
            0,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args()),
                params=ocp.args.StandardRestore(abstract()),
                notes=ocp.args.JsonRestore(),
            ),
        )
        return dict(items.items())


# v0, with the caller's own handler or registry.


@entry_point(own_handler)
def item_handlers(path: str, handler: Any = None) -> Any:
    with ocp.CheckpointManager(f"{path}/manager", item_handlers=handler or ocp.PyTreeCheckpointHandler()) as manager:
        return manager.restore(0, args=ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args()))


@entry_point(own_handler)
def handler_registry(path: str, handler: Any = None) -> Any:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.PyTreeRestore, handler or ocp.PyTreeCheckpointHandler())
    with ocp.CheckpointManager(f"{path}/composite", handler_registry=registry) as manager:
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args()))
        return manager.restore(0, args=args)["state"]


@entry_point(own_handler)
def composite_checkpoint_handler(path: str, handler: Any = None) -> Any:
    composite = ocp.CompositeCheckpointHandler(state=handler or ocp.PyTreeCheckpointHandler())
    with ocp.Checkpointer(composite) as checkpointer:
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args()))
        return checkpointer.restore(f"{path}/composite/0", args=args)["state"]


@entry_point(own_handler)
def checkpointer(path: str, handler: Any = None) -> Any:
    with ocp.Checkpointer(handler or ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(f"{path}/manager/0/default", item=abstract(), restore_args=abstract_args())


@entry_point(own_registry)
def async_checkpointer_with_a_private_registry(path: str, handler: Any = None) -> Any:
    with ocp.AsyncCheckpointer(handler or ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args())
        return checkpointer.restore(f"{path}/manager/0/default", args=args)


# v1.


def v1_context() -> Any:
    return orbax_ext.v1.context(**KNOBS)


LOAD = getattr(ocp_v1, "load", ocp_v1.load_pytree)  # its name before 0.12.0


@entry_point(v1_context)
def v1_load(path: str, context: Any = None) -> Any:
    return LOAD(f"{path}/v1", abstract())


@entry_point(v1_context)
def v1_load_with_nothing(path: str, context: Any = None) -> Any:
    return LOAD(f"{path}/v1")


@entry_point(v1_context)
def v1_load_checkpointables(path: str, context: Any = None) -> Any:
    return ocp_v1.load_checkpointables(f"{path}/v1_items", {"state": abstract(), "notes": None})


@entry_point(v1_context)
def v1_training_checkpointer(path: str, context: Any = None) -> Any:
    with ocp_v1.training.Checkpointer(f"{path}/v1_training") as checkpointer:
        return getattr(checkpointer, "load", checkpointer.load_pytree)(0, abstract())


@entry_point(v1_context)
def v1_context_made_from_ours(path: str, context: Any = None) -> Any:
    with ocp_v1.Context(context):
        return LOAD(f"{path}/v1", abstract())


@entry_point(v1_context)
def v1_load_of_a_v0_checkpoint(path: str, context: Any = None) -> Any:
    return LOAD(f"{path}/composite/0", abstract(), checkpointable_name="state")


def broadcasting_context() -> Any:
    """Returns a Context with `use_load_and_broadcast` set, in a form that all releases accept (see 0.12.0)."""
    options = ocp_v1.options.ArrayOptions
    loading = options.Loading(
        use_load_and_broadcast=True,
        load_and_broadcast_options=options.Loading.LoadAndBroadcastOptions(replica_axis_index=1),
    )
    return ocp_v1.Context(array_options=options(loading=loading))


if hasattr(ocp_v1.options.ArrayOptions.Loading, "use_load_and_broadcast"):  # not in 0.11.33

    @entry_point(lambda: orbax_ext.registered(strategy="single"))
    def v1_own_context_with_load_and_broadcast(path: str, handler: Any = None) -> Any:
        with broadcasting_context() if handler is not None else ocp_v1.Context():
            return LOAD(f"{path}/v1", abstract())

    @entry_point(lambda: orbax_ext.v1.context(broadcasting_context(), strategy="single"))
    def v1_own_context_handed_to_ours(path: str, context: Any = None) -> Any:
        return LOAD(f"{path}/v1", abstract())


if "context" in inspect.signature(ocp_v1.training.Checkpointer).parameters:  # since 0.11.40

    @entry_point(lambda: contextlib.nullcontext(v1_context()))
    def v1_training_checkpointer_given_a_context(path: str, context: Any = None) -> Any:
        with ocp_v1.training.Checkpointer(f"{path}/v1_training", context=context) as checkpointer:
            return getattr(checkpointer, "load", checkpointer.load_pytree)(0, abstract())


# Run on the processes.


def save(path: str) -> None:
    state = states.make_state(states.STATE, states.REPORTED_MESH.make())
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
    with ocp.CheckpointManager(f"{path}/composite") as manager:
        items = {"state": ocp.args.PyTreeSave(state), "params": ocp.args.StandardSave(state)}
        manager.save(0, args=ocp.args.Composite(**items, notes=ocp.args.JsonSave({"epoch": 3})))
    getattr(ocp_v1, "save", ocp_v1.save_pytree)(f"{path}/v1", state)
    ocp_v1.save_checkpointables(f"{path}/v1_items", {"state": state, "notes": {"epoch": 3}})
    with ocp_v1.training.Checkpointer(f"{path}/v1_training") as checkpointer:
        getattr(checkpointer, "save", checkpointer.save_pytree)(0, state)


def compare(path: str, name: str) -> plain_orbax.Comparison:
    entry_point = ENTRY_POINTS[name]

    def ours() -> Any:
        with entry_point.enable() as handle:
            return entry_point.restore(path) if handle is None else entry_point.restore(path, handle)

    return plain_orbax.compare(lambda: entry_point.restore(path), {}, ours)


def load_async(path: str) -> plain_orbax.Comparison:
    async_load = getattr(ocp_v1, "load_async", ocp_v1.load_pytree_async)

    def restore() -> Any:
        return async_load(f"{path}/v1", abstract()).result()

    def ours() -> Any:
        with v1_context():
            return restore()

    return plain_orbax.compare(restore, {}, ours)


def handlers_of_v1_contexts() -> list[str]:
    """Returns the handler that v1 uses before, inside and after our Context, and in a new Context inside ours."""

    def name() -> str:
        return type(array_leaf_handler.ArrayLeafHandler()._handler_impl).__name__

    names = [name()]
    with orbax_ext.v1.context(**KNOBS):
        names.append(name())
        with ocp_v1.Context():
            names.append(name())
    names.append(name())
    return names
