"""The same scenarios with the stock single-replica handler of a release as it is, and of the fork built from it."""

from __future__ import annotations

import pytest

from tests.fork import scenarios
from tests.fork.conftest import Installation

pytestmark = pytest.mark.fork

AMPLE = 240.0  # seconds for a run that takes a few on an idle machine
HANG = 45.0  # the same for one that is known to hang


def limit(orbax: Installation) -> float:
    """For scenarios in which the stock handler leaves some processes hanging."""
    return AMPLE if orbax.patched else HANG


@pytest.fixture(scope="module")
def checkpoint(orbax: Installation) -> str:
    path = str(orbax.directory / "small")
    orbax.cluster.run(scenarios.save, path, scenarios.small())
    return path


def test_restore_under_set_mesh(orbax: Installation, checkpoint: str) -> None:
    outcomes = orbax.cluster.outcomes(scenarios.restore_under_set_mesh, checkpoint, timeout=AMPLE)
    if orbax.patched or not orbax.older_than("0.11.40"):
        assert orbax.restored(outcomes), outcomes
    else:
        assert all(outcome.failure and "incompatible devices" in outcome.failure.message for outcome in outcomes)


def test_restore_keeps_types_and_bits(orbax: Installation) -> None:
    names = tuple(name for name in scenarios.patterns() if name != "int4")
    path = str(orbax.directory / "types")
    orbax.cluster.run(scenarios.save, path, {name: scenarios.patterns()[name] for name in names})
    outcomes = orbax.cluster.outcomes(scenarios.restore_many_types, path, names, timeout=AMPLE)
    if orbax.patched:
        assert orbax.restored(outcomes), outcomes
    else:
        for outcome in outcomes:
            assert set(names) - set(outcome.value) == {"int32", "uint32"}  # all others are changed
            assert outcome.value["bool"] == "bool came back as int32"
            assert outcome.value["float32"] == "other bytes"


def test_restore_of_int4(orbax: Installation) -> None:
    path = str(orbax.directory / "int4")
    orbax.cluster.run(scenarios.save, path, {"int4": scenarios.patterns()["int4"]})
    outcomes = orbax.cluster.outcomes(scenarios.restore_many_types, path, ("int4",), timeout=AMPLE)
    if orbax.patched:
        assert orbax.restored(outcomes), outcomes
    else:
        assert all(outcome.state == "raised" for outcome in outcomes), outcomes


def test_save_after_restore(orbax: Installation, checkpoint: str) -> None:
    outcomes = orbax.cluster.outcomes(scenarios.save_after_restore, checkpoint, timeout=limit(orbax))
    if orbax.patched:
        assert orbax.restored(outcomes), outcomes
    else:
        assert outcomes[0].failure
        assert "No ArrayMetadata found" in outcomes[0].failure.message


def test_read_error_on_the_primary_is_raised_by_all(orbax: Installation) -> None:
    path = str(orbax.directory / "spoilt")
    orbax.cluster.run(scenarios.save, path, scenarios.small(), use_ocdbt=False)
    scenarios.spoil(path)
    outcomes = orbax.cluster.outcomes(scenarios.restore_spoilt, path, timeout=limit(orbax))
    assert outcomes[0].state == "raised"
    if orbax.patched:
        messages = {outcome.failure.message for outcome in outcomes if outcome.failure}
        assert len(messages) == 1
        assert "before the broadcast on 1 of 4 processes: process 0 on" in messages.pop()
        assert all(outcome.state == "raised" for outcome in outcomes), outcomes
    else:
        assert [outcome.state for outcome in outcomes[1:]] == ["timed out"] * 3


def test_restore_works_again_after_a_failed_one(orbax: Installation, checkpoint: str) -> None:
    if not orbax.patched:
        pytest.skip("a failed restore hangs the stock handler, see above")
    path = str(orbax.directory / "spoilt")
    failed = orbax.cluster.outcomes(scenarios.restore_spoilt, path, timeout=limit(orbax))
    assert [outcome.state for outcome in failed] == ["raised"] * 4
    assert orbax.restored(orbax.cluster.outcomes(scenarios.restore_spoilt, checkpoint, timeout=AMPLE))


def test_late_reader(orbax: Installation, checkpoint: str) -> None:
    outcomes = orbax.cluster.outcomes(
        scenarios.restore_with_late_reader, checkpoint, timeout=scenarios.LATE + limit(orbax)
    )
    if orbax.patched:
        assert orbax.restored(outcomes), outcomes
    else:
        waiting = outcomes[2:]  # the processes of the second replica
        assert all(outcome.failure and "Gloo context" in outcome.failure.message for outcome in waiting), outcomes


def test_a_process_that_does_not_come_is_named(orbax: Installation, checkpoint: str) -> None:
    if not orbax.patched:
        pytest.skip("there is no meeting to miss in the stock handler")
    outcomes = orbax.cluster.outcomes(scenarios.restore_without_process_3, checkpoint, timeout=AMPLE)
    assert outcomes[3].value == "stayed away"
    for outcome in outcomes[:3]:
        assert outcome.failure
        assert outcome.failure.type == "TimeoutError"
        assert "waited before the broadcast for processes [3]" in outcome.failure.message


def test_doctor_tells_the_fork_from_the_release(orbax: Installation) -> None:
    code, found = orbax.doctor()
    present = {defect["id"] for defect in found["defects"] if defect["present"] and defect["breaks_restore"]}
    if orbax.patched:
        assert (code, present) == (0, set())
        assert found["orbax_files"]["state"] == "patched"
    else:
        fixed = set() if orbax.older_than("0.11.40") else {"set-mesh"}
        assert (code, present) == (
            1,
            {"set-mesh", "late-reader", "inexact", "lone-error", "save-after-restore"} - fixed,
        )
