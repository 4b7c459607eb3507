"""The acts of the demo. Each restores with real processes and returns its rows, and what orbax_ext did not keep."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orbax_ext import lab
from orbax_ext.cli.demo import work
from orbax_ext.cli.demo.rows import NAMES, Act, Row, row_of

PROCESSES, DEVICES = 4, 8
MESH = (1, PROCESSES, DEVICES)  # pp, dp, tp: every process has a whole replica
PAIRS = (1, 2, 16)  # a replica on two processes: an exchange is between pairs of processes
SLOW = 6.0  # MB/s of each process in act b
LATE = 40.0  # seconds in act c: the others begin an exchange in 10, and then give up after 30 to open a connection
GRACE = 3.0  # seconds that the other processes get once one has failed; with orbax_ext all end by themselves
LIMIT = 120.0  # seconds of a restore; it ends long before, also on a slow machine
AGAIN = 5  # restores in act a of which the fastest counts, so that other work on the machine does not
# Seconds by which ours may be slower than plain Orbax for no reason of its own. Each restore takes fractions of a
# second, on 32 devices that share a few cores: of one kind, some take several times as long as the fastest.
NOISE = 0.3
_PACKED = 1.1  # bytes read, as a part of the state: metadata comes on top

TITLES = {
    "a": f"{PROCESSES} processes x {DEVICES} devices restore under jax.set_mesh; the page cache is the storage",
    "b": f"slow storage: the demo lets each process read at most {SLOW:.0f} MB/s",
    "c": f"a late reader: the demo holds back the reads of process {work.LATE_PROCESS} for {LATE:.0f} s",
    "d": "a damaged checkpoint: the demo has cut off half of a file with chunks of the newest step",
    "e": "the timeline of orbax_ext's restore in act b, as a page",
}
CLAIMS = {
    "a": "restores every bit; again, it is no slower than plain Orbax by more than its first meeting "
    f"and {NOISE:g} s, by which restores differ anyway",
    "b": "is the fastest of the three, because it reads every byte once, and each process reads a part",
    "c": "does not fail: another replica reads the part of the late process, and every bit is restored "
    "(with late_seconds=inf, it waits for the late process instead)",
    "d": "fails on every process, names a damaged leaf and the database that it is in, and restores the step before",
}
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Where the acts play: a cluster, the folder with the checkpoint, and how to tell what happens."""

    cluster: lab.Cluster
    folder: pathlib.Path
    megabytes: int
    say: Say

    @property
    def path(self) -> str:
        return str(self.folder / "checkpoints")

    def tell(self, row: Row) -> Row:
        _, outcome, seconds, read, _ = row.cells
        figures = ", ".join(f for f in (seconds, f"{read} read" if read != "-" else "-") if f != "-")
        self.say(f"   {row.way + ':':<24}{outcome}{f' ({figures})' if figures else ''}")
        return row


def exactness(stage: Stage) -> Act:
    """Act a. The first restore of a process also imports and compiles, so two of the handlers restore again."""
    rows = {kind: _restore(stage, kind, name)[0] for kind, name in NAMES.items()}
    names = {kind: f"{NAMES[kind]}, best of {AGAIN}" for kind in ("plain", "ours")}
    restores: dict[str, list[Row]] = {kind: [] for kind in names}
    for _ in range(AGAIN):  # by turns, so that what else the machine does slows down both
        for kind, name in names.items():
            restores[kind].append(_outcome(stage, kind, name)[0])
    again = {kind: stage.tell(_fastest(found)) for kind, found in restores.items()}
    broken = _not_exact(rows["ours"]) + _not_exact(again["ours"]) + _slower(again["plain"], again["ours"])
    return _act("a", [*rows.values(), *again.values()], broken)


def slow_storage(stage: Stage) -> Act:
    """Act b."""
    restores = {kind: _restore(stage, kind, name, megabytes_per_second=SLOW) for kind, name in NAMES.items()}
    rows = {kind: row for kind, (row, _) in restores.items()}
    broken = _not_once(rows["ours"], stage.megabytes) + _not_fastest(rows) + _not_paced(restores["ours"][1])
    return dataclasses.replace(_act("b", rows.values(), broken), page=_page(restores["ours"][1]))


def _restore(stage: Stage, kind: str, name: str, **conditions: Any) -> tuple[Row, Sequence[lab.Outcome]]:
    row, outcomes = _outcome(stage, kind, name, **conditions)
    return stage.tell(row), outcomes


def _outcome(stage: Stage, kind: str, name: str, **conditions: Any) -> tuple[Row, Sequence[lab.Outcome]]:
    run = stage.cluster.submit(work.restore, stage.path, stage.megabytes, kind, sizes=MESH, **conditions)
    grace = GRACE if kind == "stock" else LIMIT
    outcomes = run.outcomes(LIMIT, grace)
    return row_of(name, outcomes, grace), outcomes


def _fastest(rows: Sequence[Row]) -> Row:
    """Returns the fastest of several restores, or the first that was not exact."""
    return next((row for row in rows if not row.exact), None) or min(rows, key=lambda row: row.seconds or 0.0)


def _page(outcomes: Sequence[lab.Outcome]) -> str | None:
    return outcomes[0].value["page"] if outcomes[0].ok else None


def _not_once(row: Row, megabytes: int) -> tuple[str, ...]:
    broken = _not_exact(row)
    if row.megabytes_read is not None and row.megabytes_read > megabytes * 1.048576 * _PACKED:
        broken += (f"it read {row.megabytes_read} MB of a state of {megabytes} MiB",)
    return broken


def _not_fastest(rows: Mapping[str, Row]) -> tuple[str, ...]:
    ours = rows["ours"].seconds
    others = {kind: row.seconds for kind, row in rows.items() if kind != "ours" and row.seconds is not None}
    return tuple(f"{NAMES[kind]} was not slower" for kind, theirs in others.items() if ours is None or ours >= theirs)


def _slower(plain: Row, ours: Row) -> tuple[str, ...]:
    """Returns what is missing unless ours took as long as plain Orbax, but for its first meeting and for noise."""
    if plain.seconds is None or ours.seconds is None:
        return ()  # what did not restore is not compared
    more, meeting = ours.seconds - plain.seconds, ours.meeting or 0.0
    if more <= meeting + NOISE:
        return ()
    return (f"again, it took {more:.2f} s more than plain Orbax; its first meeting took {meeting:.2f} s of them",)


def _not_paced(outcomes: Sequence[lab.Outcome]) -> tuple[str, ...]:
    """Returns the processes that read faster than the demo allows: then the comparison would not be fair."""
    values = {outcome.rank: outcome.value for outcome in outcomes if outcome.ok}
    return tuple(
        f"process {rank} read faster than {SLOW:.0f} MB/s"
        for rank, value in values.items()
        if value["bytes_read"] > value["seconds"] * SLOW * 1e6
    )


def _not_exact(row: Row) -> tuple[str, ...]:
    return () if row.exact else (f"it did not restore every bit: {row.outcome}",)


class LateReader:
    """Act c. It takes more than half a minute, in which its processes only wait: the other acts play meanwhile."""

    def __init__(self, folder: pathlib.Path, megabytes: int) -> None:
        self._path, self._megabytes = str(folder / "late"), megabytes
        self._clusters = {kind: lab.Cluster(PROCESSES, DEVICES) for kind in ("stock", "ours")}
        self._runs: Mapping[str, lab.Run] = {}

    def begin(self) -> None:
        """Starts the restores, and returns without waiting for them."""
        self._clusters["ours"].run(work.save, self._path, self._megabytes, [1], PAIRS)
        self._runs = {
            kind: cluster.submit(
                # Without jax.set_mesh, under which older releases fail before it comes to waiting.
                work.restore,
                self._path,
                self._megabytes,
                kind,
                sizes=PAIRS,
                set_mesh=False,
                late=LATE,
            )
            for kind, cluster in self._clusters.items()
        }

    def end(self, stage: Stage) -> Act:
        rows = {kind: row_of(NAMES[kind], run.outcomes(LIMIT, GRACE), GRACE) for kind, run in self._runs.items()}
        return _act("c", map(stage.tell, rows.values()), _not_exact(rows["ours"]) + _not_taken_over(rows["ours"]))

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for cluster in self._clusters.values():
                stack.callback(cluster.close)


def _not_taken_over(row: Row) -> tuple[str, ...]:
    late = work.LATE_PROCESS
    return () if late in row.taken_over else (f"nobody else read the part of process {late}",)


def damage(stage: Stage) -> Act:
    """Act d."""
    step = stage.folder / "checkpoints" / "2"
    file = cut_a_file(step)
    # Without jax.set_mesh, under which older releases fail before they read.
    stock, _ = _restore(stage, "stock", NAMES["stock"], set_mesh=False, step=2)
    ours, outcomes = _restore(stage, "ours", NAMES["ours"], set_mesh=False, step=2)
    before = stage.cluster.outcomes(work.restore_before, stage.path, stage.megabytes, sizes=MESH, timeout=LIMIT)
    row = stage.tell(row_of(f"{NAMES['ours']}, step before", before))
    return _act("d", (stock, ours, row), _not_named(outcomes, step, file) + _not_exact(row))


def _not_named(outcomes: Sequence[lab.Outcome], step: pathlib.Path, file: pathlib.Path) -> tuple[str, ...]:
    """Returns what is missing unless every process failed with an error that names a damaged leaf and its database.

    TensorStore names the chunk, such as "weights/3.0", and the folder of the database in which it looked for it.
    """
    item = step / file.relative_to(step).parts[0]
    leaves = work.damaged_leaves(str(item))
    named = re.compile(f'"(?:{"|".join(map(re.escape, leaves))})/[^"\n]+"[^\n]*"{re.escape(f"{item}/")}')
    messages = [outcome.failure.message if outcome.failure else "" for outcome in outcomes]
    if leaves and all(named.search(message) for message in messages):
        return ()
    damaged = f"one of {', '.join(leaves)}" if leaves else "a damaged leaf, of which there is none,"
    return (f"not every process failed with an error that names {damaged} in {item}",)


def cut_a_file(step: pathlib.Path) -> pathlib.Path:
    """Cuts the largest file of a step in half, and returns it."""
    file = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    return file


def _act(letter: str, rows: Iterable[Row], broken: tuple[str, ...]) -> Act:
    return Act(letter, TITLES[letter], CLAIMS[letter], tuple(rows), broken)
