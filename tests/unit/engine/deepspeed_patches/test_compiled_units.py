"""Under ZeRO 3 a compiled module's parameters are gathered before it is entered, and released
together afterwards: its graph neither keeps them in memory nor is compiled again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.deepspeed_patches.zero3_hooks import has_own_hooks, replace_hooks
from bigtrain.engine.startup.process_group import process_group
from bigtrain.models.torch_patches import shadow
from bigtrain.system.world import World
from tests.unit.engine.deepspeed_patches.test_zero3_hooks import (
    SETTINGS,
    STEPS,
    Frozen,
    Recomputed,
    Stack,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # Dynamo's
    pytest.mark.filterwarnings("ignore:.*(all_gather_into|reduce_scatter)_tensor:FutureWarning"),
]

BACKEND = "aot_eager_decomp_partition"
"""Divides forward and backward passes as Inductor does."""


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group(World(0, 1, 0)):
        yield


@dataclass
class Training:
    """Losses, then the parameters at the end. graphs: compiled by the end of each step. held: names
    of parameters of blocks whose full memory the passes' graph references."""

    numbers: list[torch.Tensor] = field(default_factory=list)
    graphs: list[int] = field(default_factory=list)
    held: set[str] = field(default_factory=set)


def held_parameters(module: nn.Module, loss: torch.Tensor) -> set[str]:
    """Return names of released parameters whose full memory the graph of `loss` references. In one
    process the full memory is the partition's."""
    parameters = dict(module.named_parameters())
    saved: list[torch.Tensor] = []
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        saved += [value for value in getattr(node, "saved_tensors", ()) if value is not None]
    # A parameter itself has no memory while it is released; a view of it would keep the memory.
    ids = {id(parameter) for parameter in parameters.values()}
    assert any(id(tensor) in ids for tensor in saved)
    pointers = {tensor.data_ptr() for tensor in saved if id(tensor) not in ids}
    return {name for name, p in parameters.items() if p.ds_tensor.data_ptr() in pointers}


def train(
    make: Callable[[], Stack],
    settings: dict[str, Any],
    *,
    compiled: bool,
) -> Training:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=make(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 1000,
                "stage3_max_reuse_distance": 0,
                **settings,
            },
        },
    )
    blocks = list(engine.module.blocks) if compiled else []
    for block in blocks:
        forward = torch.compile(block.forward, backend=BACKEND, dynamic=False)
        shadow(block, "forward", forward)
    assert replace_hooks(engine.optimizer, HostTime(), blocks)
    assert has_own_hooks(engine.optimizer)
    training = Training()
    for step in range(STEPS):
        ids = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(step))
        loss = engine(ids)
        if not isinstance(engine.module, Recomputed):  # reading what is saved would recompute
            training.held |= held_parameters(engine.module.blocks, loss)
        engine.backward(loss)
        engine.step()
        training.numbers.append(loss.detach())
        training.graphs.append(counters["stats"]["unique_graphs"])
    training.numbers += [flat.clone() for flat in engine.optimizer.fp32_partitioned_groups_flat]
    assert not counters["graph_break"]
    engine.destroy()
    return training


CASES = [
    *((make, "gathered") for make in (Stack, Recomputed, Frozen)),
    *((Recomputed, name) for name in SETTINGS if name != "gathered"),
]


@pytest.mark.parametrize(("make", "settings"), CASES)
def test_compiled_modules_are_gathered_as_one(make: Callable[[], Stack], settings: str) -> None:
    plain = train(make, SETTINGS[settings], compiled=False)
    training = train(make, SETTINGS[settings], compiled=True)
    for number, expected in zip(training.numbers, plain.numbers, strict=True):
        assert torch.allclose(number, expected, rtol=0, atol=1e-6)
    assert training.held == set()
    assert training.graphs == [training.graphs[0]] * STEPS
    assert training.graphs[0] == (2 if make is Frozen else 1)
