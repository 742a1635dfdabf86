"""A few steps of a small model in bfloat16 under ZeRO 1 with sums in float32, by DeepSpeed's own
code and by bigtrain's.

As a script, one process of a world: both train every model of `MODELS`, and each rank compares; so
does the code for a GPU, to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from bigtrain.engine.deepspeed_patches import bf16_update
from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.deepspeed_patches.step import counts_in_norm, skip_redundant_work
from bigtrain.engine.startup.process_group import process_group
from bigtrain.system.world import read_world
from tests.unit.engine.deepspeed_patches.test_zero3_hooks import Frozen, Reentrant, Stack
from tests.unit.engine.deepspeed_patches.zero12_training import (
    Sometimes,
    assert_close,
    same_bits,
    without_compiler,
)

STEPS, ACCUMULATION = 4, 2


class NeverAgain(Stack):
    """A block takes part in the first step alone: later its sum must be zero, not the old one."""

    passes = 0

    def run(self, block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().run(block, x) if self.passes <= 2 * ACCUMULATION else x


MODELS: tuple[Callable[[], Stack], ...] = (Stack, Frozen, Sometimes, NeverAgain, Reentrant)


def fused_as_on_a_gpu(engine: Any) -> None:
    """Let the CPU's engine take the path of a GPU, without a compiler."""
    update = bf16_update._Update(engine, counts_in_norm)
    update.install()
    update._fuse()
    assert update._fused is not None
    num_replicas = dist.get_world_size()
    assert ("_reduce_non_expert_gradients" in vars(engine)) == (num_replicas > 1)


def train(
    make: Callable[[], Stack],
    *,
    ours: bool,
    clip: float = 0.1,
    prepare: Callable[[Any], None] = lambda engine: None,
) -> list[torch.Tensor]:
    """Losses, norms, and after the steps the masters, the moments and the parameters. prepare: is
    given DeepSpeed's engine before anything is replaced."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": clip,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=make().to(torch.bfloat16), config=config)
    optimizer = engine.optimizer
    prepare(engine)
    if ours:
        skip_redundant_work(engine, dist.group.WORLD, HostTime())
        assert "_update_hp_grad" in vars(optimizer)
    tensors = []
    for number in range(STEPS * ACCUMULATION):
        seed = 100 * dist.get_rank() + number
        ids = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(seed))
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()
        tensors += [loss.detach(), torch.as_tensor(0.0 if norm is None else norm)]
    for master in optimizer.fp32_groups_flat_partition:
        state = optimizer.optimizer.state[master]
        tensors += [master.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
    tensors += [p.detach().float() for p in engine.module.parameters()]
    engine.destroy()
    return tensors


def main() -> None:
    with process_group(read_world(os.environ)):
        for make in MODELS:
            theirs, tensors = train(make, ours=False), train(make, ours=True)
            assert len(tensors) == len(theirs) > 2 * STEPS
            for number, (a, b) in enumerate(zip(tensors, theirs, strict=True)):
                assert same_bits(a, b), (make.__name__, number, a, b)
            with without_compiler():
                tensors = train(make, ours=False, prepare=fused_as_on_a_gpu)
            assert_close(tensors, theirs, make.__name__)
    print("same bits")


if __name__ == "__main__":
    main()
