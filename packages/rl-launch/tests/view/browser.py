"""Chromium without a window, driven over a pipe by its own protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Refused(AssertionError):
    """What a browser answers to a call that it did not carry out."""


class Page:
    """A page, with everything that it has written to the console and asked the network for."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest, self._number, self._session = b"", 0, None
        self._events: deque[dict[str, Any]] = deque()
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise Refused(answer["error"]["message"])
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._reading, 2**20)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(" ".join(str(each.get("value", each)) for each in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def js(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 60.0) -> None:
        """Wait until an expression holds."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            try:
                if self.js(f"(async () => !!(document.body && await ({condition})))()"):
                    return
            except Refused:  # the page was left while it was asked
                pass
            time.sleep(0.05)
        raise AssertionError(
            f"{condition} did not become true; the page has {self.js('location.hash')} and the problems {self.problems}"
        )

    def size(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def scheme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page of a new browser."""
    assert PROGRAM is not None
    to_browser, ours = os.pipe()
    theirs, from_browser = os.pipe()
    command = [
        PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={profile}", "--remote-debugging-pipe",
    ]  # fmt: skip

    # the browser reads descriptor 3 and writes descriptor 4
    shell = ["sh", "-c", f'exec "$@" 3</proc/self/fd/{to_browser} 4>/proc/self/fd/{from_browser}', "sh", *command]
    with (profile.parent / "browser.log").open("wb") as log:
        process = subprocess.Popen(shell, pass_fds=(to_browser, from_browser), stdout=log, stderr=log)
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(theirs, ours)
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(ours)
        os.close(theirs)
