"""Checks of this machine and installation, for `orbax-ext doctor`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence

from orbax_ext import lab, version
from orbax_ext import text as text_lib
from orbax_ext.cli.patch import identify
from orbax_ext.upstream import patching

_DEVICES = "import jax; d = jax.devices(); print(f'{len(d)} x {d[0].device_kind} ({d[0].platform})')"
_LIMIT = 120.0  # seconds for JAX to start and answer; on a busy machine it takes many


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    state: str  # "ok", "bad" (a restore would break) or "absent" (not every program needs it)
    detail: str


@dataclasses.dataclass(frozen=True)
class Files:
    """The state of the installed Orbax's files."""

    state: str  # "original", "patched", or "other" if they are those of no known release
    releases: tuple[str, ...] = ()  # that have the same files
    patches: tuple[str, ...] = ()


def versions() -> dict[str, str]:
    """Returns the versions of the packages that a restore depends on."""
    numbers = {"python": ".".join(map(str, sys.version_info[:3])), "orbax-ext": version.__version__}
    for name in ("orbax-checkpoint", "jax", "jaxlib", "tensorstore", "numpy"):
        numbers[name] = _installed_version(name) or "not installed"
    return numbers


def orbax_files() -> Files:
    """Compares the installed files that the patches change with those of every release, by SHA-256."""
    known = patching.load_all()
    root = importlib.metadata.distribution("orbax-checkpoint").locate_file("")
    paths = {path for series in known for path in series.originals}
    tree = {path: file.read_bytes() for path in paths if (file := pathlib.Path(str(root), path)).is_file()}
    matching, state = identify(tree, known)
    patches = matching[-1].patches if state == "patched" else ()
    names = tuple(patch.name.removesuffix(".patch") for patch in patches)
    return Files(state, tuple(series.release for series in matching), names)


def runtime() -> Check:
    """Checks that JAX finds its devices, in a process that takes as little of their memory as possible."""
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICES], env=env, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("JAX runtime", "bad", f"no answer from the devices within {text_lib.seconds(_LIMIT)}")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check("JAX runtime", "bad", f"JAX does not start: {reason}")
    return Check("JAX runtime", "ok", done.stdout.strip())


def cluster() -> list[Check]:
    """Checks that two processes on this machine meet on a coordination service, and that they run a collective."""
    checks = []
    try:
        with lab.Cluster(2, 1, timeout=_LIMIT) as pair:
            for name, function in (("coordination service", _meet), ("collectives", _gather)):
                outcomes = pair.outcomes(function)
                failed = [str(outcome) for outcome in outcomes if not outcome.ok]
                checks.append(Check(name, "bad" if failed else "ok", failed[0] if failed else outcomes[0].value))
    except lab.RunFailedError as error:
        checks.append(Check("coordination service", "bad", str(error).splitlines()[0]))
    return checks


@dataclasses.dataclass(frozen=True)
class HookedFunction:
    """A function of Orbax that `register()` takes over."""

    name: str
    why: str
    releases: str
    present: bool  # in the installed release


def hooks() -> list[HookedFunction]:
    """Returns the functions that `register()` takes over."""
    from orbax_ext import registration  # here, because it imports JAX

    return [HookedFunction(hook.label, hook.why, hook.releases, hook.exists) for hook in registration.hooks()]


def stock_handlers(hooked: Sequence[HookedFunction]) -> Check:
    """Checks that Orbax's own single-replica handler is served once orbax_ext is registered."""
    from orbax_ext import registration

    name = "stock handlers"
    if missing := [function.name for function in hooked if not function.present]:
        return Check(name, "bad", f"this Orbax does not have {', '.join(missing)}: its own handler is not served")
    if registration.stock_handler_is_unserved():
        detail = "Orbax's own single-replica handler is registered in this process, and orbax_ext is not"
        return Check(name, "bad", f"{detail}: call orbax_ext.register()")
    return Check(name, "ok", "register() serves every SingleReplicaArrayHandler, whoever makes it")


def s3() -> Check:
    """Checks that s3:// can be read: TensorStore's own driver, and the packages of the extra "s3"."""
    import tensorstore  # here, because nothing else of this command imports it

    try:
        tensorstore.KvStore.Spec({"driver": "s3", "bucket": "some-bucket"})
    except ValueError as error:
        return Check("S3", "absent", f"this TensorStore has no s3 driver: {error}")
    if missing := [name for name in _packages_of_extra("s3") if _installed_version(name) is None]:
        return Check("S3", "absent", f"not installed: {', '.join(missing)}. Get them with: pip install 'orbax-ext[s3]'")
    return Check("S3", "ok", "TensorStore's s3 driver is installed")


def _packages_of_extra(extra: str) -> list[str]:
    """Returns the packages that an extra of this package requires."""
    try:
        requirements = importlib.metadata.requires("orbax-ext") or []
    except importlib.metadata.PackageNotFoundError:  # used from a checkout that is not installed
        requirements = []
    wanted = re.compile(rf"extra == ['\"]{extra}['\"]")
    return [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements if wanted.search(text)]


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# Run on the processes. They import JAX, which this process does not need.


def _meet() -> str:
    import jax

    from orbax_ext.upstream.runtime import coordination_client

    client = coordination_client()
    client.key_value_set(f"orbax_ext/doctor/{jax.process_index()}", "here")
    client.wait_at_barrier("orbax_ext/doctor", timeout_in_ms=30_000)
    return f"{len(client.key_value_dir_get('orbax_ext/doctor'))} local processes met"


def _gather() -> str:
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    gathered = np.asarray(multihost_utils.process_allgather(np.array([jax.process_index()]))).ravel().tolist()
    if gathered != [0, 1]:
        raise ValueError(f"an all-gather of [0] and [1] gave {gathered}")
    return "gloo on local CPU processes; for your devices and network run: orbax-ext check"
