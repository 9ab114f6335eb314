# SPDX-License-Identifier: MIT
"""A headless Chromium for tests of pages, driven by chromedriver (W3C WebDriver). For tests only.

Both are Debian's packages `chromium` and `chromium-driver`; `installed` says whether they are here.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_PROGRAMS = ("chromium", "chromedriver")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def installed() -> bool:
    """Whether tests can start a browser on this machine."""
    return all(shutil.which(program) for program in _PROGRAMS)


class Browser:
    """A context manager: one window. `profile` is a folder of its own."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._url = ""

    def __enter__(self) -> Browser:
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self._profile), "TMPDIR": str(self._profile)},
        )
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if started := re.search(r"started successfully on port (\d+)", line):
                break
        else:
            raise RuntimeError("chromedriver did not start")
        driver = f"http://127.0.0.1:{started[1]}"
        arguments = [*_ARGUMENTS, f"--user-data-dir={self._profile / 'data'}"]
        options = {"args": arguments, "binary": shutil.which("chromium")}
        log = {"goog:loggingPrefs": {"browser": "ALL"}}
        capabilities = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options, **log}}
        session = _call("POST", f"{driver}/session", {"capabilities": capabilities})
        self._url = f"{driver}/session/{session['sessionId']}"
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._url:
                _call("DELETE", self._url, None)
        finally:
            self._driver.terminate()
            self._driver.wait(10)

    def open(self, url: str) -> None:
        """Load a page and wait for it."""
        self._post("/url", {"url": url})

    def resize(self, width: int, height: int) -> None:
        """Set the window's size in pixels."""
        self._post("/window/rect", {"width": width, "height": height})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body returns in the page."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def type(self, selector: str, text: str) -> None:
        """Press the keys of `text` in an element."""
        element = self._post("/element", {"using": "css selector", "value": selector})[_ELEMENT]
        self._post(f"/element/{element}/value", {"text": text})

    def click(self, selector: str) -> None:
        """Click an element that is to be seen."""
        element = self._post("/element", {"using": "css selector", "value": selector})[_ELEMENT]
        self._post(f"/element/{element}/click", {})

    def text(self, selector: str) -> str:
        """The text of the last element that matches, as it is shown; empty without one."""
        script = "return [...document.querySelectorAll(arguments[0])].at(-1)?.innerText ?? ''"
        return str(self.run(script, selector))

    def until(self, condition: str, *arguments: Any) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + 20
        while not self.run(f"return Boolean({condition})", *arguments):
            assert time.monotonic() < deadline, f"not in 20 s: {condition}; the page says: {self.text('body')}"
            time.sleep(0.02)

    def log(self) -> list[str]:
        """What the page wrote to its console since the last call, errors of its policy included."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        """Write the window as PNG."""
        path.write_bytes(base64.b64decode(_call("GET", self._url + "/screenshot", None)))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _call("POST", self._url + path, body)


def _call(method: str, url: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(json.load(error)["value"]["message"]) from None
