"""The tiers that an emergency manager's step is in: this process's local directory, and persistent storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging
from etils import epath

from orbax_ext import text
from orbax_ext.meeting import holdings
from orbax_ext.meeting.session import Session
from orbax_ext.meeting.threads import in_thread
from orbax_ext.meeting.wire import Contribution
from orbax_ext.plan.holders import ABSENT
from orbax_ext.redact import redact
from orbax_ext.request import Request
from orbax_ext.storage.checkpoint import item_tree
from orbax_ext.transfer.local_blocks import LocalBlocks
from orbax_ext.upstream.emergency import EmergencyStep, param_infos

NOWHERE = epath.Path("/nowhere")  # of a step that is not there; nothing is read from it
_LONGEST = 2000  # characters of a difference that a process tells the others
# Seconds between the first and the last host's save of one step. Longer, because clocks differ, than hosts that train
# together can be apart; a run that begins again and comes to the same step in less time is not noticed.
_SAME_SAVE = 600.0


class LocalStep:
    """The step in this process's local directory, if it is there, and what to tell the others of it."""

    def __init__(self, blocks: LocalBlocks, step: EmergencyStep, directory: epath.Path | None) -> None:
        self._blocks = blocks
        self._step = step
        self._directory = directory
        self._difference = ""  # between the tree that was saved and the one that is asked for
        self._saved: float | None = None  # when, in seconds, if it is known

    async def look(self) -> None:
        blocks, directory = self._blocks, self._directory
        await blocks.look(directory, param_infos(directory or NOWHERE, self._step.names))
        if directory is None or all(set(columns) <= {ABSENT} for columns in blocks.present.values()):
            return
        await in_thread(self._read_metadata, directory)
        if self._difference:
            logging.warning(
                "orbax_ext: the local step %s %s; other hosts or storage have to provide it",
                directory,
                self._difference,
            )
            self._forget()

    def _read_metadata(self, directory: epath.Path) -> None:
        self._saved = item_tree.save_time(directory)
        self._difference = item_tree.difference(item_tree.read_tree(directory), self._step.names)

    def tell(self) -> Contribution:
        return {
            "step": self._step.step,
            "have": holdings.pack(self._blocks.present),
            "differs": self._difference[:_LONGEST],
            "saved": None if self._difference else self._saved,
        }

    def of_one_save(
        self, told: Mapping[int, Mapping[str, Any]], is_complete: Callable[[Mapping[int, Mapping[str, Any]]], bool]
    ) -> Mapping[int, Mapping[str, Any]]:
        """Returns what each process has, without those that saved the step in an earlier run than others.

        Another run may have had other values at the same step. These are kept if the others do not have everything.
        """
        saved = {process: float(message["saved"]) for process, message in told.items() if message["saved"] is not None}
        older = {process for process, when in saved.items() if max(saved.values()) - when > _SAME_SAVE}
        if not older:
            return told
        here = jax.process_index()
        of_others = {process: message for process, message in told.items() if process not in older}
        alone = is_complete(of_others)
        if here in older:
            logging.warning(
                "orbax_ext: the local step %s was saved %s before that of other hosts, perhaps in another run; %s",
                self._directory,
                text.seconds(max(saved.values()) - saved[here]),
                "it is taken from them" if alone else "it is used, because they do not have all of it",
            )
            if alone:
                self._forget()
        return of_others if alone else told

    def _forget(self) -> None:
        blocks = self._blocks
        blocks.present = {index: (ABSENT,) * len(columns) for index, columns in blocks.present.items()}


class StoredStep:
    """The step in persistent storage, which is not asked before something is needed that no host has.

    `limit` returns how many seconds to wait for storage.
    """

    def __init__(self, step: EmergencyStep, session: Session, limit: Callable[[], float]) -> None:
        self._step = step
        self._session = session
        self._limit = limit
        self.directory: epath.Path | None = None
        self.infos: list[Any] = []  # Orbax's descriptions of the leaves there, once it has been found

    async def find(self) -> None:
        """Looks for the step, if that was not done before. All processes call it together.

        Raises on all processes the error that Orbax raises, unless storage has the step, with the same tree.
        """
        if self.directory is not None:
            return
        step = self._step
        found: dict[str, Any] = {}

        async def look() -> epath.Path | None:
            directory, how = await in_thread(self._look, limit=self._limit())
            found.update({"stored": directory is not None, **how})
            return directory

        directory, told = await self._session.together_telling("find the step in storage", look(), lambda: found)
        if without := [process for process, message in told.items() if not message["stored"]]:
            raise FileNotFoundError(
                f"No steps found in either local or persistent storage when requesting restoration of step "
                f"{step.step}: the hosts can't provide all of it, and {text.processes(without, {})} can't find it in "
                "persistent storage."
            )
        if told[0]["differs"]:
            raise _other_tree(step, str(directory), str(told[0]["differs"]))
        assert directory is not None  # otherwise this process is one of those that can't find it
        self.directory = directory
        self.infos += param_infos(directory, step.names, **told[0]["format"])

    def _look(self) -> tuple[epath.Path | None, Contribution]:
        """Returns the directory of the step's arrays, if it is there, and on process 0 what it has to tell of it."""
        directory = self._step.find_persistent()
        if directory is None or not directory.exists():
            return None, {}
        if jax.process_index() != 0:
            return directory, {}
        tree = item_tree.read_tree(directory)
        difference = item_tree.difference(tree, self._step.names)[:_LONGEST]
        return directory, {
            "differs": difference,
            "format": dataclasses.asdict(item_tree.array_format(directory, tree)),
        }

    async def beside(self, request: Request) -> Request:
        """Returns the request as one for the step in storage, beside which digests may be stored.

        Where storage does not answer, it is the request as it is: then replicas are compared with each other alone.
        """
        directory = self.directory
        if directory is None and jax.process_index() == 0:  # which reads the digests
            try:  # for half of the limit, because the others wait meanwhile
                directory = await in_thread(self._step.find_persistent, limit=self._limit() / 2)
            except Exception as error:  # of whatever client reads there
                logging.warning(
                    "orbax_ext: verify: replicas are compared alone, because persistent storage does not answer: %s",
                    redact(repr(error)),
                )
        if directory is None:
            return request
        infos = param_infos(directory, self._step.names)
        described = zip(request.leaf_requests, infos, strict=True)
        return dataclasses.replace(
            request, leaf_requests=tuple(dataclasses.replace(leaf, info=info) for leaf, info in described)
        )


def check_tree(step: EmergencyStep, told: Mapping[int, Mapping[str, Any]], session: Session) -> None:
    """Raises `ValueError` on all processes if hosts have the step, and all of these with another tree."""
    differing = {process: str(message["differs"]) for process, message in told.items() if message["differs"]}
    entries = (holdings.unpack(message["have"]).values() for message in told.values())
    if differing and all(set(entry) <= {ABSENT} for by_leaf in entries for entry in by_leaf):
        where = f"the local directory of {text.processes(differing, session.hosts)}"
        raise _other_tree(step, where, next(iter(differing.values())))


def _other_tree(step: EmergencyStep, where: str, difference: str) -> ValueError:
    """Returns the error for a tree that Orbax refuses, too."""
    return ValueError(
        f"the tree structures do not match: expected step {step.step} to have the leaves of the emergency manager's "
        f"abstract state; found that it {difference}, in {where}. Make the manager with the state that was saved."
    )
