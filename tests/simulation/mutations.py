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
    """A defect: what it is, the text that is replaced in a module, and a seed to try first."""

    name: str
    module: str
    old: str
    new: str
    seed: int = 0


MUTATIONS = (
    # The two races that were found late, in slow runs on real processes.
    Mutation(
        "a reply to a process that has just given up is not taken back",
        "protocol",
        "if now.nonces.get(other) != nonce and",
        "if False and",
        seed=420,
    ),
    Mutation(
        "a process that leaves right after a meeting takes its outcome away from the others",
        "protocol",
        "Put(session.outcome(number), value, self.most, once=True)",
        "Put(session.outcome(number - 1), value, self.most)",
        seed=13,
    ),
    # Others.
    Mutation(
        "an arrival that was replied to counts again",
        "arrivals",
        "if (process, nonce) not in self.replies}",
        "}",
        seed=574,
    ),
    Mutation(
        "a decision is made twice",
        "protocol",
        "Put(key, value, self.most, once=True)",
        "Put(key, value, self.most)",
        seed=286,
    ),
    Mutation(
        "the first process to leave removes the session's keys",
        "protocol",
        "yield from self.call(Count(session.gone))) == self.place.processes",
        "yield from self.call(Count(session.gone))) == 1",
        seed=1801,
    ),
    Mutation(
        "an arrival stays when it is over",
        "protocol",
        "yield from self.call(Delete(self.keys.arrival(self.place.process, self.nonce)))",
        "yield from ()",
        seed=1801,
    ),
    Mutation(
        "a process that leaves does not end the next meeting",
        "protocol",
        "decided = yield from self.call(Put(session.outcome(number), value, self.most, once=True))",
        "decided = True",
        seed=389,
    ),
    Mutation(
        "those who wait are not told that a process has given up",
        "protocol",
        "yield from self.call(Put(self.keys.reply(other, nonce), reply, self.most, once=True))",
        "yield from ()",
        seed=9,
    ),
    Mutation(
        "progress does not prolong the wait of process 0",
        "leader",
        "patience.note((len(found), self._advance))",
        "patience.note(len(found))",
        seed=8,
    ),
    Mutation(
        "progress does not prolong the wait of the others",
        "follower",
        'patience.note((report["advance"], report["missing"]))',
        "pass",
        seed=34,
    ),
    Mutation(
        "the grace of the others is dropped",
        "follower",
        "self._grace = GRACE +",
        "self._grace = 0 * GRACE +",
        seed=1890,
    ),
    Mutation(
        "the limit in all is ignored",
        "protocol",
        "return waited_too_long or self._waiting.now > self._waiting.deadline + self._grace",
        "return waited_too_long",
        seed=86,
    ),
    Mutation("a session has the nonce of another one", "leader", "self.enter(self.nonce)", 'self.enter("0")'),
    Mutation(
        "a process at work does not look whether the restore has failed",
        "protocol",
        "if ERROR in ((yield from self.call(Get(session.outcome(self.next)))) or {}):",
        "if False:",
        seed=50,
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
        seed=213,
    ),
    Mutation(
        "an absence that was not withdrawn stays",
        "protocol",
        "yield from self.call(Delete(self.keys.absences_of(self.place.process)))",
        "yield from ()",
        seed=68,
    ),
    Mutation(
        "an absence that was announced in another attempt counts",
        "leader",
        "{self.keys.absent(name): note for",
        '{name.partition("/")[0]: note for',
        seed=27,
    ),
    Mutation(
        "a process takes part in the same meeting again",
        "follower",
        "self.next = number + 1",
        "self.next = max(1, number)",
        seed=1,
    ),
    Mutation(
        "process 0 waits for a report that does not come",
        "leader",
        "< self.place.processes and self.now < deadline:",
        "< self.place.processes:",
    ),
    Mutation(
        "an error names nobody",
        "protocol",
        """            missing,
            phases,
        )""",
        """            (),
            phases,
        )""",
        seed=9,
    ),
    Mutation(
        "a failure after the work was brought is found out only at the limit",
        "leader",
        """        take(found.get("out") or {})
""",
        "",
        seed=106,
    ),
    Mutation(
        "a process that reports but reads no bytes is named with one that has failed",
        "leader",
        "if p not in self.heard or self.heard[p].reported < since]",
        "]",
        seed=286,
    ),
    # Shares that others read in place of a late process.
    Mutation(
        "late processes are not asked",
        "leader",
        "yield from self.call(Put(self.in_session().asked(self.next), "
        '{"asked": missing[:MAX_NAMES], "late": self.late}))',
        "yield from ()",
        seed=96,
    ),
    Mutation(
        "a process that is asked does not look",
        "protocol",
        'self.late = ((yield from self.call(Get(session.asked(self.next)))) or {}).get("late", 0)',
        "self.late = 0",
        seed=96,
    ),
    Mutation(
        "the status of process 0 stays",
        "leader",
        "yield from self.call(Delete(self.keys.status))",
        "yield from ()",
        seed=1801,
    ),
)

# None, to see that a protocol that is loaded in this way works.
CONTROL = Mutation("nothing", "protocol", "LEAVE_LIMIT = 5.0", "LEAVE_LIMIT = 5.0")

# Too few seeds find these: one needs a process that leaves within a few milliseconds, four need process 0 to leave
# while it replies, one needs a process that dies right after a meeting and little patience, one a process 0 that is
# stopped while a slow one works, and one a long silence.
UNNOTICED_DEPARTURE = Mutation(
    "a process that leaves as a meeting ends does not end the one after it",
    "protocol",
    "yield from self.call(Put(session.outcome(number + 1), value, self.most, once=True))",
    "yield from ()",
)
SOME_WITHOUT_REPLY = Mutation(
    "process 0 leaves before it has replied to all",
    "protocol",
    "if self._arriving and self.place.process == LEADER:",
    "if False:",
)
ONLY_OWN_DECISION_TOLD = Mutation(
    "process 0 leaves before it has replied to all, after another one that left has decided the outcome",
    "protocol",
    "if self._arriving and self.place.process == LEADER:",
    "if self._arriving and decided and self.place.process == LEADER:",
)
NEXT_RESTORE_TOLD = Mutation(
    "process 0 tells those who have come to their next restore why it leaves this one",
    "leader",
    "self.seen = self._nonces",
    "pass",
)
OUTSIDE_UNCOUNTED = Mutation(
    "process 0 does not count those who are never in the session if it leaves while it opens it",
    "leader",
    """        yield from self.tell_waiting(why)
        yield from self._count_outside((yield from self.arrivals()))
""",
    """        yield from self.tell_waiting(why)
""",
)
LONG_WAIT_FOR_REPORTS = Mutation(
    "process 0 waits for reports longer than the others wait for it at the next restore",
    "leader",
    "min(HAND_IN_LIMIT, self.limits.stall)",
    "HAND_IN_LIMIT",
)
STOPS_COUNT = Mutation(
    "the time in which a process was stopped uses up its limit", "protocol", "_STOPS = 5", "_STOPS = 0"
)
SILENCE_WITHOUT_LIMIT = Mutation(
    "the limit in all is ignored while the service is silent",
    "protocol",
    "return min(answered + member.limits.stall + grace, in_all)",
    "return answered + member.limits.stall + grace",
)
# Found where process 0 waits for long.
LOOKS_TOO_OFTEN = (
    Mutation(
        "process 0 looks for arrivals without longer and longer pauses",
        "leader",
        """            pause = _longer(pause, self.now - began, self.longest_pause)

    def _absent""",
        """
    def _absent""",
    ),
    Mutation(
        "process 0 looks at a meeting without longer and longer pauses",
        "leader",
        """            pause = _longer(pause, self.now - began, self.longest_pause)

    def _brought""",
        """
    def _brought""",
    ),
    Mutation(
        "process 0 looks as often after minutes as after a second",
        "leader",
        "max(longest, _PART * waited)",
        "longest",
    ),
)


@contextlib.contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """Makes simulated processes use a protocol with this defect."""
    with mock.patch.dict(sys.modules):
        loaded = {name: _load(name, mutation) for name in _MODULES}
        used = {
            "Leader": loaded["leader"].Leader,
            "Follower": loaded["follower"].Follower,
            "service_is_silent": loaded["protocol"].service_is_silent,
            "silent_at": loaded["protocol"].silent_at,
        }
        with mock.patch.multiple(processes, **used):
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
