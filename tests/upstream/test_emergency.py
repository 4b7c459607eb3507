"""The hooks of the emergency manager, without a cluster."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint.experimental.emergency.path as emergency_path
import pytest
from etils import epath

from orbax_ext.upstream import emergency
from orbax_ext.upstream.hooks import install


class Service:
    """Answers for two processes, and counts how often it was asked."""

    def __init__(self) -> None:
        self.shared: list[dict[str, Any]] = []
        self.failures: list[Exception] = []

    def restore(self, step: emergency.EmergencyStep) -> Any:
        raise AssertionError("nothing is restored here")

    def share(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        self.shared.append(data)
        return [data, data]

    def share_failure(self, error: Exception) -> None:
        self.failures.append(error)


def test_every_hooked_function_exists() -> None:
    assert [hook.label for hook in emergency.HOOKS if not hook.exists] == []


def test_data_is_shared_over_the_service_only_where_steps_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setattr(emergency_path, "sync_global_data", lambda data: ["the collective", data])
    monkeypatch.setattr(
        emergency_path, "get_per_replica_local_steps", lambda: emergency_path.sync_global_data({"steps": [1]})
    )
    undo = install(emergency.HOOKS, service)
    try:
        assert emergency_path.get_per_replica_local_steps() == [{"steps": [1]}] * 2
        assert emergency_path.sync_global_data({"iterator": "x"}) == ["the collective", {"iterator": "x"}]
    finally:
        undo()
    assert service.shared == [{"steps": [1]}]


@pytest.mark.parametrize("fails", ["before it is shared", "afterwards"])
def test_an_error_of_the_listing_is_shared_unless_the_steps_were(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    service = Service()

    def list_steps() -> None:
        if fails == "afterwards":
            emergency_path.sync_global_data({"steps": [1]})
        raise OSError("the RAM disk is gone")

    monkeypatch.setattr(emergency_path, "get_per_replica_local_steps", list_steps)
    undo = install(emergency.HOOKS, service)
    try:
        with pytest.raises(OSError, match="the RAM disk is gone"):
            emergency_path.get_per_replica_local_steps()
    finally:
        undo()
    assert [str(error) for error in service.failures] == (["the RAM disk is gone"] if not service.shared else [])
    assert len(service.shared) == (fails == "afterwards")


def test_chunks_that_are_missing_are_no_zeros() -> None:
    (info,) = emergency.param_infos(epath.Path("/step/state"), ["a.b"])
    assert (info.name, info.raise_array_data_missing_error) == ("a.b", True)
    assert info.path == epath.Path("/step/state/a.b")
    assert (info.is_ocdbt_checkpoint, info.use_zarr3) == (True, True)


def test_arrays_may_be_stored_in_another_format() -> None:
    how = {"ocdbt": False, "zarr3": False, "every_chunk": False}
    (info,) = emergency.param_infos(epath.Path("/step/default"), ["a"], **how)
    assert (info.is_ocdbt_checkpoint, info.use_zarr3, info.raise_array_data_missing_error) == (False, False, False)
