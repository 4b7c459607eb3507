"""The first meeting of a restore: every process is there, and all ask for the same.

A process that fails before this meeting reports its failure here, so that the other processes do not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import jax

from orbax_ext import errors, text, version
from orbax_ext.meeting.session import Limits, Session, open_session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.meeting.wire import failure_to_json, failures_from_json
from orbax_ext.options import Options
from orbax_ext.plan import Leaf, MeshInfo
from orbax_ext.plan.planner import digest

_MOST_PROCESSES = 8  # that one line of a message names
_MOST_DIFFERENCES = 3  # that one process reports
_LONGEST_DIFFERENCE = 200  # characters
_LONGEST_TREE = 48_000  # characters of process 0's tree that are sent to the others: one contribution holds 65,536


@contextlib.asynccontextmanager
async def failing_together(limits: Limits, all_meet: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
    """Raises an error of one process on all processes.

    An error that is the same on all of them is raised unchanged, for example as the `ValueError` that it is. After an
    error, `all_meet` returns whether the other processes may be waiting at a meeting.
    """
    loop = asyncio.get_running_loop()
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1 or loop.is_closed() or not all_meet():
            raise  # in a closed loop it is an error of cleaning up, perhaps in the middle of a later restore
        with open_session("restore", limits) as session:
            try:
                arrivals = await in_thread(session.arrive, {"failure": failure_to_json(error)})
            except errors.RestoreError:
                raise error from None  # the meeting itself failed: this process's own error is more useful
        if not same_failure(arrivals):
            raise_failures(arrivals, session.hosts)
        raise


async def arrive(
    session: Session,
    leaves: Sequence[Leaf],
    meshes: Sequence[MeshInfo],
    options: Options,
    memory_limit: int,
    checkpoint: str = "",
) -> int:
    """Waits for all processes and returns the memory limit that all of them keep to, which is the smallest.

    Raises `RestoreFailedError` if a process has failed already, and `PlanMismatchError` if the processes ask for
    different trees or checkpoints, have different options or run different versions. `checkpoint` is the name of the
    checkpoint; it is empty where each process may restore from a place of its own.
    """
    facts = {
        "checkpoint": checkpoint,
        "tree": f"{text.count(len(leaves), 'leaf')} with digest {digest([leaves, meshes])}",
        **{name: repr(value) for name, value in options.must_agree().items()},
        "orbax_ext version": version.__version__,
        "Orbax version": version.orbax_version(),
        "JAX version": jax.__version__,
    }
    arrivals = await in_thread(session.arrive, {"facts": facts, "memory_limit": memory_limit})
    raise_failures(arrivals, session.hosts)
    facts_of_all = {process: arrival.get("facts", {}) for process, arrival in arrivals.items()}
    tree_differences = {}
    if "tree" in differing(facts_of_all):
        tree_differences = await _exchange_differences(session, describe(leaves, meshes))
    check_agreement(facts_of_all, session.hosts, tree_differences)
    return min(int(arrival["memory_limit"]) for arrival in arrivals.values())


def raise_failures(arrivals: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> None:
    """Raises `RestoreFailedError` if a process has arrived with a failure."""
    failed = {process: arrival["failure"] for process, arrival in arrivals.items() if "failure" in arrival}
    if failed:
        raise errors.restore_failed(failures_from_json(failed, hosts, "describe"))


def same_failure(arrivals: Mapping[int, Mapping[str, Any]]) -> bool:
    """Returns whether all processes have arrived with the same error, or all without one."""
    return len({arrival.get("failure", {}).get("error") for arrival in arrivals.values()}) == 1


def differing(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Returns the names of the facts that are not the same on all processes."""
    names = sorted({name for own in facts.values() for name in own})
    return [name for name in names if len({own.get(name) for own in facts.values()}) > 1]


def check_agreement(
    facts: Mapping[int, Mapping[str, str]],
    hosts: Mapping[int, str],
    tree_differences: Mapping[int, Sequence[str]] | None = None,
) -> None:
    """Raises `PlanMismatchError`, with what differs on which process, unless all facts are the same on all processes.

    `tree_differences` has the differences between a process's tree and that of process 0.
    """
    if names := differing(facts):
        lines = [
            _fact_line(name, {process: own.get(name, "") for process, own in facts.items()}, hosts) for name in names
        ]
        lines += _tree_lines(tree_differences or {}, hosts)
        raise errors.PlanMismatchError(
            "the processes do not agree on what to restore:\n  " + "\n  ".join(lines),
            {process: "; ".join(f"{name}: {own.get(name)}" for name in names) for process, own in facts.items()},
        )


def _fact_line(name: str, values: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    usual = Counter(values.values()).most_common(1)[0][0]
    odd = [f"{text.process(process, hosts)} has {value}" for process, value in values.items() if value != usual]
    return f"{name}: most have {usual}, but {text.listing(odd, _MOST_PROCESSES)}"


def _tree_lines(tree_differences: Mapping[int, Sequence[str]], hosts: Mapping[int, str]) -> list[str]:
    """Returns one line for each set of differences, with the processes that share it."""
    sharing: dict[str, list[int]] = {}
    for process, differences in tree_differences.items():
        if differences:
            sharing.setdefault("; ".join(differences), []).append(process)
    return [
        f"{text.processes(processes, hosts, _MOST_PROCESSES)} compared with process 0: {differences}"
        for differences, processes in list(sharing.items())[:_MOST_PROCESSES]
    ]


async def _exchange_differences(session: Session, tree: Mapping[str, str]) -> dict[int, list[str]]:
    """Returns how each process's tree differs from that of process 0. All processes must call it together."""
    sent = {"leaves": _that_fit(tree)} if jax.process_index() == 0 else {}
    trees = await in_thread(session.meet, "compare trees", sent)
    reference = {str(name): str(description) for name, description in trees[0]["leaves"]}
    reports = await in_thread(session.meet, "report differences", {"differences": compare(tree, reference)})
    return {process: [str(line) for line in report["differences"]] for process, report in reports.items()}


def _that_fit(tree: Mapping[str, str]) -> list[tuple[str, str]]:
    room, chosen = _LONGEST_TREE, []
    for name, description in tree.items():
        room -= len(json.dumps([name, description]))
        if room < 0:
            break
        chosen.append((name, description))
    return chosen


def describe(leaves: Sequence[Leaf], meshes: Sequence[MeshInfo]) -> dict[str, str]:
    """Returns a description of each leaf, by name, that has all that must be the same on every process."""
    return {leaf.name: _describe_leaf(leaf, meshes) for leaf in leaves}


def _describe_leaf(leaf: Leaf, meshes: Sequence[MeshInfo]) -> str:
    kind = f"{leaf.dtype}{list(leaf.shape)}"
    if leaf.mesh is None:
        return f"{kind} ({leaf.direct_because})"
    spec = ", ".join("+".join(axes) or "-" for axes in leaf.spec)
    return f"{kind} sharded ({spec}) on mesh {meshes[leaf.mesh]}"


def compare(tree: Mapping[str, str], reference: Mapping[str, str], most: int = _MOST_DIFFERENCES) -> list[str]:
    """Returns the first few differences, one line each; `reference` may be only the beginning of the other tree."""
    complete = len(reference) >= len(tree) or set(reference) - set(tree)
    changed = [name for name in tree if name in reference and tree[name] != reference[name]]
    lines = [f"has {name!r} as {tree[name]}, not {reference[name]}" for name in changed]
    lines += [f"lacks {name!r}" for name in reference if name not in tree]
    if complete:
        lines += [f"has {name!r}, which process 0 lacks" for name in tree if name not in reference]
    if not lines and list(tree)[: len(reference)] != list(reference):
        lines = ["has the same leaves in another order"]
    if not lines and tree != reference:
        lines = ["differs in leaves that are not shown here"]
    more = len(lines) - most
    cut = [line[:_LONGEST_DIFFERENCE] for line in lines[:most]]
    return cut + ([f"and {text.count(more, 'more difference')}"] if more > 0 else [])
