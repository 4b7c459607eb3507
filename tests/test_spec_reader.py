from __future__ import annotations

import os
from typing import Any

import jax
import pytest

import orbax_ext
from orbax_ext import handler
from orbax_ext.storage import s3

pytestmark = pytest.mark.once

VARIABLES = ("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES")
S3 = {"driver": "zarr3", "kvstore": {"driver": "s3", "bucket": "bucket", "path": "weights/"}}
VIEW = {"driver": "cast", "dtype": "float32", "base": S3}
FILE = {"driver": "zarr3", "kvstore": {"driver": "file", "path": "/nowhere/"}}


@pytest.mark.parametrize("specs", [[S3], [VIEW], [FILE, S3]], ids=["array", "view", "beside a file"])
def test_silent_connections_to_s3_are_given_up_although_s3_is_not_enabled(
    specs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not s3.s3_enabled()
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)

    def stop(*_: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(handler, "make_request", stop)
    with pytest.raises(InterruptedError):
        orbax_ext.read_arrays(specs, [jax.sharding.SingleDeviceSharding(jax.devices()[0])] * len(specs))
    assert [os.environ.get(name) for name in VARIABLES] == ["60", "4096"]
