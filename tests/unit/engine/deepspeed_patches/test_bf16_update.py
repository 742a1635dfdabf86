"""The shorter end of a step in bfloat16 under ZeRO 1 changes no bit, and AdamW in one kernel is
torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.deepspeed_patches import fused_adamw
from bigtrain.engine.startup.process_group import process_group
from bigtrain.system.world import World
from tests.support.lives import run_script
from tests.unit.engine.deepspeed_patches import bf16_training
from tests.unit.engine.deepspeed_patches.bf16_training import MODELS, fused_as_on_a_gpu, train
from tests.unit.engine.deepspeed_patches.test_zero3_hooks import Stack
from tests.unit.engine.deepspeed_patches.zero12_training import same_bits, without_compiler

# DeepSpeed imports its Muon, compiled by torch.jit, while it makes the optimizer.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group(World(0, 1, 0)):
        yield


@pytest.mark.parametrize("make", MODELS)
def test_a_shorter_update_has_the_same_bits(make: Callable[[], Stack]) -> None:
    theirs, tensors = train(make, ours=False), train(make, ours=True)
    assert len(tensors) == len(theirs) > 20
    assert all(same_bits(a, b) for a, b in zip(tensors, theirs, strict=True))


def test_two_ranks_have_the_same_bits() -> None:
    assert run_script(2, Path(bf16_training.__file__)).count("same bits") == 2


def test_one_replica_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[int] = []
    reduce = torch.distributed.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        exchanged.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    train(Stack, ours=False)
    assert max(exchanged) > 64
    exchanged.clear()
    train(Stack, ours=True)
    assert not [count for count in exchanged if count > 64]


@pytest.mark.parametrize("clip", [0.1, 1e9, 0.0])
def test_adamw_in_one_kernel_is_torchs(clip: float) -> None:
    theirs = train(Stack, ours=False, clip=clip)
    with without_compiler():
        tensors = train(Stack, ours=False, clip=clip, prepare=fused_as_on_a_gpu)
    assert len(tensors) == len(theirs)
    for number, (a, b) in enumerate(zip(tensors, theirs, strict=True)):
        # The parameters, last, are in bfloat16: half a unit in the last place of 8 bits.
        torch.testing.assert_close(a, b, rtol=2e-6 if number < 16 else 2**-8, atol=2e-7)


def spoiled(change: Callable[..., None]) -> Callable[..., None]:
    def compute(*tensors: torch.Tensor, **options: Any) -> None:
        fused_adamw.update(*tensors, **options)
        change(*tensors)

    return compute


def fails(*_: torch.Tensor, **__: Any) -> None:
    raise RuntimeError("no C compiler\nand so on")


COMPILED: dict[str, tuple[Callable[..., None], str | None]] = {
    "right": (fused_adamw.update, None),
    "a compiler that fails": (fails, "RuntimeError: no C compiler"),
    "masters": (spoiled(lambda *tensors: tensors[0].add_(1e-3)), "masters differ by 0.001"),
    "gradients": (spoiled(lambda *tensors: tensors[1].mul_(0.5)), "gradients differ by 0.5"),
    "weights": (spoiled(lambda *tensors: tensors[4].zero_()), "weights differ by 0.99"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_update_that_is_not_right_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, problem = COMPILED[name]
    monkeypatch.setattr(fused_adamw, "compile_update", lambda: compute)
    assert fused_adamw.trial_problem(torch.device("cpu")) == problem
