"""Runs the S3 tests on several stores and the gs:// tests on an emulator, and writes a table of the results.

    python -m tools.stores [--only rclone radosgw] [--install] [--write]

`--install` gets radosgw and memcached from Debian, which needs root. A store that is missing is named and left out. The
table keeps the results of stores that are not tested, so that they can be tested one after the other.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from tests.support import gcs_server, s3_server
from tools import markdown, releases

S3_STORES = {"rclone": "rclone", "radosgw": "Ceph radosgw", "swift": "Swift s3api"}
PAGE = markdown.Page(
    "bench/results/stores.md",
    "Object stores that the tests ran on",
    """Passed and all tests of each kind. The servers are real, and are reached through a proxy that injects faults.
    Throttling, expired credentials and interruptions are made by the proxy on every store. rclone sends ranges with the
    wrong status, 200, which the proxy corrects; without that TensorStore can't read arrays from it. rclone refuses keys
    that end in a slash, and no other server can be installed without root: in its column, the test of directory markers
    ran on moto, a mock. AWS itself was not at hand.""",
    "make test-stores",
)
KINDS = {  # by what is searched in the names of tests; a test holds that each alternative finds one
    "save, asynchronous save, list, `latest_step`, delete": r"test_a_manager_saves|moved_away|agree_on_what_was",
    "`Checkpointer`, v1 API, without OCDBT": r"test_a_checkpointer_saves|v1_api|without_ocdbt",
    "restore on 4 processes": r"four_new|check_rehearses|each_piece|shapes_and_dtypes|read_by_their_specs",
    "files and directories, moved and copied too": r"as_on_a_disk|moved_to_itself|not_moved_into|all_of_a_bucket"
    r"|filled_by_moving|another_process_deletes_is_gone|as_a_whole_or_not_at_all",
    "interrupted save": r"saved_half_way|killed_just_before",
    "interrupted deletion": r"deleted_half_way",
    "names with odd characters": r"odd_",
    "5,000 small objects": r"five_thousand",
    "larger than a part of an upload": r"larger_than_a_part|large_file_is_written|between_buckets",
    "credentials of profiles, containers, instances, web identities": r"with_the_credentials|web_identity",
    "wrong credentials": r"wrong_credentials",
    "expired credentials, access denied": r"expired|denied|holds_no_secret",
    "another region, no such bucket, no server": r"another region|missing_bucket_is_named|nothing_listens",
    "throttling, internal errors": r"burst of 50|500 on |503 on |429 on |throttled for good|broken for good",
    "resets, short answers, silence": r"resets in|short data|short metadata|short for good|silent connection|no answer,"
    r"|slow bytes|deletion_without_an_answer|passing_faults_are_retried$",
    "https": r"go_over_https",
    "bucket in the host name": r"in_the_host_name",
    "directory markers of earlier releases": r"with_markers",
}
S3_TESTS = ("tests/storage/s3", "tests/multiprocess/test_s3.py")
_VERSION = "version"
_ALL = "all tests, with those that need no store"
_LIMIT = 1800.0  # seconds for one store
_PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "ceph-common", "memcached")

Outcomes = dict[str, str]  # of tests by name: "passed", "skipped", "failed"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.stores", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*S3_STORES, "gcs"], default=[*S3_STORES, "gcs"])
    parser.add_argument("--install", action="store_true", help="install Debian's packages of the stores (root)")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.path}")
    args = parser.parse_args(argv)
    if args.install:
        _install()
    results: dict[str, Outcomes] = {}
    failed = False
    for store in args.only:
        if reason := missing(store):
            print(f"{store}: not tested: {reason}", flush=True)
            continue
        try:
            results[store] = _test(store)
        except (subprocess.TimeoutExpired, OSError) as error:
            failed = True
            print(f"{store}: failed: {error}", flush=True)
            continue
        failed |= "failed" in results[store].values()
        print(f"{store}: {_count(list(results[store].values()))} tests passed", flush=True)
    if args.write and results:
        PAGE.write(*tables(results, PAGE.file.read_text() if PAGE.file.exists() else ""))
    return int(failed)


def missing(store: str) -> str | None:
    """Returns why a store can't run here, or None if it can."""
    return gcs_server.missing() if store == "gcs" else s3_server.STORES[store].missing()


def version(store: str) -> str:
    """Returns the version of a store that can run here."""
    return gcs_server.version() if store == "gcs" else s3_server.STORES[store].version()


def tables(results: Mapping[str, Outcomes], page: str) -> list[str]:
    """Returns the tables of the S3 stores and of the emulated GCS, with what `page` has of those without results."""
    before = {table[0][0]: table for table in markdown.tables_in(page)}  # by the left cell of their heads
    columns = _columns(before.get("", [[]]))
    for store in results.keys() & S3_STORES.keys():
        cells = {kind: _cell(results[store], pattern) for kind, pattern in {**KINDS, _ALL: ""}.items()}
        columns[S3_STORES[store]] = {_VERSION: version(store), **cells}
    titles = [title for title in S3_STORES.values() if title in columns]
    rows = [(kind, *(columns[title].get(kind, "-") for title in titles)) for kind in (_VERSION, *KINDS, _ALL)]
    parts = [markdown.table(("", *titles), rows)]
    head, *gcs = before.get("gs://", [["gs://", ""]])
    if "gcs" in results:
        gcs = [
            [_VERSION, version("gcs")],
            *(
                [name.partition("::")[2].removeprefix("test_").replace("_", " "), outcome]
                for name, outcome in results["gcs"].items()
            ),
        ]
    if gcs:
        parts.append(
            "gs:// is tested on an emulator (gcp-storage-emulator), with TensorStore's gcs driver for arrays and\n"
            "gcsfs for metadata files. The emulator knows no generations, which a proxy adds. It checks no\n"
            "credentials and does not throttle, so that neither is tested."
        )
        parts.append(markdown.table(head, gcs))
    return parts


def _columns(table: Sequence[Sequence[str]]) -> dict[str, dict[str, str]]:
    """Returns the cells of a table by the titles of its columns and its rows."""
    (_, *titles), *rows = table if table[0] else [[""]]
    return {title: {cells[0]: cells[place] for cells in rows} for place, title in enumerate(titles, 1)}


def _cell(outcomes: Outcomes, pattern: str) -> str:
    return _count([outcome for name, outcome in outcomes.items() if re.search(pattern, name)])


def _count(outcomes: list[str]) -> str:
    ran = [outcome for outcome in outcomes if outcome != "skipped"]
    return f"{ran.count('passed')} of {len(ran)}" if ran else "-"


def _test(store: str) -> Outcomes:
    tests = ("tests/multiprocess/test_gcs.py",) if store == "gcs" else S3_TESTS
    environ = os.environ if store == "gcs" else {**os.environ, "ORBAX_EXT_S3_STORE": store}
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}", *tests]
        with subprocess.Popen(command, cwd=releases.ROOT, env=environ, start_new_session=True) as process:
            try:
                process.wait(_LIMIT)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # the servers too
                raise
        return _outcomes(report)


def _outcomes(report: pathlib.Path) -> Outcomes:
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        failed = kinds & {"failure", "error"}
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes[name] = "failed" if failed else "skipped" if "skipped" in kinds else "passed"
    return outcomes


def _install() -> None:
    if os.geteuid() != 0:
        print("Not root: radosgw and memcached are not installed, and stores without them are left out.")
        return
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *_PACKAGES]
    if subprocess.run(command, stdout=subprocess.DEVNULL, timeout=900, check=False).returncode:
        print(f"Could not install {', '.join(_PACKAGES)}: stores without them are left out.")


if __name__ == "__main__":
    sys.exit(main())
