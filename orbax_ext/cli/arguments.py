"""Arguments that several commands share. Imports nothing large: some of these commands run without JAX."""

from __future__ import annotations

import argparse

CHECKPOINT = "a CheckpointManager's directory, a step, or an item in it; a local path or s3://bucket/..."


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, help="the step of a CheckpointManager's directory (default: the newest)")


def add_spec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--spec",
        metavar="PATTERN=SPEC",
        action="append",
        default=[],
        help="the spec of the leaves whose names match, such as '*.kernel=P(None,tp)'; may be repeated, and the first "
        "match counts",
    )
