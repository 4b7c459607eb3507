"""`orbax-ext doctor`: lists the known defects of the installed Orbax, what fixes them, and other problems."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from orbax_ext.cli import exits
from orbax_ext.cli.doctor import installation
from orbax_ext.upstream import probes
from orbax_ext.upstream.defects import DEFECTS, Defect

_EPILOG = """examples:
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


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists which known defects of Orbax this installation has, and what fixes them."
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--registered", action="store_true", help="for a program that calls orbax_ext.register()")
    parser.add_argument("--quick", action="store_true", help="look up only: run no probes (under a second)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    versions = installation.versions()
    files = installation.orbax_files()
    probed = {} if args.quick else probes.run([defect.probe for defect in DEFECTS if defect.probe])
    findings = [judge(defect, versions["orbax-checkpoint"], files, probed) for defect in DEFECTS]
    checks = [installation.s3()] if args.quick else [installation.runtime(), *installation.cluster(), installation.s3()]
    breaking = broken(findings, checks, registered=args.registered)
    if args.json:
        print(json.dumps(as_data(versions, files, findings, checks, breaking), indent=2))
    else:
        print("\n".join(as_text(versions, files, findings, checks, breaking, registered=args.registered)))
    return exits.EXIT_BAD_VERDICT if breaking else exits.EXIT_OK


def judge(defect: Defect, release: str, files: installation.Files, probed: dict[str, bool | str]) -> Finding:
    """Decides whether the defect is present: by its probe, else by the installed files, else by the release number."""
    result = probed.get(defect.probe or "")
    if isinstance(result, bool):
        return Finding(defect, result, "probed")
    note = f"could not be probed: {result}" if result else ""
    if defect.patch in files.patches:
        return Finding(defect, False, "files", note)
    return Finding(defect, defect.in_release(release), "release" if files.state == "other" else "files", note)


def broken(findings: Sequence[Finding], checks: Sequence[installation.Check], *, registered: bool) -> list[str]:
    """Returns the names of what would break a restore."""
    defects = [finding.defect.id for finding in findings if finding.present and finding.defect.breaks]
    return [*([] if registered else defects), *(check.name for check in checks if check.state == "bad")]


def as_data(
    versions: dict[str, str],
    files: installation.Files,
    findings: Sequence[Finding],
    checks: Sequence[installation.Check],
    breaking: Sequence[str],
) -> dict[str, Any]:
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
        for finding in findings
    ]
    return {
        "versions": versions,
        "orbax_files": dataclasses.asdict(files),
        "defects": defects,
        "checks": [dataclasses.asdict(check) for check in checks],
        "breaking": list(breaking),
    }


def as_text(
    versions: dict[str, str],
    files: installation.Files,
    findings: Sequence[Finding],
    checks: Sequence[installation.Check],
    breaking: Sequence[str],
    *,
    registered: bool,
) -> list[str]:
    lines = ["Versions", f"  {', '.join(f'{name} {number}' for name, number in versions.items())}"]
    lines += [f"  Orbax's files: {_files(files)}", "", "Defects of Orbax's own single-replica handler"]
    for finding in findings:
        defect = finding.defect
        mark = ("BREAKS" if defect.breaks else "limits") if finding.present else "-"
        lines.append(f"  {mark:7} {defect.title} [{finding.how}]{f' ({finding.note})' if finding.note else ''}")
        if finding.present:
            lines.append(f"          {defect.effect}; Orbax {defect.releases}")
            lines.append(f"          fixed by: {', '.join(defect.remedies)}  {' '.join(defect.links)}".rstrip())
    lines += ["", "This machine"]
    lines += [f"  {check.state:7} {check.name}: {check.detail}" for check in checks]
    return [*lines, "", *_conclusion(breaking, registered)]


def _files(files: installation.Files) -> str:
    if files.state == "other":
        return "not those of a known release, so defects are looked up by the release number"
    releases = " or ".join(files.releases)
    return f"as released in {releases}" if files.state == "original" else f"{releases} with the patches of orbax_ext"


def _conclusion(breaking: Sequence[str], registered: bool) -> list[str]:
    handler = "with orbax_ext registered" if registered else "with Orbax's own single-replica handler"
    if not breaking:
        return [f"Nothing found that would break a restore {handler}."]
    lines = [f"A restore {handler} would break: {', '.join(breaking)}."]
    if not registered:
        lines.append("If your program calls orbax_ext.register(), run this again with --registered.")
    return lines
