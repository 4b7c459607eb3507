"""The knobs of `register` as options of a command and as environment variables, made from `Options`."""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from orbax_ext.cli import exits
from orbax_ext.options import FIELDS, Options

PREFIX = "ORBAX_EXT_"  # of environment variables
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_SAME = ({"replica_axis", "replica_axis_index"},)  # knobs that say the same, so that one replaces the other


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each knob. The parsed arguments have only those that were given."""
    group = parser.add_argument_group("knobs", f"as for register(), also as environment variables {PREFIX}<KNOB>")
    for name, hint in _hints().items():
        kind: dict[str, Any] = {"type": functools.partial(_argument, name), "metavar": _metavar(hint)}
        if hint is bool:
            kind = {"action": argparse.BooleanOptionalAction}
        help_text = _help()[name].replace("%", "%%")
        group.add_argument(_option(name), dest=name, default=argparse.SUPPRESS, help=help_text, **kind)


def given_knobs(args: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the knobs that were given, checked. The command line counts more than the environment."""
    from_options = {name: value for name, value in vars(args).items() if name in FIELDS}
    knobs = _from_environment(environ)
    for names in _SAME:
        if names & from_options.keys():
            knobs = {name: value for name, value in knobs.items() if name not in names}
    places = {**{name: _variable(name) for name in knobs}, **{name: _option(name) for name in from_options}}
    knobs.update(from_options)
    try:
        Options(**knobs)
    except ValueError as error:
        mentioned = [place for name, place in places.items() if re.search(rf"\b{name}\b", str(error))]
        raise exits.UserError(f"{', '.join(mentioned or places.values())}: {error}") from None
    return knobs


def parse(name: str, text: str) -> Any:
    """Returns the value of a knob that is given as text; raises `ValueError` that says what was expected."""
    hint = _hints()[name]
    if type(None) in _members(hint) and text.lower() == "none":
        return None
    expected, convert = _converter(hint)
    try:
        return convert(text)
    except (ValueError, KeyError):
        raise ValueError(f"expected {expected}; found {text!r}") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    knobs = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if variable == _variable(name) and name in FIELDS:
            try:
                knobs[name] = parse(name, text)
            except ValueError as error:
                raise exits.UserError(f"{variable}: {error}") from None
        # Other programs may have variables with this prefix, so only a likely misspelling is refused.
        elif similar := difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.8):
            raise exits.UserError(f"unknown variable {variable}; did you mean {_variable(similar[0])}?")
    return knobs


def _argument(name: str, text: str) -> Any:
    try:
        return parse(name, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _converter(hint: Any) -> tuple[str, Callable[[str], Any]]:
    """Returns what values of this type look like, and the function that parses one."""
    members = _members(hint)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}", {word: word for word in get_args(hint)}.__getitem__
    if hint is bool:
        return "true or false", _boolean
    if str in members:
        return "a name, an index, or several with commas between them", _axes
    if float in members:
        return "a number", _number
    if int in members:
        return "a whole number", int
    raise TypeError(f"no way to parse a knob of type {hint}")


def _boolean(text: str) -> bool:
    return {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}[text.lower()]


def _axes(text: str) -> str | int | tuple[str | int, ...]:
    axes = tuple(_axis(part.strip()) for part in text.split(","))
    return axes[0] if len(axes) == 1 else axes


def _axis(text: str) -> str | int:
    if not text:
        raise ValueError(text)
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _number(text: str) -> float:
    value = float(text)
    if math.isnan(value):
        raise ValueError(text)
    return value


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _metavar(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"{{{','.join(get_args(hint))}}}"
    return "AXES" if str in _members(hint) else "N"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Options)


@functools.cache
def _help() -> dict[str, str]:
    """Returns what the docstring of `Options` says about each knob; nothing under `python -OO`."""
    described = re.findall(r"^  (\w+): (.+(?:\n    .+)*)", inspect.getdoc(Options) or "", re.MULTILINE)
    return {**dict.fromkeys(FIELDS, ""), **{name: " ".join(text.split()) for name, text in described}}
