"""Checkpoints on s3://: arrays through TensorStore's own s3 driver, metadata files through s3fs.

    orbax_ext.storage.enable_s3()                      # AWS, or what AWS_ENDPOINT_URL and AWS_REGION say
    manager = ocp.CheckpointManager("s3://bucket/run")  # and everything else as ever

`orbax_ext.register()` enables it too, and `unregister()` disables it again, unless it was enabled before. Enabling
costs nothing: s3fs is imported, and settings are looked up, when the first s3:// path is used. Make the manager after
that call, because it looks at its directory at once.

A checkpoint on S3 is complete when its commit file is there, as Orbax does it on gs://.
"""

from __future__ import annotations

import contextlib
import functools
import logging as standard_logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import logging

from orbax_ext.errors import RestoreTimeoutError
from orbax_ext.meeting.once import Board
from orbax_ext.meeting.session import Limits, open_session
from orbax_ext.storage.s3 import errors
from orbax_ext.storage.s3 import settings as settings_lib
from orbax_ext.storage.s3.settings import Addressing, Settings
from orbax_ext.storage.s3.sharing import Snapshot
from orbax_ext.storage.s3.usage import Counter, Usage
from orbax_ext.upstream.object_stores import UrlScheme, add_object_store
from orbax_ext.upstream.runtime import coordination_client

__all__ = ["disable_s3", "enable_s3", "s3_enabled", "s3_usage"]

# TensorStore waits for ever for a silent server unless told otherwise, for all of the process at once.
_STALL_VARIABLES: dict[str, Callable[[Settings], str]] = {
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": lambda settings: str(settings.stall_seconds),
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": lambda settings: "1",
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": lambda settings: str(min(settings.stall_seconds, 30)),
}

_CLEAN_LOG = errors.CleanLog()
_SHARE_LIMIT = 300.0  # seconds to wait for what another process reads for all

_lock = threading.RLock()
_store: _Store | None = None
_counter = Counter()
_restore_began: Usage | None = None  # what had been used when the restore that is under way began


def enable_s3(
    endpoint: str | None = None,
    region: str | None = None,
    *,
    profile: str | None = None,
    anonymous: bool = False,
    addressing: Addressing = "auto",
    retries: int = 8,
    stall_seconds: int = 60,
    share_metadata: bool = True,
) -> None:
    """Makes Orbax take paths that begin with s3://. Calling it again changes the settings, or nothing.

    What is not given comes from the usual places: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_REGION,
    AWS_DEFAULT_REGION, AWS_PROFILE and the profile in ~/.aws/config. Credentials are never given here: both clients
    find them (AWS_ACCESS_KEY_ID..., profiles, container and instance roles) and renew them.

    Args:
      endpoint: The URL of an S3-compatible store; AWS if there is none.
      region: The region; with an endpoint "us-east-1" if there is none, on AWS that of the bucket.
      profile: A profile of ~/.aws/config and ~/.aws/credentials.
      anonymous: Send no credentials, for public buckets.
      addressing: "path" (endpoint/bucket/key), "virtual" (bucket.endpoint/key; CoreWeave wants it), or "auto": virtual
        on AWS, path elsewhere, unless the profile's s3.addressing_style says so.
      retries: How often a request is repeated after 429, 5xx, a reset or a short answer, with growing pauses.
      stall_seconds: A connection on which nothing arrives for this long counts as broken, and is retried.
      share_metadata: During a restore each directory is listed and each metadata file read by one process, which tells
        the others over JAX's coordination service. All processes must say the same.
    """
    wanted = Settings(endpoint, region, profile, anonymous, addressing, retries, stall_seconds, share_metadata)
    global _store
    with _lock:
        if _store is not None and _store.given == wanted:
            return
        if _store is not None:
            _store.close()
        _store = _Store(wanted)


def disable_s3() -> None:
    """Puts everything back as `enable_s3` found it; does nothing if S3 is not enabled."""
    global _store
    with _lock:
        if _store is not None:
            _store.close()
            _store = None


def s3_enabled() -> bool:
    """Whether Orbax takes s3:// paths now."""
    return _store is not None


def s3_usage() -> Usage:
    """What this process has asked of S3 since it started; subtract two of them to learn what happened in between."""
    return _counter.usage()


def restore_usage() -> Usage:
    """What the restore that is under way has asked of S3 so far, in this process; nothing if it is not from S3."""
    return Usage() if _restore_began is None else s3_usage() - _restore_began


def snapshot_of(path: os.PathLike[str]) -> Snapshot | None:
    """What the restore that is under way from this path shares among processes; None if it shares nothing."""
    if _store is None or not os.fspath(path).startswith("s3://"):
        return None
    found: Snapshot | None = _store.files.snapshot(path)
    return found


def is_s3(path: str) -> bool:
    return path.startswith("s3://")


def list_folder(path: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """The files in a directory on S3 with their sizes, and the directories; FileNotFoundError if there is none."""
    listing = _files().list_directory(path)
    if not listing.exists:
        raise FileNotFoundError(f"{path} does not exist.")
    return {name: size for name, (size, _) in listing.files.items()}, listing.directories


def sizes_below(path: str) -> dict[str, int]:
    """The sizes of all files below a directory on S3, by their paths from there."""
    return dict(_files().sizes_below(path))


def _files() -> Any:
    if _store is None:
        raise ValueError("s3:// is not enabled: call orbax_ext.storage.enable_s3() first.")
    return _store.files


@contextlib.contextmanager
def _shared_board(root: str) -> Iterator[Board | None]:
    """A board for all processes that restore from `root`; None if they do not all come."""
    session = open_session(f"s3/{zlib.crc32(root.encode()):08x}", Limits())
    with session:
        try:
            session.arrive({})
        except RestoreTimeoutError as error:
            logging.warning("orbax_ext: each process reads the metadata of %s for itself: %s", root, error)
            yield None
            return
        home = f"orbax_ext/session/{session.id}/once"  # removed with the session
        yield Board(coordination_client(), home, jax.process_index(), _SHARE_LIMIT)


class _Store:
    """S3 as long as it is enabled: the settings, the hooks in Orbax and etils, and how to take them out again."""

    def __init__(self, given: Settings) -> None:
        self.given = given
        self._environ: dict[str, str] = {}
        self._files: Any = None
        self._undo = add_object_store(UrlScheme("s3", self._kvstore, lambda: self.files, explain, self.restoring))
        # When one read fails Orbax leaves the others, and asyncio logs how they ended: any time later, so this stays.
        standard_logging.getLogger("asyncio").addFilter(_CLEAN_LOG)

    @functools.cached_property
    def settings(self) -> Settings:
        """The settings in full, looked up when first needed."""
        return settings_lib.resolve(self.given)

    @property
    def files(self) -> Any:
        with _lock:
            if self._files is None:
                from orbax_ext.storage.s3.files import S3Files

                self._files = S3Files(self.settings, _counter)
            return self._files

    @contextlib.contextmanager
    def restoring(self, root: str, together: bool) -> Iterator[None]:
        """While the checkpoint in `root` is restored; `together` if by all processes of the job."""
        global _restore_began
        if not root.startswith("s3://") or _restore_began is not None:
            yield
            return
        _restore_began = s3_usage()
        try:
            with self._snapshot(root, together) if self.settings.share_metadata else contextlib.nullcontext():
                yield
        finally:
            _restore_began = None

    @contextlib.contextmanager
    def _snapshot(self, root: str, together: bool) -> Iterator[None]:
        with _shared_board(root) if together and jax.process_count() > 1 else contextlib.nullcontext() as board:
            snapshot = Snapshot(root, self.files, board.once if board else lambda name, work: work())
            self.files.snapshots.append(snapshot)
            try:
                yield
            finally:
                self.files.snapshots.remove(snapshot)

    def close(self) -> None:
        self._undo()
        for name, value in self._environ.items():
            if os.environ.get(name) == value:
                del os.environ[name]

    def _kvstore(self, bucket: str, path: str) -> dict[str, Any]:
        for name, value in _STALL_VARIABLES.items():
            if name not in os.environ:
                os.environ[name] = self._environ[name] = value(self.settings)
        return settings_lib.kvstore(self.settings, bucket, path)


def explain(error: Exception, where: str) -> Exception:
    """The same error in words that say what to do and hold no secret; the error itself if it is not about S3."""
    text = str(error)
    about_s3 = where.startswith("s3://") or (not where and "s3" in text)
    if not about_s3 or not errors.is_from_a_store(text):
        return error
    kind = ValueError if isinstance(error, ValueError) else OSError  # what TensorStore raises is a ValueError
    return kind(errors.explain(where or "s3", text))
