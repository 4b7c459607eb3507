"""Runs the S3 tests on several stores and the gs:// tests on an emulator, and writes a table of the results.

    python -m tools.stores [--only rclone radosgw] [--install] [--write]

Results are kept in build/stores.json, so that stores can be tested one after the other. `--install` gets radosgw and
memcached from Debian, which needs root; stores that are missing are named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from xml.etree import ElementTree

from tools import markdown, releases

RESULTS = releases.ROOT / "build" / "stores.json"
S3_STORES = {
    "rclone": "rclone 1.75.2",
    "radosgw": "Ceph radosgw 16.2",
    "swift": "Swift 2.38 s3api",
    "moto": "moto 5.2 (a mock)",
}
PAGE = markdown.Page(
    "bench/results/stores.md",
    "Object stores that the tests ran on",
    """Passed and all tests of each kind. The servers are real, but for moto, and are reached through a proxy
    that injects faults. Throttling, expired credentials and interruptions are made by the proxy on every store. rclone
    sends ranges with the wrong status, 200, which the proxy corrects; without that TensorStore can't read arrays from
    it. rclone refuses directory markers, so that its test of them runs on moto. AWS itself was not at hand.""",
    "make test-stores",
)
KINDS = {  # by what is searched in the names of tests
    "save, asynchronous save, list, `latest_step`, delete": r"test_a_manager_saves|trash|moved_away",
    "`Checkpointer`, v1 API, without OCDBT": r"test_a_checkpointer_saves|v1_api|without_ocdbt",
    "restore on 4 processes": r"four_new|check_rehearses|each_piece|shapes_and_dtypes",
    "interrupted save": r"saved_half_way|killed_just_before",
    "interrupted deletion": r"deleted_half_way",
    "names with odd characters": r"odd_",
    "5,000 small objects": r"five_thousand",
    "larger than a part of an upload": r"larger_than_a_part|large_file_is_written|between_buckets",
    "credentials of profiles, containers, instances, web identities": r"with_the_credentials|web_identity",
    "wrong credentials": r"wrong_credentials",
    "expired credentials, access denied": r"expired|denied|holds_no_secret",
    "throttling": r"503|429|throttled",
    "resets, short answers, silence": r"reset|short|silent|no_answer|slow_bytes|passing_faults_are_retried$",
    "bucket in the host name": r"in_the_host_name",
    "directory markers of earlier releases": r"with_markers",
}
S3_TESTS = ("tests/storage/s3", "tests/multiprocess/test_s3.py")
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
    results: dict[str, Outcomes] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for store in args.only:
        results[store] = _test(store)
        print(f"{store}: {_count(list(results[store].values()))} tests passed", flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results))
    if args.write:
        PAGE.write(*tables(results))
    return int(any(outcome == "failed" for store in args.only for outcome in results[store].values()))


def tables(results: dict[str, Outcomes]) -> list[str]:
    """Returns the tables of the S3 stores and of the emulated GCS."""
    stores = [store for store in S3_STORES if any(outcome != "skipped" for outcome in results.get(store, {}).values())]
    rows = [(kind, *(_cell(results[store], pattern) for store in stores)) for kind, pattern in KINDS.items()]
    rows.append(("all tests, with those that need no store", *(_cell(results[store], "") for store in stores)))
    parts = [markdown.table(("", *(S3_STORES[store] for store in stores)), rows)]
    if gcs := results.get("gcs"):
        parts.append(
            "gs:// is tested on an emulator (gcp-storage-emulator 2026.7), with TensorStore's gcs driver for arrays\n"
            "and gcsfs for metadata files. The emulator knows no generations, which a proxy adds. It checks no\n"
            "credentials and does not throttle, so that neither is tested."
        )
        cells = [(name.partition("::")[2].removeprefix("test_").replace("_", " "), gcs[name]) for name in gcs]
        parts.append(markdown.table(("gs://", ""), cells))
    return parts


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
        subprocess.run(command, cwd=releases.ROOT, env=environ, timeout=_LIMIT, check=False)
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
