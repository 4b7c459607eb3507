"""Restores that have begun and are ended by `result()`: with what was read ahead, or in a thread as a whole."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import jax
from absl import logging

from orbax_ext import errors, text
from orbax_ext.meeting.terms import Limits
from orbax_ext.report.progress import ProgressSnapshot, Watcher
from orbax_ext.storage.stall import OthersTurn
from orbax_ext.transfer.at_exit import end_at_exit
from orbax_ext.transfer.held_blocks import Taking
from orbax_ext.transfer.host_reads import HostReads
from orbax_ext.upstream.runtime import settings_of_thread

Scope = Callable[[], contextlib.AbstractContextManager[Any]]

_LOOK_EVERY = 1.0  # seconds
_JOIN_LIMIT = 5.0  # seconds for a cancelled restore to end


class PendingRestore:
    """A restore that was begun by `restore_async`.

    All processes must call `result()`, in the same order if several restores are pending. One that is not wanted any
    more is ended by `cancel()`, by the end of a `with` block, or with the last reference to it.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._begun = False  # `result` was called, or `cancel`
        self._error: BaseException | None = None
        self._stop = weakref.finalize(self, work.stop)
        self._stop.atexit = False  # `end_at_exit` does more: it waits

    def result(self, timeout: float | None = None) -> Any:
        """Ends the restore and returns what `checkpointer.restore` returns, once: it keeps no reference.

        A second call is a `RuntimeError`, or the same error again if the restore has failed.

        Args:
          timeout: Seconds after which the restore fails on all processes, as with the knob `timeout`. With
            `exchange="background"` the restore goes on, and `result()` may be called again.

        Raises:
          RestoreError: The restore failed on all processes. If some do not call `result()`, the message names them.
          concurrent.futures.CancelledError: It was cancelled.
          ValueError: The timeout is not positive, and `exchange` not "background". The restore is as it was.
        """
        self._work.check(timeout)
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._begun:
                raise RuntimeError("result() has handed the state over already; a pending restore keeps no reference")
            self._begun = True
        try:
            state = self._work.finish(timeout)
        except _NotYetError as late:
            self._begun = False
            raise late.error from None
        except BaseException as error:
            self._error = error
            self._stop()
            raise
        self._stop()
        return state

    def done(self) -> bool:
        """Returns whether all of the share is there that may be held; with `exchange="background"`, the state."""
        return self._begun or self._work.ended

    def exception(self) -> BaseException | None:
        """Returns what `result()` has raised, or why nothing is read ahead on this process. Waits for nobody.

        An error in reading ahead is not final: `result()` reads again what is missing, and raises on all processes if
        that fails too.
        """
        return self._error or self._work.error

    def cancel(self) -> bool:
        """Gives the restore up, and what it holds; returns False if `result()` was called before.

        With `exchange="background"` it ends a restore under way on all processes: at once if they have met already, and
        otherwise after `stall_timeout`, as if this process had never called restore. Where the others may have restored
        already, or each process restores by itself, this one ends its restore too, and keeps nothing of it: the others
        would wait for it in Orbax's own barrier.
        """
        with self._lock:
            if self._begun:
                return isinstance(self._error, concurrent.futures.CancelledError)
            self._begun, self._error = True, concurrent.futures.CancelledError("this restore was cancelled")
        self._stop()
        self._work.join()
        return True

    def progress(self) -> ProgressSnapshot:
        """Returns how far this process's reading ahead is: bytes, rate and seconds left.

        With `exchange="background"`, how far the restore is; on process 0 that of all processes together.
        """
        return self._work.progress()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.cancel()


class _NotYetError(Exception):
    """The restore goes on."""

    def __init__(self, error: errors.RestoreTimeoutError) -> None:
        super().__init__()
        self.error = error


class Work(Protocol):
    """What a pending restore does."""

    @property
    def ended(self) -> bool:
        """Whether nothing happens any more before `finish`."""

    @property
    def error(self) -> BaseException | None:
        """Why nothing more happens before `finish`."""

    def progress(self) -> ProgressSnapshot: ...

    def check(self, timeout: float | None) -> None:
        """Raises `ValueError` for a timeout that `finish` does not take."""

    def finish(self, timeout: float | None) -> Any:
        """Returns the restored state."""

    def stop(self) -> None:
        """Ends everything without waiting for it."""

    def join(self) -> None:
        """Waits a few seconds for the end."""


class ReadAheadRestore:
    """Reads ahead, and restores in `finish`."""

    def __init__(
        self,
        restore: Callable[[], Any],
        scope: Scope,
        needed: contextlib.ExitStack,
        reads: HostReads,
        limits: Callable[[], Limits] = Limits,
    ) -> None:
        """`needed` is left at the end. `limits`: of waiting for restores that run in the background."""
        self._restore = restore
        self._scope = scope
        self._needed = needed
        self._reads = reads
        self._limits = limits

    @property
    def ended(self) -> bool:
        return self._reads.ended

    @property
    def error(self) -> BaseException | None:
        return self._reads.error

    def progress(self) -> ProgressSnapshot:
        return self._reads.progress()

    def check(self, timeout: float | None) -> None:
        if timeout is not None and timeout <= 0:
            raise ValueError(
                f"timeout must be a positive number of seconds or None; found {timeout}. The restore fails on all "
                "processes after it. To ask whether all is read ahead use done()."
            )

    def finish(self, timeout: float | None) -> Any:
        self._reads.describe_no_more()
        taking, read = Taking(self._reads.held, timeout), self._reads.progress().done
        try:
            with taking.scope():
                _wait_for(_whole_restores(), self._limits())  # the order is the same on all processes
            with taking.scope(), self._scope():  # whose limits are those that are left
                return self._restore()
        finally:
            if read and not taking.taken:
                logging.warning("orbax_ext: %s were read ahead, but the restore wants something else", text.size(read))
            self._reads.stop()
            self._reads.join_reading()
            self._needed.close()

    def stop(self) -> None:
        self._reads.stop()
        self._needed.close()

    def join(self) -> None:
        self._reads.join()


# Of whole restores, in the order in which they were begun. Set when one has ended.
_under_way: list[threading.Event] = []
_under_way_lock = threading.Lock()


def _whole_restores() -> tuple[threading.Event, ...]:
    with _under_way_lock:
        return tuple(_under_way)


def _wait_for(earlier: Sequence[threading.Event], limits: Limits, stopped: Callable[[], bool] = lambda: False) -> None:
    """Waits for earlier restores; raises `RestoreTimeoutError` if one of them does not advance."""
    others_turn = OthersTurn(limits, jax.process_index())
    for one in earlier:
        while not stopped() and not one.wait(timeout=_LOOK_EVERY):
            others_turn.check()


class WholeRestore:
    """Restores in a thread. Several run one after the other, so that their programs have the same order everywhere."""

    def __init__(
        self,
        restore: Callable[[], Any],
        scope: Scope,
        needed: contextlib.ExitStack,
        limits: Callable[[], Limits] = Limits,
    ) -> None:
        """`needed` is left at the end. `limits`: of waiting for earlier ones."""
        self._restore = restore
        self._scope = scope
        self._needed = needed
        self._limits = limits
        self._settings = settings_of_thread()
        self._taking = Taking()
        self._watcher: Watcher | None = None
        self._stopped = False
        self._outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._lock = threading.RLock()  # of both; `stop` may be called wherever Python collects garbage
        self._over = threading.Event()
        with _under_way_lock:
            self._earlier = tuple(_under_way)
            _under_way.append(self._over)
        run = functools.partial(contextvars.copy_context().run, self._run)
        self._thread = threading.Thread(target=run, daemon=True, name="orbax_ext restore")
        try:
            self._thread.start()
        except BaseException:
            self._end()
            needed.close()
            raise
        end_at_exit(self)

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    @property
    def error(self) -> BaseException | None:
        outcome = self._outcome  # `stop` may put another one there
        return outcome.exception(timeout=0) if outcome.done() else None

    def progress(self) -> ProgressSnapshot:
        recorder = self._taking.recorder
        if recorder is None or recorder.plan is None:
            return ProgressSnapshot("begin", 0, 0, 0.0, "")
        if self._watcher is None or self._watcher.recorder is not recorder:  # each item of a checkpoint has its own
            self._watcher = Watcher(recorder)
        return self._watcher.look(recorder.plan, self.ended)

    def check(self, timeout: float | None) -> None:
        pass  # the restore goes on after any

    def finish(self, timeout: float | None) -> Any:
        started = time.monotonic()
        while True:
            left = _LOOK_EVERY if timeout is None else min(_LOOK_EVERY, started + timeout - time.monotonic())
            done, _ = concurrent.futures.wait([self._outcome], timeout=max(0.0, left))
            if done:
                outcome, self._outcome = self._outcome, concurrent.futures.Future()  # keep no reference to the state
                return outcome.result(timeout=0)
            if timeout is not None and time.monotonic() - started >= timeout:
                phase = self.progress().phase
                here = jax.process_index()
                message = f"the restore has not ended within {timeout:g} s on process {here}, in phase {phase!r}"
                raise _NotYetError(errors.RestoreTimeoutError(message, [here], {here: phase}))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._outcome = concurrent.futures.Future()  # it may have the state already
        self._taking.cancel()

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_LIMIT)

    def _run(self) -> None:
        try:
            with self._needed:
                _wait_for(self._earlier, self._limits(), lambda: self._stopped)
                if self._stopped:
                    raise concurrent.futures.CancelledError
                self._settings()
                with self._scope(), self._taking.scope():
                    state = self._restore()
            with self._lock:
                if not self._stopped:
                    self._outcome.set_result(state)
        except BaseException as error:
            with self._lock:
                if not self._stopped:
                    self._outcome.set_exception(error)
        finally:
            self._end()

    def _end(self) -> None:
        self._over.set()
        with _under_way_lock:
            _under_way.remove(self._over)
