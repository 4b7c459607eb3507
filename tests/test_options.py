from __future__ import annotations

import inspect
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import orbax.checkpoint as ocp
import pytest

import orbax_ext
from orbax_ext.options import DEPRECATED, Knobs, Options
from orbax_ext.registration import PyTreeKnobs
from orbax_ext.upstream.array_handler import ArrayHandlerArguments, PyTreeHandlerArguments

# Everything that takes knobs.
DOORS: dict[str, Callable[..., Any]] = {
    "register": orbax_ext.register,
    "registered": orbax_ext.registered,
    "pytree_handler": orbax_ext.pytree_handler,
    "v1.context": orbax_ext.v1.context,
    "BroadcastArrayHandler": orbax_ext.BroadcastArrayHandler,
}
every_door = pytest.mark.parametrize("door", DOORS)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"replica_axis": "dp", "replica_axis_index": 1}, "not both"),
        ({"strategy": "fast"}, "one of auto, spread, single, direct"),
        ({"primary_replica_id": -1}, "0 or more"),
        ({"broadcast_memory_limit_bytes": 0}, "positive"),
        ({"broadcast_memory_scaling_factor": 1.5}, "at most 1"),
        ({"stall_timeout": 0}, "positive number of seconds"),
        ({"timeout": -1}, "positive number of seconds"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_found(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**knobs)


@pytest.mark.parametrize(
    ("knobs", "axes"),
    [
        ({}, None),
        ({"replica_axis": "dp"}, ("dp",)),
        ({"replica_axis": 1}, (1,)),
        ({"replica_axis": ["dp", "fsdp"]}, ("dp", "fsdp")),
        ({"replica_axis_index": 2}, (2,)),
    ],
)
def test_the_replica_axis_may_be_given_in_several_ways(knobs: dict[str, Any], axes: tuple[Any, ...] | None) -> None:
    assert Options(**knobs).axes == axes


@pytest.mark.parametrize("name", DEPRECATED)
def test_a_program_with_a_knob_that_has_no_effect_shows_a_warning(name: str) -> None:
    program = f"from orbax_ext.options import Options; Options({name}=1.0)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert f"FutureWarning: {name} has no effect any more" in run.stderr


def test_the_typed_keywords_are_the_fields() -> None:
    assert get_type_hints(Knobs) == get_type_hints(Options)
    assert list(get_type_hints(Knobs)) == list(get_type_hints(Options))


@pytest.mark.core
def test_the_typed_keywords_of_orbax_are_those_of_the_installed_release() -> None:
    array_handler = set(inspect.signature(ocp.type_handlers.ArrayHandler).parameters)
    pytree_handler = set(inspect.signature(ocp.PyTreeCheckpointHandler).parameters) - {"type_handler_registry"}
    assert array_handler - set(get_type_hints(ArrayHandlerArguments)) == set()
    assert pytree_handler - set(get_type_hints(PyTreeHandlerArguments)) == set()
    assert set(get_type_hints(PyTreeKnobs)) >= array_handler | pytree_handler | set(get_type_hints(Knobs))


@every_door
def test_an_unknown_knob_is_refused_with_the_nearest_one(door: str) -> None:
    with pytest.raises(TypeError, match=r"unknown knob 'replica_axs'; did you mean 'replica_axis'\? The knobs are "):
        call(door, replica_axs="dp")
    with pytest.raises(TypeError, match=r"unknown knob 'use_replica_paralel'; did you mean 'use_replica_parallel'\?"):
        call(door, use_replica_paralel=True)
    with pytest.raises(TypeError, match=r"unknown knob 'q'\. The knobs are replica_axis, "):
        call(door, q=1)


@every_door
def test_arguments_of_orbax_s_own_handler_are_accepted(door: str) -> None:
    call(door, use_replica_parallel=False, metadata_key=".zmeta", replica_axis="dp")


@every_door
def test_help_shows_the_knobs_with_their_defaults(door: str) -> None:
    parameters = inspect.signature(DOORS[door]).parameters
    for name, field in Options.__dataclass_fields__.items():
        assert (parameters[name].kind, parameters[name].default) == (inspect.Parameter.KEYWORD_ONLY, field.default)


def call(door: str, **knobs: Any) -> None:
    if door == "registered":
        with orbax_ext.registered(**knobs):
            return
    DOORS[door](**knobs)
    if door == "register":
        orbax_ext.unregister()


SNIPPET = """import orbax_ext
orbax_ext.{door}(replica_axis=("dp", 1), strategy="spread", stall_timeout=5, verify=True, metadata_key=None)
orbax_ext.{door}(replica_axs="dp")
orbax_ext.{door}(strategy="fast")
orbax_ext.{door}(stall_timeout="5")
orbax_ext.{door}(use_replica_parallel=3)
"""


@pytest.mark.once
def test_a_type_checker_checks_the_knobs(tmp_path: pathlib.Path) -> None:
    """One run for all, because mypy takes seconds."""
    pytest.importorskip("mypy")
    root = pathlib.Path(__file__).parents[1]
    snippets = [SNIPPET.format(door=door) for door in DOORS]
    (tmp_path / "snippet.py").write_text("\n".join(snippets))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(root / "pyproject.toml"),
        str(tmp_path / "snippet.py"),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    errors = [line.partition("snippet.py:")[2] for line in done.stdout.splitlines() if ": error: " in line]
    expected = [
        f"{number * 7 + line}: error: {message}"
        for number, door in enumerate(DOORS)
        for line, message in (
            (3, f'Unexpected keyword argument "replica_axs" for "{door.rpartition(".")[2]}"; did you mean'),
            (4, f'Argument "strategy" to "{door.rpartition(".")[2]}" has incompatible type'),
            (5, f'Argument "stall_timeout" to "{door.rpartition(".")[2]}" has incompatible type'),
            (6, f'Argument "use_replica_parallel" to "{door.rpartition(".")[2]}" has incompatible type'),
        )
    ]
    assert [error[: len(message)] for error, message in zip(errors, expected, strict=True)] == expected, done.stdout
