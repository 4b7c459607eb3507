"""`orbax-ext run`: a program runs as under plain Python, with orbax_ext registered."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence

import numpy as np
import orbax.checkpoint as ocp
import pytest

from orbax_ext.cli import exits, knobs
from orbax_ext.options import DEPRECATED, FIELDS, Options
from orbax_ext.report.report import RestoreReport

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 120.0
RUN = (sys.executable, "-m", "orbax_ext", "run")

# What a program sees of itself.
PROBE = """
import builtins, json, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "package": __package__,
    "cached": __cached__, "spec": getattr(__spec__, "name", None), "loader": type(__loader__).__name__,
    "own namespace": vars(main) is globals(), "names": sorted(globals()), "builtins": __builtins__ is builtins,
}))
"""
# Programs that end in different ways.
ENDINGS = {
    "the last statement": "print('done')",
    "exit 3": "import sys; print('3'); sys.exit(3)",
    "exit without a code": "raise SystemExit",
    "exit None": "import sys; sys.exit(None)",
    "exit True": "import sys; sys.exit(True)",
    "exit with a text": "import sys; sys.exit('the disk is full')",
    "exit with an object": "import sys; sys.exit([1, 2])",
    "exit in a function": "def main():\n    return 7\nif __name__ == '__main__':\n    exit(main())",
    "an exception": "def train():\n    raise ValueError('bad batch')\ntrain()",
    "an exception in a library": "import json\njson.loads('{')",
    "chained exceptions": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
    "an exception while another is handled": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    {}['x']",
    "an exception group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
    "a syntax error": "x = 1\nprint(x\ny = 2",
    "a syntax error inside": "exec('1 +')",
    "bytes that are no text": "x = '\\udcff'",
    "a missing module": "import no_such_module",
    "an interrupt": "raise KeyboardInterrupt",
    "an exit without cleaning up": "import os; print('x', flush=True); os._exit(5)",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "a closed standard output": "import sys; sys.stdout.close()",
    "its own hook for exceptions": "import sys\n"
    "def hook(kind, error, tb):\n    print(kind.__name__, tb.tb_frame.f_code.co_name, tb is error.__traceback__)\n"
    "sys.excepthook = hook\n1 / 0",
    "a function at exit": "import atexit, sys\nglobal_name = 7\n"
    "atexit.register(lambda: print(global_name, sys.modules['__main__'].global_name, sys.argv))",
    "a thread that goes on": "import sys, threading, time\nvalue = 7\n"
    "threading.Thread(target=lambda: (time.sleep(0.3), print(value, sys.modules['__main__'].value))).start()",
    "a process of its own": "import multiprocessing\ndef double(x):\n    return 2 * x\n"
    "if __name__ == '__main__':\n    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
    "        print(pool.map(double, [1, 2]))",
    "a forked process": "import os, sys\nif os.fork() == 0:\n    sys.exit(3)\n"
    "print(os.waitstatus_to_exitcode(os.wait()[1]))",
    "a pickled class": "import pickle\nclass State:\n    pass\nprint(type(pickle.loads(pickle.dumps(State()))))",
}


def execute(
    *words: str, cwd: pathlib.Path, env: Mapping[str, str] | None = None, code: int | None = None
) -> tuple[int, str, str]:
    """Runs a command and returns its exit code, output and errors."""
    done = subprocess.run(
        words, cwd=cwd, env=environment(env), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert code is None or done.returncode == code, done.stderr
    return done.returncode, done.stdout, done.stderr


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(knobs.PREFIX)}
    return {**own, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **(more or {})}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A working directory with the probe as a script, in a package, as a package's main, in a folder and a zip file."""
    for name in ("train.py", "jobs/train.py", "package/__init__.py", "package/module.py", "package/__main__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if name.endswith("__init__.py") else PROBE)
    (tmp_path / "link.py").symlink_to("jobs/train.py")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "__main__.py").write_text(PROBE)
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w") as bundle:
        bundle.writestr("__main__.py", PROBE)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-b", "jobs"], cwd=tmp_path, check=True)
    return tmp_path


PROGRAMS = {
    "a file": ["train.py"],
    "a file elsewhere": ["jobs/train.py"],
    "a link": ["link.py"],
    "a compiled file": ["jobs/train.pyc"],
    "a module": ["-m", "package.module"],
    "a package": ["-m", "package"],
    "a module beside": ["-m", "train"],
    "a module, written together": ["-mtrain"],
    "a folder": ["bundle"],
    "a zip file": ["bundle.zip"],
}


@pytest.mark.once
@pytest.mark.parametrize("arguments", [[], ["a", "--report", "x", "-m", "--str", "--", "--help", ""]], ids=len)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_sees_itself_as_under_python(name: str, arguments: list[str], folder: pathlib.Path) -> None:
    words = [*PROGRAMS[name], *arguments]
    plain = execute(sys.executable, *words, cwd=folder, code=0)
    assert json.loads(plain[1])["argv"][1:] == arguments
    assert execute(*RUN, "--strategy", "single", "--no-verify", *words, cwd=folder) == plain


@pytest.mark.once
def test_the_installed_command_and_a_safe_path_are_the_same(folder: pathlib.Path) -> None:
    script = "import sys; from orbax_ext.cli.main import main; sys.exit(main())"  # as pip writes it
    (folder / "bin").mkdir()
    (folder / "bin" / "orbax-ext").write_text(script)
    plain = execute(sys.executable, "jobs/train.py", "x", cwd=folder)
    assert execute(sys.executable, "bin/orbax-ext", "run", "jobs/train.py", "x", cwd=folder) == plain
    safe = {"PYTHONSAFEPATH": "1"}
    for words in (["jobs/train.py"], ["bundle"]):
        plain = execute(sys.executable, *words, cwd=folder, env=safe)
        assert execute(*RUN, *words, cwd=folder, env=safe) == plain


@pytest.mark.once
@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_ends_as_under_python(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(ENDINGS[name], errors="surrogateescape")
    plain = execute(sys.executable, "train.py", "x", cwd=tmp_path)
    assert execute(*RUN, "train.py", "x", cwd=tmp_path) == plain


@pytest.mark.once
@pytest.mark.parametrize("name", ["exit 3", "an exception", "an interrupt", "a process of its own"])
def test_a_module_ends_as_under_python(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(ENDINGS[name])
    code, out, err = execute(sys.executable, "-m", "train", "x", cwd=tmp_path)
    without_python_s_frames = re.sub(r'  File "<frozen .*\n', "", err)
    assert execute(*RUN, "-m", "train", "x", cwd=tmp_path) == (code, out, without_python_s_frames)


@pytest.mark.once
def test_ctrl_c_ends_a_program_as_under_python(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(100)")
    ends = []
    for command in ((sys.executable,), RUN):
        process = subprocess.Popen(
            [*command, "train.py"], cwd=tmp_path, env=environment(), stdout=-1, stderr=-1, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        wait_until_asleep(process)
        process.send_signal(signal.SIGINT)
        ends.append((*process.communicate(timeout=LIMIT), process.returncode))
    assert ends[0] == ends[1]
    assert ends[1][2] == -signal.SIGINT
    assert ends[1][1].endswith("KeyboardInterrupt\n")


def wait_until_asleep(process: subprocess.Popen[str]) -> None:
    """Waits until a program sleeps: Ctrl-C before that would interrupt another line of it."""
    stat, deadline = pathlib.Path(f"/proc/{process.pid}/stat"), time.monotonic() + LIMIT
    time.sleep(0.1)  # is enough nearly always, and elsewhere than on Linux it has to be
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "S":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.once
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a program: a file, or -m and a module"),
        (["-m"], "give a module after -m"),
        (["none.py"], "none.py': No such file or directory"),
        (["-m", "no_such_module"], "no module named 'no_such_module'"),
        (["-m", "package.none"], "no module named 'package.none'"),
        (["-m", "empty"], "no module named 'empty.__main__'"),
        (["-m", ".x"], "'.x' is no full name of a module"),
        (["empty"], "can't find '__main__' in 'empty'"),
    ],
)
def test_a_program_that_is_not_there_is_one_line(words: list[str], message: str, folder: pathlib.Path) -> None:
    (folder / "empty").mkdir()
    _, out, err = execute(*RUN, *words, cwd=folder, code=exits.EXIT_CANNOT_RUN)
    assert out == ""
    assert err.startswith("orbax-ext run: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.once
@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        (["--stall-timeout", "soon"], {}, "--stall-timeout: expected a number; found 'soon'"),
        (["--stall-timeout", "-5"], {}, "--stall-timeout: stall_timeout must be a positive number of seconds"),
        (["--strategy", "fast"], {}, "--strategy: expected one of auto, spread, single, direct; found 'fast'"),
        (["--replica-axs", "dp"], {}, "unrecognized arguments: --replica-axs"),
        (["--replica-axis", "dp,,tp"], {}, "expected a name, an index, or several with commas between them"),
        (["--primary-replica-id", "1.5"], {}, "--primary-replica-id: expected a whole number; found '1.5'"),
        (["--timeout", "nan"], {}, "--timeout: expected a number; found 'nan'"),
        (["--replica-axis", "a", "--replica-axis-index", "0"], {}, "--replica-axis, --replica-axis-index: Give "),
        (["--report", "restore.txt"], {}, "--report: expected a name that ends in .json or .html"),
        ([], {"REPORT": "restore.txt"}, "ORBAX_EXT_REPORT: expected a name that ends in .json or .html"),
        ([], {"STALL_TIMEOUT": "soon"}, "ORBAX_EXT_STALL_TIMEOUT: expected a number; found 'soon'"),
        ([], {"TIMEOUT": "0"}, "ORBAX_EXT_TIMEOUT: timeout must be a positive number of seconds or None; found 0.0"),
        ([], {"VERIFY": "maybe"}, "ORBAX_EXT_VERIFY: expected true or false; found 'maybe'"),
        ([], {"REPLICA_AXS": "dp"}, "unknown variable ORBAX_EXT_REPLICA_AXS; did you mean ORBAX_EXT_REPLICA_AXIS?"),
    ],
)
def test_a_bad_value_is_one_line_and_the_program_does_not_start(
    words: list[str], env: dict[str, str], message: str, folder: pathlib.Path
) -> None:
    variables = {knobs.PREFIX + name: value for name, value in env.items()}
    _, out, err = execute(*RUN, *words, "train.py", cwd=folder, env=variables, code=exits.EXIT_CANNOT_RUN)
    assert out == ""
    assert err.startswith("orbax-ext")
    assert message in err
    assert err.count("\n") == 1


REGISTERED = """
import dataclasses, json, os, sys
os.environ["JAX_NUM_CPU_DEVICES"] = "3"  # counts if JAX is imported later
assert not {"jax", "orbax.checkpoint"} & set(sys.modules)
import jax
import orbax.checkpoint as ocp
from jax._src import xla_bridge
handler = ocp.type_handlers.get_type_handler(jax.Array)
assert not xla_bridge.backends_are_initialized()
print(json.dumps([type(handler).__name__, len(jax.devices()), dataclasses.asdict(handler.options)]))
"""


def registered(folder: pathlib.Path, words: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Options:
    """Returns the options of the handler that a program finds registered."""
    (folder / "registered.py").write_text(REGISTERED)
    _, out, _ = execute(*RUN, *words, "registered.py", cwd=folder, env=env, code=0)
    name, devices, options = json.loads(out)
    assert (name, devices) == ("BroadcastArrayHandler", 3)
    return Options(**options)


def test_every_knob_can_be_given_as_an_option_and_as_a_variable(tmp_path: pathlib.Path) -> None:
    texts = {
        "replica_axis": ("dp,1", ["dp", 1]),
        "primary_replica_id": ("2", 2),
        "strategy": ("spread", "spread"),
        "broadcast_memory_limit_bytes": ("1000", 1000),
        "broadcast_memory_scaling_factor": ("none", None),
        "request_concurrency": ("16", 16),
        "stall_timeout": ("7", 7.0),
        "timeout": ("900", 900.0),
        "stall_seconds": ("20", 20.0),
        "stall_rate": ("1000", 1000),
        "late_seconds": ("2.5", 2.5),
        "strict_readers": ("true", True),
        "verify": ("true", True),
        "progress": ("no", False),
    }
    assert {*texts, "replica_axis_index", *DEPRECATED} == set(FIELDS)
    expected = Options(**{name: value for name, (_, value) in texts.items()})  # type: ignore[arg-type]
    variables = {knobs.PREFIX + name.upper(): text for name, (text, _) in texts.items()}
    assert registered(tmp_path, env={**variables, "ORBAX_EXT_SOMETHING_ELSE": "1"}) == expected
    words = [f"--{name.replace('_', '-')}={text}" for name, (text, _) in texts.items() if text not in ("true", "no")]
    assert registered(tmp_path, [*words, "--strict-readers", "--verify", "--no-progress"]) == expected
    assert registered(tmp_path, ["--replica-axis-index", "2"]) == Options(replica_axis_index=2)


@pytest.mark.parametrize(
    "statement",
    [
        "from orbax import checkpoint as ocp",
        "import orbax.checkpoint.experimental.v1\nimport orbax.checkpoint as ocp",
        "from orbax.checkpoint import type_handlers\nimport orbax.checkpoint as ocp",
        "import importlib.util\nassert importlib.util.find_spec('orbax.checkpoint')\nimport orbax.checkpoint as ocp",
        "import orbax_ext\norbax_ext.register(verify=True)\nimport orbax.checkpoint as ocp",
    ],
)
def test_it_is_registered_however_the_program_imports_orbax(statement: str, tmp_path: pathlib.Path) -> None:
    rest = "import jax\nprint(type(ocp.type_handlers.get_type_handler(jax.Array)).__name__, ocp.__spec__.name)"
    (tmp_path / "train.py").write_text(f"{statement}\n{rest}")
    _, out, _ = execute(*RUN, "train.py", cwd=tmp_path, code=0)
    assert out == "BroadcastArrayHandler orbax.checkpoint\n"


@pytest.mark.once
def test_the_command_line_counts_more_than_the_environment(tmp_path: pathlib.Path) -> None:
    env = {
        "ORBAX_EXT_REPLICA_AXIS": "fsdp",
        "ORBAX_EXT_TIMEOUT": "9",
        "ORBAX_EXT_VERIFY": "1",
        "ORBAX_EXT_STRATEGY": "",
    }
    words = ["--replica-axis-index", "0", "--timeout", "none", "--no-verify"]
    assert registered(tmp_path, words, env) == Options(replica_axis_index=0)


@pytest.mark.once
def test_a_program_without_orbax_imports_nothing_heavy(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys; print({'jax', 'orbax.checkpoint', 'tensorstore'} & set(sys.modules))"
    )
    assert execute(*RUN, "train.py", cwd=tmp_path) == (0, "set()\n", "")


@pytest.mark.once
def test_every_knob_has_its_help() -> None:
    for name in FIELDS:
        assert len(knobs._help()[name]) > 20


RESTORING = """
import os, sys
import jax
import orbax.checkpoint as ocp
os.chdir("/")
with ocp.CheckpointManager(sys.argv[1]) as manager:
    state = manager.restore(0)
if sys.argv[2] == "fails":
    raise RuntimeError("after the restore")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("ending", ["0", "3", "fails"])
def test_the_report_is_left_however_the_program_ends(ending: str, tmp_path: pathlib.Path) -> None:
    save(tmp_path / "checkpoint")
    (tmp_path / "train.py").write_text(RESTORING)
    words = ["train.py", str(tmp_path / "checkpoint"), ending]
    code, _, err = execute(*RUN, "--report", "restore.json", *words, cwd=tmp_path)
    assert code == {"fails": 1}.get(ending, int(ending) if ending.isdigit() else 1)
    assert ("RuntimeError: after the restore" in err) == (ending == "fails")
    report = RestoreReport.from_json((tmp_path / "restore.json").read_text())
    assert (report.leaves, report.process, report.error) == (1, 0, "")


@pytest.mark.once
def test_the_report_can_be_a_page(tmp_path: pathlib.Path) -> None:
    save(tmp_path / "checkpoint")
    (tmp_path / "train.py").write_text(RESTORING)
    words = ["train.py", str(tmp_path / "checkpoint"), "0"]
    execute(*RUN, *words, cwd=tmp_path, env={"ORBAX_EXT_REPORT": "restore.html"}, code=0)
    assert (tmp_path / "restore.html").read_text().startswith("<!")
    _, _, err = execute(*RUN, "--report", "none/restore.html", *words, cwd=tmp_path, code=0)
    assert err.endswith("none/restore.html: No such file or directory\n")


@pytest.mark.once
def test_a_report_of_nothing_is_said(folder: pathlib.Path) -> None:
    _, _, err = execute(*RUN, "--report", "restore.json", "train.py", cwd=folder, code=0)
    assert err.endswith("restore.json is not written: the program restored nothing through orbax_ext\n")
    assert not (folder / "restore.json").exists()


def save(path: pathlib.Path) -> None:
    import jax.numpy as jnp

    with ocp.CheckpointManager(path) as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": jnp.asarray(np.arange(6.0))}))
        manager.wait_until_finished()
