"""A headless Chromium through its DevTools pipe: no driver, no library, no port."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_SECONDS = 60.0


def chromium_binary() -> str | None:
    """The first one on the path."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a browser; messages are JSON objects that end with a NUL byte."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int):
        self._process = process
        self._out, self._in = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command's result; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Loads a page and waits until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        # Another fragment of the same page alone would not load it again.
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """A JavaScript expression's value."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until a JavaScript expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"never true: {expression}"

    def hover(self, selector: str) -> None:
        """Moves the pointer onto an element."""
        center = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=center[0], y=center[1])

    def press(self, key: str) -> None:
        """One key, down and up."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        import base64

        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 16)
            assert data, f"the browser ended with {self._process.poll()}"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextlib.contextmanager
def running(binary: str) -> Iterator[Browser]:
    """A browser with a profile of its own, ended and removed afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        child_in, to_browser = os.pipe()
        from_browser, child_out = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4. The shell moves them
        # there; a hook between fork and exec could deadlock in a process with threads.
        command = f'exec "$0" "$@" 3<&{child_in} 4>&{child_out}'
        process = subprocess.Popen(
            ["bash", "-c", command, binary, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(child_in, child_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(child_in)
        os.close(child_out)
        try:
            yield Browser(process, to_browser, from_browser)
        finally:
            process.terminate()
            process.wait(timeout=_SECONDS)
            os.close(to_browser)
            os.close(from_browser)
