"""A headless Chromium, driven through its DevTools protocol over a pipe: no port, no library.

https://chromedevtools.github.io/devtools-protocol/: messages are JSON that a zero byte ends; the
browser reads them from descriptor 3 and answers on descriptor 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SECONDS = 120.0


def chromium() -> str | None:
    """Its program, or None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. A context manager."""

    def __init__(self) -> None:
        program = chromium()
        assert program is not None
        self._profile = tempfile.mkdtemp(prefix="bigtrain-chromium-")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # A process that gives the pipes the numbers that the browser looks for, and becomes it.
        script = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
            "os.execv(sys.argv[3], sys.argv[3:])"
        )
        # Numbers that are neither 3 nor 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-S", "-c", script, *map(str, ends)),
                *(program, "--headless=new", "--remote-debugging-pipe"),
                *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
                *("--hide-scrollbars", "--font-render-hinting=none", "--disable-extensions"),
                *("--disable-background-networking", "--disable-component-update"),
                f"--user-data-dir={self._profile}",
            ],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._held = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return one command; what it returns. Events that come meanwhile are kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _SECONDS
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            block = os.read(self._in, 1 << 20)
            assert block, "the browser ended"
            self._held += block
        text, _, self._held = self._held.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def open(
        self,
        url: str,
        width: int = 1440,
        height: int = 900,
        dark: bool = False,
        touch: bool = False,
    ) -> None:
        """Load a page in a window of this size and wait until it is rendered."""
        self.resize(width, height)
        self.media(dark=dark)
        self.events.clear()
        self.call("Page.navigate", url=url)
        until = time.monotonic() + _SECONDS
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive(until))

    def resize(self, width: int, height: int = 900) -> None:
        """Size of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def media(self, dark: bool = False, paper: bool = False) -> None:
        """Set the reader's preferences, and whether the page is printed."""
        self.call(
            "Emulation.setEmulatedMedia",
            media="print" if paper else "",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; of a promise what it brings."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Until the page has drawn twice."""
        self.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    def wait_for(self, expression: str) -> None:
        """Until a JavaScript expression is true."""
        until = time.monotonic() + _SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < until, f"never true: {expression}"
            self.evaluate("new Promise(done => setTimeout(done, 10))")

    def screenshot(self, path: Path) -> None:
        """Take a screenshot of the full page."""
        self.settle()
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        answer = self.call(
            "Page.captureScreenshot",
            format="png",
            optimizeForSpeed=True,
            captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def print_pdf(self, path: Path) -> None:
        """Return the page as its printer gets it."""
        answer = self.call("Page.printToPDF", printBackground=False, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a mouse event, ``mousePressed`` for one."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def problems(self) -> list[str]:
        """Return errors that the page's programs raised, and what the browser refused or complained
        of."""
        texts = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                texts.append(str(event["params"]["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] in ("error", "warning"):
                    texts.append(f"{entry['source']}: {entry['text']}")
        return texts

    def requests(self) -> list[str]:
        """Return every address that the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        """End it, with all its processes."""
        os.close(self._out)
        os.close(self._in)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def drawn(browser: Browser, chart: str, plot: int = 0) -> dict[str, Any]:
    """Return the data given to uPlot for a chart of `bigtrain report`: points of each series by its
    label, None for a gap, and the ranges of its axes."""
    given: dict[str, Any] = browser.evaluate(
        f"""(() => {{
            const {{ plot }} = bigtrainReport.drawn.get({json.dumps(chart)})[{plot}];
            const lines = plot.series.map((s, i) => [i ? s.label : "x", [...plot.data[i]]]);
            return {{ ...Object.fromEntries(lines), range: [plot.scales.x.min, plot.scales.x.max],
                      y: [plot.scales.y.min, plot.scales.y.max] }};
        }})()"""
    )
    return given
