"""The table of defects and `orbax-ext doctor`."""

from __future__ import annotations

import json

import jax
import pytest
from orbax.checkpoint import type_handlers

import orbax_ext
from orbax_ext import version
from orbax_ext.cli import exits, main
from orbax_ext.cli.doctor import command, installation
from orbax_ext.upstream import defects, patching, probes
from tools import docs

BY_ID = {defect.id: defect for defect in defects.DEFECTS}


def test_defects_have_unique_names() -> None:
    assert len(BY_ID) == len(defects.DEFECTS)


@pytest.mark.parametrize("defect", defects.DEFECTS, ids=lambda defect: defect.id)
def test_a_defect_names_patches_and_probes_that_exist(defect: defects.Defect) -> None:
    assert defect.probe is None or defect.probe in probes.PROBES
    if defect.patch:
        has_patch = [s.release for s in patching.load_all() if f"{defect.patch}.patch" in [p.name for p in s.patches]]
        assert has_patch == [s.release for s in patching.load_all() if defect.in_release(s.release)]


def test_every_patch_fixes_a_known_defect() -> None:
    fixes = {f"{defect.patch}.patch" for defect in defects.DEFECTS}
    assert {patch.name for series in patching.load_all() for patch in series.patches} <= fixes


def test_the_page_of_defects_is_up_to_date() -> None:
    assert not docs.is_stale(docs.DEFECTS, defects.markdown_table()), "run: make docs"


@pytest.mark.parametrize(
    ("release", "present"), [("0.11.33", True), ("0.11.39", True), ("0.11.40", False), ("0.12.8", False)]
)
def test_a_fixed_defect_is_in_the_releases_before_the_fix(release: str, present: bool) -> None:
    assert BY_ID["set-mesh"].in_release(release) is present


def test_a_probe_overrides_the_files_and_the_files_override_the_release() -> None:
    defect = BY_ID["set-mesh"]
    released, patched = (
        installation.Files("original", ("0.11.33",)),
        installation.Files("patched", ("0.11.33",), (defect.patch or "",)),
    )
    unknown = installation.Files("other")

    def judged(files: installation.Files, probed: dict[str, bool | str]) -> tuple[bool, str]:
        finding = command.judge(defect, "0.11.33", files, probed)
        return finding.present, finding.how

    assert judged(released, {"set_mesh": False}) == (False, "probed")
    assert judged(patched, {"set_mesh": True}) == (True, "probed")
    assert judged(patched, {}) == (False, "files")
    assert judged(released, {"set_mesh": "no answer within 120 s"}) == (True, "files")
    assert judged(unknown, {}) == (True, "release")


def test_doctor_finds_the_defects_of_the_installed_orbax(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json"]) == exits.EXIT_BAD_VERDICT
    data = json.loads(capsys.readouterr().out)
    installed = version.orbax_version()
    assert data["versions"]["orbax-checkpoint"] == installed
    assert installed in data["orbax_files"]["releases"]
    for defect in data["defects"]:
        assert defect["present"] == BY_ID[defect["id"]].in_release(installed), defect
        assert defect["how"] == ("probed" if BY_ID[defect["id"]].probe else "files"), defect
    assert {check["name"]: check["state"] for check in data["checks"]} == {
        "stock handlers": "ok",
        "JAX runtime": "ok",
        "coordination service": "ok",
        "collectives": "ok",
        "S3": "ok",
    }
    assert data["hooks"]
    assert all(hook["present"] for hook in data["hooks"])
    assert data["breaking"] == [d["id"] for d in data["defects"] if d["present"] and d["breaks_restore"]]


def test_the_text_shows_what_fixes_a_defect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--quick"]) == exits.EXIT_BAD_VERDICT
    shown = capsys.readouterr().out
    assert "  BREAKS  No meeting before the broadcast" in shown
    assert "          fixed by: register, patch 02-pre-broadcast-barrier" in shown
    assert "run this again with --registered" in shown


def test_nothing_breaks_with_the_handler_registered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--quick", "--registered"]) == exits.EXIT_OK
    assert "Nothing found that would break a restore with orbax_ext registered" in capsys.readouterr().out


def test_a_runtime_that_does_not_start_breaks_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "no-such-platform")
    check = installation.runtime()
    assert check.state == "bad"
    assert "no-such-platform" in check.detail
    assert command.Diagnosis({}, installation.Files("other"), [], [check], [], registered=True).breaking == [
        "JAX runtime"
    ]


def test_a_stock_handler_that_is_registered_and_not_served_breaks_a_restore() -> None:
    assert installation.stock_handlers(installation.hooks()).state == "ok"
    before = type_handlers.get_type_handler(jax.Array)
    try:
        type_handlers.register_type_handler(jax.Array, type_handlers.SingleReplicaArrayHandler(), override=True)
        check = installation.stock_handlers(installation.hooks())
        assert (check.state, check.detail.rpartition(": ")[2]) == ("bad", "call orbax_ext.register()")
        with orbax_ext.registered():
            type_handlers.register_type_handler(jax.Array, type_handlers.SingleReplicaArrayHandler(), override=True)
            assert installation.stock_handlers(installation.hooks()).state == "ok"
    finally:
        type_handlers.register_type_handler(jax.Array, before, override=True)


def test_a_release_without_a_hooked_function_breaks_a_restore() -> None:
    check = installation.stock_handlers([installation.HookedFunction("module.function", "why", "all", present=False)])
    assert check.state == "bad"
    assert "does not have module.function" in check.detail
