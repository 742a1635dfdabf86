"""Parts of a launch add up, from the start of the process."""

from __future__ import annotations

import subprocess
import sys
import time

from bigtrain.run.diagnostics.start_times import GROUPS, IMPORTS, StartTimes
from bigtrain.system.processes import process_start


def test_parts_follow_each_other_from_the_start_of_the_process() -> None:
    moments = iter([14.0, 15.5])
    times = StartTimes(now=lambda: next(moments), began=lambda: 10.0)
    times.end(IMPORTS)
    times.end(GROUPS)
    assert times.seconds == {IMPORTS: 4.0, GROUPS: 1.5}
    assert times.text() == (
        "the first step ended at 15.500, 5.50 s after the start of the process: "
        "imports and checks 4.00, process groups 1.50"
    )


def test_a_process_starts_when_it_is_started() -> None:
    assert process_start() < time.time()
    before = time.time()
    code = "from bigtrain.system.processes import process_start; print(process_start())"
    command = [sys.executable, "-c", code]
    started = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert before - 0.05 <= started <= time.time()
