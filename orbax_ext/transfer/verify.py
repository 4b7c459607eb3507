"""`verify=True`: compares digests of what was restored across replicas and with those stored beside the checkpoint.

Digests are computed in threads as leaves arrive, while others are still being read. Comparing them takes a few
meetings: one for what can be compared with storage, one for a digest of each set of leaves and part, and only where
these differ, more with smaller and smaller sets until the leaf is found.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from absl import logging
from jax.sharding import SingleDeviceSharding

from orbax_ext import errors, text
from orbax_ext.meeting.session import Limits, Session, open_session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.request import Request
from orbax_ext.storage.checkpoint import digest_files, digests
from orbax_ext.transfer import comparison
from orbax_ext.transfer.comparison import LeafSet
from orbax_ext.transfer.read_ahead import abandon, both
from orbax_ext.upstream.stored_arrays import checkpoint_of

_THREADS = min(4, os.cpu_count() or 1)
_SMALL = 16 << 20  # bytes that are not worth a second thread
_KEPT = 1 << 16  # bytes of which JAX may keep a copy on the host
_MOST_EXCEPTIONS = 2000  # leaves without a stored digest that a message may list

Table = Mapping[jax.Device, Mapping[int, tuple[int, int]]]  # for each device and leaf: part and digest


class Digests:
    """The digests of one restore's arrays on this process, computed in threads from the moment that they are there.

    Used in a `with` block, at the end of which it gives up what is under way.
    """

    def __init__(self, session: Session, request: Request, version: int = digests.CURRENT) -> None:
        self._session = session
        self._leaves = request.leaves
        self._version = version
        self._begun: set[int] = set()
        self._tasks: list[asyncio.Future[None]] = []
        self._free = asyncio.Semaphore(_THREADS)
        self._table: dict[jax.Device, dict[int, tuple[int, int]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for task in self._tasks:
            abandon(task)
        self._tasks = []  # they hold arrays

    def begin(self, arrays: Mapping[int, Any]) -> None:
        """Begins with arrays, given by the index of their leaf, that are new here. Leaves without a mesh have none."""
        new = [index for index in arrays if index not in self._begun and self._leaves[index].mesh is not None]
        self._begun.update(new)
        nbytes = sum(self._leaves[index].block_bytes for index in new) * jax.local_device_count()
        threads = 1 if nbytes < _SMALL else _THREADS
        for part in filter(None, (new[number::threads] for number in range(threads))):
            self._tasks.append(asyncio.ensure_future(self._compute({index: arrays[index] for index in part})))

    async def table(self) -> Table:
        """Returns the digests of all arrays that it was given."""
        await asyncio.gather(*self._tasks)
        self._tasks = []
        return self._table

    async def _compute(self, arrays: Mapping[int, jax.Array]) -> None:
        def compute() -> None:
            for index, array in arrays.items():
                for device, part, digest in self._of_array(array):
                    found.setdefault(device, {})[index] = part, digest

        found: dict[jax.Device, dict[int, tuple[int, int]]] = {}
        async with self._free:
            await in_thread(compute)
        for device, by_leaf in found.items():
            self._table.setdefault(device, {}).update(by_leaf)

    def _of_array(self, array: jax.Array) -> Iterator[tuple[jax.Device, int, int]]:
        """Yields part and digest of what each of this process's devices holds, equal copies included."""
        for shard in array.addressable_shards:
            block = _on_host(shard.data)
            starts = [rows.start or 0 for rows in shard.index]
            digest = digests.of_block(block, starts, array.shape, self._version)
            yield shard.device, comparison.part_number(starts, block.shape, array.shape), digest
            self._session.worked += block.nbytes


def _on_host(data: jax.Array) -> np.ndarray:
    """Returns what one device has. Where JAX has to copy that, it keeps the copy as long as the array lives."""
    if data.nbytes > _KEPT:
        (device,) = data.devices()
        sharding = SingleDeviceSharding(device, memory_kind=data.sharding.memory_kind)
        data = jax.make_array_from_single_device_arrays(data.shape, sharding, [data])
    return np.asarray(data)


async def verify(session: Session, request: Request, arrays: Mapping[int, Any], found: Digests) -> None:
    """Raises the same `RestoreFailedError` on all processes if replicas differ, or differ from what is stored.

    `arrays` are given by the index of their leaf, and are of the same leaves on all processes. `found` may have been
    given some of them before; all others are given to it here.
    """
    leaves, meshes = request.leaves, request.mesh_infos
    chosen = {index: arrays[index] for index in sorted(arrays) if leaves[index].mesh is not None}
    if len(chosen) < len(arrays):
        logging.info("orbax_ext: verify: %d leaves have no mesh and are not compared", len(arrays) - len(chosen))
    found.begin(chosen)
    (version, stored), table = await session.together(
        "verify", both(in_thread(_stored, request, chosen), found.table())
    )
    version, comparable = await _agree_on_comparable(session, list(chosen), version, stored)
    if version != digests.CURRENT:
        logging.info("orbax_ext: verify: the stored digests are of version %d, which takes longer", version)
        with Digests(session, request, version) as old:
            old.begin(chosen)
            table = await session.together("verify", old.table())
    waiting = comparison.leaf_sets(leaves, list(chosen), comparable)
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
    with open_session("verify", limits) as session, Digests(session, request) as found:
        by_leaf = dict(enumerate(arrays))
        found.begin(by_leaf)
        await in_thread(session.arrive, {})
        await verify(session, request, by_leaf, found)


def _stored(request: Request, chosen: Iterable[int]) -> tuple[int, dict[int, int]]:
    """Returns, on process 0, version and stored digests of leaves that are restored as they were saved, by index."""
    if jax.process_index() != 0:
        return digests.CURRENT, {}
    item = checkpoint_of(request.leaf_requests[0].info)
    records = None if item is None else digest_files.load(item)
    if records is None:
        logging.info("orbax_ext: verify: no digests are stored beside %s; replicas are compared alone", item)
        return digests.CURRENT, {}
    stored, changed, leaves = {}, [], request.leaves
    for index in chosen:
        leaf = leaves[index]
        record = records.leaves.get(leaf.name)
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
    return records.version, stored


async def _agree_on_comparable(
    session: Session, chosen: Sequence[int], version: int, stored: Mapping[int, int]
) -> tuple[int, frozenset[int]]:
    """Returns the version of the stored digests and the leaves that have one, by what process 0 has found."""
    missing = [index for index in chosen if index not in stored]
    none = len(missing) > _MOST_EXCEPTIONS or not stored
    mine = {"version": version, "none": none, "except": missing[:_MOST_EXCEPTIONS]}
    agreed = (await in_thread(session.meet, "verify", mine if jax.process_index() == 0 else {}))[0]
    if agreed["none"]:
        return digests.CURRENT, frozenset()
    return agreed["version"], frozenset(chosen) - frozenset(agreed["except"])


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
