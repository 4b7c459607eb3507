from __future__ import annotations

import pathlib
from unittest import mock

import pytest
import tensorstore as ts

from bench import work

pytestmark = pytest.mark.once

URL = "http://localhost:1"


@pytest.mark.parametrize(("requests", "limits"), [(None, {}), (7, {"limit": 7})])
def test_all_arrays_of_a_restore_share_their_requests_to_storage(
    tmp_path: pathlib.Path, requests: int | None, limits: dict[str, int]
) -> None:
    parent = ts.Context()
    with mock.patch.object(ts, "open") as opened, work.served_from(str(tmp_path / "checkpoint"), URL, requests):
        for name in ("a", "b"):
            ts.open({"driver": "zarr", "kvstore": f"file://{tmp_path}/checkpoint/{name}"}, context=parent)
    contexts = [call.kwargs["context"] for call in opened.call_args_list]
    assert contexts[0] is contexts[1]
    assert contexts[0]["http_request_concurrency"].to_json() == limits
    assert [call.args[0].kvstore.url for call in opened.call_args_list] == [f"{URL}/checkpoint/{one}/" for one in "ab"]
