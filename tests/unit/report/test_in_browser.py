"""The page in a real browser: what is drawn, at several widths, light, dark and on paper.

Needs Chromium (``apt-get install chromium``). Screenshots are left in ``BIGTRAIN_SCREENSHOTS``,
where that names a folder, for somebody to look at.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image  # tensorboard brings it along

from bigtrain.report import run_files
from bigtrain.report.page import page_html, write_page
from bigtrain.report.run_files import open_runs
from tests.support.browser import Browser, chromium, drawn
from tests.support.run_directories import eventful_lines, eventful_run, make_run, step_line

REASON = "Chromium is not installed: make test-deps"
pytestmark = pytest.mark.skipif(chromium() is None, reason=REASON)

BLUE = {"light": (0x1F, 0x6F, 0xEB), "dark": (0x6C, 0xB0, 0xFF)}
"""--run-0 of report.css: the curve of the only, or first, run."""
BACKGROUND = {"light": (0xFF, 0xFF, 0xFF), "dark": (0x14, 0x17, 0x1A)}


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted = os.environ.get("BIGTRAIN_SCREENSHOTS")
    folder = Path(wanted) if wanted else tmp_path_factory.mktemp("shots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of a page of one run, of one of three, and of one of steps in buckets of four."""
    root = tmp_path_factory.mktemp("pages")
    one = eventful_run(root / "one")
    two = eventful_run(root / "two", num_steps=400, seed=2)
    small = make_run(root / "small", [step_line(step) for step in range(1, 6)])
    big = make_run(
        root / "big",
        [step_line(s, grad_norm=50.0 if s == 7_777 else 1.0) for s in range(1, 10_001)],
    )
    addresses = {}
    for name, runs in (("one", [one]), ("three", [one, two, small]), ("big", [big])):
        with pytest.MonkeyPatch.context() as patched:
            if name == "big":
                patched.setattr(run_files, "MAX_BUCKETS", run_files.MAX_BUCKETS // 10)
            write_page(root / f"{name}.html", page_html(open_runs(runs)))
        addresses[name] = f"file://{root}/{name}.html"
    return addresses


def share_of(image: Image.Image, colour: tuple[int, int, int]) -> int:
    """How many pixels of an image are about of this colour."""
    pixels = np.asarray(image, dtype=np.int16)
    return int((np.abs(pixels - np.array(colour, np.int16)).max(axis=2) < 24).sum())


def picture(browser: Browser, shot: Path) -> Image.Image:
    """A screenshot of the page, which is left in a file."""
    browser.screenshot(shot)
    with Image.open(shot) as image:
        return image.convert("RGB")


def part(browser: Browser, selector: str, image: Image.Image) -> Image.Image:
    """An element's part of a screenshot of the page."""
    box = browser.evaluate(
        f"""(() => {{ const b = document.querySelector({json.dumps(selector)})
            .getBoundingClientRect();
            return [b.left, b.top + scrollY, b.right, b.bottom + scrollY]; }})()"""
    )
    return image.crop(tuple(map(int, box)))


@pytest.mark.parametrize(
    ("page", "width", "dark"),
    [
        *(("one", 360, False), ("one", 768, True), ("three", 1440, False)),
        pytest.param("one", 1440, False, marks=pytest.mark.slow),
        pytest.param("three", 360, True, marks=pytest.mark.slow),
    ],
)
def test_it_is_drawn_at_every_width(
    browser: Browser, pages: dict[str, str], shots: Path, page: str, width: int, dark: bool
) -> None:
    scheme = "dark" if dark else "light"
    browser.open(pages[page], width, dark=dark)
    image = picture(browser, shots / f"{page}-{width}-{scheme}.png")
    assert browser.problems() == []
    assert browser.requests() == [pages[page]]
    # Nothing to scroll to the side: all that is wide scrolls within itself.
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert image.getpixel((2, 2)) == BACKGROUND[scheme]
    charts = ("loss", "held-out-loss", "lr", "throughput", "mfu", "step-time", "memory", "experts",
              "expert-bytes", "site-bytes", "site-distance", "sites")  # fmt: skip
    for chart in charts:
        pixels = part(browser, f"#chart-{chart} canvas", image)
        assert pixels.width >= min(width - 60, 400), chart
        assert share_of(pixels, BLUE[scheme]) > 40, chart


def test_the_points_are_the_figures(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["one"], 1440)
    lines = [line for line in eventful_lines() if "loss" in line and "event" not in line]
    loss = drawn(browser, "loss")
    assert loss["x"] == [line["step"] for line in lines]
    assert len(loss["Training loss"]) == 600
    for step in (1, 100, 159, 600):
        assert loss["Training loss"][step - 1] == pytest.approx(lines[step - 1]["loss"], rel=1e-6)
    assert [n + 1 for n, value in enumerate(loss["Training loss"]) if value is None] == [
        160,
        161,
        402,
    ]
    assert loss["range"] == [1, 600]
    held_out = drawn(browser, "held-out-loss")
    assert held_out["x"] == list(range(50, 601, 50))
    assert set(held_out) >= {"Held-out loss", "code", "web"}
    assert held_out["code"][0] == pytest.approx(held_out["Held-out loss"][0] - 0.4, rel=1e-5)
    outer = drawn(browser, "site-distance")
    assert outer["x"] == list(range(25, 601, 25))
    assert outer["distance"] == pytest.approx([3 * change for change in outer["change"]])
    assert drawn(browser, "sites")["Participating sites"][7:12] == [2, 2, 2, 2, 3]
    busiest = drawn(browser, "experts")
    assert {"busiest layer", "mean of layers", "model.layers.0.mlp.experts"} < set(busiest)
    assert max(drawn(browser, "mfu")["Model FLOPs utilization"]) > 35, "not in percent"
    # The dashed line of the prediction is in sight, above all that was measured.
    throughput = drawn(browser, "throughput")
    assert max(throughput["Throughput"]) < 66_900 < throughput["y"][1]
    assert throughput["y"][0] < min(throughput["Throughput"])
    browser.evaluate("document.querySelector('#chart-grad-norm button.log').click()")
    browser.settle()
    assert browser.evaluate("bigtrainReport.drawn.get('grad-norm')[0].plot.scales.y.distr") == 3
    assert browser.problems() == []


def test_areas_lie_on_top_of_each_other(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["one"], 1440)
    areas = drawn(browser, "breakdown")
    names = ["data", "forward", "backward", "optimizer", "engine"]
    step = next(line for line in eventful_lines() if line["step"] == 310)
    sums = np.cumsum([step["breakdown"][f"{name}_seconds"] for name in names])
    assert [areas[name][309] for name in names] == pytest.approx(sums, rel=1e-5)
    # Waiting for other ranks is a part of these, and a line of its own.
    assert areas["communication"][309] == pytest.approx(0.08)
    assert areas["y"][1] < 0.8


def test_marks_stand_at_their_steps(browser: Browser, pages: dict[str, str], shots: Path) -> None:
    browser.open(pages["one"], 1440)
    circles = browser.evaluate(
        """[...document.querySelectorAll(".lanes circle")].map(c =>
            [Number(c.getAttribute("cx")), c.querySelector("title").textContent])"""
    )
    titles = [title.split("\n")[0] for _, title in circles]
    assert titles == [
        "step 200: restart",
        "step 450: restart",
        "step 405: rollback",
        "step 247: hang",
        "step 160: skipped step",
        "step 161: skipped step",
        "step 402: skipped step",
        "step 320: straggler",
        "step 200: other sites",
        "step 300: other sites",
    ]
    assert "rank 11 on node1" in circles[3][1]
    # On a straight line from the first step to the last.
    places = {int(text.split(":")[0].removeprefix("step ")): x for x, text in circles}
    scale = (places[450] - places[200]) / 250
    for step, x in places.items():
        assert x == pytest.approx(places[200] + scale * (step - 200), abs=0.01)
    # In a chart: a dashed line of the hang's colour, all the way up, where step 247 is.
    image = part(browser, "#chart-lr canvas", picture(browser, shots / "marks.png"))
    left, width = browser.evaluate(
        "(({ plot }) => [plot.bbox.left, plot.bbox.width])(bigtrainReport.drawn.get('lr')[0])"
    )
    at = round(left + (247 - 1) / 599 * width)
    column = image.crop((at - 2, 0, at + 3, image.height))
    assert share_of(column, (0xB9, 0x1C, 0x1C)) > 60
    other = image.crop((at + 20, 0, at + 25, image.height))
    assert share_of(other, (0xB9, 0x1C, 0x1C)) == 0


def test_ten_thousand_steps_keep_their_spike(
    browser: Browser, pages: dict[str, str], shots: Path
) -> None:
    browser.open(pages["big"], 1440)
    norm = drawn(browser, "grad-norm")
    assert len(norm["x"]) < 700, "more points than pixels"
    highest = norm["Gradient norm, highest"]
    assert max(highest) == 50.0
    browser.evaluate("bigtrainReport.show(7_700, 7_800)")
    browser.settle()
    near = drawn(browser, "grad-norm")
    spike = near["x"][near["Gradient norm, highest"].index(50.0)]
    assert spike - 4 < 7_777 <= spike
    assert near["range"] == [7_700, 7_800]


def test_it_zooms_and_pans(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["one"], 1440, 1400)
    browser.evaluate("document.querySelector('#chart-lr').scrollIntoView({block: 'center'})")
    box = browser.evaluate(
        """(() => { const b = bigtrainReport.drawn.get("lr")[0].plot.over.getBoundingClientRect();
            return [b.left, b.top, b.width, b.height]; })()"""
    )
    left, top, width, height = box
    y = top + height / 2

    def drag(begin: float, end: float, modifiers: int = 0) -> None:
        places = np.linspace(left + begin * width, left + end * width, 5)
        held = {"button": "left", "buttons": 1, "modifiers": modifiers}
        browser.mouse("mouseMoved", places[0], y)
        browser.mouse("mousePressed", places[0], y, clickCount=1, **held)
        for x in places[1:]:
            browser.mouse("mouseMoved", x, y, **held)
        browser.mouse("mouseReleased", places[-1], y, clickCount=1, **held)
        browser.settle()

    drag(0.25, 0.75)
    zoomed = drawn(browser, "lr")["range"]
    assert zoomed == pytest.approx([1 + 599 / 4, 1 + 599 * 3 / 4], abs=3)
    # All charts show the same steps.
    for chart in ("loss", "memory", "breakdown", "held-out-loss"):
        assert drawn(browser, chart)["range"] == zoomed
    drag(0.5, 0.25, modifiers=8)  # Shift
    panned = drawn(browser, "lr")["range"]
    assert panned[0] - zoomed[0] == pytest.approx((zoomed[1] - zoomed[0]) / 4, abs=3)
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0])
    browser.evaluate(
        """bigtrainReport.drawn.get("lr")[0].plot.root.dispatchEvent(
            new KeyboardEvent("keydown", { key: "ArrowLeft" }))"""
    )
    assert drawn(browser, "lr")["range"][0] < panned[0]
    for _ in range(20):
        browser.evaluate("bigtrainReport.pan(0.5)")
    assert drawn(browser, "lr")["range"][1] == 600, "panned beyond the end"
    browser.evaluate("[...document.querySelectorAll('.buttons button')].at(-1).click()")
    assert drawn(browser, "lr")["range"] == [1, 600]


def test_fingers_pan_and_pinch(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["one"], 360)
    browser.evaluate("bigtrainReport.show(200, 400)")
    browser.evaluate("document.querySelector('#chart-lr').scrollIntoView({block: 'center'})")
    left, top, width = browser.evaluate(
        """(() => { const b = bigtrainReport.drawn.get("lr")[0].plot.over.getBoundingClientRect();
            return [b.left, b.top + 50, b.width]; })()"""
    )

    def touch(kind: str, *shares: float) -> None:
        points = [{"x": left + share * width, "y": top, "id": n} for n, share in enumerate(shares)]
        browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    touch("touchStart", 0.8)
    for share in (0.7, 0.6, 0.5, 0.4, 0.3):
        touch("touchMove", share)
    touch("touchEnd")
    browser.settle()
    begin, end = drawn(browser, "lr")["range"]
    assert end - begin == pytest.approx(200)
    # The browser keeps the first few pixels of a stroke, to see whether it is a scroll.
    assert 260 < begin <= 301
    touch("touchStart", 0.3, 0.7)
    for apart in (0.15, 0.1, 0.05):
        touch("touchMove", 0.5 - apart, 0.5 + apart)
    touch("touchEnd")
    browser.settle()
    wide_begin, wide_end = drawn(browser, "lr")["range"]
    assert wide_end - wide_begin > 300
    assert browser.problems() == []


def test_against_tokens(browser: Browser, pages: dict[str, str]) -> None:
    """Of runs with other batches, the same number of tokens is at the same place."""
    browser.open(pages["three"], 1440)
    choose = """(axis => { const s = document.querySelector("#controls select"); s.value = axis;
        s.dispatchEvent(new Event("change")); })"""
    for axis, last in (("tokens", 600 * 4096), ("samples", 600 * 8), ("step", 600)):
        browser.evaluate(f"{choose}({json.dumps(axis)})")
        assert drawn(browser, "loss")["range"][1] == pytest.approx(last)
    browser.evaluate(f"{choose}('hours')")
    assert drawn(browser, "loss")["range"][1] == pytest.approx(600 * 0.53 / 3600, rel=0.02)


def test_runs_are_overlaid_and_can_be_hidden(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["three"], 1440)
    loss = drawn(browser, "loss")
    assert {"one", "two", "small"} < set(loss)
    ends = {
        name: max(x for x, v in zip(loss["x"], loss[name], strict=True) if v is not None)
        for name in ("one", "two", "small")
    }
    assert ends == {"one": 600, "two": 400, "small": 5}
    browser.evaluate("document.querySelector('.runs input').click()")
    hidden = drawn(browser, "loss")
    assert "one" not in hidden
    assert hidden["range"] == [1, 450], "a restart of the second run was later than its last step"
    # Areas cannot lie over each other: each run has its own.
    assert browser.evaluate("bigtrainReport.drawn.get('breakdown').length") == 1
    browser.evaluate("document.querySelector('.runs input').click()")
    assert browser.evaluate("bigtrainReport.drawn.get('breakdown').length") == 2


def test_the_reading_under_the_cursor(browser: Browser, pages: dict[str, str]) -> None:
    browser.open(pages["one"], 1440, 1400)
    reading = "document.querySelector('#chart-lr .readout').textContent"
    assert browser.evaluate(reading).endswith("at step 600")
    browser.evaluate("document.querySelector('#chart-lr').scrollIntoView({block: 'center'})")
    x, y = browser.evaluate(
        """(() => { const { plot } = bigtrainReport.drawn.get("lr")[0];
            const b = plot.over.getBoundingClientRect();
            return [b.left + plot.valToPos(100, "x"), b.top + 40]; })()"""
    )
    browser.mouse("mouseMoved", x, y)
    browser.settle()
    value, _, step = browser.evaluate(reading).partition(" at step ")
    assert abs(int(step) - 100) <= 1  # less than a pixel
    expected = next(line["lr"] for line in eventful_lines() if line["step"] == int(step))
    assert float(value) == pytest.approx(expected, rel=1e-3)


def test_on_paper_it_is_light_and_open(
    browser: Browser, pages: dict[str, str], shots: Path
) -> None:
    """Also for a reader who prefers the dark."""
    page = "one"
    browser.open(pages[page], 800, dark=True)
    closed = browser.evaluate("document.querySelectorAll('details:not([open])').length")
    assert closed > 2
    browser.media(dark=True, paper=True)
    browser.wait_for("document.querySelectorAll('details:not([open])').length === 0")
    image = picture(browser, shots / f"{page}-print.png")
    assert image.getpixel((2, 2)) == BACKGROUND["light"]
    assert share_of(part(browser, "#chart-lr canvas", image), BLUE["light"]) > 80
    assert (
        browser.evaluate("getComputedStyle(document.querySelector('#controls')).display") == "none"
    )
    browser.media(dark=True)
    browser.wait_for(f"document.querySelectorAll('details:not([open])').length === {closed}")
    browser.print_pdf(shots / f"{page}.pdf")
    assert (shots / f"{page}.pdf").read_bytes().startswith(b"%PDF")
    assert browser.problems() == []


def test_a_name_breaks_out_of_nothing(browser: Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror=window.broken=1>"
    lines = [step_line(1), step_line(2), {"step": 1, "event": evil}]
    run = make_run(tmp_path / evil, lines, config={evil: evil})
    other = make_run(tmp_path / "other", [step_line(1)])
    write_page(tmp_path / "page.html", page_html(open_runs([run, other])))
    browser.open(f"file://{tmp_path}/page.html", 768)
    browser.settle()
    assert browser.problems() == []
    assert browser.evaluate("window.broken") is None
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert evil in browser.evaluate("document.querySelector('.runs').textContent")


def test_the_policy_refuses_programs_that_are_not_the_pages(
    browser: Browser, pages: dict[str, str]
) -> None:
    """Were something not escaped after all."""
    browser.open(pages["one"], 768)
    browser.evaluate(
        """(() => { const s = document.createElement("script"); s.textContent = "window.broken = 1";
            document.body.append(s); document.body.insertAdjacentHTML("beforeend",
            "<img src=x onerror='window.broken = 2'>"); })()"""
    )
    browser.settle()
    assert browser.evaluate("window.broken") is None
    assert any("Content Security Policy" in text for text in browser.problems())


@pytest.mark.parametrize("width", [360, 1440])
def test_open_tables_can_be_read(browser: Browser, tmp_path: Path, width: int) -> None:
    """Keys and values share the width, however long they are."""
    config = {
        "watchdog": {"collective_timeout_seconds": 1800.0},
        "data": {"sources": [{"path": "/somewhere/far/away/" * 6}]},
    }
    runs = [make_run(tmp_path / name, eventful_lines(50), config=config) for name in ("a", "b")]
    write_page(tmp_path / "page.html", page_html(open_runs(runs)))
    browser.open(f"file://{tmp_path}/page.html", width)
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    widths = browser.evaluate(
        """[...document.querySelectorAll("tbody th, .keys td, .events td:last-child")]
            .map(cell => cell.getBoundingClientRect().width)"""
    )
    assert min(widths) > 90
