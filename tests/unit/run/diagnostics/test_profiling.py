"""Which steps are recorded, what a run out of memory says, and how batches reach the device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.profiler import profile

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.forward import DeviceFeed
from bigtrain.run.diagnostics.out_of_memory import MeasuredMemory, memory_use, remedies
from bigtrain.run.diagnostics.profiling import NUM_TOP_OPS, Profiler, top_ops
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.units import GIB
from tests.support.run_trees import run_config


def config_of(**sections: Any) -> RunConfig:
    model = {"config": {"model_type": "llama"}, **sections.pop("model", {})}
    batch = {"sequence_length": 16, "global_batch_size": 8, "micro_batch_size": 4}
    return run_config(model=model, batch=batch, train={"steps": 9}, **sections)


def profiler_of(directory: Path, rank: int, **section: Any) -> tuple[Profiler, list[str]]:
    said: list[str] = []
    config = config_of(profile=section)
    world = SimpleNamespace(rank=rank)
    place = {"directory": directory, "device": torch.device("cpu")}
    log = SimpleNamespace(info=said.append)
    context: Any = SimpleNamespace(config=config, world=world, log=log, **place)
    return Profiler(context), said


def train(profiler: Profiler, steps: range, last: int = 0) -> None:
    for step in steps:
        profiler.before(step)
        torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after(step, last=step == last)


def test_chosen_steps_of_chosen_ranks_are_recorded(tmp_path: Path) -> None:
    profiler, said = profiler_of(tmp_path, 1, steps=[3, 4], ranks=[1, 2])
    train(profiler, range(1, 7))
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank_1_steps_3-4.json"]
    assert said[0].startswith("profile of steps 3 to 4: ")
    assert any(line.endswith("aten::mm") for line in said)
    profiler, said = profiler_of(tmp_path / "other", 0, steps=[3, 4], ranks=[1, 2])
    train(profiler, range(1, 7))
    assert not said
    assert not (tmp_path / "other").exists()


def test_what_a_run_has_of_the_steps_is_recorded(tmp_path: Path) -> None:
    profiler, _ = profiler_of(tmp_path, 0, steps=[3, 8])
    train(profiler, range(5, 7), last=6)  # resumed after 4, over after 6
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank_0_steps_5-6.json"]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"steps = \[4, 3\]: the first step is after"):
        config_of(profile={"steps": [4, 3]})
    with pytest.raises(ValidationError, match=r"set it to full"):
        config_of(model={"activation_offload": True})


def test_the_dearest_operations_come_first() -> None:
    with profile(acc_events=True) as recorded:
        a = torch.ones(200, 200)
        for _ in range(20):
            a = a @ a
            torch.ones(2).add(1).mul(2).sub(3).div(4).exp().log().sin().cos().tan().neg().abs()
    head, *rows = top_ops(recorded, "cpu")
    assert head.split() == ["ms", "share", "calls", "operation"]
    assert len(rows) == NUM_TOP_OPS
    times = [float(row.split()[0]) for row in rows]
    assert times == sorted(times, reverse=True)


def test_holdings_count_every_storage_once() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    size = 4 * (64 * 64 + 64)
    held = memory_use(model, optimizer, 6 * size, 10 * size)
    assert held.parameters == held.gradients == size
    assert 2 * size <= held.optimizer <= 2 * size + 8  # and two step counts
    assert held.unattributed == 6 * size - held.parameters - held.gradients - held.optimizer
    assert MeasuredMemory(GIB, GIB // 2, 2 * GIB, 4 * GIB, 8 * GIB).describe() == (
        "of 8.00 GiB: parameters 1.00, gradients 0.50, optimizer 2.00, activations and other 4.00"
    )


def test_remedies_are_for_what_holds_most() -> None:
    activations = MeasuredMemory(1, 1, 1, 90, 100)
    states = MeasuredMemory(20, 20, 50, 5, 100)
    assert remedies(config_of(model={"loss": "plain"}), 1, activations) == [
        "batch.micro_batch_size=2",
        "model.loss=auto",
        "model.gradient_checkpointing=full",
    ]
    full = config_of(model={"gradient_checkpointing": "full"})
    assert remedies(full, 1, activations)[1:] == [
        "model.activation_offload=true",
        "model.tiled_mlp=auto",
        "parallel.sequence=2",
    ]
    assert remedies(full, 1, states) == [
        "ds_configs/zero2.json on more ranks",
        "ds_configs/zero2_offload.json",
    ]
    assert remedies(full, 3, states) == ["ds_configs/zero3_offload.json"]


def test_micro_batches_come_in_order_as_they_were() -> None:
    batches = [
        MicroBatch(torch.full((1, 2), n), torch.full((1, 2), -n), torch.arange(2)[None])
        for n in range(3)
    ]
    pairs = list(DeviceFeed(torch.device("cpu"))(iter(batches)))
    assert [host for host, _ in pairs] == batches
    for host, moved in pairs:
        assert torch.equal(host.input_ids, moved.input_ids)
        assert torch.equal(host.labels, moved.labels)
        assert moved.position_ids is not None
