"""starts.jsonl has a line for each start, also after one that a kill cut off."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from bigtrain.run.run_directory import FILE, note_start


def test_each_start_is_a_line(tmp_path: Path) -> None:
    note_start(tmp_path, generation=1, step=0, samples=0, world_size=8)
    note_start(tmp_path, generation=2, step=125, samples=1000, world_size=4)
    first, second = map(json.loads, (tmp_path / FILE).read_text().splitlines())
    times = [datetime.strptime(one.pop("time"), "%Y-%m-%d %H:%M:%S UTC") for one in (first, second)]
    assert times == sorted(times)
    assert first == {"generation": 1, "step": 0, "samples": 0, "world_size": 8}
    assert second == {"generation": 2, "step": 125, "samples": 1000, "world_size": 4}


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    note_start(tmp_path, generation=1, step=0, samples=0, world_size=1)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes() + b'{"generation": 2, "ti')
    note_start(tmp_path, generation=3, step=5, samples=40, world_size=1)
    lines = path.read_text().splitlines()
    assert lines[1] == '{"generation": 2, "ti'
    assert [json.loads(lines[n])["generation"] for n in (0, 2)] == [1, 3]
