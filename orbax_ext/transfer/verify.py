"""`verify=True`: digests of what was restored, compared across replicas and with those stored beside the checkpoint.

A few meetings: what can be compared with storage, one digest for each bundle of leaves and part, and only where these
differ, smaller and smaller bundles until the leaf is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from orbax_ext import errors
from orbax_ext.meeting.session import Limits, Session, open_session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.request import Request
from orbax_ext.storage.checkpoint import digest_files, digests
from orbax_ext.transfer import comparison
from orbax_ext.transfer.comparison import Bundle

_THREADS = 4
_MOST_EXCEPTIONS = 2000  # leaves that the list of those that are not stored may have

Table = Mapping[jax.Device, Mapping[int, tuple[int, int]]]  # for each device and leaf: part and digest


async def verify(session: Session, request: Request, arrays: Sequence[Any]) -> None:
    """Raises the same `RestoreFailedError` on all processes unless all is as it should be."""
    leaves, meshes = request.leaves, request.mesh_infos
    chosen = [index for index, leaf in enumerate(leaves) if leaf.mesh is not None]
    if len(chosen) < len(leaves):
        logging.info("orbax_ext: verify: %d leaves have no mesh and are not compared", len(leaves) - len(chosen))
    stored = await session.together("verify", in_thread(_stored, request, chosen))
    table = await session.together("verify", _digests(session, {index: arrays[index] for index in chosen}))
    comparable = await _agree_on_comparable(session, chosen, stored)
    waiting = comparison.bundles(leaves, chosen, comparable)
    for start in range(0, len(waiting), comparison.MOST):
        level = waiting[start : start + comparison.MOST]
        wrong = await _compare(session, level, table, leaves, stored, comparable)
        while wrong is not None and len(level[wrong.bundle]) > 1:
            level = comparison.split(level[wrong.bundle])
            wrong = await _compare(session, level, table, leaves, stored, comparable) or wrong
        if wrong is not None:
            raise _error(wrong, leaves[level[wrong.bundle][0]], meshes, session.hosts)


async def verify_alone(limits: Limits, request: Request, arrays: Sequence[Any]) -> None:
    """The same for a restore that had no session of its own, every process having read what it needs."""
    with open_session("verify", limits) as session:
        await in_thread(session.arrive, {})
        await verify(session, request, arrays)


def _stored(request: Request, chosen: Sequence[int]) -> dict[int, int]:
    """On process 0, the stored digests of leaves that are restored as they were saved, by leaf index."""
    if jax.process_index() != 0:
        return {}
    item = request.leaf_requests[0].info.parent_dir
    found = digest_files.load(item)
    if found is None:
        logging.info("orbax_ext: verify: no digests are stored beside %s; replicas are compared alone", item)
        return {}
    result, changed = {}, []
    for index in chosen:
        leaf = request.leaves[index]
        record = found.get(leaf.name)
        if record is not None and (tuple(record["shape"]), record["dtype"]) == (leaf.shape, leaf.dtype):
            result[index] = digests.from_text(record["digest"])
        else:
            changed.append(leaf.name)
    if changed:
        logging.info(
            "orbax_ext: verify: %d leaves are cast, cut or new, and not compared with stored digests: %s",
            len(changed),
            ", ".join(changed[:3]) + (" ..." if changed[3:] else ""),
        )
    return result


async def _agree_on_comparable(session: Session, chosen: Sequence[int], stored: Mapping[int, int]) -> frozenset[int]:
    missing = [index for index in chosen if index not in stored]
    note = {"none": len(missing) > _MOST_EXCEPTIONS or not stored, "except": missing[:_MOST_EXCEPTIONS]}
    told = (await in_thread(session.meet, "verify", note if jax.process_index() == 0 else {}))[0]
    return frozenset() if told["none"] else frozenset(chosen) - frozenset(told["except"])


async def _digests(session: Session, arrays: Mapping[int, jax.Array]) -> Table:
    by_device: dict[jax.Device, dict[int, Any]] = {}
    for index, array in arrays.items():
        for shard in array.addressable_shards:
            by_device.setdefault(shard.device, {})[index] = shard
    table: dict[jax.Device, dict[int, tuple[int, int]]] = {}

    def work(devices: Sequence[jax.Device]) -> None:
        for device in devices:
            table[device] = {}
            for index, shard in by_device[device].items():
                table[device][index] = _digest(shard, arrays[index].shape)
                session.worked += shard.data.nbytes

    every = list(by_device)
    await asyncio.gather(*(in_thread(work, every[number::_THREADS]) for number in range(_THREADS)))
    return table


def _digest(shard: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    block = np.asarray(shard.data)
    starts = [index.start or 0 for index in shard.index]
    return comparison.part_number(starts, block.shape, shape), digests.of_block(block, starts, shape)


async def _compare(
    session: Session,
    level: Sequence[Bundle],
    table: Table,
    leaves: Sequence[Any],
    stored: Mapping[int, int],
    comparable: frozenset[int],
) -> comparison.Mismatch | None:
    mine: dict[str, Any] = {"folds": _folds(level, table, leaves)}
    if jax.process_index() == 0:
        mine["stored"] = {
            number: digests.to_text(digests.fold((leaves[index].name, stored[index]) for index in bundle))
            for number, bundle in enumerate(level)
            if set(bundle) <= comparable
        }
    brought = await in_thread(session.meet, "verify", mine)
    expected = {int(number): str(text) for number, text in brought[0]["stored"].items()}
    return comparison.first_mismatch({process: each["folds"] for process, each in brought.items()}, expected)


def _folds(level: Sequence[Bundle], table: Table, leaves: Sequence[Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for number, bundle in enumerate(level):
        for there in table.values():
            if bundle[0] not in there:  # a mesh of other devices
                continue
            key = f"{number}/{there[bundle[0]][0]}"
            digest = digests.to_text(digests.fold((leaves[index].name, there[index][1]) for index in bundle))
            if digest not in found.setdefault(key, []):
                found[key].append(digest)
    return found


def _error(
    wrong: comparison.Mismatch, leaf: Any, meshes: Sequence[Any], hosts: Mapping[int, str]
) -> errors.RestoreFailedError:
    box = comparison.box_text(leaf, meshes, wrong.part)
    against = "stored beside the checkpoint" if wrong.reference is None else f"that of process {wrong.reference}"
    text = f"ValueError: leaf {leaf.name!r}, box {box}: digest {wrong.found} is not {wrong.expected}, {against}"
    return errors.RestoreFailedError(
        {process: errors.ProcessFailure(hosts[process], "verify", text) for process in wrong.processes}
    )
