"""A headless Chromium, driven through chromedriver by the WebDriver protocol. Needs no other package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests.support.s3_stores import free_port

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_START_LIMIT = 60.0  # seconds; machines that run tests are slow
_CALL_LIMIT = 60.0
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def missing() -> str:
    """Returns the programs that must be installed first, or "" if all are there."""
    lacking = [] if any(map(shutil.which, _CHROMIUM)) else ["chromium"]
    return " and ".join([*lacking, *([] if shutil.which("chromedriver") else ["chromedriver"])])


class Browser:
    """One tab."""

    def __init__(self, address: str) -> None:
        self._address = address

    def open(self, page: pathlib.Path) -> None:
        self._call("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        """Returns the value that a JavaScript function body returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def resize(self, width: int, height: int) -> None:
        self._call("POST", "/window/rect", {"width": width, "height": height})

    def view(self, width: int, height: int, scale: float) -> None:
        """Sets the size of what is shown, and how many pixels of a screenshot a pixel of the page has each way."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})

    def point_at(self, x: float, y: float) -> None:
        """Moves the mouse to a point, in pixels from the window's upper left corner."""
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"}
        self._call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def press(self, key: str) -> None:
        pressed = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": pressed}]})

    def prefer(self, scheme: str) -> None:
        """Sets the user's preference for a "light" or a "dark" color scheme."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": media})

    def screenshot(self, path: pathlib.Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        return _call(method, self._address + path, body)


@contextlib.contextmanager
def running(width: int = 1400, height: int = 900) -> Iterator[Browser]:
    """Runs a browser with an empty profile; removes both at the end of the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        port = free_port()
        # Chromium keeps its sockets and settings in these directories.
        env = {**os.environ, "HOME": profile, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile}
        driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        address = f"http://127.0.0.1:{port}"
        try:
            _wait_for(address)
            flags = [*_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}/profile"]
            binary = next(filter(None, map(shutil.which, _CHROMIUM)))
            options = {"goog:chromeOptions": {"args": flags, "binary": binary}}
            created = _call("POST", f"{address}/session", {"capabilities": {"alwaysMatch": options}})
            session = f"{address}/session/{created['sessionId']}"
            try:
                yield Browser(session)
            finally:
                _call("DELETE", session)
        finally:
            driver.terminate()
            driver.wait(10)


def _call(method: str, url: str, body: Any = None) -> Any:
    data = None if method == "GET" else json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_CALL_LIMIT) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {url}: {error.read().decode()[:1000]}") from None


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + _START_LIMIT
    while True:
        try:
            if _call("GET", f"{address}/status")["ready"]:
                return
        except (OSError, ValueError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)
