"""The keys of the protocol on the coordination service. Pure.

docs/internals/meetings.md has the table of who writes which key, when, and who removes it.
"""

from __future__ import annotations

from urllib import parse

PREFIX = "orbax_ext"


class SubjectKeys:
    """The keys by which the processes find each other, before they have a session."""

    def __init__(self, subject: str, attempt: str = "") -> None:
        self._home = f"{PREFIX}/{parse.quote(subject, safe=' ')}"  # a slash would put a subject inside of another one
        self.arrivals = f"{self._home}/arrive"
        self.status = f"{self._home}/status"
        self.absences = f"{self._home}/absent"
        self._attempt = parse.quote(attempt, safe=" ") or "-"
        self.sessions = f"{self._home}/session"

    def arrivals_of(self, process: int) -> str:
        return f"{self.arrivals}/{process}"

    def arrival(self, process: int, nonce: str) -> str:
        """Everything about one arrival: `arrived` and `reply`. The nonce keeps late calls away from a later arrival."""
        return f"{self.arrivals}/{process}/{nonce}"

    def arrived(self, process: int, nonce: str) -> str:
        return f"{self.arrival(process, nonce)}/in"

    def reply(self, process: int, nonce: str) -> str:
        return f"{self.arrival(process, nonce)}/reply"

    def absences_of(self, process: int) -> str:
        return f"{self.absences}/{process}"

    def absence(self, process: int) -> str:
        """A process will not come in this attempt. The attempt keeps a forgotten or late one away from a later one."""
        return f"{self.absences_of(process)}/{self._attempt}"

    def absent(self, name: str) -> str:
        """Returns the process in the rest of the key of an absence in this attempt; "" for those in others."""
        process, _, attempt = name.partition("/")
        return process if attempt == self._attempt else ""


class SessionKeys:
    """The keys of one session. All of them are below `home`."""

    def __init__(self, subject: SubjectKeys, session: str) -> None:
        self.home = f"{subject.sessions}/{session}"
        self.status = f"{self.home}/status"
        self.reports = f"{self.home}/progress"
        self.gone = f"{self.home}/gone"
        self.handed_in = f"{self.home}/handed_in"
        self.handed_in_count = f"{self.home}/handed_in_count"

    def meeting(self, number: int) -> str:
        """Everything about one meeting: `contribution`, `outcome` and `asked`."""
        return f"{self.home}/meeting/{number}"

    def contribution(self, number: int, process: int) -> str:
        return f"{self.meeting(number)}/in/{process}"

    def outcome(self, number: int) -> str:
        return f"{self.meeting(number)}/out"

    def asked(self, number: int) -> str:
        """Asks those who are late to come to a meeting as they are."""
        return f"{self.meeting(number)}/asked"

    def report(self, process: int) -> str:
        return f"{self.reports}/{process}"
