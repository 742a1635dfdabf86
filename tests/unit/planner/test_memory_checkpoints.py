"""Costs of checkpoints in memory by hand counts, and what plans and `check` say of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bigtrain.cli import main
from bigtrain.planner.layout import Layout
from bigtrain.planner.memory_checkpoints import (
    EXCHANGE_BANDWIDTH,
    WRITE_BANDWIDTH,
    MemoryCheckpointCosts,
    memory_checkpoint_costs,
)
from bigtrain.planner.model_costs import closed_form
from bigtrain.planner.step_time import step_time
from bigtrain.planner.tables.engines import engine_named
from bigtrain.planner.tables.hardware import find_device, with_network
from bigtrain.python_api.planning import plan
from tests.unit.planner.test_costs_and_memory import LLAMA

LLAMA_8B = closed_form(LLAMA)
H100 = find_device("H100-80GB")
ENGINE = engine_named("deepspeed")
MEMORY = ("checkpoint.memory={every_steps: 2, copies: 1}", "batch.global_batch_size=64")


def costs_of(**changes: Any) -> MemoryCheckpointCosts:
    layout = Layout(zero_stage=3, data_size=64, memory_every_steps=2, partner_copies=1)
    costs = memory_checkpoint_costs(LLAMA_8B, layout.changed(**changes), H100, ENGINE)
    assert costs is not None
    return costs


def test_costs_are_those_of_a_hand_count() -> None:
    part = 12 * LLAMA_8B.num_parameters / 64  # master and two moments in float32
    costs = costs_of()
    assert costs.part_bytes == pytest.approx(part)
    assert costs.directory_bytes == pytest.approx(4 * part)  # two generations, own and partner's
    assert costs.sent_bytes == pytest.approx(part)
    assert costs.blocked_seconds == pytest.approx(part / 50e9)
    seconds = part / WRITE_BANDWIDTH + part / EXCHANGE_BANDWIDTH
    assert costs.writing_seconds == pytest.approx(seconds)
    alone = costs_of(partner_copies=0)
    assert alone.directory_bytes == pytest.approx(2 * part)
    assert alone.sent_bytes == 0
    assert alone.writing_seconds == pytest.approx(part / WRITE_BANDWIDTH)
    assert memory_checkpoint_costs(LLAMA_8B, Layout(), H100, ENGINE) is None


def test_a_slow_link_of_the_host_is_the_limit() -> None:
    costs = memory_checkpoint_costs(
        LLAMA_8B,
        Layout(data_size=64, memory_every_steps=1, partner_copies=1),
        with_network(H100, 1e9),
        ENGINE,
    )
    assert costs is not None
    sending = costs.part_bytes / (0.9 * 1e9 / 8)
    assert costs.writing_seconds == pytest.approx(costs.part_bytes / WRITE_BANDWIDTH + sending)


def test_a_step_has_its_share_of_the_copies() -> None:
    layout = Layout(zero_stage=3, data_size=64, partner_copies=1)
    without = step_time(LLAMA_8B, layout, H100, ENGINE)
    for every in (1, 10):
        with_copies = step_time(LLAMA_8B, layout.changed(memory_every_steps=every), H100, ENGINE)
        share = costs_of(memory_every_steps=every).blocked_seconds / every
        assert with_copies.terms()["memory checkpoints"] == pytest.approx(share)
        assert with_copies.total == pytest.approx(without.total + share)
    assert "memory checkpoints" not in without.terms()


def test_what_cannot_be_written_in_time_is_one_line_with_the_least_that_can() -> None:
    costs = costs_of(memory_every_steps=1)
    alone = costs.writing_seconds / 6.1
    step = alone + costs.blocked_seconds
    told, skipped = costs.lines(step)
    assert told.startswith("a checkpoint in memory every step blocks training for 0.03 s, and is")
    assert "sent to the partner (1.4 GiB a rank) in 3.53 s during training" in told
    assert skipped.endswith(" -> checkpoint.memory.every_steps=7")
    for every, num_lines in ((6, 2), (7, 1)):
        other = costs_of(memory_every_steps=every)
        assert len(other.lines(alone + other.blocked_seconds / every)) == num_lines


def test_a_plan_tells_them(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--config", "quickstart", "--gpus", "16xH100-80GB", *MEMORY]
    best = plan("quickstart", "16xH100-80GB", *MEMORY).fitting[0]
    costs = best.memory_checkpoints
    assert costs is not None
    assert main([*command, "--top", "1"]) == 0
    text = capsys.readouterr().out

    assert f"checkpoints in memory of 1: {8 * costs.directory_bytes / 2**30:.3g} GiB of" in text
    assert "\n".join(costs.lines(best.time.total)) + "\nnext:" in text
    assert main([*command, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]["memory_checkpoints"]
    assert first == costs.as_json(8)
    assert math.isclose(first["host_directory_bytes"], 8 * costs.directory_bytes)
    alone = plan("quickstart", "8xH100-80GB", *MEMORY).fitting[0].memory_checkpoints
    assert alone is not None
    assert alone.sent_bytes == 0  # one host has no partner


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this machine has no /dev/shm")
def test_check_tells_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "--config", "quickstart", "--world-size", "16", "--gpu", "H100"]
    command.append(f"output.directory={tmp_path / 'run'}")
    assert main([*command, *MEMORY]) == 0
    assert "a checkpoint in memory every 2 steps blocks training for" in capsys.readouterr().out
