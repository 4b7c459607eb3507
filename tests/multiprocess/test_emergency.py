"""Restores of Orbax's emergency manager after the loss of hosts, with stock Orbax and with orbax_ext."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import time
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from orbax_ext import lab
from orbax_ext.storage.checkpoint import digest_files
from tests.support import emergency, file_damage, states
from tests.support.emergency import (
    EACH_ITS_OWN,
    ONE_HOST,
    STATE,
    SWAPPED_HOSTS,
    SWAPPED_REPLICAS,
    TWO_HOSTS,
    assert_exact,
    lose,
)

EXAMPLES = int(os.environ.get("ORBAX_EXT_EXAMPLES", "0"))


def once(*values: Any) -> list[Any]:
    """Returns parameters for the newest release alone: on the oldest, others show what depends on it."""
    return [pytest.param(value, marks=pytest.mark.once) for value in values]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Step 1 in both tiers, of a mesh with replicas of one host and of a mesh with replicas of two.

    "two steps" has steps 2 and 3 of a mesh with replicas of two hosts, of which only step 2 is in persistent storage.
    """
    # Stock Orbax's barriers for saving can't be used by two different sets of processes in one job.
    roots = {name: str(tmp_path_factory.mktemp("emergency")) for name in ("one host", "two hosts", "two steps")}
    with lab.Cluster(processes=4, devices=2) as running:
        running.run(emergency.save, roots["one host"], STATE, ONE_HOST)
    with lab.Cluster(processes=4, devices=2) as running:
        running.run(emergency.save, roots["two hosts"], STATE, TWO_HOSTS)
        running.run(emergency.save, roots["two steps"], STATE, TWO_HOSTS, steps=(2, 3), persistent_every=2)
    # The same step once more, so that the hosts of the primary replica have it, too.
    with lab.Cluster(processes=4, devices=2) as running:
        running.run(emergency.save, roots["two hosts"], STATE, SWAPPED_REPLICAS, persistent="other")
    return roots


@pytest.fixture
def root(saved: dict[str, str], tmp_path: pathlib.Path) -> str:
    """Steps of replicas of one host. Hosts 1 to 3 have it; host 0, as primary replica, has saved to storage."""
    shutil.copytree(saved["one host"], tmp_path / "root")
    return str(tmp_path / "root")


@pytest.fixture
def wide_root(saved: dict[str, str], tmp_path: pathlib.Path) -> str:
    """Steps of replicas of two hosts; all four hosts have it."""
    shutil.copytree(saved["two hosts"], tmp_path / "root")
    return str(tmp_path / "root")


def test_stock_fails_under_set_mesh(small_cluster: lab.Cluster, root: str) -> None:
    for result in small_cluster.run(
        emergency.restore, root, STATE, ONE_HOST, implementation="stock", context="set_mesh"
    ):
        assert "Gathering global non-fully-addressable arrays only supports tiled=True" in result.error


def test_stock_changes_data(small_cluster: lab.Cluster, root: str) -> None:
    for result in small_cluster.run(emergency.restore, root, STATE, ONE_HOST, implementation="stock"):
        assert result.error == ""
        assert "mask: dtype int32, not bool" in result.differences
        assert "quantized: dtype int32, not int8" in result.differences
        assert "embedding: bytes" in result.differences


@pytest.mark.parametrize("context", ["none", "set_mesh"])
@pytest.mark.parametrize(
    "lost",
    [(), (1,), (2, 3), (1, 2, 3)],
    ids=["nothing", "one replica", "all but one", "all"],
)
def test_ours_is_exact_after_the_loss_of(
    small_cluster: lab.Cluster, root: str, lost: tuple[int, ...], context: str
) -> None:
    lose(root, *lost, *(["persistent"] if len(lost) < 3 else []))  # storage is needed only if no host has the step
    results = small_cluster.run(emergency.restore, root, STATE, ONE_HOST, context=context)
    assert_exact(results)
    assert set(results[0].strategy) == set(STATE)
    sources = {how.partition(";")[0] for how in results[0].strategy.values()}
    assert sources == {"local: from the hosts that have it" if len(lost) < 3 else "storage: no host has it"}


@pytest.mark.parametrize("context", ["none", "set_mesh", *once("with mesh", "other mesh")])
def test_a_manager_made_before_register_is_served(small_cluster: lab.Cluster, root: str, context: str) -> None:
    lose(root, 2, "persistent")
    assert_exact(small_cluster.run(emergency.restore, root, STATE, ONE_HOST, context=context, manager_first=True))


@pytest.mark.once
def test_two_restores_in_a_row_are_exact(small_cluster: lab.Cluster, root: str) -> None:
    lose(root, 3)
    assert_exact(small_cluster.run(emergency.restore, root, STATE, ONE_HOST, times=2))


@pytest.mark.parametrize("strategy", ["spread", *once("single", "direct")])
def test_any_strategy_reads_what_no_host_has(small_cluster: lab.Cluster, root: str, strategy: str) -> None:
    lose(root, 1, 2, 3)
    assert_exact(small_cluster.run(emergency.restore, root, STATE, ONE_HOST, knobs={"strategy": strategy}))


def test_what_no_host_has_is_read_once(small_cluster: lab.Cluster, root: str) -> None:
    lose(root, 1, 2, 3)
    results = small_cluster.run(emergency.restore, root, STATE, ONE_HOST)
    assert_exact(results)
    size = sum(data.nbytes for data in states.host_data(STATE).values())
    assert size < sum(result.read for result in results) < 1.5 * size
    assert all(how.startswith("storage: no host has it; spread") for how in results[0].strategy.values())


def test_verify_compares_with_the_digests_of_the_persistent_step(small_cluster: lab.Cluster, root: str) -> None:
    state = f"{root}/persistent/1/default"
    records = {name: record for name, record in digest_files.compute(state) if isinstance(record, dict)}
    digest_files.write(state, records)
    assert_exact(small_cluster.run(emergency.restore, root, STATE, ONE_HOST, knobs={"verify": True}))
    records["bias"]["digest"] = "0" * 16
    digest_files.write(state, records)
    for result in small_cluster.run(emergency.restore, root, STATE, ONE_HOST, knobs={"verify": True}):
        assert result.error.startswith("RestoreFailedError")
        assert "bias" in result.error


@pytest.mark.parametrize("lost", [(0, 1, 2), *once((1, 2), (2,))])
def test_hosts_that_complement_each_other_need_no_storage(
    small_cluster: lab.Cluster, wide_root: str, lost: tuple[int, ...]
) -> None:
    lose(wide_root, *lost)
    if len(lost) < 3:  # otherwise two hosts of four, which hold half of each leaf
        lose(wide_root, "persistent")
    results = small_cluster.run(emergency.restore, wide_root, STATE, TWO_HOSTS)
    assert_exact(results)
    assert any("no host has all of" in line for line in results[0].lines) == (len(lost) == 3)


def test_hosts_with_more_blocks_than_they_load_need_no_storage(small_cluster: lab.Cluster, wide_root: str) -> None:
    """Hosts 0 and 2 have one half of each leaf, the others the other half; each needs another quarter."""
    lose(wide_root, "persistent")
    results = small_cluster.run(emergency.restore, wide_root, STATE, EACH_ITS_OWN)
    assert_exact(results)
    assert results[0].strategy["layer_0"] == "local: from the hosts that have it"


def test_stock_reads_storage_although_the_hosts_have_the_step(small_cluster: lab.Cluster, wide_root: str) -> None:
    lose(wide_root, 1, 2)
    for result in small_cluster.run(emergency.restore, wide_root, STATE, TWO_HOSTS, implementation="stock"):
        assert "restoring step=1 from persistent checkpoint" in "".join(result.lines)


def test_nothing_travels_if_every_host_has_the_step(small_cluster: lab.Cluster, wide_root: str) -> None:
    lose(wide_root, "persistent")
    results = small_cluster.run(emergency.restore, wide_root, STATE, TWO_HOSTS)
    assert_exact(results)
    assert results[0].strategy == dict.fromkeys(STATE, "local: every host has it")
    assert [(result.received, result.collectives) for result in results] == [(0, 0)] * 4
    lose(wide_root, 1)
    results = small_cluster.run(emergency.restore, wide_root, STATE, TWO_HOSTS)
    assert_exact(results)
    assert results[1].received > 0
    assert results[1].collectives > 0


@pytest.fixture
def half_a_step(saved: dict[str, str], tmp_path: pathlib.Path) -> str:
    """Step 2 in persistent storage, and of step 3 the half that host 2 had."""
    root = tmp_path / "root"
    shutil.copytree(saved["two steps"], root)
    assert [path.name for path in (root / "persistent").iterdir() if path.name.isdigit()] == ["2"]
    shutil.rmtree(root / "host2" / "2")
    lose(str(root), 3)
    return str(root)


@pytest.mark.parametrize("implementation", ["stock", "ours"])
def test_the_manager_chooses_an_older_step_if_the_newest_is_not_complete(
    small_cluster: lab.Cluster, half_a_step: str, implementation: str
) -> None:
    results = small_cluster.run(
        emergency.restore, half_a_step, STATE, TWO_HOSTS, None, implementation=implementation, expected=2
    )
    assert [result.error for result in results] == [""] * 4
    assert all("Restoring at step 2." in result.lines for result in results)
    if implementation == "ours":
        assert_exact(results)
    else:
        assert "step: bytes" not in results[0].differences  # other leaves are changed by stock's sum


def test_a_program_can_restore_an_older_step_after_one_that_is_not_complete(
    small_cluster: lab.Cluster, half_a_step: str
) -> None:
    results = small_cluster.run(emergency.restore_older, half_a_step, STATE, TWO_HOSTS, 3, 2)
    assert len({error for error, _ in results}) == 1
    assert results[0][0].startswith("FileNotFoundError: No steps found in either local or persistent storage")
    assert "step 3" in results[0][0]
    assert states.all_differences([differences for _, differences in results]) == []


@pytest.mark.parametrize("lost", [(0, 1), *once((), (0, 1, 3))])
def test_hosts_that_changed_places_send_what_they_have(
    small_cluster: lab.Cluster, wide_root: str, lost: tuple[int, ...]
) -> None:
    lose(wide_root, *lost)
    assert_exact(small_cluster.run(emergency.restore, wide_root, STATE, SWAPPED_HOSTS))


@pytest.mark.parametrize(("lost", "fate"), [((), "it is taken from them"), ((2, 3), "it is used, because they do not")])
def test_a_step_of_an_earlier_run_is_used_only_if_others_do_not_have_it(
    small_cluster: lab.Cluster, wide_root: str, lost: tuple[int, ...], fate: str
) -> None:
    lose(wide_root, *lost, "persistent")
    file = pathlib.Path(wide_root, "host1", "1", "_CHECKPOINT_METADATA")
    metadata = json.loads(file.read_text())
    metadata["init_timestamp_nsecs"] -= 3600 * 10**9
    file.write_text(json.dumps(metadata))
    results = small_cluster.run(emergency.restore, wide_root, STATE, TWO_HOSTS)
    assert_exact(results)
    lines = ["perhaps in another run; " + fate in "".join(result.lines) for result in results]
    assert lines == [False, True, False, False]
    assert (results[1].received > 0) == (not lost)


def test_a_step_that_was_being_saved_counts_for_nothing(small_cluster: lab.Cluster, root: str) -> None:
    step = pathlib.Path(root, "host1", "1")
    (step / "commit_success.txt").unlink(missing_ok=True)  # releases with an atomic rename write none
    step.rename(step.with_name("1.orbax-checkpoint-tmp"))
    lose(root, "persistent")
    assert_exact(small_cluster.run(emergency.restore, root, STATE, ONE_HOST))


def test_a_partial_step_counts_for_nothing(small_cluster: lab.Cluster, root: str) -> None:
    pathlib.Path(root, "host1", "1", "state", "manifest.ocdbt").unlink()
    shutil.rmtree(pathlib.Path(root, "host2", "1", "state"))
    lose(root, "persistent")
    results = small_cluster.run(emergency.restore, root, STATE, ONE_HOST)
    assert_exact(results)
    for process, result in enumerate(results):
        lines = [line for line in result.lines if "can't be read; other hosts or storage" in line]
        assert len(lines) == (process in (1, 2)), lines


@pytest.mark.parametrize(
    "damage", [file_damage.truncate_largest, file_damage.truncate, file_damage.corrupt, file_damage.remove]
)
def test_a_damaged_host_is_no_reader(small_cluster: lab.Cluster, root: str, damage: Any) -> None:
    damage(f"{root}/host1/1")
    lose(root, "persistent")
    results = small_cluster.run(emergency.restore, root, STATE, ONE_HOST)
    assert_exact(results)
    assert ["can't be read; other hosts or storage" in "".join(result.lines) for result in results] == [
        False,
        True,
        False,
        False,
    ]


@pytest.mark.once
def test_a_leaf_that_differs_from_its_digest_is_not_sent(small_cluster: lab.Cluster, root: str) -> None:
    emergency.write_wrong_digest(f"{root}/host1/1/state", "weights")
    lose(root, "persistent")
    results = small_cluster.run(emergency.restore, root, STATE, ONE_HOST)
    assert_exact(results)
    (line,) = [line for line in results[1].lines if "can't be read; other hosts or storage" in line]
    assert "1 leaf" in line
    assert "weights (its digest is " in line


@pytest.mark.once
def test_verify_compares_what_hosts_have_also_if_another_leaf_comes_from_storage(
    small_cluster: lab.Cluster, root: str
) -> None:
    for host in (1, 2, 3):
        emergency.write_wrong_digest(f"{root}/host{host}/1/state", "layer_0")
    emergency.write_wrong_digest(f"{root}/persistent/1/default", "bias")
    for result in small_cluster.run(emergency.restore, root, STATE, ONE_HOST, knobs={"verify": True}):
        assert result.error.startswith("RestoreFailedError")
        assert "bias" in result.error


def test_storage_replaces_what_is_damaged_on_all_hosts(small_cluster: lab.Cluster, root: str) -> None:
    for host in (1, 2, 3):
        file_damage.truncate(f"{root}/host{host}/1")
    assert_exact(small_cluster.run(emergency.restore, root, STATE, ONE_HOST))


@pytest.mark.once
def test_one_report_is_about_hosts_and_storage(small_cluster: lab.Cluster, root: str) -> None:
    for host in (1, 2, 3):
        emergency.write_wrong_digest(f"{root}/host{host}/1/state", "layer_0")
    results = small_cluster.run(emergency.restore, root, STATE, ONE_HOST)
    assert_exact(results)
    strategy = dict(results[0].strategy)
    assert strategy.pop("layer_0").startswith("storage: no host has it; ")
    assert dict(strategy) == {name: "local: from the hosts that have it" for name in STATE if name != "layer_0"}


def test_without_hosts_and_storage_all_processes_raise_the_same(small_cluster: lab.Cluster, root: str) -> None:
    lose(root, 1, 2, 3, "persistent")
    results = small_cluster.run(emergency.restore, root, STATE, ONE_HOST)
    assert len({result.error for result in results}) == 1
    assert results[0].error.startswith("FileNotFoundError: No steps found in either local or persistent storage")


def test_a_read_error_on_one_host_is_no_failure(small_cluster: lab.Cluster, root: str) -> None:
    results = small_cluster.run(emergency.restore, root, STATE, ONE_HOST, fault=(2, "read error"))
    assert_exact(results)
    assert "the disk is gone" in "".join(results[2].lines)


def test_a_read_error_from_storage_is_raised_by_all_and_the_next_restore_works(
    small_cluster: lab.Cluster, root: str
) -> None:
    lose(root, 1, 2, 3)
    fault, knobs = (0, "read error"), {"strict_readers": True}
    results = small_cluster.run(emergency.restore_after_failure, root, STATE, ONE_HOST, fault, knobs)
    for error, _ in results:
        assert error.startswith("RestoreFailedError")
        assert "process 0" in error
        assert "the disk is gone" in error
    assert_exact([after for _, after in results])


@pytest.mark.parametrize("lost", [(), *once((2, 3))], ids=["moved", "summed"])
def test_an_exception_in_an_exchange_is_raised_by_all_and_the_next_restore_works(
    small_cluster: lab.Cluster, root: str, lost: tuple[int, ...]
) -> None:
    lose(root, *lost, "persistent")
    fault, knobs = (1, "exception in exchange"), {"broadcast_memory_limit_bytes": 1 << 20}  # several groups
    results = small_cluster.run(emergency.restore_after_failure, root, STATE, ONE_HOST, fault, knobs)
    for error, _ in results:
        assert error.startswith("RestoreFailedError")
        assert "process 1 (" in error
        assert "MemoryError: no room for the exchange" in error
    assert_exact([after for _, after in results])


def test_an_error_while_listing_local_steps_is_raised_by_all_and_the_next_restore_works(
    small_cluster: lab.Cluster, root: str
) -> None:
    fault, began = (2, "listing error"), time.monotonic()
    results = small_cluster.run(emergency.restore_after_failure, root, STATE, ONE_HOST, fault, {"stall_timeout": 120.0})
    assert time.monotonic() - began < 100  # nobody has waited for the process that failed
    for error, _ in results:
        assert error.startswith("RestoreFailedError")
        assert "process 2 (" in error
        assert "in phase 'list local steps': OSError: the RAM disk is gone" in error
    assert_exact([after for _, after in results])


@pytest.mark.parametrize("strategy", ["auto", *once("direct")])
def test_an_error_before_the_first_meeting_is_raised_by_all(
    small_cluster: lab.Cluster, root: str, strategy: str
) -> None:
    fault, knobs = (2, "error while describing"), {"strategy": strategy, "stall_timeout": 5.0}
    for result in small_cluster.run(emergency.restore, root, STATE, ONE_HOST, fault=fault, knobs=knobs):
        assert result.error.startswith("RestoreFailedError")
        assert "process 2 (" in result.error
        assert "OSError: no metadata here" in result.error


@pytest.mark.once
def test_a_late_reader_is_waited_for(small_cluster: lab.Cluster, root: str) -> None:
    results = small_cluster.run(emergency.restore_with_late_reader, root, STATE, ONE_HOST, 1)
    assert_exact([result for result, _, _ in results])
    last = max(loaded for _, loaded, _ in results)
    assert [entered > last for _, _, entered in results] == [True] * 4


@pytest.mark.once
def test_a_killed_reader_is_named_by_all_others(root: str) -> None:
    with lab.Cluster(processes=4, devices=2) as running:
        knobs = {"stall_timeout": 5.0}
        outcomes = running.submit(emergency.restore, root, STATE, ONE_HOST, fault=(2, "killed"), knobs=knobs).outcomes(
            90
        )
    assert [outcome.state for outcome in outcomes] == ["returned", "returned", "died", "returned"]
    for outcome in outcomes:
        if outcome.rank != 2:
            assert "process 2" in outcome.value.error


@pytest.mark.property
@hypothesis.settings(
    max_examples=EXAMPLES or 12,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    print_blob=False,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(
    lost=st.sets(st.sampled_from([0, 1, 2, 3])),
    damaged=st.sets(st.sampled_from([0, 1, 2, 3]), max_size=2),
    stored=st.booleans(),
    mesh=st.sampled_from([TWO_HOSTS, SWAPPED_HOSTS, SWAPPED_REPLICAS]),
    context=st.sampled_from(["none", "set_mesh"]),
)
def test_any_loss_of_hosts_is_made_up_for_or_named(
    small_cluster: lab.Cluster,
    saved: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    lost: set[int],
    damaged: set[int],
    stored: bool,
    mesh: states.MeshSpec,
    context: str,
) -> None:
    root = str(tmp_path_factory.mktemp("loss") / "root")
    shutil.copytree(saved["two hosts"], root)
    lose(root, *lost, *([] if stored else ["persistent"]))
    for host in damaged:
        file_damage.truncate(f"{root}/host{host}")
    # Hosts 0 and 2 hold the same half of each leaf, hosts 1 and 3 the other.
    left = {host % 2 for host in range(4) if host not in lost | damaged}
    results = small_cluster.run(emergency.restore, root, STATE, mesh, context=context)
    if stored or left == {0, 1}:
        assert_exact(results)
    else:
        assert {result.error.partition(":")[0] for result in results} == {"FileNotFoundError"}
