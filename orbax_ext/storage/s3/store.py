"""S3 while it is enabled: the hooks in Orbax and etils, and what a restore shares among processes."""

from __future__ import annotations

import contextlib
import functools
import logging as standard_logging
import math
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import logging

from orbax_ext.errors import RestoreTimeoutError
from orbax_ext.meeting.once import SharedResults
from orbax_ext.meeting.session import Limits, open_session
from orbax_ext.storage.connections import limit_silence, trust
from orbax_ext.storage.s3 import settings as settings_lib
from orbax_ext.storage.s3.errors import SecretFilter, explain
from orbax_ext.storage.s3.files import S3Files
from orbax_ext.storage.s3.objects import ObjectStore
from orbax_ext.storage.s3.paths import is_s3
from orbax_ext.storage.s3.settings import Settings
from orbax_ext.storage.s3.sharing import Snapshot
from orbax_ext.storage.s3.usage import RequestCounter, Usage
from orbax_ext.upstream.object_stores import UrlScheme, add_object_store
from orbax_ext.upstream.runtime import coordination_client

_SECRET_FILTER = SecretFilter()
_PART = 0.2  # of a restore's limits: to share metadata is only an optimisation, and the restore waits for all later


class S3Store:
    """Makes Orbax and etils take s3:// paths, from its creation until `close`."""

    def __init__(self, given: Settings, counter: RequestCounter, limits: Callable[[], Limits] = Limits) -> None:
        self.given = given
        self._limits = limits  # of a restore
        self.files = S3Files(ObjectStore(lambda: self.settings, counter, self._kvstore))
        self._counter = counter
        self._environ: dict[str, str] = {}
        self._before_restore: Usage | None = None
        self._undo = add_object_store(UrlScheme("s3", self._kvstore, lambda: self.files, explain, self.restoring))
        # When one read fails, Orbax abandons the others and asyncio logs their errors. That may be much later, so the
        # filter stays after `close`.
        standard_logging.getLogger("asyncio").addFilter(_SECRET_FILTER)

    @functools.cached_property
    def settings(self) -> Settings:
        """The settings in full, looked up when they are first needed."""
        return settings_lib.resolve(self.given)

    @property
    def restore_usage(self) -> Usage:
        """The usage of the restore that is under way; zero if there is none."""
        return Usage() if self._before_restore is None else self._counter.usage() - self._before_restore

    @contextlib.contextmanager
    def restoring(self, root: str, together: bool) -> Iterator[None]:
        """Surrounds the restore of the checkpoint in `root`; `together` if all processes of the job restore it."""
        if not is_s3(root) or self._before_restore is not None:
            yield
            return
        self._before_restore = self._counter.usage()
        try:
            with contextlib.ExitStack() as stack:
                if self.settings.share_metadata:
                    alone = not together or jax.process_count() == 1
                    results = None if alone else stack.enter_context(_shared_results(root, self._limits()))
                    once = results.once if results else lambda name, work: work()
                    self.files.snapshots.append(Snapshot(root, self.files.objects, once))
                    stack.callback(self.files.snapshots.pop)
                yield
        finally:
            self._before_restore = None

    def close(self) -> None:
        self._undo()
        for name, value in self._environ.items():
            if os.environ.get(name) == value:
                del os.environ[name]

    def _kvstore(self, bucket: str, path: str) -> dict[str, Any]:
        self._environ.update(limit_silence(self.settings.stall_seconds, self.settings.stall_rate))
        self._environ.update(trust(self.settings.ca_bundle))
        return settings_lib.kvstore(self.settings, bucket, path)


@contextlib.contextmanager
def _shared_results(root: str, limits: Limits) -> Iterator[SharedResults | None]:
    """Yields the results shared by all processes that restore from `root`; None if some of them do not arrive."""
    arrival = Limits(_PART * limits.stall, limits.total and _PART * limits.total)
    with open_session(f"s3/{zlib.crc32(root.encode()):08x}", arrival) as session:
        try:
            session.arrive({})
        except RestoreTimeoutError as error:
            logging.warning("orbax_ext: each process reads the metadata of %s for itself: %s", root, error)
            yield None
            return
        home = f"{session.home}/once"  # removed with the session
        limit = min(limits.stall, limits.total or math.inf)
        yield SharedResults(coordination_client(), home, jax.process_index(), limit)
