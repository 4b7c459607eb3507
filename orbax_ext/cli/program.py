"""Runs a file or a module as `python FILE` and `python -m MODULE` do.

Not with `runpy`, whose `__main__` is gone when the program's last statement is done: threads and functions registered
with `atexit` would find another one.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from orbax_ext.cli import exits


def run_file(path: str, arguments: Sequence[str]) -> None:
    """Runs a source file, a compiled file, or a directory or zip file with a `__main__`."""
    sys.argv = [path, *arguments]
    absolute = os.path.abspath(path)
    finder: Any = pkgutil.get_importer(absolute)
    try:
        if finder is not None:
            _set_first_path(absolute, always=True)
            _run_spec(_required(finder.find_spec("__main__"), f"can't find '__main__' in {path!r}"))
        else:
            _set_first_path(os.path.dirname(os.path.realpath(path)))
            _run_script(absolute)
    except BaseException as error:
        _leave_out_our_frames(error)
        raise


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Runs a module, or a package's `__main__`."""
    sys.argv = ["-m", *arguments]  # as Python has it while it imports the packages that the module is in
    _set_first_path(os.getcwd())
    try:
        spec = _find_module(name)
        sys.argv[0] = spec.origin or name
        _run_spec(spec)
    except BaseException as error:
        _leave_out_our_frames(error)
        raise


def _run_script(path: str) -> None:
    compiled = path.endswith(".pyc")
    kind = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
    loader = kind("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        raise exits.UserError(f"can't open file {path!r}: {error.strerror}") from None
    namespace = _new_main(__file__=path, __cached__=None, __loader__=loader, __package__=None, __spec__=None)
    code: Any = loader.get_code("__main__") if compiled else compile(source, path, "exec", dont_inherit=True)
    exec(code, namespace)


def _run_spec(spec: importlib.machinery.ModuleSpec) -> None:
    loader: Any = spec.loader
    code = _required(loader.get_code(spec.name), f"no code in module {spec.name!r}")
    namespace = _new_main(
        __file__=spec.origin, __cached__=spec.cached, __loader__=loader, __package__=spec.parent, __spec__=spec
    )
    exec(code, namespace)


def _find_module(name: str) -> importlib.machinery.ModuleSpec:
    if name.startswith("."):
        raise exits.UserError(f"{name!r} is no full name of a module")
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that the module is in imports something that is not there
        spec = None
    except ValueError as error:
        raise exits.UserError(f"-m {name}: {error}") from None
    spec = _required(spec, f"no module named {name!r}")
    if spec.submodule_search_locations is None:
        return spec
    if name.endswith(".__main__"):
        raise exits.UserError(f"{name!r} is a package and can't be run")
    return _find_module(f"{name}.__main__")


def _new_main(**attributes: Any) -> dict[str, Any]:
    """Puts an empty module in the place of `__main__` and returns its namespace."""
    module = types.ModuleType("__main__")
    module.__dict__.update(attributes, __annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = module
    return module.__dict__


def _set_first_path(directory: str, always: bool = False) -> None:
    """Puts a directory where Python has put that of our own script; with -P and -I it has put none there."""
    if not sys.flags.safe_path:
        sys.path[0] = directory
    elif always:
        sys.path.insert(0, directory)


def _leave_out_our_frames(error: BaseException) -> None:
    """Makes Python print an exception that nothing has caught without the frames of this package.

    Python then decides how the process ends; after Ctrl-C, for one, it ends itself with the signal.
    """
    if isinstance(error, (SystemExit, exits.UserError)):
        return
    hook = sys.excepthook  # possibly the program's own

    def show(kind: type[BaseException], shown: BaseException, traceback: types.TracebackType | None) -> None:
        rest = _after_this_file(traceback)
        hook(kind, shown.with_traceback(rest), rest)

    sys.excepthook = show


def _after_this_file(traceback: types.TracebackType | None) -> types.TracebackType | None:
    ours = [number for number, entry in enumerate(_entries(traceback)) if entry.tb_frame.f_code.co_filename == __file__]
    rest = list(_entries(traceback))[max(ours, default=-1) + 1 :]
    return rest[0] if rest else None


def _entries(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _required(found: Any, message: str) -> Any:
    if found is None:
        raise exits.UserError(message)
    return found
