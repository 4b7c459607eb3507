"""What a machine of the protocol asks for, and what it is sent in return. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

from orbax_ext.meeting.terms import MAX_VALUE


@dataclasses.dataclass(frozen=True, slots=True)
class Put:
    """Sets a key. With `once`, a key that is set stays as it is, and the answer is False."""

    key: str
    value: Mapping[str, Any]
    most: int = MAX_VALUE  # characters
    once: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Get:
    """The answer is the value of a key, or None."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """The answer is all values below a key, by the rest of their keys; None for one that is too long."""

    home: str
    most: int = MAX_VALUE


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """The answer is the value of a key as soon as it is set, or None after `seconds`."""

    key: str
    seconds: float
    most: int


@dataclasses.dataclass(frozen=True, slots=True)
class Count:
    """Adds one to a counter. The answer is its new value."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Delete:
    """Removes a key and all keys below it."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sleep:
    """Nothing happens for some seconds. `Sleep(0)` asks for the time."""

    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Log:
    """A line for the log of this process."""

    line: str


Action: TypeAlias = Put | Get | Read | Wait | Count | Delete | Sleep | Log


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """What a machine is sent: the answer to its action, a time that never goes back, and the time of day."""

    answer: Any
    now: float
    wall: float


Steps: TypeAlias = Generator[Action, Moment, Any]  # a machine
