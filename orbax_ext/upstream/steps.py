"""The steps of a `CheckpointManager`: those whose save did not finish, and how one process lists them for all.

With `single_host_load_and_broadcast`, process 0 lists the steps and Orbax sends them to the others in a collective that
has no time limit: if listing fails on process 0, the others wait for ever. While these hooks are installed, what
`install` was given sends them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from etils import epath
from orbax.checkpoint._src.path import atomicity_types, step, temporary_paths

from orbax_ext.upstream.hooks import Hook

COMMIT_FILE = atomicity_types.COMMIT_SUCCESS_FILE
List = Callable[[], Sequence[int]]
Share = Callable[[List], Sequence[int]]  # lists on process 0 and returns the result on all processes


def steps_without_commit(manager: Any, listed: Collection[int]) -> list[int]:
    """Returns the steps that have a directory but not the commit file that the manager's way of saving writes last.

    There are none where saving ends with a rename. `listed` are the steps that the manager returns.
    """
    name_format, options = getattr(manager, "_step_name_format", None), getattr(manager, "_options", None)
    if name_format is None or options is None:  # another kind of manager
        return []
    settings = {
        "temporary_path_cls": getattr(options, "temporary_path_class", None),
        "atomicity_options": getattr(options, "atomicity_options", None),
    }
    accepted = inspect.signature(temporary_paths.is_path_finalized).parameters
    given = {name: value for name, value in settings.items() if value is not None and name in accepted}
    there = _steps_with_directory(epath.Path(manager.directory), name_format)
    # What the manager lists has its commit file; but older releases do not know the manager's settings there.
    suspects = [number for number in there if given or number not in listed]
    return [number for number in suspects if not step.is_path_finalized(there[number], **given)]


def _steps_with_directory(directory: epath.Path, name_format: Any) -> dict[int, epath.Path]:
    steps = {}
    for path in directory.iterdir() if directory.exists() else ():
        digits = re.search(r"\d+$", path.name)
        if digits and name_format.build_name(int(digits[0])) == path.name and path.is_dir():
            steps[int(digits[0])] = path
    return steps


def _find_all(original: Callable[..., Any], share: Share) -> Callable[..., Any]:
    @functools.wraps(original)
    def find_all(self: Any, base_path: epath.PathLike) -> Iterator[Any]:
        alone = dataclasses.replace(self, single_host_load_and_broadcast=False)
        steps = share(lambda: sorted(found.step for found in alone.find_all(base_path)))
        return iter([step.Metadata(number, step.build_step_path(base_path, self, number)) for number in steps])

    return find_all


HOOKS = (
    Hook(
        step._StandardNameFormat,
        "_find_all_with_single_host_load_and_broadcast",
        "steps that process 0 lists for all: an untimed collective sends them",
        _find_all,
    ),
)
