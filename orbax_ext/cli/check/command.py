"""`orbax-ext check`: finds out whether a checkpoint restores on this cluster, by restoring it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, get_args

import jax

from orbax_ext import lab
from orbax_ext import text as text_lib
from orbax_ext.cli import arguments, exits, files
from orbax_ext.cli.check import joining, rehearsal, verdict
from orbax_ext.cli.check.target import CheckRequest
from orbax_ext.cli.check.verdict import CheckResult
from orbax_ext.options import Strategy
from orbax_ext.plan.forecast import notation
from orbax_ext.upstream.runtime import place_in_job

DESCRIPTION = (
    "Restores a checkpoint on all processes of this job, discards the result, and reports whether the restore "
    "works, how fast storage and interconnect were, whether all copies are exact, and what to change."
)
EPILOG = """examples:
  srun -N 4 orbax-ext check /ckpt/run7 --mesh pp=1,dp=4,tp=8
  mpirun -n 4 orbax-ext check s3://bucket/run7 --step 1200
  orbax-ext check /ckpt/run7 --local 4x8          4 processes x 8 CPU devices on this machine

Start it as you start your job: JAX finds the other processes by itself under Slurm, Open MPI and Kubernetes. Where it
does not, give each process --coordinator, --processes and --process. The verdict says which launcher was found.

Without --mesh, the mesh is the one that the checkpoint was saved on if this job has as many devices, else one axis over
all devices with a copy of everything on each. Leaves keep the sharding that they were saved with as far as it fits
that mesh; --spec changes it. Process 0 prints the verdict.

Exit code 0: the restore worked and all copies are exact; 1: it did not; 2: the arguments or the path are wrong, or the
processes of the job do not find each other.
"""
_LEAVE_LIMIT = 15.0  # seconds for the other processes to leave `jax.distributed` too
_GRACE = 30.0  # seconds above the restore's own limit, whose error names the missing processes


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help=arguments.CHECKPOINT)
    arguments.add_step(parser)
    parser.add_argument("--mesh", metavar="AXES", help="the mesh to restore on, such as pp=1,dp=4,tp=8")
    arguments.add_spec(parser)
    parser.add_argument("--strategy", choices=get_args(Strategy), default="auto", help="as for register() (auto)")
    parser.add_argument("--local", metavar="PxD", help="start P processes with D CPU devices each on this machine")
    parser.add_argument("--timeout", type=float, default=600.0, help="limit in seconds for the whole restore (600)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    joining.add_options(parser)


def run(args: argparse.Namespace) -> bool:
    try:
        request = CheckRequest(
            args.checkpoint if "://" in args.checkpoint else os.path.abspath(args.checkpoint),
            args.step,
            notation.parse_mesh(args.mesh) if args.mesh else None,
            tuple(notation.parse_rule(text) for text in args.spec),
            args.timeout,
            args.strategy,
        )
    except ValueError as error:
        raise exits.UserError(str(error)) from None
    if args.timeout <= 0:
        raise exits.UserError(f"--timeout must be a positive number of seconds; found {args.timeout:g}")
    place = joining.place_of(args)
    if args.local:
        result = _check_locally(request, args.local)
        _print(result, args.json)
        return result.ok
    return _check_in_job(request, place, args.json)


def _check_locally(request: CheckRequest, size: str) -> CheckResult:
    match = re.fullmatch(r"(\d+)x(\d+)", size)
    processes, devices = map(int, match.groups()) if match else (0, 0)
    if not processes or not devices:
        raise exits.UserError(f"--local is PROCESSESxDEVICES, such as 4x8; found {size!r}")
    _check_path(request)
    where = f"{text_lib.count(processes, 'process')} x {text_lib.count(devices, 'CPU device')}"
    print(f"starting {where} ...", file=sys.stderr, flush=True)
    try:
        with lab.Cluster(processes, devices) as cluster:
            outcomes = cluster.outcomes(rehearsal.rehearse, request, timeout=request.timeout + _GRACE)
    except lab.RunFailedError as error:
        return CheckResult(request.path, {}, error=str(error).splitlines()[0])
    return result_of(request.path, outcomes)


def _check_path(request: CheckRequest) -> None:
    """Raises `UserError` if the path is wrong, before any process is started or waited for."""
    with files.readable_checkpoint(request.path):
        rehearsal.items(request)


def result_of(path: str, outcomes: Sequence[lab.Outcome]) -> CheckResult:
    """Returns the result of the first process that returned one; processes that returned none make it an error."""
    lost = [str(outcome).splitlines()[0] for outcome in outcomes if not outcome.ok]
    result: CheckResult = next((outcome.value for outcome in outcomes if outcome.ok), CheckResult(path, {}))
    if lost and not result.error:
        return CheckResult(path, result.processes, error="; ".join(lost))
    return result


def _check_in_job(request: CheckRequest, place: joining.GivenPlace | None, as_json: bool) -> bool:
    """Checks as one process of the job that a launcher started, or alone if there is no launcher."""
    stdout = _keep_stdout()

    def show(result: CheckResult, alone: bool) -> None:
        if place_in_job()[0] == 0:
            _print(dataclasses.replace(result, launcher=joining.describe(place, alone)), as_json, stdout)

    def watchdog(alone: bool, limit: float, what: str) -> contextlib.AbstractContextManager[None]:
        remedy = "see the logs of the others, and whether they reach process 0's host"
        failed = CheckResult(request.path, {}, error=f"{what} within {limit:g} s: {remedy}")

        def show_failure() -> None:
            show(failed, alone)
            if process := place_in_job()[0]:  # process 0, which prints the verdict, may be the one that is missing
                print(f"orbax-ext check, process {process}: {failed.error}", file=sys.stderr, flush=True)

        return _watchdog(limit, show_failure)

    with watchdog(False, request.timeout, "not all processes of the job came"):
        # JAX kills the process at its own limit, without a verdict, so that limit must be later than ours.
        alone = not joining.join(place, int(request.timeout + _GRACE))
    if alone:
        _check_path(request)
    with watchdog(alone, request.timeout + _GRACE, "it did not end"):
        result = rehearsal.rehearse(request)
    show(dataclasses.replace(result, launcher_advice=joining.advice(place, alone)), alone)
    if not alone:
        _leave(exits.EXIT_OK if result.ok else exits.EXIT_BAD_VERDICT)
    return result.ok


def _keep_stdout() -> IO[str]:
    """Returns standard output for the verdict alone: the collectives' library prints there too, on every process."""
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stdout


@contextlib.contextmanager
def _watchdog(limit: float, show: Callable[[], None]) -> Iterator[None]:
    """Shows a verdict and ends this process if the block takes longer than `limit`: it may hang in native code."""

    def give_up() -> None:
        show()
        os._exit(exits.EXIT_BAD_VERDICT)

    timer = threading.Timer(limit, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave(code: int) -> None:
    """Ends this process. Leaving `jax.distributed` waits for the others, which may be gone, so it has a limit."""

    def shut_down() -> None:
        with contextlib.suppress(Exception):
            jax.distributed.shutdown()

    leaving = threading.Thread(target=shut_down, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_LIMIT)
    os._exit(code)


def _print(result: CheckResult, as_json: bool, file: IO[str] | None = None) -> None:
    print(json.dumps(verdict.data(result), indent=2) if as_json else verdict.text(result), file=file, flush=True)
