"""What of this machine and installation a restore needs, tried out: for `orbax-ext doctor`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from orbax_ext import lab, version
from orbax_ext.upstream import patching

_DEVICES = "import jax; d = jax.devices(); print(f'{len(d)} x {d[0].device_kind} ({d[0].platform})')"
_LIMIT = 120.0


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing looked at: `state` is "ok", "bad" (a restore would break) or "absent" (not needed by all)."""

    name: str
    state: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Files:
    """What the installed Orbax's files are: "original", "patched", or "other" than any release that is known."""

    state: str
    releases: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()


def versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3])), "orbax-ext": version.__version__}
    for name in ("orbax-checkpoint", "jax", "jaxlib", "tensorstore", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def orbax_files() -> Files:
    """Compares the installed files that the patches are about with those of every release, by SHA-256."""
    known = patching.load_all()
    root = importlib.metadata.distribution("orbax-checkpoint").locate_file("")
    paths = {path for series in known for path in series.originals}
    tree = {path: found.read_bytes() for path in paths if (found := pathlib.Path(str(root), path)).is_file()}
    for state in ("original", "patched"):
        matching = [series for series in known if patching.state(series, tree) == state]
        if matching:
            patches = [patch.name.removesuffix(".patch") for patch in matching[-1].patches]
            releases = tuple(series.release for series in matching)
            return Files(state, releases, tuple(patches) if state == "patched" else ())
    return Files("other")


def runtime() -> Check:
    """Whether JAX finds its devices, in a process of its own that takes as little of them as it can."""
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICES], env=env, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("JAX runtime", "bad", f"no answer from the devices within {_LIMIT:.0f} s")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check("JAX runtime", "bad", f"JAX does not start: {reason}")
    return Check("JAX runtime", "ok", done.stdout.strip())


def cluster() -> list[Check]:
    """Two processes on this machine meet on a coordination service, then run a collective."""
    checks = []
    try:
        with lab.Cluster(2, 1, timeout=_LIMIT) as pair:
            for name, function in (("coordination service", _meet), ("collectives", _sum)):
                checks.append(_verdict(name, pair.outcomes(function)))
    except lab.RunFailedError as error:
        checks.append(Check("coordination service", "bad", str(error).splitlines()[0]))
    return checks


def _verdict(name: str, outcomes: Sequence[lab.Outcome]) -> Check:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        return Check(name, "bad", str(failed[0]))
    return Check(name, "ok", str(outcomes[0].value))


def _meet() -> str:
    from orbax_ext.upstream.runtime import coordination_client

    client = coordination_client()
    import jax

    client.key_value_set(f"orbax_ext/doctor/{jax.process_index()}", "here")
    client.wait_at_barrier("orbax_ext/doctor", timeout_in_ms=30_000)
    return f"{len(client.key_value_dir_get('orbax_ext/doctor'))} local processes met"


def _sum() -> str:
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    found: Any = multihost_utils.process_allgather(np.array([jax.process_index()]))
    if found.ravel().tolist() != [0, 1]:
        raise ValueError(f"an all-gather of [0] and [1] gave {found.ravel().tolist()}")
    return "gloo on local CPU processes; for your devices and network run: orbax-ext check"


def s3() -> Check:
    """Whether s3:// can be read: TensorStore's own driver, and what the extra "s3" asks for."""
    import tensorstore

    try:
        tensorstore.KvStore.Spec({"driver": "s3", "bucket": "some-bucket"})
    except ValueError as error:
        return Check("S3", "absent", f"this TensorStore has no s3 driver: {error}")
    missing = [name for name in _extra("s3") if not _installed(name)]
    if missing:
        return Check("S3", "absent", f"not installed: {', '.join(missing)}. Get them with: pip install 'orbax-ext[s3]'")
    return Check("S3", "ok", "TensorStore's s3 driver is there")


def _extra(extra: str) -> list[str]:
    """The packages that an extra of ours asks for."""
    try:
        needs = importlib.metadata.requires("orbax-ext") or []
    except importlib.metadata.PackageNotFoundError:  # used from a checkout that is not installed
        needs = []
    wanted = re.compile(rf"extra == ['\"]{extra}['\"]")
    return [re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in needs if wanted.search(need)]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
