"""`orbax-ext plan`: forecasts a restore on a cluster, without devices and without reading arrays.

A described model (--shapes) is planned without JAX, Orbax and TensorStore: importing them takes longer than planning.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16, float8_e4m3fn and the like with numpy, for dtypes in --shapes
import numpy as np

from orbax_ext import text as text_lib
from orbax_ext.cli import arguments, exits, files
from orbax_ext.plan import Leaf, MeshInfo
from orbax_ext.plan.cost import Rates
from orbax_ext.plan.forecast import described, notation, picture
from orbax_ext.plan.forecast import forecast as forecast_lib
from orbax_ext.plan.forecast.described import Described
from orbax_ext.plan.forecast.forecast import Forecast

DESCRIPTION = (
    "Shows, without devices, what each process would read and receive, which leaves would be read more "
    "than once, how long each strategy would take, and which one auto picks and why."
)
EPILOG = """examples:
  orbax-ext plan /ckpt/run7 --mesh pp=1,dp=4,tp=8 --processes 4
  orbax-ext plan /ckpt/run7 --mesh dp=64,tp=8 --processes 64 --spec '*.kernel=P(None,tp)' --svg plan.svg
  orbax-ext plan --shapes model.txt --mesh pp=16,dp=256,tp=8 --processes 4096

A file can describe a model that is not saved yet, in JSON or with one array on each line:
  embed                    bfloat16  129280x7168    P(tp)            16160x7168
  layers.{0..60}.experts   bfloat16  256x7168x2048  P(pp,None,tp)
  step                     int32     ()
The columns are the name ({0..60} stands for 61 arrays), dtype, shape, spec (default: --spec, else a copy on every
device) and stored chunk (default: what one device of this mesh holds). Leaves of a checkpoint keep the spec that they
were saved with as far as it fits the mesh, unless --spec matches them. Devices are assigned to processes in the order
of the mesh; the last axis runs fastest.

Exit code 0: the state fits into the devices' memory; 1: it does not; 2: the arguments or files are wrong.
"""
_SHOWN = 16  # processes, or leaves, that are listed one by one
_HEAD = ("strategy", "read in all", "of the state", "busiest reads", "receives", "groups", "seconds", "peak per device")


def configure(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("checkpoint", metavar="CKPT", nargs="?", help=arguments.CHECKPOINT)
    what.add_argument("--shapes", metavar="FILE", type=pathlib.Path, help="a file that describes a model, see below")
    arguments.add_step(parser)
    parser.add_argument("--mesh", metavar="AXES", required=True, help="the mesh, such as pp=1,dp=4,tp=8")
    parser.add_argument(
        "--processes", metavar="N", type=int, required=True, help="processes; all have the same number of devices"
    )
    arguments.add_spec(parser)
    parser.add_argument(
        "--replica-axis", metavar="AXIS", help="the replica axis of `single` (default: the axes that no leaf uses)"
    )
    rate = parser.add_argument_group("the cluster; rates are per process while all processes work at once")
    rate.add_argument("--storage-gbps", metavar="GBPS", type=float, help="gigabits per second from storage (8)")
    rate.add_argument("--storage-total-gbps", metavar="GBPS", type=float, help="of all processes together (no limit)")
    rate.add_argument("--fabric-gbps", metavar="GBPS", type=float, help="gigabits per second between processes (100)")
    rate.add_argument("--memory", metavar="GB", type=float, help="memory free on each device before the restore (64)")
    parser.add_argument("--svg", metavar="OUT", type=pathlib.Path, help="write a picture of the bytes by process")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> bool:
    rates, free = _cluster(args)
    try:
        mesh = forecast_lib.mesh_on(notation.parse_mesh(args.mesh), args.processes)
        rules = [notation.parse_rule(text) for text in args.spec]
        arrays = files.load(args.shapes, described.parse_shapes) if args.shapes else _stored(args.checkpoint, args.step)
        leaves, unfit = described.place(arrays, mesh, rules)
        forecasts: dict[str, Forecast] = {
            strategy: forecast_lib.forecast(leaves, mesh, args.processes, rates, free, strategy, args.replica_axis)
            for strategy in forecast_lib.STRATEGIES
        }
    except ValueError as error:
        raise exits.UserError(str(error)) from None
    model = str(args.shapes or args.checkpoint)
    notes = _notes(forecasts["auto"], unfit, rules, leaves, free)
    if args.svg:
        title = f"{model} on {mesh}, {text_lib.count(args.processes, 'process')}"
        drawn = [forecast for strategy, forecast in forecasts.items() if strategy != "auto"]
        files.write(args.svg, picture.draw(title, drawn))
    if args.json:
        print(json.dumps(_data(model, leaves, forecasts, rates, notes), indent=1))
    else:
        print(_text(model, mesh, args, leaves, forecasts, rates, notes))
    return forecasts["auto"].device_peak <= free


def _cluster(args: argparse.Namespace) -> tuple[Rates, int]:
    """Returns the rates of one process and the bytes that are free on each device."""
    for name in ("storage_gbps", "fabric_gbps", "memory", "storage_total_gbps"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise exits.UserError(f"--{name.replace('_', '-')} must be above 0; found {value:g}")
    rates = Rates(
        (args.storage_gbps or 8) * 1e9 / 8,
        (args.fabric_gbps or 100) * 1e9 / 8,
        (args.storage_total_gbps or math.inf) * 1e9 / 8,
        "given" if args.storage_gbps and args.fabric_gbps else "assumed",
    )
    return rates, int((args.memory or 64) * 1e9)


def _stored(path: str, step: int | None) -> list[Described]:
    """Returns the arrays of a checkpoint."""
    from orbax_ext.storage import checkpoint  # imports JAX, Orbax and TensorStore

    with files.readable_checkpoint(path):
        items = [item for item in checkpoint.items_of(path, step, sizes_wanted=False) if item.has_arrays]
    arrays = []
    for item in items:
        for leaf in item.leaves:
            if leaf.array:
                name = f"{item.name}.{leaf.name}" if len(items) > 1 else leaf.name
                header, spec = leaf.array.header, leaf.sharding.spec if leaf.sharding else None
                because = _why_direct(leaf.kind, leaf.key_type)
                arrays.append(Described(name, header.shape, header.dtype, spec, header.chunk, because))
    if not arrays:
        raise exits.UserError(f"{path} holds no arrays")
    return arrays


def _why_direct(kind: str, key_type: str) -> str:
    """Returns why every process reads a stored leaf directly; empty if the leaf can travel."""
    if key_type:
        return "it is a typed PRNG key"
    return "" if kind in ("jax.Array", "array") else f"it was saved as a {kind}, not as an array on devices"


def _notes(
    auto: Forecast, unfit: Mapping[str, str], rules: Sequence[notation.Rule], leaves: Sequence[Leaf], free: int
) -> list[str]:
    notes = []
    if unfit:
        reason = next(iter(unfit.values()))
        notes.append(f"sharded less, because their own spec does not fit ({reason}): {text_lib.listing(unfit)}")
    for rule in rules:
        if not any(rule.matches(leaf.name) for leaf in leaves):
            notes.append(f"--spec {rule.pattern!r} matches no leaf")
    read = auto.volumes.read
    if read.max() > 1.5 * read.mean() and auto.plan.groups:
        notes.append(
            f"{text_lib.process(int(read.argmax()), {})} reads {read.max() / read.mean():.1f} times the mean: some "
            "leaves can't be cut"
        )
    if auto.device_peak > free:
        notes.append(
            f"DOES NOT FIT: the restore needs {text_lib.size(auto.device_peak)} on each device, and "
            f"{text_lib.size(free)} are free: shard more"
        )
    return notes


def _text(
    model: str,
    mesh: MeshInfo,
    args: argparse.Namespace,
    leaves: Sequence[Leaf],
    forecasts: Mapping[str, Forecast],
    rates: Rates,
    notes: Sequence[str],
) -> str:
    auto = forecasts["auto"]
    devices = len(mesh.processes) // args.processes
    storage = min(rates.storage_total, rates.storage * args.processes)  # if every process reads at its own rate
    lines = [
        f"{model}: {text_lib.count(len(leaves), 'leaf')}, {text_lib.size(_logical(leaves))}",
        f"  mesh {mesh} on {text_lib.count(args.processes, 'process')} x {text_lib.count(devices, 'device')}; "
        f"{text_lib.size(auto.device_bytes)} on each device",
        f"  {rates}; all processes together {text_lib.size(storage)}/s from storage",
        "",
        text_lib.table(_HEAD, [_row(forecast, leaves) for forecast in forecasts.values()], range(1, len(_HEAD))),
        "",
        "auto picks",
    ]
    lines += [f"  {reason}: {text_lib.listing(names)}" for reason, names in forecast_lib.reasons(auto, leaves).items()]
    lines += ["", "who reads what, with auto", *_by_process(auto)]
    if unfit := forecast_lib.unfit_chunks(auto.volumes, leaves):
        lines += ["", f"read more than needed, with auto ({len(unfit)} of {text_lib.count(len(leaves), 'leaf')})"]
        lines += [f"  {chunks.read / max(1, chunks.needed):.1f} times  {chunks}" for chunks in unfit[:_SHOWN]]
        lines.append("  Chunks that divide the blocks are read once: save from this mesh, or with a chunk_byte_size.")
    lines += [f"note: {note}" for note in notes]
    if args.svg:
        lines.append(f"written: {args.svg}")
    return "\n".join(lines)


def _row(forecast: Forecast, leaves: Sequence[Leaf]) -> tuple[str, ...]:
    return (
        forecast.strategy,
        text_lib.size(forecast.volumes.total_read),
        f"x {forecast.volumes.total_read / max(1, _logical(leaves)):.2f}",
        text_lib.size(forecast.volumes.read.max()),
        text_lib.size(forecast.volumes.received.max()),
        str(len(forecast.plan.groups)),
        text_lib.seconds(forecast.seconds),
        text_lib.size(forecast.device_peak),
    )


def _by_process(auto: Forecast) -> list[str]:
    read, received = auto.volumes.read, auto.volumes.received
    if len(read) <= _SHOWN:
        rows = [
            (str(process), *map(text_lib.size, volumes))
            for process, volumes in enumerate(zip(read, received, strict=True))
        ]
        return [text_lib.table(("process", "from storage", "from others"), rows, right=(0, 1, 2))]
    rows = [
        (name, text_lib.size(np.quantile(read, share)), text_lib.size(np.quantile(received, share)))
        for name, share in (("least", 0.0), ("middle", 0.5), ("most", 1.0))
    ]
    reads_most, receives_most = (text_lib.process(int(volume.argmax()), {}) for volume in (read, received))
    busiest = f"  {reads_most} reads most, {receives_most} receives most"
    return [text_lib.table(("", "from storage", "from others"), rows, right=(1, 2)), busiest]


def _logical(leaves: Sequence[Leaf]) -> int:
    return sum(math.prod(leaf.shape) * leaf.itemsize for leaf in leaves)


def _data(
    model: str, leaves: Sequence[Leaf], forecasts: Mapping[str, Forecast], rates: Rates, notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "model": model,
        "leaves": len(leaves),
        "logical_bytes": _logical(leaves),
        "bytes_per_device": forecasts["auto"].device_bytes,
        "rates": {name: None if value == math.inf else value for name, value in dataclasses.asdict(rates).items()},
        "strategies": {name: _forecast_data(forecast, leaves) for name, forecast in forecasts.items()},
        "notes": list(notes),
    }


def _forecast_data(forecast: Forecast, leaves: Sequence[Leaf]) -> dict[str, Any]:
    return {
        "seconds": forecast.seconds,
        "peak_bytes_per_device": forecast.device_peak,
        "bytes_read": forecast.volumes.total_read,
        "bytes_received": forecast.volumes.total_received,
        "read_by_process": forecast.volumes.read.tolist(),
        "received_by_process": forecast.volumes.received.tolist(),
        "groups": [
            {"leaves": len(group.leaves), "bytes_per_device": group.device_bytes} for group in forecast.plan.groups
        ],
        "because": dict(forecast_lib.reasons(forecast, leaves)),
        "read_more_than_needed": [
            {
                "leaf": chunks.leaf.name,
                "read": chunks.read,
                "needed": chunks.needed,
                "chunk": chunks.leaf.chunk,
                "block": chunks.leaf.block,
            }
            for chunks in forecast_lib.unfit_chunks(forecast.volumes, leaves)
        ],
    }
