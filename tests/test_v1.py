"""v1 Contexts on one process: their handlers and options. Loading is tested on several processes."""

from __future__ import annotations

import inspect
import pathlib
import threading
from typing import Any

import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from orbax.checkpoint.experimental.v1._src.serialization import array_leaf_handler

import orbax_ext
from orbax_ext import registration

HAS_BROADCAST = hasattr(ocp_v1.options.ArrayOptions.Loading, "use_load_and_broadcast")
needs_broadcast = pytest.mark.skipif(not HAS_BROADCAST, reason="Orbax 0.11.33 has no use_load_and_broadcast")


def handler(context: Any = None) -> Any:
    """Returns the handler that v1 makes for a Context, or for the active one."""
    return array_leaf_handler.ArrayLeafHandler(context=context)._handler_impl


def broadcasting(**options: Any) -> Any:
    array = ocp_v1.options.ArrayOptions
    chosen = array.Loading.LoadAndBroadcastOptions(**options)
    loading = array.Loading(use_load_and_broadcast=True, load_and_broadcast_options=chosen)
    return ocp_v1.Context(array_options=array(loading=loading))


def test_only_our_context_loads_through_our_handler() -> None:
    with orbax_ext.v1.context(replica_axis="dp"):
        assert handler().options.replica_axis == "dp"
        with ocp_v1.Context():
            assert type(handler()) is ocp.type_handlers.ArrayHandler
    assert type(handler()) is ocp.type_handlers.ArrayHandler


def test_a_context_made_from_ours_is_ours_too() -> None:
    with ocp_v1.Context(orbax_ext.v1.context(stall_timeout=7.0)):
        assert handler().options.stall_timeout == 7.0


def test_our_context_keeps_the_options_of_the_active_or_given_one() -> None:
    multiprocessing = ocp_v1.options.MultiprocessingOptions(barrier_sync_key_prefix="mine")
    theirs = ocp_v1.Context(multiprocessing_options=multiprocessing)
    contexts = [orbax_ext.v1.context(theirs)]
    with theirs:
        contexts.append(orbax_ext.v1.context())
    assert [ours.multiprocessing_options.barrier_sync_key_prefix for ours in contexts] == ["mine", "mine"]
    assert isinstance(handler(contexts[0]), orbax_ext.BroadcastArrayHandler)
    assert type(handler(theirs)) is ocp.type_handlers.ArrayHandler


def test_other_threads_are_not_affected() -> None:
    types = []
    with orbax_ext.v1.context():
        thread = threading.Thread(target=lambda: types.append(type(handler())))
        thread.start()
        thread.join(60)
    assert types == [ocp.type_handlers.ArrayHandler]


def test_bad_knobs_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="strategy must be one of"):
        orbax_ext.v1.context(strategy="fastest")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown knob 'replica_axes'; did you mean 'replica_axis'"):
        orbax_ext.v1.context(replica_axes="dp")  # type: ignore[call-arg]


@needs_broadcast
def test_load_and_broadcast_options_fill_in_missing_knobs() -> None:
    theirs = broadcasting(replica_axis_index=1, primary_replica_id=2, broadcast_memory_limit_bytes=1000)
    options = handler(orbax_ext.v1.context(theirs, primary_replica_id=3)).options
    assert (options.axes, options.primary_replica_id, options.broadcast_memory_limit_bytes) == ((1,), 3, 1000)
    assert handler(orbax_ext.v1.context(theirs, replica_axis="dp")).options.axes == ("dp",)


@needs_broadcast
def test_register_needs_no_hook_of_v1_for_a_user_s_own_context() -> None:
    """It has Orbax's own single-replica handler, which is served whoever makes it."""
    theirs = broadcasting(replica_axis_index=1)
    with orbax_ext.registered(stall_timeout=7.0):
        assert type(handler(theirs)) is ocp.type_handlers.SingleReplicaArrayHandler
        served = registration._handler_for_stock(handler(theirs))
        assert served is not None
        assert (served.options.axes, served.options.stall_timeout) == ((1,), 7.0)
        assert type(handler(ocp_v1.Context())) is ocp.type_handlers.ArrayHandler


def test_the_documented_table_is_true_of_this_release() -> None:
    page = (pathlib.Path(__file__).parents[1] / "docs" / "restoring.md").read_text()
    table = page[page.index("| Orbax | `v1.context(...)` |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    here = _release(ocp.__version__)
    mine = [row for row in rows if _release(row[0].split(" to ")[0]) <= here <= _release(row[0].split(" to ")[-1])]
    assert len(mine) == 1
    _, context, own_context, given_context, _ = mine[0]
    assert (context == "yes") == isinstance(handler(orbax_ext.v1.context()), orbax_ext.BroadcastArrayHandler)
    assert (own_context == "yes") == HAS_BROADCAST
    takes_context = "context" in inspect.signature(ocp_v1.training.Checkpointer).parameters
    assert (given_context == "yes") == takes_context


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
