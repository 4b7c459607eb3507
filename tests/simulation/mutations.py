"""Defects put into the protocol on purpose, to see that the simulator finds them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
import types
from collections.abc import Iterator
from unittest import mock

from tests.simulation import processes

_ROOM = "orbax_ext.meeting"
_MODULES = ("arrivals", "protocol", "leader", "follower")  # in the order in which they import each other


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A defect: what it is, and the text that is replaced in a module."""

    name: str
    module: str
    old: str
    new: str


MUTATIONS = (
    # The two races that were found late, in slow runs on real processes.
    Mutation(
        "a reply to a process that has just given up is not taken back",
        "protocol",
        "if now.nonces.get(other) != nonce:",
        "if False:",
    ),
    Mutation(
        "a process that leaves right after a meeting takes its outcome away from the others",
        "protocol",
        "Put(session.outcome(number), value, self.most, once=True)",
        "Put(session.outcome(number - 1), value, self.most)",
    ),
    # Others.
    Mutation(
        "an arrival that was replied to counts again",
        "arrivals",
        "if (process, nonce) not in self.replies}",
        "}",
    ),
    Mutation(
        "a decision is made twice", "protocol", "Put(key, value, self.most, once=True)", "Put(key, value, self.most)"
    ),
    Mutation(
        "the first process to leave removes the session's keys",
        "protocol",
        "yield from self.call(Count(session.gone))) == self.place.processes",
        "yield from self.call(Count(session.gone))) == 1",
    ),
    Mutation(
        "an arrival stays when it is over",
        "protocol",
        "yield from self.call(Delete(self.keys.arrival(self.place.process, self.nonce)))",
        "yield from ()",
    ),
    Mutation(
        "periods without an answer count as waiting",
        "protocol",
        "return self.now - self._stood_still",
        "return self.now",
    ),
    Mutation(
        "an interrupted process that missed an outcome does not end the next meeting",
        "protocol",
        "if not decided and error is not None:",
        "if False:",
    ),
    Mutation(
        "a process that leaves does not end the next meeting",
        "protocol",
        "decided = yield from self.call(Put(session.outcome(number), value, self.most, once=True))",
        "decided = True",
    ),
    Mutation(
        "those who wait are not told that a process has given up",
        "protocol",
        "for other, nonce in told.items():\n            yield",
        "for other, nonce in ():\n            yield",
    ),
    Mutation(
        "a process that has come again is told about its last restore",
        "protocol",
        " and before.get(other) == nonce}",
        "}",
    ),
    Mutation(
        "an older arrival of a process counts",
        "arrivals",
        "sorted(found.items())",
        "sorted(found.items(), reverse=True)",
    ),
    Mutation(
        "progress does not prolong the wait of process 0",
        "leader",
        "patience.note((len(found), self._advance))",
        "patience.note(len(found))",
    ),
    Mutation(
        "progress does not prolong the wait of the others",
        "follower",
        'patience.note((report["advance"], report["missing"]))',
        "pass",
    ),
    Mutation("the grace of the others is dropped", "follower", "self._grace = GRACE +", "self._grace = -GRACE +"),
    Mutation(
        "process 0 does not look again after its replies",
        "leader",
        "if refused or gone:",
        "if False:",
    ),
    Mutation(
        "keys of earlier sessions stay",
        "leader",
        "yield from self.call(Delete(self.keys.sessions))",
        "yield from ()",
    ),
    Mutation(
        "an announced absence ends the wait before all others are there",
        "leader",
        "if absent.keys() >= set(missing):",
        "if absent:",
    ),
    Mutation(
        "those who were never in a session are not counted as gone",
        "leader",
        "for _ in {*refused, *unread}:",
        "for _ in ():",
    ),
    Mutation(
        "process 0 does not notice that it was told",
        "leader",
        "if own := arrivals.replies.get((LEADER, self.nonce)):",
        "if own := None:",
    ),
    Mutation(
        "a process that gives up does not look whether all have met",
        "follower",
        "stands = yield from self.decide(session.outcome(number), outcome)",
        "stands = outcome\n            yield from ()",
    ),
    Mutation(
        "a process that gives up its session does not tell those without a session",
        "follower",
        "if stands is outcome and number == 0:",
        "if False:",
    ),
    Mutation(
        "a process takes part in the same meeting again",
        "follower",
        "self.next = number + 1",
        "self.next = max(1, number)",
    ),
    Mutation(
        "the status of process 0 stays",
        "leader",
        "yield from self.call(Delete(self.keys.status))",
        "yield from ()",
    ),
)


@contextlib.contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Makes simulated processes use a protocol with this defect."""
    with mock.patch.dict(sys.modules):
        loaded = {name: _load(name, mutation) for name in _MODULES}
        leader, follower = loaded["leader"].Leader, loaded["follower"].Follower
        with mock.patch.object(processes, "Leader", leader), mock.patch.object(processes, "Follower", follower):
            yield


def _load(name: str, mutation: Mutation) -> types.ModuleType:
    spec = importlib.util.find_spec(f"{_ROOM}.{name}")
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as file:
        source = file.read()
    if name == mutation.module:
        assert source.count(mutation.old) == 1, f"{mutation.name}: the text that it replaces is not there, or not once"
        source = source.replace(mutation.old, mutation.new)
    module = types.ModuleType(f"{_ROOM}.{name}")
    sys.modules[module.__name__] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module
