"""Runs a machine of the protocol, or one call, on a coordination service."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
from absl import logging

from orbax_ext.meeting.actions import Action, Count, Delete, Get, Log, Moment, Put, Read, Sleep, Steps, Wait
from orbax_ext.meeting.board import Board
from orbax_ext.meeting.protocol import LEAVE_LIMIT
from orbax_ext.meeting.threads import watched
from orbax_ext.redact import redact
from orbax_ext.upstream import runtime


def run(steps: Steps, board: Board) -> Any:
    """Runs a machine of the protocol on a coordination service; returns its result."""
    try:
        action = next(steps)
        while True:
            try:
                answer = perform(action, board)
            except Exception as error:
                action = steps.throw(error)
            else:
                action = steps.send(Moment(answer, time.monotonic(), time.time()))
    except StopIteration as end:
        return end.value


def perform(action: Action, board: Board) -> Any:
    """Does what a machine asks for; returns the answer."""
    match action:
        case Put(key, value, most, once):
            return board.put(key, value, most, once=once)
        case Get(key):
            return board.get(key)
        case Read(home, most):
            return board.read(home, most)
        case Wait(key, seconds, most):
            return board.wait(key, seconds, most)
        case Count(key):
            return board.count(key)
        case Delete(key):
            return board.delete(key)
        case Sleep(seconds):
            return time.sleep(seconds)
        case Log(line):
            return logging.info("%s", line)


def with_service(call: Callable[[Board], object]) -> None:
    """Makes one call to the service; goes on without it if that fails: the error of the restore matters more."""
    if jax.process_count() > 1:
        board = Board(runtime.coordination_client())
        try:
            watched(lambda: call(board), lambda: board.last_answer() + LEAVE_LIMIT)
        except Exception as problem:
            logging.warning("orbax_ext: the coordination service does not answer: %s", redact(repr(problem)))
