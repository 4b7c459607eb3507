"""`orbax-ext plan`: what a restore would do on a cluster, without devices and without reading data."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from orbax_ext import text as text_lib
from orbax_ext.cli import exits, paths
from orbax_ext.plan import Leaf
from orbax_ext.plan.cost import Rates
from orbax_ext.plan.forecast import described, forecast, notation, picture
from orbax_ext.plan.forecast.described import Described
from orbax_ext.plan.forecast.forecast import Forecast
from orbax_ext.storage import checkpoint

_EPILOG = """examples:
  orbax-ext plan /ckpt/run7 --mesh pp=1,dp=4,tp=8 --processes 4
  orbax-ext plan /ckpt/run7 --mesh dp=64,tp=8 --processes 64 --spec '*.kernel=P(None,tp)' --svg plan.svg
  orbax-ext plan --shapes model.txt --mesh pp=16,dp=256,tp=8 --processes 4096

A model that is not saved yet is described in a file, an array on each line, or in JSON:
  embed                    bfloat16  129280x7168    P(tp)            16160x7168
  layers.{0..60}.experts   bfloat16  256x7168x2048  P(pp,None,tp)
  step                     int32     ()
with name ({0..60} stands for 61 arrays), dtype, shape, spec (else --spec, else copies) and stored chunk (else what a
device of this mesh holds). Without --spec, leaves of a checkpoint keep the spec that they were saved with where it fits
the mesh. Devices are given to processes in the mesh's order, the last axis running fastest.
"""
_SHOWN = 16  # processes, or leaves, that are listed one by one


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tells without devices who would read what, what would cross each link, which leaves are read more "
        "than once, how long each strategy would take, and which one auto picks and why."
    )
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("checkpoint", metavar="CKPT", nargs="?", help=paths.HELP)
    what.add_argument("--shapes", metavar="FILE", type=pathlib.Path, help="a described model instead, see below")
    parser.add_argument("--step", type=int, help="which step of a CheckpointManager's directory (the newest)")
    parser.add_argument("--mesh", metavar="AXES", required=True, help="such as pp=1,dp=4,tp=8")
    parser.add_argument(
        "--processes", metavar="N", type=int, required=True, help="processes, with equally many devices"
    )
    paths.add_spec(parser)
    parser.add_argument(
        "--replica-axis", metavar="AXIS", help="for `single`: the axis of copies (those that none uses)"
    )
    rate = parser.add_argument_group("the cluster, per process while all work at once")
    rate.add_argument("--storage-gbps", metavar="GBPS", type=float, help="gigabits per second from storage (8)")
    rate.add_argument("--storage-total-gbps", metavar="GBPS", type=float, help="of all processes together (no limit)")
    rate.add_argument("--fabric-gbps", metavar="GBPS", type=float, help="gigabits per second between processes (100)")
    rate.add_argument("--memory", metavar="GB", type=float, help="free on each device before the restore (64)")
    parser.add_argument("--svg", metavar="OUT", type=pathlib.Path, help="write a picture of the bytes by process")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    rates, free = _cluster(args)
    try:
        mesh = forecast.mesh_on(notation.parse_mesh(args.mesh), args.processes)
        rules = [notation.parse_rule(text) for text in args.spec]
        leaves, unfit = described.place(_described(args), mesh, rules)
        found: dict[str, Forecast] = {
            strategy: forecast.forecast(leaves, mesh, args.processes, rates, free, strategy, args.replica_axis)
            for strategy in forecast.STRATEGIES
        }
    except ValueError as error:
        raise exits.UserError(str(error)) from None
    what = str(args.shapes or args.checkpoint)
    notes = _notes(found["auto"], unfit, rules, leaves, free)
    if args.svg:
        _draw(args.svg, f"{what} on {mesh}, {text_lib.count(args.processes, 'process')}", found)
    if args.json:
        print(json.dumps(_data(what, leaves, found, rates, notes), indent=1))
    else:
        print(_text(what, str(mesh), args, leaves, found, rates, notes))
    return exits.EXIT_OK if found["auto"].device_peak <= free else exits.EXIT_BAD_VERDICT


def _cluster(args: argparse.Namespace) -> tuple[Rates, int]:
    given = {name: getattr(args, name) for name in ("storage_gbps", "fabric_gbps", "memory", "storage_total_gbps")}
    for name, value in given.items():
        if value is not None and value <= 0:
            raise exits.UserError(f"--{name.replace('_', '-')} must be above 0; found {value:g}")
    assumed = [name for name in ("storage_gbps", "fabric_gbps") if given[name] is None]
    rates = Rates(
        (given["storage_gbps"] or 8) * 1e9 / 8,
        (given["fabric_gbps"] or 100) * 1e9 / 8,
        (given["storage_total_gbps"] or float("inf")) * 1e9 / 8,
        "assumed" if assumed else "given",
    )
    return rates, int((given["memory"] or 64) * 1e9)


def _described(args: argparse.Namespace) -> list[Described]:
    if args.shapes is not None:
        try:
            return described.parse_shapes(args.shapes.read_text(encoding="utf-8"))
        except OSError as error:
            raise exits.UserError(f"{args.shapes}: {error.strerror or error}") from None
        except ValueError as error:
            raise exits.UserError(f"{args.shapes}: {error}") from None
    with paths.readable(args.checkpoint):
        items = [item for item in checkpoint.items_of(args.checkpoint, args.step) if item.has_arrays]
    found = [
        _from_leaf(leaf, item.name if len(items) > 1 else "") for item in items for leaf in item.leaves if leaf.array
    ]
    if not found:
        raise exits.UserError(f"{args.checkpoint} holds no arrays")
    return found


def _from_leaf(leaf: checkpoint.StoredLeaf, item: str) -> Described:
    assert leaf.array is not None
    header = leaf.array.header
    reason = ""
    if leaf.key_type:
        reason = "it is a typed PRNG key"
    elif leaf.kind not in ("jax.Array", "array"):
        reason = f"it was saved as a {leaf.kind}, not as an array on devices"
    return Described(
        f"{item}.{leaf.name}" if item else leaf.name,
        header.shape,
        header.dtype,
        leaf.sharding.spec if leaf.sharding else None,
        header.chunk,
        reason,
    )


def _notes(
    auto: Forecast, unfit: Mapping[str, str], rules: Sequence[notation.Rule], leaves: Sequence[Leaf], free: int
) -> list[str]:
    notes = []
    if unfit:
        shown = ", ".join([*unfit][:3]) + (f" and {len(unfit) - 3} more" if len(unfit) > 3 else "")
        notes.append(f"taken as copies, because their own spec does not fit ({next(iter(unfit.values()))}): {shown}")
    for rule in rules:
        if not any(rule.matches(leaf.name) for leaf in leaves):
            notes.append(f"--spec {rule.pattern!r} matches no leaf")
    read = auto.volumes.read
    if read.max() > 1.5 * read.mean() and auto.travelling:
        notes.append(
            f"process {int(read.argmax())} reads {read.max() / read.mean():.1f} times the mean: leaves can't be cut"
        )
    if auto.device_peak > free:
        notes.append(
            f"DOES NOT FIT: {text_lib.size(auto.device_peak)} on each device, "
            f"{text_lib.size(free)} are free: shard more"
        )
    return notes


def _text(
    what: str,
    mesh: str,
    args: argparse.Namespace,
    leaves: Sequence[Leaf],
    found: Mapping[str, Forecast],
    rates: Rates,
    notes: Sequence[str],
) -> str:
    auto = found["auto"]
    each = np.prod([size for _, size in notation.parse_mesh(args.mesh)]) // args.processes
    lines = [
        f"{what}: {text_lib.count(len(leaves), 'leaf')}, {text_lib.size(_logical(leaves))}",
        f"  mesh {mesh} on {text_lib.count(args.processes, 'process')} x {each} devices; "
        f"{text_lib.size(auto.device_bytes)} on each device",
        f"  {rates}{_storage_in_all(rates, args.processes)}",
        "",
        text_lib.table(_HEAD, [_row(each, leaves) for each in found.values()], right=range(1, len(_HEAD))),
        "",
        "auto picks",
    ]
    for reason, names in forecast.reasons(auto, leaves).items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
        lines.append(f"  {reason}: {shown}")
    lines += ["", "who reads what, with auto", *_by_process(auto)]
    if blamed := forecast.unfit_chunks(auto.volumes, leaves):
        lines += ["", f"read more than needed, with auto ({len(blamed)} of {len(leaves)} leaves)"]
        lines += [f"  {b.read / max(1, b.needed):.1f} times  {b}" for b in blamed[:_SHOWN]]
        lines.append("  Chunks that divide the blocks are read once: save from this mesh, or with a chunk_byte_size.")
    lines += [f"note: {note}" for note in notes]
    if args.svg:
        lines.append(f"written: {args.svg}")
    return "\n".join(lines)


def _storage_in_all(rates: Rates, processes: int) -> str:
    """What the figure for one process supposes of a store that all share."""
    total = min(rates.storage_total, rates.storage * processes)
    return f"; all processes together {text_lib.size(total)}/s from storage"


_HEAD = ("strategy", "read in all", "of the state", "busiest reads", "receives", "groups", "seconds", "peak per device")


def _row(each: Forecast, leaves: Sequence[Leaf]) -> tuple[str, ...]:
    return (
        each.strategy,
        text_lib.size(each.volumes.total_read),
        f"x {each.volumes.total_read / max(1, _logical(leaves)):.2f}",
        text_lib.size(each.volumes.read.max()),
        text_lib.size(each.volumes.received.max()),
        str(len(each.plan.groups)),
        text_lib.seconds(each.seconds),
        text_lib.size(each.device_peak),
    )


def _by_process(auto: Forecast) -> list[str]:
    read, received = auto.volumes.read, auto.volumes.received
    if len(read) <= _SHOWN:
        rows = [(str(p), text_lib.size(read[p]), text_lib.size(received[p])) for p in range(len(read))]
        return [text_lib.table(("process", "from storage", "from others"), rows, right=(0, 1, 2))]
    rows = [
        (name, text_lib.size(np.quantile(read, share)), text_lib.size(np.quantile(received, share)))
        for name, share in (("least", 0.0), ("middle", 0.5), ("most", 1.0))
    ]
    busiest = f"  process {int(read.argmax())} reads most, process {int(received.argmax())} receives most"
    return [text_lib.table(("", "from storage", "from others"), rows, right=(1, 2)), busiest]


def _logical(leaves: Sequence[Leaf]) -> int:
    return sum(int(np.prod(leaf.shape, dtype=object)) * leaf.itemsize for leaf in leaves)


def _draw(path: pathlib.Path, title: str, found: Mapping[str, Forecast]) -> None:
    shown = [each for name, each in found.items() if name != "auto"]
    try:
        path.write_text(picture.draw(title, shown), encoding="utf-8")
    except OSError as error:
        raise exits.UserError(f"{path}: {error.strerror or error}") from None


def _data(
    what: str, leaves: Sequence[Leaf], found: Mapping[str, Forecast], rates: Rates, notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "model": what,
        "leaves": len(leaves),
        "logical_bytes": _logical(leaves),
        "bytes_per_device": found["auto"].device_bytes,
        "rates": {
            "storage": rates.storage,
            "fabric": rates.fabric,
            "storage_total": None if rates.storage_total == float("inf") else rates.storage_total,
            "how": rates.how,
        },
        "strategies": {name: _forecast_data(each, leaves) for name, each in found.items()},
        "notes": list(notes),
    }


def _forecast_data(each: Forecast, leaves: Sequence[Leaf]) -> dict[str, Any]:
    return {
        "seconds": each.seconds,
        "peak_bytes_per_device": each.device_peak,
        "bytes_read": each.volumes.total_read,
        "bytes_received": each.volumes.total_received,
        "read_by_process": each.volumes.read.tolist(),
        "received_by_process": each.volumes.received.tolist(),
        "groups": [{"leaves": len(g.leaves), "bytes_per_device": g.device_bytes} for g in each.plan.groups],
        "because": dict(forecast.reasons(each, leaves)),
        "read_more_than_needed": [
            {"leaf": b.leaf.name, "read": b.read, "needed": b.needed, "chunk": b.leaf.chunk, "block": b.leaf.block}
            for b in forecast.unfit_chunks(each.volumes, leaves)
        ],
    }
