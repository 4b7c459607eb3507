"""The Orbax that is installed beside orbax_ext."""

from __future__ import annotations

import importlib.metadata
import pathlib

from orbax_ext.upstream import patching


def files_to_patch() -> dict[str, bytes]:
    """Returns the files of the installed Orbax that the patches change."""
    root = pathlib.Path(str(importlib.metadata.distribution("orbax-checkpoint").locate_file("")))
    return {path: (root / path).read_bytes() for path in patching.load_all()[0].originals}
