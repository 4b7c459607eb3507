"""What all processes brought to a meeting, in few words: what most of them say is said once. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

Payload = Mapping[str, Any]


def pack(found: Mapping[int, Payload]) -> dict[str, Any]:
    """The contributions as one JSON value; `unpack` makes them again."""
    usual = {key: _most_common(key, found) for key in sorted({key for each in found.values() for key in each})}
    others, lacking = {}, {}
    for process, each in found.items():
        own = {key: value for key, value in each.items() if value != usual[key]}
        missing = [key for key in usual if key not in each]
        if own:
            others[str(process)] = own
        if missing:
            lacking[str(process)] = missing
    return {
        "processes": len(found) if sorted(found) == list(range(len(found))) else sorted(found),
        "usual": usual,
        "others": others,
        "lacking": lacking,
    }


def unpack(packed: Mapping[str, Any]) -> dict[int, Payload]:
    processes: int | list[int] = packed["processes"]
    found: dict[int, Payload] = {}
    for process in range(processes) if isinstance(processes, int) else processes:
        lacking = packed["lacking"].get(str(process), ())
        usual = {key: value for key, value in packed["usual"].items() if key not in lacking}
        found[int(process)] = {**usual, **packed["others"].get(str(process), {})}
    return found


def _most_common(key: str, found: Mapping[int, Payload]) -> Any:
    texts = Counter(json.dumps(each[key], sort_keys=True) for each in found.values() if key in each)
    return json.loads(texts.most_common(1)[0][0])
