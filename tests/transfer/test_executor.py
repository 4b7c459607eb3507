from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from orbax.checkpoint import type_handlers

from orbax_ext.plan import Group
from orbax_ext.request import Request
from orbax_ext.transfer.executor import Executor

pytestmark = pytest.mark.once

AXES = tuple("abcdefghij")


class CountingExchange:
    """Stands in for an exchange that was compiled and connected."""

    def __init__(self) -> None:
        self.connected = 0

    def connect(self) -> None:
        self.connected += 1


def test_exchanges_are_kept_for_a_whole_restore_however_many_there_are() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape([1] * len(AXES)), AXES)
    executor = Executor(type_handlers.ArrayHandler(), Request((), (mesh,), ()), (), limit=10)
    groups = [Group(0, (axis,), (), 0) for axis in AXES]
    made: list[CountingExchange] = []

    def exchange_among(replicas: Any) -> CountingExchange:
        made.append(CountingExchange())
        return made[-1]

    with mock.patch("orbax_ext.transfer.executor.exchange_among", exchange_among):
        for _ in range(2):
            asyncio.run(executor.connect(groups))

    assert [exchange.connected for exchange in made] == [2] * len(AXES)
