"""`orbax-ext check`: will this checkpoint restore on this cluster? Found out by restoring it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any, get_args

from orbax_ext.cli import exits, paths
from orbax_ext.cli.check import verdict
from orbax_ext.options import Strategy
from orbax_ext.plan.forecast import notation

_EPILOG = """examples:
  srun -N 4 orbax-ext check /ckpt/run7 --mesh pp=1,dp=4,tp=8
  mpirun -n 4 orbax-ext check s3://bucket/run7 --step 1200
  orbax-ext check /ckpt/run7 --local 4x8          4 processes x 8 CPU devices on this machine

Start it as you start your job: JAX finds the other processes by itself under Slurm, Open MPI and Kubernetes. Without
--mesh the mesh is the one that the checkpoint was saved on, if there are as many devices, else all devices on one axis
with a copy of everything on each. Leaves keep the sharding that they were saved with where it fits that mesh; --spec
changes it. Process 0 prints the verdict; the exit code is 0 if the restore worked and all copies are exact, else 1.
"""
_LEAVE_LIMIT = 15.0
_GRACE = 30.0  # above the restore's own limit, which names who is missing


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Restores a checkpoint on all processes of this job into a state that is thrown away, and tells "
        "whether it works, how fast storage and interconnect were, whether all copies are exact, and what to change."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkpoint", metavar="CKPT", help=paths.HELP)
    parser.add_argument("--step", type=int, help="which step of a CheckpointManager's directory (the newest)")
    parser.add_argument("--mesh", metavar="AXES", help="the mesh to restore on, such as pp=1,dp=4,tp=8")
    paths.add_spec(parser)
    parser.add_argument("--strategy", choices=get_args(Strategy), default="auto", help="as for register() (auto)")
    parser.add_argument("--local", metavar="PxD", help="start P processes with D CPU devices each on this machine")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds in all (600)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from orbax_ext.cli.check import rehearsal

    try:
        request = rehearsal.Request(
            _absolute(args.checkpoint),
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
    if args.local:
        facts = _locally(request, *_processes_and_devices(args.local))
        _print(facts, args.json)
        return exits.EXIT_OK if facts.ok else exits.EXIT_BAD_VERDICT
    return _in_this_job(request, args.json)


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


def _processes_and_devices(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if not found or int(found[1]) < 1 or int(found[2]) < 1:
        raise exits.UserError(f"--local is PROCESSESxDEVICES, such as 4x8; found {text!r}")
    return int(found[1]), int(found[2])


def _locally(request: Any, processes: int, devices: int) -> verdict.Facts:
    from orbax_ext import lab
    from orbax_ext.cli.check import rehearsal

    with paths.readable(request.path):  # what is wrong with the path is told before processes are started
        rehearsal.items(request)
    _say(f"starting {processes} processes x {devices} CPU devices ...")
    try:
        with lab.Cluster(processes, devices) as cluster:
            outcomes = cluster.outcomes(rehearsal.rehearse, request, timeout=request.timeout + _GRACE)
    except lab.RunFailedError as error:
        return verdict.Facts(request.path, {}, error=str(error).splitlines()[0])
    return _from_outcomes(request.path, outcomes)


def _from_outcomes(path: str, outcomes: Sequence[Any]) -> verdict.Facts:
    """What process 0 found, unless a process did not come to an end by itself."""
    lost = [str(outcome) for outcome in outcomes if not outcome.ok]
    known = [outcome.value for outcome in outcomes if outcome.ok]
    facts: verdict.Facts = known[0] if known else verdict.Facts(path, {})
    if lost and not facts.error:
        return verdict.Facts(path, facts.told, error="; ".join(line.splitlines()[0] for line in lost))
    return facts


def _in_this_job(request: Any, as_json: bool) -> int:
    """As one process of a job that was started by a launcher, or alone if there is none."""
    from orbax_ext.cli.check import rehearsal

    ours = _keep_for_the_verdict()
    with _watchdog(request.path, as_json, ours, request.timeout, "not all processes of the job came"):
        alone = not _join(request.timeout)
    if alone:
        with paths.readable(request.path):
            rehearsal.items(request)
    with _watchdog(request.path, as_json, ours, request.timeout + _GRACE, "it did not end"):
        facts = rehearsal.rehearse(request)
    if _rank() == 0:
        _print(facts, as_json, ours)
    code = exits.EXIT_OK if facts.ok else exits.EXIT_BAD_VERDICT
    if not alone:
        _leave(code)
    return code


def _rank() -> int:
    from orbax_ext.upstream.runtime import place_in_job

    return place_in_job()[0]


def _keep_for_the_verdict() -> IO[str]:
    """Standard output, for us alone: the collectives' library prints there too, on every process."""
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return ours


def _join(timeout: float) -> bool:
    """Whether a launcher has started this process together with others; returns when they have met."""
    import jax

    try:
        # JAX kills the process when its own limit is over, without a verdict, so it must not be the first.
        jax.distributed.initialize(initialization_timeout=int(timeout + _GRACE))
    except ValueError as error:
        if "coordinator_address" in str(error):  # JAX found no launcher
            return False
        raise exits.UserError(f"JAX can't find the other processes of this job: {error}") from None
    except RuntimeError as error:
        raise exits.UserError(f"the processes of this job did not meet: {str(error).splitlines()[0]}") from None
    return True


@contextlib.contextmanager
def _watchdog(path: str, as_json: bool, ours: IO[str], limit: float, what: str) -> Iterator[None]:
    """The last resort against what hangs and has no limit of its own: a verdict, and the end of this process."""

    def give_up() -> None:
        if _rank() == 0:
            remedy = "see the logs of the others, and whether they reach process 0's host"
            facts = verdict.Facts(path, {}, error=f"{what} within {limit:g} s: {remedy}")
            _print(facts, as_json, ours)
        os._exit(exits.EXIT_BAD_VERDICT)

    timer = threading.Timer(limit, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave(code: int) -> None:
    """Ends this process. Leaving `jax.distributed` waits for the others, who may be gone, so it has a limit."""
    import jax

    def shut_down() -> None:
        with contextlib.suppress(Exception):
            jax.distributed.shutdown()

    leaving = threading.Thread(target=shut_down, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_LIMIT)
    os._exit(code)


def _print(facts: verdict.Facts, as_json: bool, file: IO[str] | None = None) -> None:
    print(json.dumps(verdict.data(facts), indent=2) if as_json else verdict.text(facts), file=file, flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
