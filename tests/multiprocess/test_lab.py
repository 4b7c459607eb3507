"""The local cluster of `orbax_ext.lab`."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from orbax_ext import lab
from orbax_ext.lab import cluster as cluster_lib

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def pair() -> Iterator[lab.Cluster]:
    with lab.Cluster(processes=2, devices=2) as running:
        yield running


def test_functions_run_one_after_another_on_all_processes(pair: lab.Cluster) -> None:
    assert pair.run(who_am_i) == [(0, 2, 4), (1, 2, 4)]
    first = pair.pids
    assert pair.run(add, 1, by=2) == [3, 3]
    assert pair.pids == first


def test_processes_are_forked_unless_jax_must_be_imported_again(pair: lab.Cluster) -> None:
    (server,) = {parent for parent, _, _, _ in pair.run(describe)}
    assert server != os.getpid()
    with lab.Cluster(1, env={"MINE": "1", "ORBAX_EXT_LAB_PRELOAD": "colorsys wave"}) as other:
        assert other.run(describe) == [(server, False, "1", True)]
    with lab.Cluster(1, env={"JAX_ENABLE_X64": "1"}) as other:
        ((parent, x64, mine, _),) = other.run(describe)
    assert parent != server
    assert (x64, mine) == (True, None)
    with lab.Cluster(1, command_prefix=lambda rank: ("env", "MINE=2")) as other:
        assert other.run(describe) == [(os.getpid(), False, "2", False)]


def test_forked_processes_draw_different_numbers(pair: lab.Cluster) -> None:
    first, second = pair.run(draw)
    assert first != second


def test_the_fork_server_ends_with_its_parent() -> None:
    script = (
        "import os; from orbax_ext import lab; from tests.multiprocess.test_lab import describe\n"
        "cluster = lab.Cluster(1); print(cluster.run(describe)[0][0], cluster.pids[0], flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    deadline = time.monotonic() + 30
    left = {int(pid) for pid in done.stdout.split()}
    assert len(left) == 2
    while left := {pid for pid in left if runs(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_failure_shows_the_traceback_and_the_log_of_the_process(pair: lab.Cluster) -> None:
    with pytest.raises(lab.RunFailedError) as caught:
        pair.run(fail_on_1)
    assert "process 1 raised KeyError: 'missing'" in str(caught.value)
    assert "in fail_on_1" in str(caught.value)
    assert "about to fail" in str(caught.value)
    assert [outcome.state for outcome in caught.value.outcomes] == ["returned", "raised"]
    assert pair.run(add, 1) == [2, 2]  # the cluster is still there


def test_a_hang_ends_at_the_limit_and_shows_its_stack(pair: lab.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_lib, "_STACKS_DELAY", 3.0)  # a busy machine writes them late
    with pytest.raises(lab.RunFailedError, match="process 0 timed out") as caught:
        pair.run(hang, timeout=2)
    assert "in hang" in str(caught.value)
    assert pair.run(add, 1) == [2, 2]  # in new processes


def test_a_process_that_dies_is_reported_and_replaced(pair: lab.Cluster) -> None:
    outcomes = pair.outcomes(die_on_1, timeout=10)
    assert outcomes[1].state == "died"
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert pair.run(add, 1) == [2, 2]


def test_a_start_without_process_0_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit of the parent's, the other processes would wait for three minutes."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(cluster_lib, "reserved_port", lambda: contextlib.nullcontext(port))
        started, cluster = time.monotonic(), lab.Cluster(processes=2)
        with pytest.raises(lab.RunFailedError, match="the cluster did not start") as caught:
            cluster.start()
        cluster.close()
    # JAX raises an error where its service gets no port, or it crashes on the way.
    first, second = (outcome.state for outcome in caught.value.outcomes)
    assert first in ("raised", "died")
    assert f"process 0 {first}" in str(caught.value)
    assert second == "timed out"
    assert time.monotonic() - started < 90


def test_no_process_is_left_behind() -> None:
    with lab.Cluster(processes=2) as cluster:
        pids = cluster.pids
        cluster.outcomes(ignore_sigterm, timeout=1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_function_without_an_importable_name_is_refused(pair: lab.Cluster) -> None:
    with pytest.raises(ValueError, match="must be a module's own function"):
        pair.run(lambda: 1)


def test_a_users_own_script_works(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from orbax_ext import lab\n"
        "def count():\n"
        "    import jax\n"
        "    return jax.device_count()\n"
        "if __name__ == '__main__':\n"
        "    with lab.Cluster(processes=2, devices=3) as cluster:\n"
        "        print(cluster.run(count))\n"
    )
    root = pathlib.Path(lab.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "[6, 6]\n", done.stderr


def runs(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Run on the processes.


def who_am_i() -> tuple[int, int, int]:
    import jax

    return jax.process_index(), jax.process_count(), jax.device_count()


def describe() -> tuple[int, bool, str | None, bool]:
    """Returns the parent, whether JAX has 64 bits, a variable, and whether the preloaded modules are there."""
    import jax

    return os.getppid(), jax.config.jax_enable_x64, os.environ.get("MINE"), {"colorsys", "wave"} <= sys.modules.keys()


def draw() -> tuple[float, float]:
    import numpy as np

    return random.random(), float(np.random.rand())


def add(number: int, by: int = 1) -> int:
    return number + by


def fail_on_1() -> None:
    import jax

    if jax.process_index() == 1:
        print("about to fail")
        raise KeyError("missing")


def hang() -> None:
    time.sleep(600)


def die_on_1() -> None:
    import jax

    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
