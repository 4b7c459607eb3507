"""OpenStack Swift with its s3api: one proxy, account, container and object server on one folder.

`make test-stores` installs the package in an environment of its own; ORBAX_EXT_SWIFT names the folder of another one's
programs. Debian's memcached is needed too.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from tests.support.s3_stores import HOST, ROOT, SECRET_KEY, Store, free_port, serving, version_in

_SWIFT = pathlib.Path(os.environ.get("ORBAX_EXT_SWIFT") or ROOT / ".venv" / "swift" / "bin")
_HASHES = "[swift-hash]\nswift_hash_path_suffix = tests\nswift_hash_path_prefix = tests\n"
_PARTS = ("account", "container", "object")
_STORAGE = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
workers = 1
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
recon_cache_path = {folder}
fallocate_reserve = 0
[pipeline:main]
pipeline = {part}-server
[app:{part}-server]
use = egg:swift#{part}
"""
_PROXY = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
workers = 2
swift_dir = {folder}
[pipeline:main]
pipeline = catch_errors cache listing_formats s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {secret} .admin
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
storage_domain = {host}
auth_pipeline_check = false
max_multi_delete_objects = 1000
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{cache}
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:slo]
use = egg:swift#slo
"""


class Swift(Store):
    """The store of OpenStack."""

    access_key = "test:tester"  # account and user
    takes_any_session_token = False

    def missing(self) -> str | None:
        if not (_SWIFT / "swift-proxy-server").exists():
            return f"{_SWIFT}/swift-proxy-server is missing; `make test-stores` installs it"
        return None if shutil.which("memcached") else "memcached is missing; `make test-stores` installs it as root"

    def version(self) -> str:
        program = "import importlib.metadata; print(importlib.metadata.version('swift'))"
        return version_in([str(_SWIFT / "python"), "-c", program])

    @contextlib.contextmanager
    def running(self, bucket_in_host_name: bool) -> Iterator[int]:
        del bucket_in_host_name  # it takes both
        ports = {part: free_port() for part in (*_PARTS, "proxy", "cache")}
        user = getpass.getuser()
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            folder = pathlib.Path(name)
            (folder / "devices" / "disk").mkdir(parents=True)
            (folder / "swift.conf").write_text(_HASHES)
            memory = ["memcached", "-u", user, "-l", "127.0.0.1", "-p", str(ports["cache"])]
            stack.enter_context(serving(memory, ports["cache"]))
            for part in _PARTS:
                _make_ring(folder, part, ports[part])
                text = _STORAGE.format(part=part, port=ports[part], user=user, folder=folder)
                stack.enter_context(_server(folder, part, text, ports[part]))
            text = _PROXY.format(
                port=ports["proxy"], cache=ports["cache"], user=user, folder=folder, secret=SECRET_KEY, host=HOST
            )
            stack.enter_context(_server(folder, "proxy", text, ports["proxy"]))
            yield ports["proxy"]


@contextlib.contextmanager
def _server(folder: pathlib.Path, part: str, configuration: str, port: int) -> Iterator[None]:
    (folder / f"{part}-server.conf").write_text(configuration)
    with serving([str(_SWIFT / f"swift-{part}-server"), str(folder / f"{part}-server.conf")], port):
        yield


def _make_ring(folder: pathlib.Path, part: str, port: int) -> None:
    """Writes the file that says where the only copy of everything is."""
    for arguments in ("create 4 1 0", f"add r1z1-127.0.0.1:{port}/disk 1", "rebalance"):
        command = [str(_SWIFT / "swift-ring-builder"), f"{part}.builder", *arguments.split()]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
