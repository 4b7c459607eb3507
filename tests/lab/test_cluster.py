"""What a local cluster does before its processes run."""

from __future__ import annotations

import socket

import pytest

from orbax_ext.lab import cluster

pytestmark = pytest.mark.once


def test_nobody_else_gets_the_port_before_the_service_has_it() -> None:
    with cluster.reserved_port() as port, socket.socket() as other, socket.socket(socket.AF_INET6) as service:
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        service.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        service.bind(("::", port))
        service.listen()
        for _ in range(10):
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
            service.settimeout(10)
            service.accept()[0].close()
