"""`orbax-ext inspect`: shows what a checkpoint holds, how it is stored, and whether it is complete."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from orbax_ext import text as text_lib
from orbax_ext.cli import arguments, exits, files, restore_code
from orbax_ext.plan.forecast import notation
from orbax_ext.storage import checkpoint
from orbax_ext.storage.checkpoint import CheckpointItem, ManagerDirectory, SavedStep, StoredLeaf

DESCRIPTION = (
    "Shows the steps of a CheckpointManager's directory, or the tree of one checkpoint with shapes, "
    "dtypes, stored chunks, bytes on disk, and the mesh it was saved on."
)
EPILOG = """examples:
  orbax-ext inspect /ckpt/run7               the steps, which of them are committed, how large they are
  orbax-ext inspect /ckpt/run7 --step 1200   the tree of one step: shapes, dtypes, chunks, bytes
  orbax-ext inspect s3://bucket/run7/1200 --json
  orbax-ext inspect /ckpt/run7 --code --mesh dp=2,tp=4     the Python that restores the newest step on that mesh

Reads metadata only and needs no devices. Exit code 0: the checkpoint is complete; 1: no step is committed, or arrays
are missing; 2: the path is not a checkpoint, or its save never finished.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help=arguments.CHECKPOINT)
    parser.add_argument("--step", type=int, help="the step of a CheckpointManager's directory (default: list all)")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    output.add_argument("--code", action="store_true", help="print the Python that restores it")
    parser.add_argument("--mesh", metavar="AXES", help="with --code: the mesh, such as dp=2,tp=4 (default: one device)")
    arguments.add_spec(parser)


def run(args: argparse.Namespace) -> bool:
    if args.code:
        print(_code(args))
        return True
    if args.mesh or args.spec:
        raise exits.UserError("--mesh and --spec are for --code: the stored specs are shown as they were saved")
    with files.readable_checkpoint(args.checkpoint):
        contents = checkpoint.inspect(args.checkpoint, args.step)
    if isinstance(contents, ManagerDirectory):
        print(json.dumps(_manager_data(contents), indent=2) if args.json else _manager_text(contents))
        return any(step.state.committed for step in contents.steps)
    data = {"path": args.checkpoint, "items": [_item_data(item) for item in contents]}
    print(json.dumps(data, indent=2) if args.json else "\n\n".join(_item_text(item) for item in contents))
    return not any(leaf.problem for item in contents for leaf in item.leaves)


def _code(args: argparse.Namespace) -> str:
    with files.readable_checkpoint(args.checkpoint):
        items = [path.name for path in checkpoint.locate(args.checkpoint, args.step)]
        try:
            mesh = notation.parse_mesh(args.mesh) if args.mesh else None
            rules = [notation.parse_rule(text) for text in args.spec]
            if rules and not mesh:
                raise ValueError("--spec needs a mesh: give --mesh too")
            return restore_code.restore_code(args.checkpoint, args.step, mesh, rules, items)
        except ValueError as error:
            raise exits.UserError(str(error)) from None


def _manager_text(manager: ManagerDirectory) -> str:
    rows = [
        (
            step.name,
            "committed" if step.state.committed else "UNFINISHED",
            text_lib.size(step.bytes_on_disk),
            str(step.files),
            "-" if step.seconds_to_save is None else text_lib.seconds(step.seconds_to_save),
            ", ".join(step.items),
        )
        for step in manager.steps
    ]
    head = ("step", "state", "on disk", "files", "saved in", "items")
    committed = [step for step in manager.steps if step.state.committed]
    lines = [manager.path, "", text_lib.table(head, rows, right=(2, 3, 4)), "", _newest(committed)]
    lines += [f"{step.name}: {step.state.because}" for step in manager.steps if not step.state.committed]
    return "\n".join(lines)


def _newest(committed: Sequence[SavedStep]) -> str:
    if not committed:
        return "No step is committed: there is nothing to restore from."
    newest = committed[-1]
    hint = "" if newest.number is None else f"; --step {newest.number} shows what it holds"
    return f"{text_lib.count(len(committed), 'committed step')}; a restore takes {newest.name}{hint}"


def _item_text(item: CheckpointItem) -> str:
    lines = [item.path, f"  {_facts(item)}"]
    if item.has_arrays:
        head = ("leaf", "dtype", "shape", "chunk", "chunks", "saved as", "bytes", "on disk", "")
        table = text_lib.table(head, [_row(leaf) for leaf in item.leaves], right=(4, 6, 7, 8))
        lines += ["", table, "", f"  {_totals(item)}"]
        lines += [f"  PROBLEM: {leaf.name}: {leaf.problem}" for leaf in item.leaves if leaf.problem]
    return "\n".join(lines)


def _facts(item: CheckpointItem) -> str:
    facts = [f"committed: {item.state.because}"]
    if item.has_arrays:
        facts.append(f"{item.format}{' in OCDBT' if item.ocdbt else ', one file per chunk'}")
    else:
        facts.append(f"no arrays, {text_lib.size(item.bytes_on_disk)} in {text_lib.count(item.files, 'file')}")
    if item.mesh:
        facts.append(f"saved on mesh {text_lib.mesh(dict(item.mesh))}")
    if item.saved_by:
        devices = text_lib.count(len(item.saved_by[0]), "device")
        facts.append(f"by {text_lib.count(len(item.saved_by), 'process')} x {devices}")
    elif item.writers:
        facts.append(f"written by {text_lib.count(item.writers, 'process')}")
    if item.handler:
        facts.append(item.handler.rpartition(".")[2])
    return "; ".join(facts)


def _row(leaf: StoredLeaf) -> tuple[str, ...]:
    sharding = str(leaf.sharding) if leaf.sharding else "-"
    if leaf.array is None:
        return (leaf.name, leaf.kind, "-", "-", "-", sharding, "-", "MISSING" if leaf.problem else "-", "")
    array, header = leaf.array, leaf.array.header
    chunk = text_lib.shape(header.chunk)
    if header.file_chunk != header.chunk:
        chunk += f" in {text_lib.shape(header.file_chunk)}"
    return (
        leaf.name,
        f"key<{leaf.key_type}>" if leaf.key_type else header.dtype,
        text_lib.shape(header.shape),
        chunk,
        str(array.chunks),
        sharding if leaf.sharding else leaf.kind,
        text_lib.size(header.logical_bytes),
        text_lib.size(array.stored_bytes),
        text_lib.share(array.stored_bytes, header.logical_bytes),
    )


def _totals(item: CheckpointItem) -> str:
    arrays = sum(leaf.array is not None for leaf in item.leaves)
    return (
        f"{text_lib.count(len(item.leaves), 'leaf')}, {text_lib.count(arrays, 'array')}: "
        f"{text_lib.size(item.logical_bytes)} logical, {text_lib.size(item.stored_bytes)} stored "
        f"({text_lib.share(item.stored_bytes, item.logical_bytes)}), "
        f"{text_lib.size(item.bytes_on_disk)} in {text_lib.count(item.files, 'file')} with all metadata"
    )


def _manager_data(manager: ManagerDirectory) -> dict[str, Any]:
    steps = [
        {
            "step": step.number,
            "path": step.path,
            "committed": step.state.committed,
            "because": step.state.because,
            "items": step.items,
            "bytes_on_disk": step.bytes_on_disk,
            "files": step.files,
            "seconds_to_save": step.seconds_to_save,
        }
        for step in manager.steps
    ]
    return {"path": manager.path, "steps": steps}


def _item_data(item: CheckpointItem) -> dict[str, Any]:
    return {
        "path": item.path,
        "committed": item.state.committed,
        "because": item.state.because,
        "handler": item.handler or None,
        "format": item.format,
        "ocdbt": item.ocdbt,
        "mesh": dict(item.mesh) or None,
        "processes_that_wrote": item.writers,
        "devices_by_process": item.saved_by or None,
        "logical_bytes": item.logical_bytes,
        "stored_bytes": item.stored_bytes,
        "bytes_on_disk": item.bytes_on_disk,
        "files": item.files,
        "leaves": [_leaf_data(leaf) for leaf in item.leaves],
    }


def _leaf_data(leaf: StoredLeaf) -> dict[str, Any]:
    data: dict[str, Any] = {"name": leaf.name, "kind": leaf.kind}
    if leaf.array is not None:
        header = leaf.array.header
        data |= {
            "shape": header.shape,
            "dtype": header.dtype,
            "chunk": header.chunk,
            "chunk_of_a_file": header.file_chunk,
            "chunks": leaf.array.chunks,
            "logical_bytes": header.logical_bytes,
            "stored_bytes": leaf.array.stored_bytes,
        }
    if sharding := leaf.sharding:
        data["sharding"] = {"kind": sharding.kind, "mesh": dict(sharding.axes), "spec": sharding.spec}
    if leaf.key_type:
        data["key_type"] = leaf.key_type
    if leaf.problem:
        data["problem"] = leaf.problem
    return data
