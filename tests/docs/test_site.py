"""The site in a browser: on a phone, opened as files, and served with its search."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.browser import Browser, chromium
from tests.support.worlds import ROOT

REASON = "Chromium is not installed: make test-deps"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason=REASON)]
PAGES = ("index", "planner", "status", "compatibility", "reference/configuration", "howto/chat")
BROKEN_KEYS = """
    [...document.querySelectorAll(".md-typeset :not(pre) > code .together")]
        .filter((word) => word.getClientRects().length > 1).map((word) => word.textContent)
"""
HIDDEN = """
    [...document.querySelectorAll("td .together")].filter((word) => {
        const cell = word.closest("td").getBoundingClientRect();
        return word.getBoundingClientRect().right > cell.right + 1;
    }).map((word) => word.textContent)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(site))
    ) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("width", [390, 1400])
def test_no_key_is_broken_or_hidden(browser: Browser, address: str, width: int) -> None:
    for page in PAGES:
        browser.open(f"{address}/{page}.html", width)
        assert browser.evaluate("document.documentElement.scrollWidth") == width, page
        assert browser.evaluate("document.querySelectorAll('.together').length") > 0, page
        assert browser.evaluate(BROKEN_KEYS) == [], page
        if width == 390:
            assert browser.evaluate(HIDDEN) == [], page


def test_files_name_the_command_that_has_a_search(browser: Browser, site: Path) -> None:
    browser.open(f"file://{site}/index.html", 1400)
    field = "document.querySelector('.md-search__input')"
    assert browser.evaluate(f"{field}.disabled")
    assert browser.evaluate(f"{field}.placeholder") == "Search needs a server: make docs-serve"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\ndocs-serve:" in makefile


def test_a_served_site_is_searched(browser: Browser, address: str) -> None:
    browser.open(f"{address}/index.html", 1400)
    browser.evaluate(
        "(() => { const field = document.querySelector('.md-search__input'); field.focus();"
        "field.value = 'preference'; field.dispatchEvent(new Event('keyup')); })()"
    )
    browser.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")
    assert "references" not in browser.evaluate(
        "document.querySelector('.md-search-result__meta').textContent"
    )
