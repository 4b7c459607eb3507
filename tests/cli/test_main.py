"""What all commands have in common: help with an example, errors in one line, Ctrl-C, pipes."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext.cli import exits, main

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 120.0

# Mistakes that users make, and what the one line about each must contain: what was found, or what to do.
MISTAKES = {
    "check of nothing": (["check", "{tmp}/none", "--local", "1x1"], "does not exist"),
    "check with a bad mesh": (["check", "{ckpt}", "--mesh", "dp4"], "as in pp=1,dp=4,tp=8"),
    "check with a bad spec": (["check", "{ckpt}", "--spec", "*.w=Q(tp)"], "such as P(None, tp)"),
    "check with a bad size": (["check", "{ckpt}", "--local", "4"], "such as 4x8"),
    "check without time": (["check", "{ckpt}", "--timeout", "0"], "positive number of seconds"),
    "demo of nothing": (["demo", "--megabytes", "0"], "at least 1 megabyte"),
    "inspect of nothing": (["inspect", "{tmp}/none"], "does not exist"),
    "inspect of something else": (["inspect", "{tmp}"], "no step was saved here"),
    "patch of nothing": (["patch", "--to", "{tmp}"], "Give the directory that does"),
    "run of nothing": (["run"], "give a program: a file, or -m and a module"),
    "run with a bad knob": (["run", "--stall-timeout", "-1", "train.py"], "must be a positive number of seconds"),
    "verify of nothing": (["verify", "{tmp}/none"], "does not exist"),
    "verify of something else": (["verify", "{root}"], "is no Orbax checkpoint"),
    "verify without digests": (["verify", "{ckpt}"], "`orbax-ext verify --write` makes it"),
    "verify of a step that is not there": (["verify", "{ckpt}", "--step", "9"], "has no step 9; it has 0"),
}
LONG = {"demo": ["demo", "--json"], "doctor": ["doctor"], "check": ["check", "{ckpt}", "--local", "2x1"]}


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli") / "run"
    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.StandardSave({f"leaf_{number}": np.ones(3) for number in range(40)}))
        manager.wait_until_finished()
    return str(path)


def command(*args: str) -> list[str]:
    """Returns a command line that needs no installation."""
    return [sys.executable, "-m", "orbax_ext.cli", *args]


def start(words: Sequence[str], **kwargs: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(words, env=env, **{**piped, **kwargs})  # type: ignore[call-overload]


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main([name, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert re.search(rf"examples?:\s.*orbax-ext {name}", shown, re.DOTALL)
    assert "\x1b" not in shown


def test_help_lists_every_command_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--help"])
    shown = capsys.readouterr().out
    assert all(re.search(rf"^    {name} ", shown, re.MULTILINE) for name in main.COMMANDS)
    assert all(summary in " ".join(shown.split()) for summary in main.COMMANDS.values())


def test_the_version_is_printed_whatever_follows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--version", "plan"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"orbax-ext {orbax_ext.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "the following arguments are required: COMMAND"), (["plant"], "invalid choice: 'plant'")],
)
def test_a_missing_or_unknown_command_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (exits.EXIT_CANNOT_RUN, "")
    assert message in err
    assert err.endswith("(see orbax-ext --help)\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_line_with_the_remedy(
    mistake: str, ckpt: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = MISTAKES[mistake]
    code = main.main([word.format(ckpt=ckpt, tmp=tmp_path, root=ROOT) for word in words])
    out, err = capsys.readouterr()
    assert (code, out) == (exits.EXIT_CANNOT_RUN, "")
    assert err.startswith(f"orbax-ext {words[0]}: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_directory_without_read_permission_is_reported_in_one_line(
    ckpt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything, whatever the mode
    for name in ("inspect", "verify"):
        assert main.main([name, ckpt]) == exits.EXIT_CANNOT_RUN
        assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("name", LONG)
def test_ctrl_c_ends_a_command_at_once_and_quietly(name: str, ckpt: str) -> None:
    process = start(command(*(word.format(ckpt=ckpt) for word in LONG[name])))
    wait_for_children(process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == exits.EXIT_INTERRUPTED, err
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1] == f"orbax-ext {name}: interrupted"
    wait_until_gone(process.pid)


def test_ctrl_c_is_quiet_while_jax_is_imported() -> None:
    code = """
import os, signal, sys
import orbax_ext.cli.main

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.exit(orbax_ext.cli.main.main())
"""
    process = start([sys.executable, "-c", code, "inspect", "checkpoint"])
    assert process.communicate(timeout=LIMIT) == ("", "orbax-ext: interrupted\n")
    assert process.returncode == exits.EXIT_INTERRUPTED


def test_a_closed_pipe_is_no_error(ckpt: str) -> None:
    process = start(command("inspect", ckpt))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(LIMIT) == exits.EXIT_BROKEN_PIPE


def wait_until_gone(group: int) -> None:
    """Waits until all processes of a command have ended: one that was just starting may need a moment."""
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)


def wait_for_children(process: subprocess.Popen[str]) -> None:
    """Waits until a command has started its own processes."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + LIMIT
    while not children.read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_paths_may_be_relative(
    ckpt: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ckpt, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for words in (
        ["inspect", "run"],
        ["inspect", "run/0"],
        ["plan", "run", "--mesh", "dp=2", "--processes", "2"],
        ["verify", "--write", "run"],
        ["verify", "run/0/default"],
    ):
        assert main.main(words) == exits.EXIT_OK, capsys.readouterr().err
