"""A page that is served follows its run, in a real browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bigtrain.report import live
from bigtrain.report import run_files as run_module
from bigtrain.report.live import open_server
from bigtrain.report.run_files import open_runs
from tests.support.browser import Browser, chromium, drawn
from tests.support.run_directories import make_run, step_line
from tests.support.worlds import free_port


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of a run's live page."""
    port = free_port()
    server = open_server(open_runs([run], final=False), port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


REASON = "Chromium is not installed: make test-deps"
pytestmark = pytest.mark.skipif(chromium() is None, reason=REASON)


def test_a_live_page_follows_its_run(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New steps appear, an open table stays open, and what a rollback takes back goes."""
    monkeypatch.setattr(live, "POLL_SECONDS", 0.05)
    run = make_run(tmp_path / "run", [step_line(step) for step in range(1, 4)])
    metrics = run / "metrics.jsonl"
    last = "bigtrainReport.drawn.get('loss')[0].plot.data[0].at(-1)"
    with served(run) as address:
        browser.open(address, 1440)
        assert browser.evaluate(last) == 3
        browser.evaluate("document.querySelector('#section-setup details').open = true")
        with metrics.open("a") as file:
            for step in (4, 5, 6):
                file.write(json.dumps(step_line(step, loss=float(step))) + "\n")
            file.write(json.dumps({"step": 5, "event": "skipped", "reason": "bad"}) + "\n")
        browser.wait_for(f"{last} === 6")
        assert drawn(browser, "loss")["Training loss"][-3:] == [4, 5, 6]
        assert drawn(browser, "loss")["range"] == [1, 6]
        assert browser.evaluate("document.querySelectorAll('.lanes circle').length") == 1
        assert "6 of 1,000" in browser.evaluate("document.body.textContent")
        assert browser.evaluate("document.querySelector('#section-setup details').open")
        kept = metrics.read_text().splitlines(keepends=True)[:2]
        metrics.write_text("".join(kept))
        browser.wait_for(f"{last} === 2")
        assert drawn(browser, "loss")["x"] == [1, 2]
        assert browser.problems() == []
    browser.wait_for("document.getElementById('status').textContent.includes('does not respond')")


def test_a_live_page_comes_to_what_a_fresh_one_shows(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While buckets become complete, and wider, and a figure begins that was not there before."""
    monkeypatch.setattr(live, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(run_module, "MAX_BUCKETS", 8)
    run = make_run(tmp_path / "run", [step_line(1)])
    rows = "bigtrainReport.runs[0].steps.rows"
    everything = "(({ steps, evaluations }) => ({ steps, evaluations }))(bigtrainReport.runs[0])"
    with served(run) as address:
        browser.open(address, 768)
        for step in range(2, 24):
            more = {} if step < 12 else {"breakdown": {"forward_seconds": step / 10}}
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(step_line(step, loss=10.0 - step, **more)) + "\n")
            browser.wait_for(f"{rows} === {step}")
        followed = browser.evaluate(everything)
        assert followed["steps"]["width"] == 4
        assert drawn(browser, "breakdown")["forward"][-1] == pytest.approx(2.2)
        browser.open(address, 768)
        fresh = browser.evaluate(everything)
        assert fresh["steps"]["step"] == [4, 8, 12, 16, 20, 23]
        assert fresh["steps"]["series"]["loss"]["low"] == [6, 2, -2, -6, -10, -13]
        assert followed == fresh
