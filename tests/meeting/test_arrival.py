"""The first meeting: on plain data, and of processes that are threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from orbax_ext import errors
from orbax_ext.meeting import arrival, wire
from orbax_ext.meeting.session import Limits, Session
from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo
from tests.support.coordination import SharedClient, on_processes

pytestmark = pytest.mark.once

MESH = MeshInfo(("dp", "tp"), (2, 4), (0,) * 4 + (1,) * 4)
TREE = {"a": "float32[8]", "b": "int8[2]", "c": "bool[1]"}
HOSTS = {process: f"host{process}" for process in range(20)}


# Facts that all processes must share.


def test_equal_facts_agree() -> None:
    facts = {process: {"tree": "x", "strategy": "'auto'"} for process in range(3)}
    assert arrival.differing(facts) == []
    arrival.check_agreement(facts, HOSTS)


def test_a_fact_that_one_process_lacks_differs() -> None:
    assert arrival.differing({0: {"tree": "x", "verify": "True"}, 1: {"tree": "x"}}) == ["verify"]


def test_a_mismatch_names_the_fact_the_processes_and_their_values() -> None:
    facts = {0: {"tree": "x", "verify": "True"}, 1: {"tree": "y", "verify": "True"}, 2: {"tree": "x", "verify": "True"}}
    with pytest.raises(errors.PlanMismatchError) as caught:
        arrival.check_agreement(facts, HOSTS)
    assert str(caught.value) == (
        "the processes do not agree on what to restore:\n  tree: most have x, but process 1 (host1) has y"
    )
    assert caught.value.digests == {0: "tree: x", 1: "tree: y", 2: "tree: x"}


def test_a_mismatch_of_many_processes_names_the_first_eight() -> None:
    facts = {process: {"verify": "True" if process < 11 else str(process)} for process in range(20)}
    with pytest.raises(errors.PlanMismatchError, match=r"process 18 \(host18\) has 18 and 1 more$"):
        arrival.check_agreement(facts, HOSTS)


def test_processes_with_the_same_tree_differences_share_a_line() -> None:
    facts = {process: {"tree": "x" if process == 0 else "y"} for process in range(4)}
    differences = {0: [], 1: ["lacks 'a'"], 2: ["lacks 'b'", "lacks 'c'"], 3: ["lacks 'a'"]}
    with pytest.raises(errors.PlanMismatchError) as caught:
        arrival.check_agreement(facts, HOSTS, differences)
    assert str(caught.value).splitlines()[2:] == [
        "  processes 1 (host1), 3 (host3) compared with process 0: lacks 'a'",
        "  process 2 (host2) compared with process 0: lacks 'b'; lacks 'c'",
    ]


# Failures before the meeting.


def test_arrivals_without_a_failure_raise_nothing() -> None:
    arrival.raise_failures({0: {"memory_limit": 1}, 1: {"memory_limit": 2}}, HOSTS)


def test_a_failure_of_one_process_is_raised_with_its_name_and_type() -> None:
    failure = wire.failure_to_json(FileNotFoundError("no metadata here"))
    with pytest.raises(
        FileNotFoundError, match=r"process 1 \(host1\), in phase 'describe': FileNotFoundError: no meta"
    ):
        arrival.raise_failures({0: {}, 1: {"failure": failure}}, HOSTS)


@pytest.mark.parametrize(
    ("messages", "same"), [(["no", "no"], True), (["no", "never"], False), (["no", None], False), ([None, "no"], False)]
)
def test_a_failure_is_the_same_if_every_process_has_it(messages: Sequence[str | None], same: bool) -> None:
    arrivals = {
        process: {} if message is None else {"failure": wire.failure_to_json(ValueError(message))}
        for process, message in enumerate(messages)
    }
    assert arrival.same_failure(arrivals) is same


def test_an_error_of_a_single_process_is_raised_unchanged() -> None:
    error = ValueError("its own")

    async def fail() -> None:
        async with arrival.failing_together(Limits()):
            raise error

    with pytest.raises(ValueError, match="its own") as caught:
        asyncio.run(fail())
    assert caught.value is error


# Differences between trees.


def test_equal_trees_have_no_differences() -> None:
    assert arrival.compare(TREE, TREE) == []


def test_each_kind_of_difference_is_listed() -> None:
    tree = {"a": "float32[9]", "c": "bool[1]", "d": "int8[3]"}
    assert arrival.compare(tree, TREE) == [
        "has 'a' as float32[9], not float32[8]",
        "lacks 'b'",
        "has 'd', which process 0 lacks",
    ]


def test_another_order_is_a_difference() -> None:
    assert arrival.compare(dict(reversed(TREE.items())), TREE) == ["has the same leaves in another order"]


def test_only_the_first_few_differences_are_listed() -> None:
    assert arrival.compare({}, TREE, most=1) == ["lacks 'a'", "and 2 more differences"]
    assert arrival.compare({}, TREE, most=2) == ["lacks 'a'", "lacks 'b'", "and 1 more difference"]


def test_a_long_difference_is_cut() -> None:
    (line,) = arrival.compare({}, {"x" * 1000: "bool[1]"})
    assert line == "lacks '" + "x" * 193


def test_leaves_beyond_a_cut_tree_are_not_called_missing() -> None:
    assert arrival.compare(TREE, {"a": TREE["a"]}) == ["differs in leaves that are not shown here"]


def test_a_description_has_all_that_must_agree() -> None:
    leaves = [
        Leaf("a", (8, 2), "float32", 16, mesh=0, spec=(("tp",), ())),
        Leaf("k", (), "key", 0, direct_because="it is a key"),
    ]
    assert arrival.describe(leaves, [MESH]) == {
        "a": "float32[8, 2] sharded (tp, -) on mesh (dp=2, tp=4)",
        "k": "key[] (it is a key)",
    }


# The meeting.


def tree(*sizes: int) -> list[Leaf]:
    return [
        Leaf(f"leaf{number}", (size,), "float32", 4 * size, mesh=0, spec=((),)) for number, size in enumerate(sizes)
    ]


def meet(
    *trees: Sequence[Leaf],
    options: Sequence[Options] = (Options(),) * 3,
    limits: Sequence[int] = (1, 1, 1),
    checkpoints: Sequence[str] = ("",) * 3,
) -> list[int | Exception]:
    """Arrives on one process for each tree; returns the memory limit or the error of each."""
    client = SharedClient()

    def run(process: int) -> int:
        with Session(client, process, len(trees), "restore", Limits(stall=30)) as session:
            mine = options[process], limits[process], checkpoints[process]
            return asyncio.run(arrival.arrive(session, trees[process], [MESH], *mine))

    outcomes = on_processes(len(trees), run)
    assert client.key_value_dir_get("") == []
    return outcomes


def test_all_processes_take_the_smallest_memory_limit() -> None:
    assert meet(tree(8), tree(8), tree(8), limits=[300, 100, 200]) == [100] * 3


def test_different_trees_are_refused_on_all_processes_with_the_leaf_that_differs() -> None:
    outcomes = meet(tree(8, 2), tree(8, 2), tree(8, 3))
    assert {type(outcome) for outcome in outcomes} == {errors.PlanMismatchError}
    (message,) = {str(outcome) for outcome in outcomes}
    assert "tree: most have 2 leaves with digest" in message
    assert (
        "compared with process 0: has 'leaf1' as float32[3] sharded (-) on mesh (dp=2, tp=4), not float32[2]" in message
    )


def test_a_difference_in_a_tree_that_is_too_long_to_send_is_still_refused() -> None:
    sizes = [8] * 2000
    for outcome in meet(tree(*sizes, 1), tree(*sizes, 2)):
        assert isinstance(outcome, errors.PlanMismatchError)
        assert "compared with process 0: differs in leaves that are not shown here" in str(outcome)


def test_different_options_are_refused_on_all_processes() -> None:
    options = [Options(), Options(strategy="spread"), Options()]
    for outcome in meet(tree(8), tree(8), tree(8), options=options):
        assert isinstance(outcome, errors.PlanMismatchError)
        assert "strategy: most have 'auto', but process 1 (" in str(outcome)
        assert "compared with process 0" not in str(outcome)


def test_different_checkpoints_of_one_tree_are_refused_on_all_processes() -> None:
    for outcome in meet(tree(8), tree(8), tree(8), checkpoints=["5/default", "6/default", "5/default"]):
        assert isinstance(outcome, errors.PlanMismatchError)
        assert "checkpoint: most have 5/default, but process 1 (" in str(outcome)
        assert "has 6/default" in str(outcome)


def test_a_process_that_failed_before_the_meeting_ends_it_for_all() -> None:
    client = SharedClient()

    def run(process: int) -> int:
        with Session(client, process, 2, "restore", Limits(stall=30)) as session:
            if process == 1:
                session.arrive({"failure": wire.failure_to_json(OSError("no metadata here"))})
                return 0
            return asyncio.run(arrival.arrive(session, tree(8), [MESH], Options(), 1))

    failed, absent = on_processes(2, run)
    assert absent == 0
    assert isinstance(failed, errors.RestoreFailedError)
    assert failed.failures[1].error == "OSError: no metadata here"


def test_a_failure_in_a_closed_loop_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a coroutine is destroyed some time later: a report would reach another restore."""
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(arrival, "open_session", lambda *args: pytest.fail("it opens a session"))

    async def restore() -> None:
        async with arrival.failing_together(Limits()):
            try:
                await asyncio.Event().wait()
            finally:
                raise RuntimeError("Event loop is closed")

    loop, restoring = asyncio.new_event_loop(), restore()
    task = loop.create_task(restoring)
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        restoring.close()
    assert not task.done()
