"""An s3fs file system that counts its requests and reads again when an answer breaks off."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

from orbax_ext.storage.s3.settings import Settings, filesystem_arguments
from orbax_ext.storage.s3.usage import RequestCounter


def make(settings: Settings, counter: RequestCounter) -> Any:
    """Returns a new file system for these settings; imports s3fs."""
    try:
        import s3fs
        from fsspec import asyn
    except ImportError as error:
        raise ImportError(
            f"s3:// paths need the package s3fs, and it can't be imported ({error}): pip install 'orbax-ext[s3]'."
        ) from None

    class CountingFileSystem(s3fs.S3FileSystem):
        # botocore repeats requests and `_read_range` repeats reads that broke off; a third loop would multiply them.
        retries = 1

        async def _call_s3(self, method: str, *args: Any, **kwargs: Any) -> Any:
            counter.add(requests=1)
            return await super()._call_s3(method, *args, **kwargs)

        async def _read_range(self, bucket: str, key: str, start: int, end: int) -> bytes:
            for attempt in range(settings.retries + 1):
                try:
                    return await self._read_range_once(bucket, key, start, end)
                except s3fs.core.S3_RETRYABLE_ERRORS:
                    if attempt == settings.retries:
                        raise
                await asyncio.sleep(min(0.1 * 2**attempt, 10.0))
            raise AssertionError("not reached")

        async def _read_range_once(self, bucket: str, key: str, start: int, end: int) -> bytes:
            try:
                answer = await self._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
            except OSError as error:
                if error.errno == errno.EINVAL:  # the file has no byte at `start`: it is empty, or this is its end
                    return b""
                raise
            async with answer["Body"] as body:
                content: bytes = await body.read()
            if len(content) != answer["ContentLength"]:
                raise s3fs.core.IncompleteRead(content, answer["ContentLength"] - len(content))
            return content

        call_s3 = asyn.sync_wrapper(_call_s3)
        read_range = asyn.sync_wrapper(_read_range)

    return CountingFileSystem(**filesystem_arguments(settings))
