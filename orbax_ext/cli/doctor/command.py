"""`orbax-ext doctor`: which of Orbax's known defects this installation has, what mends them, what else is amiss."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from orbax_ext.cli.doctor import installation
from orbax_ext.cli.exits import EXIT_BAD_VERDICT, EXIT_OK
from orbax_ext.upstream import probes
from orbax_ext.upstream.defects import DEFECTS, Defect

_EXAMPLE = """\
example:
  orbax-ext doctor
  orbax-ext doctor --registered --json

Exit code 1: something would break a restore. By default that is a restore with Orbax's own single-replica handler;
with --registered it is one with orbax_ext registered, which all of the defects below are mended by.
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One defect and whether it is here. `how` tells what that rests on."""

    defect: Defect
    present: bool
    how: str  # "probed", "files" or "release"
    note: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Tells which known defects of Orbax this installation has, and what mends them."
    parser.epilog = _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--registered", action="store_true", help="the program registers orbax_ext's handler")
    parser.add_argument("--quick", action="store_true", help="look up only: no probes, no processes (under a second)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    versions = installation.versions()
    files = installation.orbax_files()
    wanted = [] if args.quick else [defect.probe for defect in DEFECTS if defect.probe]
    probed = probes.run(wanted) if wanted else {}
    findings = [judge(defect, versions["orbax-checkpoint"], files, probed) for defect in DEFECTS]
    checks = [installation.s3()] if args.quick else [installation.runtime(), *installation.cluster(), installation.s3()]
    breaking = broken(findings, checks, registered=args.registered)
    if args.json:
        print(json.dumps(as_data(versions, files, findings, checks, breaking), indent=2))
    else:
        print("\n".join(as_text(versions, files, findings, checks, breaking, registered=args.registered)))
    return EXIT_BAD_VERDICT if breaking else EXIT_OK


def judge(defect: Defect, release: str, files: installation.Files, probed: dict[str, bool | str]) -> Finding:
    """Whether the defect is here: by trying, else by the installed files, else by the release's number."""
    result = probed.get(defect.probe or "")
    if isinstance(result, bool):
        return Finding(defect, result, "probed")
    note = f"could not be probed: {result}" if result else ""
    if defect.patch in files.patches:
        return Finding(defect, False, "files", note)
    return Finding(defect, defect.in_release(release), "release" if files.state == "other" else "files", note)


def broken(findings: Sequence[Finding], checks: Sequence[installation.Check], *, registered: bool) -> list[str]:
    """What would break a restore, by name."""
    found = (
        [] if registered else [finding.defect.id for finding in findings if finding.present and finding.defect.breaks]
    )
    return [*found, *(check.name for check in checks if check.state == "bad")]


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
            lines.append(f"          mended by: {', '.join(defect.remedies)}  {' '.join(defect.links)}".rstrip())
    lines += ["", "This machine"]
    lines += [f"  {check.state:7} {check.name}: {check.detail}" for check in checks]
    return [*lines, "", *_verdict(breaking, registered)]


def _files(files: installation.Files) -> str:
    if files.state == "other":
        return "not those of a release that is known here, so defects are told by the release's number"
    releases = " or ".join(files.releases)
    return f"as released in {releases}" if files.state == "original" else f"{releases} with the patches of orbax_ext"


def _verdict(breaking: Sequence[str], registered: bool) -> list[str]:
    whose = "with orbax_ext registered" if registered else "with Orbax's own single-replica handler"
    if not breaking:
        return [f"Nothing found that would break a restore {whose}."]
    lines = [f"A restore {whose} would break: {', '.join(breaking)}."]
    if not registered:
        lines.append("If your program calls orbax_ext.register(), look again with --registered.")
    return lines
