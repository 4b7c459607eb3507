"""`restore_async` and `v1.load_async`: what is read before `result()`, and what happens in every other case."""

from __future__ import annotations

import pathlib
import re
import shutil
from collections.abc import Iterator

import pytest

from orbax_ext import lab
from tests.support import file_damage, pending, states

pytestmark = pytest.mark.core

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def small_cluster() -> Iterator[lab.Cluster]:
    """One that no other test has used: after a restore that failed, Orbax's own v1 save may wait for a wrong signal."""
    with lab.Cluster(processes=4, devices=2) as running:
        yield running


@pytest.fixture(scope="module")
def saved(small_cluster: lab.Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("pending"))
    small_cluster.run(pending.save, path)
    return path


@pytest.fixture(autouse=True)
def _leaves_no_key(small_cluster: lab.Cluster) -> Iterator[None]:
    yield
    assert not any(small_cluster.run(states.coordination_keys))


@pytest.mark.parametrize("way", pending.WAYS)
def test_all_is_read_before_the_result_and_nothing_else_is_done(
    small_cluster: lab.Cluster, saved: str, way: str
) -> None:
    found = small_cluster.run(pending.restore, saved, way)
    assert states.all_differences([one.differences for one in found]) == []
    assert all(one.left == () for one in found)
    reads = [one.ahead for one in found]
    if way == "manager_registered_single":  # only the primary replica reads what travels
        assert reads[0] > 3 * pending.SHARE > reads[1]
    else:
        assert min(reads) > pending.SHARE
    assert max(one.read for one in found) < pending.SMALL


def test_the_callers_mesh_does_not_matter(small_cluster: lab.Cluster, saved: str) -> None:
    for one in small_cluster.run(pending.restore, saved, "manager_registered", context="set_mesh"):
        assert (one.differences, one.left) == ([], ())


@pytest.mark.parametrize("way", ["manager_registered", "latest_standard"])
def test_what_exceeds_the_memory_limit_is_read_in_the_result(small_cluster: lab.Cluster, saved: str, way: str) -> None:
    half = pending.SHARE // 2
    for one in small_cluster.run(pending.restore, saved, way, host_memory_limit_bytes=half):
        assert one.differences == []
        assert 0 < one.ahead <= half
        assert one.read > pending.SHARE - half
    assert max(small_cluster.run(pending.held_while_pending, saved, half)) < half + pending.SHARE // 4
    for one in small_cluster.run(pending.restore, saved, way, host_memory_limit_bytes=0):
        assert (one.differences, one.ahead) == ([], 0)


@pytest.mark.parametrize(
    ("room", "travel", "held"),
    [
        ([64 << 20] * 4, False, True),
        ([64 << 20, 12 << 20, 64 << 20, 64 << 20], True, True),
        ([64 << 20, 64 << 20, 0, 64 << 20], True, False),
    ],
    ids=["all", "less on one", "nothing on one"],
)
def test_what_all_processes_have_read_as_a_whole_does_not_travel(
    small_cluster: lab.Cluster, saved: str, room: list[int], travel: bool, held: bool
) -> None:
    found = small_cluster.run(pending.restore_what_is_held, saved, room)
    assert all(differences == [] for differences, *_ in found)
    assert {(exchanges > 0, whole > 0) for _, exchanges, whole in found} == {(travel, held)}
    assert len({(exchanges, whole) for _, exchanges, whole in found}) == 1


@pytest.mark.once
def test_nothing_is_left_of_a_restore_that_nobody_wants(small_cluster: lab.Cluster, saved: str) -> None:
    for left in small_cluster.run(pending.leave, saved):
        for way, held, threads in left:
            assert held < pending.SHARE / 4, way
            assert threads == [], way


def test_two_pending_restores_an_ordinary_one_and_a_save(small_cluster: lab.Cluster, saved: str, path: str) -> None:
    shutil.copytree(saved, path)
    for ordinary, first, second, again, *left in small_cluster.run(pending.several, path):
        assert ordinary == first == second == []
        assert again == ["result() has handed the state over already; a pending restore keeps no reference"]
        assert left == [[]]


@pytest.mark.once
def test_processes_that_restore_different_steps_are_refused(small_cluster: lab.Cluster, saved: str) -> None:
    """They would exchange pieces of both."""
    for texts in small_cluster.run(pending.restore_different_steps, saved):
        assert len(texts) == 2
        for text in texts:
            assert "checkpoint: most have 0/default, but process 1 (" in text
            assert "has 1/default" in text


def test_a_step_that_does_not_exist_is_the_error_of_the_result(small_cluster: lab.Cluster, saved: str) -> None:
    for error, ordinary in small_cluster.run(pending.ask_for_no_step, saved):
        assert error == ordinary


def test_a_step_that_is_deleted_meanwhile_is_the_error_of_the_result(
    small_cluster: lab.Cluster, saved: str, path: str
) -> None:
    shutil.copytree(saved, path)
    for error, ordinary, left in small_cluster.run(pending.delete_meanwhile, path):
        assert error == ordinary
        assert left == []


def test_a_damaged_chunk_is_the_error_of_all(small_cluster: lab.Cluster, saved: str, path: str) -> None:
    shutil.copytree(saved, path)
    file_damage.truncate(str(pathlib.Path(path, "manager", "0")))
    for exchange in ("result", "background"):
        for first, second, *left in small_cluster.run(pending.fail, path, exchange=exchange):
            assert "restore failed on" in first
            assert re.search(r"process(es)? 0 \(", first)  # with others if they have the same error
            assert first == second
            assert left == []


@pytest.mark.parametrize("exchange", ["result", pytest.param("background", marks=pytest.mark.once)])
def test_an_error_of_one_process_is_the_error_of_all(small_cluster: lab.Cluster, saved: str, exchange: str) -> None:
    for text, *left in small_cluster.run(pending.fail_on_one, saved, exchange):
        assert text.startswith("RestoreFailedError: restore failed on 1 process:\n  process 2 (")
        assert "OSError: the disk is gone" in text
        assert left == []


@pytest.mark.parametrize("limit", [None, pytest.param(3.0, marks=pytest.mark.once)])
def test_a_process_that_does_not_ask_is_named_within_the_limits(
    small_cluster: lab.Cluster, saved: str, limit: float | None
) -> None:
    results = small_cluster.run(pending.fail, saved, absent=2, limit=limit)
    for first, second, *left in results[:2] + results[3:]:
        assert "RestoreTimeoutError" in first
        assert "process 2" in first
        assert first == second
        assert left == []


@pytest.mark.once
def test_the_example_computes_what_the_sequential_program_does(small_cluster: lab.Cluster, path: str) -> None:
    sequential, overlapped = (str(EXAMPLES / name) for name in ("train.py", "overlap.py"))
    small_cluster.run(pending.losses, sequential, path, 3)
    shutil.copytree(path, f"{path}_copy")
    expected, *_ = small_cluster.run(pending.losses, sequential, path, 6)
    found, *_ = small_cluster.run(pending.losses, overlapped, f"{path}_copy", 6)
    assert len(expected) == 3
    assert found == expected  # nine digits tell all float32 numbers apart
    assert len((EXAMPLES / "overlap.py").read_text().splitlines()) <= 80


# exchange="background"


@pytest.mark.parametrize("context", ["none", "set_mesh"])
@pytest.mark.parametrize("way", ["manager", "manager_registered", "v1_context"])
def test_the_whole_restore_runs_in_the_background(
    small_cluster: lab.Cluster, saved: str, way: str, context: str
) -> None:
    for one in small_cluster.run(pending.restore_in_background, saved, way, context):
        assert (one.differences, one.left) == ([], ())


@pytest.mark.once
def test_two_whole_restores_run_one_after_the_other(small_cluster: lab.Cluster, saved: str) -> None:
    assert small_cluster.run(pending.several_in_background, saved) == [[[], [], []]] * 4


@pytest.mark.once
def test_a_restore_in_the_background_can_be_waited_for_again(small_cluster: lab.Cluster, saved: str) -> None:
    for message, differences in small_cluster.run(pending.wait_a_little, saved):
        assert "has not ended within 0 s" in message
        assert differences == []


@pytest.mark.once
def test_a_process_that_cancels_in_the_background_ends_it_for_all(small_cluster: lab.Cluster, saved: str) -> None:
    results = small_cluster.run(pending.fail, saved, absent=2, exchange="background")
    for first, second, *left in results[:2] + results[3:]:
        assert "process 2" in first
        assert first == second
        assert left == []


@pytest.mark.once
def test_cancelling_at_the_end_leaves_nobody_in_a_barrier(small_cluster: lab.Cluster, saved: str) -> None:
    """Some are in Orbax's own barrier already: process 0 has to come to it as well."""
    assert small_cluster.run(pending.cancel_at_the_end, saved) == [[]] * 4


@pytest.mark.once
@pytest.mark.parametrize("where", ["read", "meeting"])
def test_cancelling_on_one_process_ends_it_soon_for_all(small_cluster: lab.Cluster, saved: str, where: str) -> None:
    results = small_cluster.run(pending.cancel_on_one, saved, where)
    assert results[1] == ["CancelledError: this restore was cancelled"]
    for text, *left in (results[0], *results[2:]):
        assert "process 1 (" in text
        assert left == []
