"""Hosts on one machine: network namespaces with limited links to storage and to each other.

Every host has a storage link and a fabric link (or one for both) to private bridges, each limited in both directions.
The rate of a storage link can change while it is used. The network of the machine itself does not change. Needs root,
iproute2, nginx, unshare and bash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Self

PREFIX = f"oxe{os.getpid()}"  # of the names of this process's namespaces
_MTU = "9000"  # bytes of a packet, as in a data centre; with 1,500, packets alone keep a slow machine busy

_FABRIC = "10.98.0"
_STORAGE = "10.97.0"
_STORE = 2  # last number of the storage server's addresses
_FIRST = 10  # last number of the first host's addresses
_PORT = 8080
_START_LIMIT = 10.0  # seconds for a server to start
_BURST = "256kb"
# A link that nothing passes: the least rate that tbf takes with room for one packet, and a queue of a second of the
# fastest link here, so that packets wait rather than get lost. After a stop of 2 s, TCP goes on at once.
_STOPPED = ("rate", "1kbit", "burst", "10kb", "limit", "200mb")


@dataclasses.dataclass(frozen=True)
class Links:
    """Rates in Mbit/s, each way. 0 is unlimited."""

    storage: int
    fabric: int
    shared: bool = False  # storage is reached over the fabric link
    storage_total: int = 0  # of the storage server's own link
    latency: float = 0.0  # seconds until storage begins to answer a request, as if it were far away

    @property
    def to_storage(self) -> int:
        """The rate of the link over which a host reaches storage."""
        return self.fabric if self.shared else self.storage


class Network:
    """Namespaces for some hosts and a storage server that serves the files of a directory over HTTP."""

    def __init__(self, hosts: int, links: Links, root: pathlib.Path) -> None:
        self.hosts = hosts
        self.links = links
        self._root = root
        self._state = pathlib.Path(tempfile.mkdtemp(prefix="orbax_ext_net_"))
        self._servers: list[subprocess.Popen[bytes]] = []

    @property
    def coordinator(self) -> str:
        """The address of the first host on the fabric."""
        return f"{_FABRIC}.{_FIRST}"

    @property
    def url(self) -> str:
        """The URL at which the hosts find the files."""
        return f"http://{_FABRIC if self.links.shared else _STORAGE}.{_STORE}:{_PORT}"

    def command_prefix(self, rank: int) -> Sequence[str]:
        """Returns the words that run a command on a host, under the host's own name: gloo binds to that name."""
        name = self.namespace_of(rank)
        script = 'hostname "$0"; exec "$@"'
        return ("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script, f"h{rank}")

    def bytes_served(self) -> list[int]:
        """Returns the bytes that the storage server has sent to each host so far."""
        served = [0] * self.hosts
        log = self._state / "access.log"
        for line in log.read_text().splitlines() if log.exists() else ():
            address, sent = line.split()
            served[int(address.rsplit(".", 1)[1]) - _FIRST] += int(sent)
        return served

    def bytes_passed(self) -> list[int]:
        """Returns the bytes that have passed each host's storage link so far, on their way to the host."""
        links = json.loads(_ip("-n", self._switch, "-s", "-j", "link", "show", "type", "veth"))
        sent = {link["ifname"]: int(link["stats64"]["tx"]["bytes"]) for link in links}
        return [sent[f"p{self._storage_device(rank)}"] for rank in range(self.hosts)]

    def set_storage_rate(self, rank: int, rate: int) -> None:
        """Changes the rate of a host's storage link, in Mbit/s each way; with 0 nothing passes."""
        device = self._storage_device(rank)
        shape = ("rate", f"{rate}mbit", "burst", _BURST, "latency", "1s") if rate else _STOPPED
        for namespace, end in ((self.namespace_of(rank), device), (self._switch, f"p{device}")):
            _run("tc", "-n", namespace, "qdisc", "change", "dev", end, "root", "tbf", *shape)
        # A queue that waits at a low rate looks at the new one when the next packet comes: send one. The host answers
        # it ("port unreachable"), which does the same for the other direction.
        address = self._address(rank)
        _run("ip", "netns", "exec", self._store, "bash", "-c", f"echo > /dev/udp/{address}/9")

    def namespace_of(self, rank: int) -> str:
        return f"{PREFIX}-h{rank}"

    def _storage_device(self, rank: int) -> str:
        return f"f{rank}" if self.links.shared else f"s{rank}"

    def _address(self, rank: int) -> str:
        """The address of a host on the network over which it reaches storage."""
        return f"{_FABRIC if self.links.shared else _STORAGE}.{_FIRST + rank}"

    def __enter__(self) -> Self:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._down()

    def _up(self) -> None:
        _ip("netns", "add", self._switch)
        for bridge in ("fabric", "storage"):
            _ip("-n", self._switch, "link", "add", bridge, "type", "bridge")
            _ip("-n", self._switch, "link", "set", bridge, "up")
        names = [f"{_FABRIC}.{_FIRST + rank} h{rank}" for rank in range(self.hosts)]
        for rank in range(self.hosts):
            self._namespace(self.namespace_of(rank), names)
            self._link(self.namespace_of(rank), f"f{rank}", "fabric", f"{_FABRIC}.{_FIRST + rank}", self.links.fabric)
            if not self.links.shared:
                self._link(
                    self.namespace_of(rank), f"s{rank}", "storage", f"{_STORAGE}.{_FIRST + rank}", self.links.storage
                )
        self._namespace(self._store, [])
        where, subnet = ("fabric", _FABRIC) if self.links.shared else ("storage", _STORAGE)
        self._link(self._store, "st", where, f"{subnet}.{_STORE}", self.links.storage_total)
        self._serve()

    def _namespace(self, name: str, names: Sequence[str]) -> None:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        home = pathlib.Path("/etc/netns") / name
        home.mkdir(parents=True)
        (home / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")

    def _link(self, name: str, device: str, bridge: str, address: str, rate: int) -> None:
        _ip("link", "add", device, "netns", name, "type", "veth", "peer", "name", f"p{device}", "netns", self._switch)
        for namespace, end in ((name, device), (self._switch, f"p{device}")):
            _ip("-n", namespace, "link", "set", end, "mtu", _MTU)
        _ip("-n", self._switch, "link", "set", f"p{device}", "master", bridge, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "up")
        for namespace, end in ((name, device), (self._switch, f"p{device}")) if rate else ():
            # Storage serves many connections at once: a short queue would lose packets, which costs seconds.
            queue = "1s" if bridge == "storage" or self.links.shared else "200ms"
            shape = ["root", "tbf", "rate", f"{rate}mbit", "burst", _BURST, "latency", queue]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", end, *shape)

    def _serve(self) -> None:
        late = ""
        if self.links.latency:  # nginx asks another server before it answers a request, and that one takes its time
            socket = self._state / "latency.sock"
            script = pathlib.Path(__file__).with_name("latency.py")
            self._start([sys.executable, "-S", str(script), str(socket), str(self.links.latency)], socket)
            late = f"""
                location / {{ auth_request /late; root {self._root}; }}
                location = /late {{ internal; proxy_pass http://unix:{socket}; proxy_pass_request_body off; }}
                """
        config = self._state / "nginx.conf"
        config.write_text(
            f"""
            pid {self._state}/nginx.pid;
            error_log {self._state}/error.log;
            worker_processes 1;
            user root;
            events {{ worker_connections 4096; }}
            http {{
              log_format bytes '$remote_addr $body_bytes_sent';
              access_log {self._state}/access.log bytes;
              sendfile on; tcp_nopush on; keepalive_requests 1000000;
              server {{ listen {_PORT}; {late or f"location / {{ root {self._root}; }}"} }}
            }}
            """
        )
        prefix = ["ip", "netns", "exec", self._store]
        self._start([*prefix, "nginx", "-c", str(config), "-g", "daemon off;"], self._state / "nginx.pid")

    def _start(self, command: Sequence[str], ready: pathlib.Path) -> None:
        """Starts a server and waits until it has made a file."""
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._servers.append(server)
        deadline = time.monotonic() + _START_LIMIT
        while not ready.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} did not start; nginx's log: {self._errors()}")
            time.sleep(0.05)

    def _errors(self) -> str:
        log = self._state / "error.log"
        return log.read_text()[-2000:] if log.exists() else "(empty)"

    def _down(self) -> None:
        for server in self._servers:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(5)
            server.kill()
        for name in (*map(self.namespace_of, range(self.hosts)), self._store, self._switch):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
            shutil.rmtree(pathlib.Path("/etc/netns") / name, ignore_errors=True)
        shutil.rmtree(self._state, ignore_errors=True)

    @property
    def _store(self) -> str:
        return f"{PREFIX}-store"

    @property
    def _switch(self) -> str:
        return f"{PREFIX}-switch"


def why_not() -> str:
    """Returns why this machine can't have hosts with limited links, or an empty string."""
    if os.geteuid() != 0:
        return "it needs root"
    missing = [command for command in ("ip", "tc", "nginx", "unshare", "bash") if shutil.which(command) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = f"{PREFIX}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return made.stderr.strip() if made.returncode else ""


def interface_bytes() -> Iterator[tuple[str, int, int]]:
    """Yields the name, bytes received and bytes sent of each interface of this process's host."""
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, counts = line.partition(":")
        fields = counts.split()
        yield name.strip(), int(fields[0]), int(fields[8])


def idle_seconds() -> float:
    """Returns the seconds that all cores of the machine together have been idle since it started."""
    fields = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()
    return sum(map(int, fields[4:6])) / os.sysconf("SC_CLK_TCK")


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
