"""A few steps of a small model under ZeRO 1 or 2, by DeepSpeed's own code and by bigtrain's.

As a script, one process of a world: both train every case of `CASES`, and each rank compares; so
does the code for a GPU in the cases of `FUSED`, to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from bigtrain.engine.deepspeed_patches import fused_adamw
from bigtrain.engine.deepspeed_patches.fused_adamw import FusedAdamW
from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.deepspeed_patches.step import (
    skip_redundant_work_of_zero12,
    take_norms_at_once,
)
from bigtrain.engine.deepspeed_patches.zero12_reduction import replace_reduction
from bigtrain.engine.deepspeed_patches.zero12_update import FusedUpdate, can_fuse_update
from bigtrain.engine.startup.process_group import process_group
from bigtrain.system.world import read_world
from tests.unit.engine.deepspeed_patches.test_zero3_hooks import Frozen, Reentrant, Stack

PASSES = 10


class Sometimes(Stack):
    """A block takes part in every second pass alone."""

    passes = 0

    def run(self, block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().run(block, x) if self.passes % 6 != 2 else x


# The embedding and the head are larger than the bucket of 30; of three ranks two share each.
CASES: list[tuple[Callable[[], Stack], dict[str, Any]]] = [
    (Stack, {"stage": 1}),
    (Frozen, {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 30}),
    (Sometimes, {"stage": 2, "reduce_bucket_size": 100}),
    (Stack, {"stage": 1, "overlap_comm": True, "dtype": "bf16", "reduce_bucket_size": 30}),
    (Reentrant, {"stage": 1, "dtype": "fp16", "sums": "fp32", "reduce_bucket_size": 30}),
    (Sometimes, {"stage": 2, "dtype": "bf16", "sums": "fp32", "reduce_bucket_size": 30}),
    # Without a norm, only the look at each gradient finds what is not finite.
    (Stack, {"stage": 2, "dtype": "fp16", "sums": "fp32", "compute_grad_norm": False}),
    # What is left to DeepSpeed.
    (Stack, {"stage": 2, "round_robin_gradients": True, "reduce_bucket_size": 100}),
]


# Several buckets a pass, of which several ranks own a part; a parameter without a gradient.
FUSED: list[tuple[Callable[[], Stack], dict[str, Any]]] = [
    (make, {"stage": 2, "dtype": "bf16", "sums": "fp32", "exchange": "fp32", **options})
    for make, options in (
        (Stack, {"reduce_bucket_size": 30}),
        (Sometimes, {"reduce_bucket_size": 100}),
        (Frozen, {}),
    )
]


def fused_as_on_a_gpu(optimizer: Any) -> None:
    """Let the CPU's optimizer take the path of a GPU, without a compiler."""
    assert can_fuse_update(optimizer)
    take_norms_at_once(optimizer)
    assert replace_reduction(optimizer, HostTime(), update_averages=True)
    FusedUpdate(optimizer).install()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let the update of a GPU run uncompiled inside."""
    plain = mock.patch.object(fused_adamw, "compile_update", return_value=fused_adamw.update)
    with plain, mock.patch.object(FusedAdamW, "supports", return_value=True):
        yield


def assert_close(
    tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], name: object
) -> None:
    """Compare two trainings in bfloat16, of which one divides gradients before they are summed, and
    rounds them. What is not divided at all is a multiple."""
    assert len(tensors) == len(expected) > 20
    for number, (a, b) in enumerate(zip(tensors, expected, strict=True)):
        largest = float(b.abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(
            a, b, rtol=0, atol=2**-6 * largest, msg=lambda text, n=number: f"{name}, {n}: {text}"
        )


def train(
    make: Callable[[], Stack],
    options: dict[str, Any],
    *,
    ours: bool,
    prepare: Callable[[Any], None] = lambda optimizer: None,
    replace: Callable[[Any], None] = lambda optimizer: skip_redundant_work_of_zero12(
        optimizer, HostTime()
    ),
) -> tuple[list[torch.Tensor], bool]:
    """Losses, norms, the flat masters and their moments after five steps of two micro-batches, and
    whether the reduction is ours. options: of ``zero_optimization``; dtype, sums, exchange: of the
    model, of gradients, of their exchange. prepare: is given DeepSpeed's optimizer before anything
    is replaced. replace: replaces what is ours.
    """
    torch.manual_seed(0)
    zero = {"stage": 1, **options}
    name, sums = zero.pop("dtype", "fp32"), zero.pop("sums", None)
    exchange = zero.pop("exchange", None)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1 if zero.get("compute_grad_norm", True) else 0.0,
        "bf16": {"enabled": name == "bf16"},
        # So large that the first steps overflow.
        "fp16": {"enabled": name == "fp16", "initial_scale_power": 18, "hysteresis": 1},
        "data_types": {} if sums is None else {"grad_accum_dtype": sums},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": zero,
        **({} if exchange is None else {"communication_data_type": exchange}),
    }
    # DeepSpeed asks whether oneDNN has float16, which few CPUs have; torch computes in it on all.
    with mock.patch.object(get_accelerator(), "is_fp16_supported", return_value=True):
        engine, *_ = deepspeed.initialize(model=make().to(dtype), config=config)
    optimizer = engine.optimizer
    rank, tensors = int(os.environ.get("RANK", "0")), []
    if ours:
        prepare(optimizer)
        replace(optimizer)
    for number in range(PASSES):
        generator = torch.Generator().manual_seed(PASSES * rank + number)
        loss = engine(torch.randint(0, 7, (2, 5), generator=generator))
        engine.backward(loss)
        engine.step()
        tensors += [loss.detach(), torch.as_tensor(engine.get_global_grad_norm() or 0.0)]
        tensors.append(torch.tensor([float(optimizer.overflow), float(optimizer.loss_scale)]))
    for flat in optimizer.single_partition_of_fp32_groups:
        state = optimizer.optimizer.state[flat]
        tensors += [flat.clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
    tensors += [p.detach().float() for p in engine.module.parameters()]
    replaced = "independent_gradient_partition_epilogue" in vars(optimizer)
    engine.destroy()
    return tensors, replaced


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def main() -> None:
    with process_group(read_world(os.environ)):
        for make, options in CASES:
            theirs, _ = train(make, options, ours=False)
            tensors, replaced = train(make, options, ours=True)
            assert len(tensors) == len(theirs) > 3 * PASSES
            assert replaced != ("round_robin_gradients" in options), options
            for number, (a, b) in enumerate(zip(tensors, theirs, strict=True)):
                assert same_bits(a, b), (make.__name__, options, number, a, b)
            if options.get("dtype") == "fp16":
                overflows = [bool(t[0]) for t in tensors if t.shape == (2,)]
                assert True in overflows
                assert False in overflows[-2:]
        for make, options in FUSED:
            theirs, _ = train(make, options, ours=False)
            with without_compiler():
                tensors, _ = train(make, options, ours=True, replace=fused_as_on_a_gpu)
            assert_close(tensors, theirs, (make.__name__, options))
    print("same bits")


if __name__ == "__main__":
    main()
