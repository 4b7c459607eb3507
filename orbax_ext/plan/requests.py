"""How many requests to an object store a process has under way at a time: a number that follows what they achieve."""

from __future__ import annotations

import dataclasses

FIRST = 128  # its latency counts once for all of them (marin #8505)
_LEAST = 8
_FACTOR = 2.0
_FACTOR_REFUSED = 1.125  # once storage has refused requests: where it does so is near
_GAIN = 0.1  # part of an increase that has to come back as rate
_REFUSED = 0.01  # part of the requests; object stores refuse single ones at any rate


@dataclasses.dataclass(frozen=True)
class Answers:
    """What an object store has answered while requests were under way."""

    requests: int
    refused: int  # with 429 or 503
    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.bytes / max(self.seconds, 1e-6)


class RequestLimit:
    """Rises while reads get faster by it, and falls when storage refuses requests."""

    def __init__(self, most: int, first: int = FIRST) -> None:
        self._most = most
        self.current = min(first, most)
        self._factor = _FACTOR
        self._before: tuple[int, float] | None = None  # the limit before this one, and its rate
        self._settled = False

    def note(self, seen: Answers) -> bool:
        """Takes what was seen with the current limit. Returns whether that was enough to say something about it."""
        if seen.refused > _REFUSED * seen.requests:
            self.current = max(min(_LEAST, self._most), self.current // 2)
            self._factor, self._before, self._settled = _FACTOR_REFUSED, None, False
        elif seen.requests < 2 * self.current:
            return False  # so few that the limit hardly mattered
        elif not self._settled:
            self._rise_or_settle(seen.rate)
        return True

    def _rise_or_settle(self, rate: float) -> None:
        if self._before is not None and rate < self._before[1] * (1 + _GAIN * (self._factor - 1)):
            self.current, self._settled = self._before[0], True
            return
        self._before = self.current, rate
        self.current = min(self._most, max(self.current + 1, int(self.current * self._factor)))
        self._settled = self.current == self._before[0]
