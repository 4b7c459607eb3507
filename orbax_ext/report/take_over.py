"""TakeOver: what others have read in place of a process. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from orbax_ext import text


@dataclasses.dataclass(frozen=True)
class TakeOver:
    """A group of which others have read the share of a process."""

    group: int  # its number, counted from 0
    process: int
    host: str
    why: str  # "late", or the error

    def moved(self, groups: int) -> TakeOver:
        """Returns the same, after `groups` groups of an earlier part of the restore."""
        return dataclasses.replace(self, group=self.group + groups)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TakeOver:
        return cls(int(data["group"]), int(data["process"]), str(data["host"]), str(data["why"]))

    def __str__(self) -> str:
        return f"group {self.group + 1} in place of {text.process(self.process, {self.process: self.host})}: {self.why}"
