"""The fork's wheel differs from the release only where patches change it, and says so."""

from __future__ import annotations

import base64
import csv
import email
import hashlib
import pathlib
import zipfile

import pytest

from orbax_ext.upstream import patching
from tools import fork, releases

pytestmark = pytest.mark.fork


@pytest.fixture(scope="module", params=[releases.RELEASES[0], releases.RELEASES[-1]])
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wheel(release: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return fork.build(release, tmp_path_factory.mktemp("fork"))


def contents(path: pathlib.Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def info(release: str, name: str) -> str:
    return f"orbax_checkpoint-{release}+ext.{fork.FORK}.dist-info/{name}"


def test_only_the_patched_files_differ_from_the_release(release: str, wheel: pathlib.Path) -> None:
    code = {name: data for name, data in contents(wheel).items() if ".dist-info/" not in name}
    released = {name: data for name, data in contents(releases.wheel(release)).items() if ".dist-info/" not in name}
    assert code.keys() == released.keys()
    changed = {name: patching.sha256(data) for name, data in code.items() if data != released[name]}
    assert changed == patching.load_series(releases.PATCHES / release).results


def test_the_record_lists_every_file_with_its_hash_and_size(release: str, wheel: pathlib.Path) -> None:
    files = contents(wheel)
    rows = {
        name: (digest, size) for name, digest, size in csv.reader(files[info(release, "RECORD")].decode().splitlines())
    }
    assert rows.pop(info(release, "RECORD")) == ("", "")
    assert rows.keys() == files.keys() - {info(release, "RECORD")}
    for name, (digest, size) in rows.items():
        sha256 = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={sha256}", str(len(files[name])))


def test_metadata_differs_only_in_version_summary_and_notice(release: str, wheel: pathlib.Path) -> None:
    ours = email.message_from_bytes(contents(wheel)[info(release, "METADATA")])
    theirs = email.message_from_bytes(
        contents(releases.wheel(release))[f"orbax_checkpoint-{release}.dist-info/METADATA"]
    )
    assert ours["Version"] == f"{release}+ext.{fork.FORK}"
    assert "patches of orbax_ext" in ours["Summary"]
    assert ours.get_all("License-File") == ["LICENSE", "NOTICE"]
    differing = ("Version", "Summary", "License-File")
    assert [item for item in ours.items() if item[0] not in differing] == [
        item for item in theirs.items() if item[0] not in differing
    ]
    assert ours.get_payload() == theirs.get_payload()


def test_the_licence_is_kept_and_the_notice_lists_the_changes(release: str, wheel: pathlib.Path) -> None:
    files = contents(wheel)
    theirs = contents(releases.wheel(release))[f"orbax_checkpoint-{release}.dist-info/licenses/LICENSE"]
    assert files[info(release, "licenses/LICENSE")] == theirs
    notice = files[info(release, "licenses/NOTICE")].decode()
    series = patching.load_series(releases.PATCHES / release)
    for path in series.results:
        assert path in notice
        assert files[path].count(b"# Changed by orbax_ext: ") == sum(
            change.path == path for patch in series.patches for change in patch.files
        )
    for patch in series.patches:
        assert patch.name.removesuffix(".patch") in notice


def test_building_twice_makes_the_same_wheel(release: str, wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert fork.build(release, tmp_path).read_bytes() == wheel.read_bytes()
