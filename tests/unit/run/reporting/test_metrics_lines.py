"""The end of metrics.jsonl is cut as if the whole file had been read."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigtrain.run.reporting import metrics_lines
from bigtrain.run.reporting.metrics_lines import cut_lines
from tests.support.tiers import examples


def expected(lines: list[dict[str, Any]], last_step: int, samples: int) -> list[dict[str, Any]]:
    """What stays, line by line."""
    kept = []
    for line in lines:
        if "event" in line:
            stays = line["first_sample"] < samples
        else:
            stays = line["step"] <= last_step
        if stays and last_step > 0:
            kept.append(line)
    return kept


@st.composite
def written(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """The lines of a run that rolls back after bad steps, and where it could resume."""
    lines: list[dict[str, Any]] = []
    places = []
    step = samples = 0
    for what in draw(st.lists(st.sampled_from("sssseobb"), max_size=40)):
        if what in "so":
            step, samples = step + 1, samples + 8
        if what == "s":
            lines.append({"step": step, "loss": float(step), "samples": samples})
            places.append((step, samples))
        elif what == "e":
            lines.append({"step": step, "held_out_loss": 1.0})
        elif what == "b" and places:
            event = {"step": step, "event": "skipped", "first_sample": max(samples - 8, 0)}
            back = draw(st.sampled_from(places))[0]
            lines = [line for line in lines if "event" in line or line["step"] <= back]
            places = [place for place in places if place[0] <= back]
            lines.append(event)
            step = back
    return lines, places


@settings(
    max_examples=examples(300),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(run=written(), data=st.data(), block=st.integers(1, 90), rest=st.binary(max_size=20))
def test_it_stays_what_would_of_all_lines(
    tmp_path: Path,
    run: tuple[list[dict[str, Any]], list[tuple[int, int]]],
    data: st.DataObject,
    block: int,
    rest: bytes,
) -> None:
    lines, places = run
    last_step, samples = data.draw(st.sampled_from([(0, 0), *places]))
    path = tmp_path / "metrics.jsonl"
    cut_off = b"" if rest.strip() == b"" else b'{"' + rest.replace(b"\n", b"")
    path.write_bytes("".join(json.dumps(line) + "\n" for line in lines).encode() + cut_off)
    before, metrics_lines._BLOCK_BYTES = metrics_lines._BLOCK_BYTES, block
    try:
        first_loss, num_dropped = cut_lines(path, last_step, samples)
    finally:
        metrics_lines._BLOCK_BYTES = before
    stays = expected(lines, last_step, samples)
    assert [json.loads(line) for line in path.read_text().splitlines()] == stays
    assert num_dropped == len(lines) - len(stays)
    assert first_loss == next((line["loss"] for line in stays if "loss" in line), None)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_without_its_end_is_given_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0, "samples": 8}')
    assert cut_lines(path, 1, 8) == (2.0, 0)
    assert path.read_text() == '{"step": 1, "loss": 2.0, "samples": 8}\n'


def test_a_long_file_is_copied_unparsed(tmp_path: Path) -> None:
    """Of 50,000 steps 3 are dropped: no memory for the others, and a new file, since a launch that
    was fenced off may still append to the old one."""
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, 50_001):
            file.write(f'{{"step": {step}, "loss": 1.5, "samples": {8 * step}}}\n')
    inode = path.stat().st_ino
    tracemalloc.start()
    assert cut_lines(path, 49_997, 8 * 49_997) == (1.5, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert path.stat().st_ino != inode
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text().endswith('{"step": 49997, "loss": 1.5, "samples": 399976}\n')


def test_an_event_before_a_step_that_stays_may_go(tmp_path: Path) -> None:
    """Of samples that are read again, though the run has done that step since by other samples."""
    path = tmp_path / "metrics.jsonl"
    first, event = (
        '{"step": 1, "samples": 8}\n',
        '{"step": 3, "event": "skipped", "first_sample": 16}',
    )
    path.write_text(f'{first}{event}\n{{"step": 2, "samples": 32}}\n')
    assert cut_lines(path, 2, 16) == (None, 1)
    assert path.read_text() == f'{first}{{"step": 2, "samples": 32}}\n'
