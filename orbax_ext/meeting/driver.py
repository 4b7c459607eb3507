"""Runs a machine of the protocol on a coordination service."""

from __future__ import annotations

import time
from typing import Any

from absl import logging

from orbax_ext.meeting.actions import Action, Count, Delete, Get, Log, Moment, Put, Read, Sleep, Steps, Wait
from orbax_ext.meeting.board import Board


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
