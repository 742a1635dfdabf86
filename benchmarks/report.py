"""Cost of a page of a million logged steps: to write, to store, and to open.

write    `bigtrain report` of a run of `--steps` logged steps, complete processes
parse    a Python that parses each line of the same file with orjson and keeps nothing
open     milliseconds from the start of the page to its last curve, in a headless Chromium that has
         just been started, where there is one; empty: the same of a page of ten steps

They take turns; medians and their ratios are printed, and as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tests.support.browser import Browser, chromium
from tests.support.run_directories import make_run, step_line

ROOT = Path(__file__).resolve().parents[1]
REPORT = (
    "import sys\n"
    "from bigtrain.cli import main\n"
    "code = main(sys.argv[1:])\n"
    "status = open('/proc/self/status').read()\n"
    "print(int(status.split('VmHWM:')[1].split()[0]) / 1024)\n"
    "sys.exit(code)\n"
)
PARSE = "import orjson, sys\nfor line in open(sys.argv[1], 'rb'):\n    orjson.loads(line)\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="logged steps of the run")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        figures = measure(directory, args.steps, args.rounds)
    for name, value in figures.items():
        print(f"{name:<28} {value:,.2f}")
    print(json.dumps(figures, indent=2))
    return 0


def measure(directory: Path, num_steps: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds: seconds, MiB, and milliseconds in the browser."""
    run = make_run(directory / "run", lines(num_steps))
    small = make_run(directory / "small", lines(10))
    metrics = run / "metrics.jsonl"
    page, empty = directory / "page.html", directory / "empty.html"
    report = [sys.executable, "-c", REPORT, "report", "--run"]
    write, parse = [], []
    call([*report, str(small), "--output", str(empty)])
    for _ in range(rounds):
        seconds, said = call([*report, str(run), "--output", str(page)])
        write.append(seconds)
        parse.append(call([sys.executable, "-c", PARSE, str(metrics)])[0])
    figures = {
        "steps": float(num_steps),
        "metrics_mib": metrics.stat().st_size / 2**20,
        "page_mib": page.stat().st_size / 2**20,
        "write_seconds": statistics.median(write),
        "parse_seconds": statistics.median(parse),
        "write_over_parse": statistics.median(write) / statistics.median(parse),
        "peak_mib": float(said.split()[-1]),
    }
    if chromium() is not None:
        opened = {path: [opening(path) for _ in range(rounds)] for path in (page, empty)}
        figures["open_ms"] = statistics.median(opened[page])
        figures["open_empty_ms"] = statistics.median(opened[empty])
    return figures


def lines(num_steps: int) -> Iterator[str]:
    """Logged steps with noise, as they are written."""
    draw = random.Random(1)
    for step in range(1, num_steps + 1):
        line = step_line(
            step,
            loss=2 + 8 / (1 + step / 5000) + draw.gauss(0, 0.05),
            grad_norm=draw.lognormvariate(0, 0.3),
            tokens_per_second=400_000 + draw.gauss(0, 4000),
            step_seconds=10.4 + draw.gauss(0, 0.1),
            model_flops_utilization=0.41 + draw.gauss(0, 0.004),
        )
        yield json.dumps(line)


def call(command: list[str]) -> tuple[float, str]:
    """Return seconds of a command, and what it printed."""
    begun = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return time.perf_counter() - begun, done.stdout


def opening(page: Path) -> float:
    """Milliseconds until a browser that has just been started has drawn a page's last curve."""
    with Browser() as browser:
        browser.open(f"file://{page}", 1440)
        return float(browser.evaluate("bigtrainReport.drawnAt"))


if __name__ == "__main__":
    sys.exit(main())
