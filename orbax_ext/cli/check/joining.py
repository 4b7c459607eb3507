"""How a process of `orbax-ext check` finds the other processes of its job."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re

import jax

from orbax_ext.cli import exits
from orbax_ext.cli.check import launcher
from orbax_ext.upstream.runtime import place_in_job

_ADDRESS = "JAX_COORDINATOR_ADDRESS"


@dataclasses.dataclass(frozen=True)
class GivenPlace:
    """The place of this process in its job, as the arguments give it."""

    coordinator: str
    processes: int
    process: int


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where JAX does not find the other processes by itself")
    group.add_argument("--coordinator", metavar="HOST:PORT", help=f"process 0's host and a free port (or {_ADDRESS})")
    group.add_argument("--processes", type=int, metavar="N", help="the number of processes")
    group.add_argument("--process", type=int, metavar="RANK", help="the number of this process, from 0")


def place_of(args: argparse.Namespace) -> GivenPlace | None:
    """Returns the place that the arguments give; None if JAX is to find it. Raises `UserError` if they are wrong."""
    if args.coordinator is args.processes is args.process is None:
        return None
    if args.local:
        raise exits.UserError("--local starts its own processes: leave out --coordinator, --processes and --process")
    coordinator = args.coordinator or os.environ.get(_ADDRESS)
    if coordinator is None or args.processes is None or args.process is None:
        raise exits.UserError("--coordinator, --processes and --process belong together: give all of them")
    if not re.fullmatch(r".+:\d+", coordinator):
        raise exits.UserError(f"--coordinator is HOST:PORT, such as node0:1234; found {coordinator!r}")
    if not 0 <= args.process < args.processes:
        raise exits.UserError(f"--process is a number from 0 to --processes minus 1; found {args.process}")
    return GivenPlace(coordinator, args.processes, args.process)


def join(place: GivenPlace | None, limit: int) -> bool:
    """Joins the other processes if a launcher started them with this one; returns whether it did.

    Raises `UserError` if there seem to be others and JAX can't join them: a verdict on one process would mislead.
    """
    found = None if place else launcher.find(os.environ)
    advice = f". {found.advice}" if found else ""
    try:
        if place:
            jax.distributed.initialize(
                place.coordinator,
                place.processes,
                place.process,
                cluster_detection_method="deactivate",
                initialization_timeout=limit,
            )
        else:
            jax.distributed.initialize(initialization_timeout=limit)
    except ValueError as error:
        if "coordinator_address" in str(error):  # JAX found no launcher
            if found and found.several:
                raise exits.UserError(found.advice) from None
            return False
        if _ADDRESS in os.environ and not found:
            raise exits.UserError(
                f"{_ADDRESS} is set, but no launcher was found: give --processes and --process"
            ) from None
        raise exits.UserError(f"JAX can't find the other processes of this job: {error}{advice}") from None
    except Exception as error:  # of JAX, of the Kubernetes client, or a KeyError of a variable
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise exits.UserError(f"the processes of this job did not meet: {reason}{advice}") from None
    return True


def describe(place: GivenPlace | None, alone: bool) -> str:
    """Returns which launcher was found and what it said, for the verdict."""
    found = launcher.find(os.environ)
    return launcher.alone(found) if alone else launcher.joined(found, *place_in_job(), by_hand=place is not None)


def advice(place: GivenPlace | None, alone: bool) -> tuple[str, ...]:
    """Returns what to change about how the processes were started."""
    found = launcher.find(os.environ)
    if alone:
        return (found.advice,) if found else ()
    unused = launcher.unused_gpus(os.environ, jax.local_device_count()) if place is None else ""
    return (unused,) if unused else ()
