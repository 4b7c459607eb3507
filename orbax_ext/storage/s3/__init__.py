"""Checkpoints on s3://: arrays through TensorStore's own s3 driver, metadata files through obstore.

    orbax_ext.storage.enable_s3()                       # AWS, or what AWS_ENDPOINT_URL and AWS_REGION say
    manager = ocp.CheckpointManager("s3://bucket/run")  # not earlier: it looks at its directory at once

After `orbax_ext.register()` it is enabled when the first s3:// path is used, and `unregister()` disables it again,
unless it was enabled before. Only then is obstore imported, and are settings looked up. A checkpoint on S3 is complete
when it has its commit file, as Orbax does it on gs://.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from orbax_ext.meeting.terms import Limits
from orbax_ext.storage.connections import STALL_RATE
from orbax_ext.storage.s3.errors import explain
from orbax_ext.storage.s3.objects import ObjectStore
from orbax_ext.storage.s3.paths import is_s3
from orbax_ext.storage.s3.settings import Addressing, Settings
from orbax_ext.storage.s3.sharing import Snapshot
from orbax_ext.storage.s3.store import S3Store
from orbax_ext.storage.s3.usage import RequestCounter, Usage
from orbax_ext.upstream.object_stores import on_first_path

__all__ = [
    "disable_s3",
    "enable_s3",
    "enable_s3_on_first_path",
    "enabled_for",
    "explain",
    "is_s3",
    "object_store",
    "restore_usage",
    "s3_enabled",
    "s3_usage",
    "silence_limits",
    "snapshot_of",
    "waiting_within",
]

_lock = threading.RLock()  # a block of `enabled_for` may end wherever Python collects garbage
_store: S3Store | None = None
_borrowers = 0  # blocks of `enabled_for`
_borrowed = False  # whether S3 is enabled for these alone
_counter = RequestCounter()  # of the whole process, whatever is enabled and disabled
_limits = [Limits()]  # the defaults, then those of registrations and restores in force, the latest last


def enable_s3(
    endpoint: str | None = None,
    region: str | None = None,
    *,
    profile: str | None = None,
    anonymous: bool = False,
    addressing: Addressing = "auto",
    retries: int = 8,
    stall_seconds: int = 60,
    stall_rate: int = STALL_RATE,
    share_metadata: bool = True,
) -> None:
    """Makes Orbax take paths that begin with s3://. Another call with other settings replaces them.

    Settings that are not given come from the usual places: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION,
    AWS_DEFAULT_REGION, AWS_PROFILE and the profile in ~/.aws/config. Credentials are never given here: both clients
    find them (AWS_ACCESS_KEY_ID..., profiles, web identity, container and instance roles) and renew them.

    Args:
      endpoint: The URL of an S3-compatible store; without one, AWS.
      region: The region. The default is "us-east-1" with an endpoint, and the bucket's region on AWS.
      profile: A profile of ~/.aws/config and ~/.aws/credentials.
      anonymous: Send no credentials, for public buckets.
      addressing: "path" (endpoint/bucket/key), "virtual" (bucket.endpoint/key; CoreWeave requires it), or "auto":
        the profile's s3.addressing_style if it has one, otherwise virtual on AWS and path elsewhere.
      retries: How often a request is repeated after 429, 5xx, a reset or a short answer, with growing pauses.
      stall_seconds: A connection that brings less than `stall_rate` for this long counts as broken, and is retried.
      stall_rate: Bytes per second that a connection for arrays brings at least; for metadata files only silence counts.
      share_metadata: During a restore, one process lists each directory and reads each metadata file, and passes the
        result to the others over JAX's coordination service. Give the same value on all processes.
    """
    settings = Settings(
        endpoint, region, profile, anonymous, addressing, retries, stall_seconds, stall_rate, share_metadata
    )
    global _store, _borrowed
    with _lock:
        _borrowed = False
        if _store is None or _store.given != settings:
            if _store is not None:
                _store.close()
            _store = S3Store(settings, _counter, lambda: _limits[-1])


def enable_s3_on_first_path() -> Callable[[], None]:
    """Enables S3 when the first s3:// path is used, unless it is enabled; returns a function that undoes this."""
    global _borrowed
    with _lock:
        if _borrowed:
            _borrowed = False
            return _give_up
        if _store is not None:
            return lambda: None
    enabled_here = False

    def enable() -> bool:
        nonlocal enabled_here
        if s3_enabled():
            return False
        enable_s3()
        enabled_here = True
        return True

    stop_watching = on_first_path("s3", enable)

    def undo() -> None:
        stop_watching()
        if enabled_here:
            _give_up()

    return undo


def disable_s3() -> None:
    """Undoes `enable_s3`; does nothing if S3 is not enabled."""
    global _store, _borrowed
    with _lock:
        _borrowed = False
        if _store is not None:
            _store.close()
            _store = None


@contextlib.contextmanager
def enabled_for(path: str | os.PathLike[str]) -> Iterator[None]:
    """Enables S3 for a block, with the settings of the environment, if the path needs it and it is not enabled yet.

    If there are several such blocks at a time, it stays enabled until the last one ends, in whichever thread.
    """
    if not is_s3(path):
        yield
        return
    _borrow()
    try:
        yield
    finally:
        _give_back()


def _borrow() -> None:
    global _borrowers, _borrowed
    with _lock:
        if _store is None:
            enable_s3()
            _borrowed = True
        _borrowers += 1


def _give_back() -> None:
    global _borrowers
    with _lock:
        _borrowers -= 1
        if _borrowed and not _borrowers:
            disable_s3()


def _give_up() -> None:
    """Disables S3, as soon as no block of `enabled_for` needs it."""
    global _borrowed
    with _lock:
        if _borrowers:
            _borrowed = True
        else:
            disable_s3()


@contextlib.contextmanager
def waiting_within(limits: Limits) -> Iterator[None]:
    """Makes the processes of a restore wait for each other's metadata within its limits, for a block."""
    _limits.append(limits)
    try:
        yield
    finally:
        del _limits[-1 - _limits[::-1].index(limits)]  # the latest: registrations may end in any order


def s3_enabled() -> bool:
    """Returns whether Orbax takes s3:// paths now."""
    return _store is not None


def silence_limits() -> tuple[int, int] | None:
    """Returns the `stall_seconds` and `stall_rate` that S3 was enabled with; None if it is not enabled."""
    return None if _store is None else (_store.given.stall_seconds, _store.given.stall_rate)


def s3_usage() -> Usage:
    """Returns the S3 requests and bytes of this process since it started. Subtract two results to measure a period."""
    return _counter.usage()


def restore_usage() -> Usage:
    """Returns the S3 usage so far of the restore that is under way in this process; zero if it is not from S3."""
    return Usage() if _store is None else _store.restore_usage


def snapshot_of(path: os.PathLike[str]) -> Snapshot | None:
    """Returns the shared metadata of the restore that is under way from this path; None if nothing is shared."""
    return _store.files.snapshot(path) if _store is not None and is_s3(path) else None


def object_store() -> ObjectStore:
    """Returns what sends requests to S3. Raises ValueError if S3 is not enabled."""
    if _store is None:
        raise ValueError("s3:// is not enabled: call orbax_ext.storage.enable_s3() first.")
    return _store.files.objects
