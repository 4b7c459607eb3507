"""Every way into a restore, by name, over checkpoints that plain Orbax has saved. Run on the processes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1

import orbax_ext
from tests.support import plain, world

KNOBS: dict[str, Any] = {"replica_axis": "dp", "strategy": "single"}


@dataclasses.dataclass(frozen=True)
class Door:
    """A restore as users write it, and the line or two that bring orbax_ext into it."""

    restore: Callable[..., Any]  # path, and the handler or v1 Context if `bring` makes one
    bring: Callable[[], Any]  # a context manager; what it yields, unless None, is passed to `restore`


DOORS: dict[str, Door] = {}


@contextlib.contextmanager
def registered() -> Iterator[None]:
    with orbax_ext.registered(**KNOBS):
        yield


@contextlib.contextmanager
def own_handler() -> Iterator[Any]:
    yield orbax_ext.pytree_handler(**KNOBS)


@contextlib.contextmanager
def own_registry() -> Iterator[Any]:
    mended = [(jax.Array, orbax_ext.BroadcastArrayHandler(**KNOBS))]
    registry = ocp.type_handlers.create_type_handler_registry(*mended)
    yield ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def door(bring: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(restore: Callable[..., Any]) -> Callable[..., Any]:
        DOORS[restore.__name__] = Door(restore, bring)
        return restore

    return add


def abstract() -> dict[str, jax.ShapeDtypeStruct]:
    return world.abstract_state(world.STATE, world.REPORTERS.make())


def abstract_args() -> Any:
    return ocp.checkpoint_utils.construct_restore_args(abstract())


# v0, with the global registry.


@door(registered)
def pytree_restore_with_item_and_args(path: str) -> Any:
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args()))


@door(registered)
def pytree_restore_with_args_alone(path: str) -> Any:
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=ocp.args.PyTreeRestore(restore_args=abstract_args()))


@door(registered)
def pytree_restore_with_nothing(path: str) -> Any:
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=ocp.args.PyTreeRestore())


@door(registered)
def partial_restore(path: str) -> Any:
    item = {name: abstract()[name] for name in ("weights", "step")}
    args = ocp.args.PyTreeRestore(
        item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=args)


@door(registered)
def transforms(path: str) -> Any:
    item = {"kernel": abstract()["weights"], "bias": abstract()["bias"]}
    args = ocp.args.PyTreeRestore(
        item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        transforms={"kernel": ocp.Transform(original_key="weights")},
    )
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=args)


@door(registered)
def standard_restore(path: str) -> Any:
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        return manager.restore(0, args=ocp.args.StandardRestore(abstract()))


@door(registered)
def standard_checkpointer(path: str) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(f"{path}/manager/0/default", abstract())


@door(registered)
def composite_of_several_items(path: str) -> Any:
    with ocp.CheckpointManager(f"{path}/composite") as manager:
        found = manager.restore(
            0,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args()),
                params=ocp.args.StandardRestore(abstract()),
                notes=ocp.args.JsonRestore(),
            ),
        )
        return dict(found.items())


# v0, with a handler or registry of one's own.


@door(own_handler)
def item_handlers(path: str, handler: Any = None) -> Any:
    with ocp.CheckpointManager(f"{path}/manager", item_handlers=handler or ocp.PyTreeCheckpointHandler()) as manager:
        return manager.restore(0, args=ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args()))


@door(own_handler)
def handler_registry(path: str, handler: Any = None) -> Any:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.PyTreeRestore, handler or ocp.PyTreeCheckpointHandler())
    with ocp.CheckpointManager(f"{path}/composite", handler_registry=registry) as manager:
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args()))
        return manager.restore(0, args=args)["state"]


@door(own_handler)
def composite_checkpoint_handler(path: str, handler: Any = None) -> Any:
    composite = ocp.CompositeCheckpointHandler(state=handler or ocp.PyTreeCheckpointHandler())
    with ocp.Checkpointer(composite) as checkpointer:
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args()))
        return checkpointer.restore(f"{path}/composite/0", args=args)["state"]


@door(own_handler)
def checkpointer(path: str, handler: Any = None) -> Any:
    with ocp.Checkpointer(handler or ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(f"{path}/manager/0/default", item=abstract(), restore_args=abstract_args())


@door(own_registry)
def async_checkpointer_with_a_private_registry(path: str, handler: Any = None) -> Any:
    with ocp.AsyncCheckpointer(handler or ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.args.PyTreeRestore(abstract(), restore_args=abstract_args())
        return checkpointer.restore(f"{path}/manager/0/default", args=args)


# v1.


def v1_context() -> Any:
    return orbax_ext.v1.context(**KNOBS)


LOAD = getattr(ocp_v1, "load", ocp_v1.load_pytree)  # its name before 0.12.0


@door(v1_context)
def v1_load(path: str, context: Any = None) -> Any:
    return LOAD(f"{path}/v1", abstract())


@door(v1_context)
def v1_load_with_nothing(path: str, context: Any = None) -> Any:
    return LOAD(f"{path}/v1")


@door(v1_context)
def v1_load_checkpointables(path: str, context: Any = None) -> Any:
    return ocp_v1.load_checkpointables(f"{path}/v1_items", {"state": abstract(), "notes": None})


@door(v1_context)
def v1_training_checkpointer(path: str, context: Any = None) -> Any:
    with ocp_v1.training.Checkpointer(f"{path}/v1_training") as checkpointer:
        return getattr(checkpointer, "load", checkpointer.load_pytree)(0, abstract())


@door(v1_context)
def v1_context_made_from_ours(path: str, context: Any = None) -> Any:
    with ocp_v1.Context(context):
        return LOAD(f"{path}/v1", abstract())


@door(v1_context)
def v1_load_of_a_v0_checkpoint(path: str, context: Any = None) -> Any:
    return LOAD(f"{path}/composite/0", abstract(), checkpointable_name="state")


def broadcasting_context() -> Any:
    """A user's own Context with `use_load_and_broadcast` set, before and after options became mutable (0.12.0)."""
    options = ocp_v1.options.ArrayOptions
    loading = options.Loading(
        use_load_and_broadcast=True,
        load_and_broadcast_options=options.Loading.LoadAndBroadcastOptions(replica_axis_index=1),
    )
    return ocp_v1.Context(array_options=options(loading=loading))


if hasattr(ocp_v1.options.ArrayOptions.Loading, "use_load_and_broadcast"):  # not in 0.11.33

    @door(lambda: orbax_ext.registered(strategy="single"))
    def v1_own_context_with_load_and_broadcast(path: str, handler: Any = None) -> Any:
        with broadcasting_context() if handler is not None else ocp_v1.Context():
            return LOAD(f"{path}/v1", abstract())

    @door(lambda: orbax_ext.v1.context(broadcasting_context(), strategy="single"))
    def v1_own_context_handed_to_ours(path: str, context: Any = None) -> Any:
        return LOAD(f"{path}/v1", abstract())


if "context" in inspect.signature(ocp_v1.training.Checkpointer).parameters:  # since 0.11.40

    @door(lambda: contextlib.nullcontext(v1_context()))
    def v1_training_checkpointer_given_a_context(path: str, context: Any = None) -> Any:
        with ocp_v1.training.Checkpointer(f"{path}/v1_training", context=context) as checkpointer:
            return getattr(checkpointer, "load", checkpointer.load_pytree)(0, abstract())


# Run on the processes.


def save(path: str) -> None:
    state = world.make_state(world.STATE, world.REPORTERS.make())
    with ocp.CheckpointManager(f"{path}/manager") as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
    with ocp.CheckpointManager(f"{path}/composite") as manager:
        items = {"state": ocp.args.PyTreeSave(state), "params": ocp.args.StandardSave(state)}
        manager.save(0, args=ocp.args.Composite(**items, notes=ocp.args.JsonSave({"epoch": 3})))
    getattr(ocp_v1, "save", ocp_v1.save_pytree)(f"{path}/v1", state)
    ocp_v1.save_checkpointables(f"{path}/v1_items", {"state": state, "notes": {"epoch": 3}})
    with ocp_v1.training.Checkpointer(f"{path}/v1_training") as checkpointer:
        getattr(checkpointer, "save", checkpointer.save_pytree)(0, state)


def compare(path: str, name: str) -> plain.Comparison:
    found = DOORS[name]

    def ours() -> Any:
        with found.bring() as handle:
            return found.restore(path) if handle is None else found.restore(path, handle)

    return plain.compare(lambda: found.restore(path), {}, ours)


def load_async(path: str) -> plain.Comparison:
    async_load = getattr(ocp_v1, "load_async", ocp_v1.load_pytree_async)

    def restore() -> Any:
        return async_load(f"{path}/v1", abstract()).result()

    def ours() -> Any:
        with v1_context():
            return restore()

    return plain.compare(restore, {}, ours)


def handlers_of_v1_contexts() -> list[str]:
    """The handler that v1 uses outside and inside of our Context, with and without load-and-broadcast."""
    from orbax.checkpoint.experimental.v1._src.serialization import array_leaf_handler

    def name() -> str:
        return type(array_leaf_handler.ArrayLeafHandler()._handler_impl).__name__

    found = [name()]
    with orbax_ext.v1.context(**KNOBS):
        found.append(name())
        with ocp_v1.Context():
            found.append(name())
    found.append(name())
    return found
