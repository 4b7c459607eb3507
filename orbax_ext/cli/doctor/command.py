"""`orbax-ext doctor`: lists the known defects of the installed Orbax, what fixes them, and other problems."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from orbax_ext.cli.doctor import installation
from orbax_ext.upstream import probing
from orbax_ext.upstream.defects import DEFECTS, Defect

DESCRIPTION = "Lists which known defects of Orbax this installation has, and what fixes them."
EPILOG = """examples:
  orbax-ext doctor
  orbax-ext doctor --registered --json

Exit code 0: nothing would break a restore; 1: something would. By default, that is a restore with Orbax's own
single-replica handler. With --registered, it is a restore with orbax_ext registered, which fixes all of these defects.
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One defect, and whether this installation has it."""

    defect: Defect
    present: bool
    how: str  # how this was found out: "probed", by the installed "files", or by the number of the "release"
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Everything that was found."""

    versions: dict[str, str]
    files: installation.Files
    findings: Sequence[Finding]
    checks: Sequence[installation.Check]
    hooks: Sequence[installation.HookedFunction]
    registered: bool  # whether the program calls orbax_ext.register()

    @property
    def breaking(self) -> list[str]:
        """The names of what would break a restore."""
        defects = [finding.defect.id for finding in self.findings if finding.present and finding.defect.breaks]
        bad = [check.name for check in self.checks if check.state == "bad"]
        return bad if self.registered else [*defects, *bad]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--registered", action="store_true", help="for a program that calls orbax_ext.register()")
    parser.add_argument("--quick", action="store_true", help="look up only: run no probes (under a second)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> bool:
    versions = installation.versions()
    files = installation.orbax_files()
    probed = {} if args.quick else probing.run([defect.probe for defect in DEFECTS if defect.probe])
    findings = [judge(defect, versions["orbax-checkpoint"], files, probed) for defect in DEFECTS]
    hooks = [] if args.quick else installation.hooks()
    checks = [installation.s3()]
    if not args.quick:
        checks = [installation.stock_handlers(hooks), installation.runtime(), *installation.cluster(), *checks]
    diagnosis = Diagnosis(versions, files, findings, checks, hooks, args.registered)
    print(json.dumps(_data(diagnosis), indent=2) if args.json else "\n".join(_lines(diagnosis)))
    return not diagnosis.breaking


def judge(defect: Defect, release: str, files: installation.Files, probed: dict[str, bool | str]) -> Finding:
    """Decides whether the defect is present: by its probe, else by the installed files, else by the release number."""
    result = probed.get(defect.probe or "")
    if isinstance(result, bool):
        return Finding(defect, result, "probed")
    note = f"could not be probed: {result}" if result else ""
    if defect.patch in files.patches:
        return Finding(defect, False, "files", note)
    return Finding(defect, defect.in_release(release), "release" if files.state == "other" else "files", note)


def _data(diagnosis: Diagnosis) -> dict[str, Any]:
    defects = [
        {
            "id": finding.defect.id,
            "title": finding.defect.title,
            "effect": finding.defect.effect,
            "breaks_restore": finding.defect.breaks,
            "reports": finding.defect.links,
            "releases": finding.defect.releases,
            "present": finding.present,
            "how": finding.how,
            "note": finding.note,
            "mended_by": finding.defect.remedies,
        }
        for finding in diagnosis.findings
    ]
    return {
        "versions": diagnosis.versions,
        "orbax_files": dataclasses.asdict(diagnosis.files),
        "defects": defects,
        "checks": [dataclasses.asdict(check) for check in diagnosis.checks],
        "hooks": [dataclasses.asdict(hook) for hook in diagnosis.hooks],
        "breaking": diagnosis.breaking,
    }


def _lines(diagnosis: Diagnosis) -> list[str]:
    lines = ["Versions", f"  {', '.join(f'{name} {number}' for name, number in diagnosis.versions.items())}"]
    lines += [f"  Orbax's files: {_files(diagnosis.files)}", "", "Defects of Orbax's own single-replica handler"]
    for finding in diagnosis.findings:
        defect = finding.defect
        mark = ("BREAKS" if defect.breaks else "limits") if finding.present else "-"
        lines.append(f"  {mark:7} {defect.title} [{finding.how}]{f' ({finding.note})' if finding.note else ''}")
        if finding.present:
            lines.append(f"          {defect.effect}; Orbax {defect.releases}")
            lines.append(f"          fixed by: {', '.join(defect.remedies)}  {' '.join(defect.links)}".rstrip())
    lines += ["", "This machine"]
    lines += [f"  {check.state:7} {check.name}: {check.detail}" for check in diagnosis.checks]
    if diagnosis.hooks:
        lines += ["", "Functions that register() takes over; last_report().served_by names the one that was called"]
        lines += [f"  {'ok' if hook.present else 'absent':7} {hook.name}: {hook.why}" for hook in diagnosis.hooks]
    return [*lines, "", *_conclusion(diagnosis.breaking, diagnosis.registered)]


def _files(files: installation.Files) -> str:
    if files.state == "other":
        return "not those of a known release, so defects are looked up by the release number"
    releases = " or ".join(files.releases)
    return f"as released in {releases}" if files.state == "original" else f"{releases} with the patches of orbax_ext"


def _conclusion(breaking: Sequence[str], registered: bool) -> list[str]:
    handler = "with orbax_ext registered" if registered else "with Orbax's own single-replica handler"
    if not breaking:
        return [f"Nothing found that would break a restore {handler}."]
    hint = "If your program calls orbax_ext.register(), run this again with --registered."
    return [f"A restore {handler} would break: {', '.join(breaking)}.", *([] if registered else [hint])]
