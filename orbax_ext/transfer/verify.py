"""`verify=True`: compares digests of what was restored across replicas and with those stored beside the checkpoint.

It takes a few meetings: one for what can be compared with storage, one for a digest of each set of leaves and part, and
only where these differ, more with smaller and smaller sets until the leaf is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from orbax_ext import errors, text
from orbax_ext.meeting.session import Limits, Session, open_session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.request import Request
from orbax_ext.storage.checkpoint import digest_files, digests
from orbax_ext.transfer import comparison
from orbax_ext.transfer.comparison import LeafSet

_THREADS = 4
_MOST_EXCEPTIONS = 2000  # leaves without a stored digest that a message may list

Table = Mapping[jax.Device, Mapping[int, tuple[int, int]]]  # for each device and leaf: part and digest


async def verify(session: Session, request: Request, arrays: Sequence[Any]) -> None:
    """Raises the same `RestoreFailedError` on all processes if replicas differ, or differ from what is stored."""
    leaves, meshes = request.leaves, request.mesh_infos
    chosen = [index for index, leaf in enumerate(leaves) if leaf.mesh is not None]
    if len(chosen) < len(leaves):
        logging.info("orbax_ext: verify: %d leaves have no mesh and are not compared", len(leaves) - len(chosen))
    stored = await session.together("verify", in_thread(_stored, request, chosen))
    table = await session.together("verify", _digests(session, {index: arrays[index] for index in chosen}))
    comparable = await _agree_on_comparable(session, chosen, stored)
    waiting = comparison.leaf_sets(leaves, chosen, comparable)
    for start in range(0, len(waiting), comparison.MOST):
        level = waiting[start : start + comparison.MOST]
        wrong = await _compare(session, level, table, leaves, stored, comparable)
        while wrong is not None and len(level[wrong.leaf_set]) > 1:
            level = comparison.split(level[wrong.leaf_set])
            wrong = await _compare(session, level, table, leaves, stored, comparable) or wrong
        if wrong is not None:
            raise _error(wrong, leaves[level[wrong.leaf_set][0]], meshes, session.hosts)


async def verify_alone(limits: Limits, request: Request, arrays: Sequence[Any]) -> None:
    """Does the same for a restore without a session, in which every process has read what it needs."""
    with open_session("verify", limits) as session:
        await in_thread(session.arrive, {})
        await verify(session, request, arrays)


def _stored(request: Request, chosen: Sequence[int]) -> dict[int, int]:
    """Returns, on process 0, the stored digests of leaves that are restored as they were saved, by leaf index."""
    if jax.process_index() != 0:
        return {}
    item = request.leaf_requests[0].info.parent_dir
    records = digest_files.load(item)
    if records is None:
        logging.info("orbax_ext: verify: no digests are stored beside %s; replicas are compared alone", item)
        return {}
    stored, changed = {}, []
    for index in chosen:
        leaf = request.leaves[index]
        record = records.get(leaf.name)
        if record is not None and (tuple(record["shape"]), record["dtype"]) == (leaf.shape, leaf.dtype):
            stored[index] = digests.from_text(record["digest"])
        else:
            changed.append(leaf.name)
    if changed:
        logging.info(
            "orbax_ext: verify: %d leaves are cast, cut or new, and not compared with stored digests: %s",
            len(changed),
            text.listing(changed),
        )
    return stored


async def _agree_on_comparable(session: Session, chosen: Sequence[int], stored: Mapping[int, int]) -> frozenset[int]:
    missing = [index for index in chosen if index not in stored]
    mine = {"none": len(missing) > _MOST_EXCEPTIONS or not stored, "except": missing[:_MOST_EXCEPTIONS]}
    agreed = (await in_thread(session.meet, "verify", mine if jax.process_index() == 0 else {}))[0]
    return frozenset() if agreed["none"] else frozenset(chosen) - frozenset(agreed["except"])


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

    devices = list(by_device)
    await asyncio.gather(*(in_thread(work, devices[number::_THREADS]) for number in range(_THREADS)))
    return table


def _digest(shard: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    block = np.asarray(shard.data)
    starts = [index.start or 0 for index in shard.index]
    return comparison.part_number(starts, block.shape, shape), digests.of_block(block, starts, shape)


async def _compare(
    session: Session,
    level: Sequence[LeafSet],
    table: Table,
    leaves: Sequence[Any],
    stored: Mapping[int, int],
    comparable: frozenset[int],
) -> comparison.Mismatch | None:
    mine: dict[str, Any] = {"folds": _folds(level, table, leaves)}
    if jax.process_index() == 0:
        mine["stored"] = {
            number: digests.to_text(digests.fold((leaves[index].name, stored[index]) for index in leaf_set))
            for number, leaf_set in enumerate(level)
            if set(leaf_set) <= comparable
        }
    of_all = await in_thread(session.meet, "verify", mine)
    expected = {int(number): str(digest) for number, digest in of_all[0]["stored"].items()}
    return comparison.first_mismatch({process: one["folds"] for process, one in of_all.items()}, expected)


def _folds(level: Sequence[LeafSet], table: Table, leaves: Sequence[Any]) -> dict[str, list[str]]:
    folds: dict[str, list[str]] = {}
    for number, leaf_set in enumerate(level):
        for by_leaf in table.values():
            if leaf_set[0] not in by_leaf:  # its mesh does not have this device
                continue
            key = f"{number}/{by_leaf[leaf_set[0]][0]}"
            digest = digests.to_text(digests.fold((leaves[index].name, by_leaf[index][1]) for index in leaf_set))
            if digest not in folds.setdefault(key, []):
                folds[key].append(digest)
    return folds


def _error(
    wrong: comparison.Mismatch, leaf: Any, meshes: Sequence[Any], hosts: Mapping[int, str]
) -> errors.RestoreFailedError:
    box = comparison.box_text(leaf, meshes, wrong.part)
    against = "stored beside the checkpoint" if wrong.reference is None else f"that of process {wrong.reference}"
    error = f"ValueError: leaf {leaf.name!r}, box {box}: digest {wrong.found} is not {wrong.expected}, {against}"
    return errors.RestoreFailedError(
        {process: errors.ProcessFailure(hosts[process], "verify", error) for process in wrong.processes}
    )
