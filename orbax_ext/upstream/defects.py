"""Known defects of Orbax's own single-replica restores, as data for `orbax-ext doctor` and the README."""

from __future__ import annotations

import dataclasses

from orbax_ext import version

_ISSUE = "https://github.com/google/orbax/issues/{}"


@dataclasses.dataclass(frozen=True)
class Defect:
    """One defect of the stock `SingleReplicaArrayHandler`, of what it uses, or of the emergency manager."""

    id: str
    title: str
    effect: str
    breaks: bool  # a restore that should work hangs, fails or changes data; otherwise the defect limits or slows it
    reports: tuple[int, ...] = ()  # issues and pull requests of google/orbax
    first: str = "0.11.33"  # the oldest supported release that has it, not always the one that introduced it
    fixed: str | None = None  # the first release without it
    patch: str | None = None  # the name of the patch in patches/<release>/ that fixes it
    probe: str | None = None  # the function of orbax_ext.upstream.probes that detects it in seconds

    def in_release(self, release: str) -> bool:
        """Returns whether a release of Orbax has the defect."""
        number = version.numbers(release)
        return version.numbers(self.first) <= number and (self.fixed is None or number < version.numbers(self.fixed))

    @property
    def releases(self) -> str:
        return f"{self.first} to the one before {self.fixed}" if self.fixed else f"{self.first} and newer"

    @property
    def links(self) -> tuple[str, ...]:
        return tuple(_ISSUE.format(number) for number in self.reports)

    @property
    def remedies(self) -> tuple[str, ...]:
        """What fixes it, the easiest first."""
        patch = (f"patch {self.patch}",) if self.patch else ()
        upgrade = (f"upgrade to {self.fixed}",) if self.fixed else ()
        return ("register", *patch, *upgrade)


DEFECTS = (
    Defect(
        id="set-mesh",
        title="Fails under `jax.set_mesh`",
        effect='every process raises "Received incompatible devices for jitted computation"',
        breaks=True,
        reports=(3184, 3164, 3183),
        fixed="0.11.40",
        patch="01-replica-mesh-scope",
        probe="set_mesh",
    ),
    Defect(
        id="late-reader",
        title="No meeting before the broadcast",
        effect="processes enter the broadcast while the primary still reads, and time out or hang there",
        breaks=True,
        reports=(3181,),
        patch="02-pre-broadcast-barrier",
    ),
    Defect(
        id="inexact",
        title="The broadcast changes data",
        effect="bool and short integers become 32-bit, -0.0 becomes 0.0, denormals become 0, NaNs change, int4 crashes",
        breaks=True,
        patch="03-exact-broadcast",
        probe="inexact",
    ),
    Defect(
        id="lone-error",
        title="A read error stays on the primary",
        effect="the other processes enter the broadcast and wait forever",
        breaks=True,
        reports=(3181,),
        patch="04-error-propagation",
    ),
    Defect(
        id="save-after-restore",
        title="Left registered, it breaks later saves",
        effect='the next save fails with "No ArrayMetadata found"',
        breaks=True,
        patch="05-save-after-restore",
        probe="save_after_restore",
    ),
    Defect(
        id="emergency-set-mesh",
        title="The emergency manager fails under `jax.set_mesh`",
        effect='every process raises "Gathering global non-fully-addressable arrays only supports tiled=True"',
        breaks=True,
        patch="06-emergency-mesh-scope",
    ),
    Defect(
        id="emergency-inexact",
        title="The emergency manager changes data",
        effect="it broadcasts by the same sum: bool and short integers become 32-bit, -0.0 becomes 0.0",
        breaks=True,
        patch="03-exact-broadcast",
    ),
    Defect(
        id="emergency-lone-error",
        title="A read error stays on the emergency manager's reader",
        effect="the other processes wait forever in a barrier",
        breaks=True,
        patch="07-emergency-meeting",
    ),
    Defect(
        id="emergency-incomplete",
        title="The emergency manager counts only complete replicas",
        effect="one lost or damaged host makes the copies on all other hosts of its replica useless",
        breaks=False,
    ),
    Defect(
        id="plain-args",
        title="Refuses plain restore arguments",
        effect="`ArrayRestoreArgs` and `StandardRestore` are errors, a missing shape or dtype only on non-primaries",
        breaks=False,
        probe="plain_args",
    ),
    Defect(
        id="one-mesh",
        title="One mesh for all leaves",
        effect="leaves on other meshes, 1-D meshes, a replica axis of size 1 and leaves sharded over it are errors",
        breaks=False,
        probe="one_mesh",
    ),
    Defect(
        id="axis-types",
        title="Drops the mesh's axis types",
        effect="explicit axes become automatic ones in the replica's sharding",
        breaks=False,
        probe="axis_types",
    ),
    Defect(
        id="memory-kind",
        title="Drops the memory kind",
        effect="`pinned_host` arrays silently come back in device memory",
        breaks=False,
        probe="memory_kind",
    ),
    Defect(
        id="random-keys",
        title="Typed random keys come back raw",
        effect="a `jax.random.key` leaf comes back as uint32 data",
        breaks=False,
        probe="random_keys",
    ),
    Defect(
        id="own-limits",
        title="Memory limits are not agreed",
        effect="each host splits the broadcast by its own free memory; different splits are different programs",
        breaks=False,
    ),
    Defect(
        id="cold-broadcast",
        title="The warm-up misses under `jax.set_mesh`",
        effect="programs compiled during the read are compiled again in the broadcast",
        breaks=False,
        first="0.12.7",
    ),
    Defect(
        id="no-s3",
        title="No `s3://`",
        effect="checkpoints on S3-compatible storage can't be opened by their address",
        breaks=False,
        reports=(359, 872, 2739),
    ),
)


def markdown_table() -> str:
    """Returns the table of defects for the README."""
    rows = ["| defect | what happens | Orbax releases | fixed by |", "|---|---|---|---|"]
    for defect in DEFECTS:
        links = ", ".join(f"[#{number}]({_ISSUE.format(number)})" for number in defect.reports)
        name = f"**{defect.title}**" if defect.breaks else defect.title
        title = f"{name} ({links})" if links else name
        rows.append(f"| {title} | {defect.effect} | {_span(defect)} | {', '.join(map(_remedy, defect.remedies))} |")
    return "\n".join([*rows, "", "Defects in bold break a restore; the others limit or slow it."])


def _span(defect: Defect) -> str:
    return f"{defect.first}, fixed in {defect.fixed}" if defect.fixed else f"{defect.first} and newer"


def _remedy(remedy: str) -> str:
    return "`orbax_ext.register`" if remedy == "register" else remedy
