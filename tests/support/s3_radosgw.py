"""Ceph's radosgw on a cluster of one monitor and one OSD, which keeps objects in memory.

Debian's packages radosgw, ceph-mon, ceph-osd and ceph-common; `make test-stores` installs them as root.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator

from tests.support.s3_stores import ACCESS_KEY, HOST, SECRET_KEY, Store, free_port, serving, version_in

_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_CONFIGURATION = """\
[global]
fsid = {id}
mon host = [v1:127.0.0.1:{monitor}]
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
ms bind msgr2 = false
public network = 127.0.0.0/8
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 0
run dir = {folder}
crash dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
# Nobody asks for a class of devices, and an OSD whose first request to set its class is refused ends at once.
osd class update on start = false
[client.rgw]
rgw data = {folder}/rgw
rgw dns name = {host}
rgw frontends = beast endpoint=127.0.0.1:{gateway}
"""


class Radosgw(Store):
    """The store of many GPU clouds."""

    takes_any_session_token = False

    def missing(self) -> str | None:
        absent = [program for program in _PROGRAMS if shutil.which(program) is None]
        return f"{', '.join(absent)} missing; `make test-stores` installs them as root" if absent else None

    def version(self) -> str:
        return version_in(["radosgw", "--version"])

    @contextlib.contextmanager
    def running(self, bucket_in_host_name: bool) -> Iterator[int]:
        del bucket_in_host_name  # it takes both
        monitor, gateway = free_port(), free_port()
        cluster, device = uuid.uuid4(), uuid.uuid4()
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            folder = pathlib.Path(name)
            for part in ("mon", "osd", "rgw"):
                (folder / part).mkdir()
            configuration = folder / "ceph.conf"
            values = {"id": cluster, "monitor": monitor, "gateway": gateway, "folder": folder, "host": HOST}
            configuration.write_text(_CONFIGURATION.format(**values))
            stack.enter_context(_environment("CEPH_CONF", str(configuration)))
            _run(f"monmaptool --create --fsid {cluster} --addv a [v1:127.0.0.1:{monitor}] {folder}/monmap")
            _run(f"ceph-mon --mkfs -i a --monmap {folder}/monmap")
            stack.enter_context(serving(["ceph-mon", "-i", "a", "-f"], monitor))
            _run(f"ceph osd new {device}")
            _run(f"ceph-osd -i 0 --mkfs --osd-uuid {device}")
            stack.enter_context(serving(["ceph-osd", "-i", "0", "-f"], None))
            _wait_for_device()
            keys = f"--access-key={ACCESS_KEY} --secret-key={SECRET_KEY}"
            _run(f"radosgw-admin user create --uid=tests --display-name=tests {keys}")
            stack.enter_context(serving(["radosgw", "-n", "client.rgw", "-f"], gateway))
            yield gateway


def _wait_for_device() -> None:
    deadline = time.monotonic() + 60
    while "1 up" not in _run("ceph osd stat"):
        if time.monotonic() > deadline:
            raise RuntimeError("the OSD did not come up within 60 s")
        time.sleep(0.5)


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{command.split()[0]} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
