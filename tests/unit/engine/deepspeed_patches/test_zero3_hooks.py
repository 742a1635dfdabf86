"""ZeRO-3's hooks of bigtrain gather and release what DeepSpeed's do, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from bigtrain.engine.deepspeed_patches import zero3_hooks
from bigtrain.engine.deepspeed_patches.host_time import HostTime
from bigtrain.engine.deepspeed_patches.zero3_hooks import replace_hooks
from bigtrain.engine.startup.process_group import process_group
from bigtrain.system.world import World

# torch's of its own code, which DeepSpeed makes it import, and of calls of DeepSpeed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*(all_gather_into|reduce_scatter)_tensor:FutureWarning"),
]

WIDTH = 6
STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group(World(0, 1, 0)):
        yield


class Block(nn.Module):
    """Norm, two products and an activation; returns a tuple, as layers of transformers did."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, None]:
        # Twice used inside and once outside: the order of three gradients' sum shows.
        normed = self.norm(x)
        return x + self.down(self.act(self.up(normed) * scale)) + normed, None


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = self.run(block, x)
        logits: torch.Tensor = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = block(x)[0]
        return result


class Recomputed(Stack):
    reentrant = False

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().run(block, x)
        result: torch.Tensor = checkpoint(block, x, use_reentrant=self.reentrant)[0]
        return result


class Reentrant(Recomputed):
    reentrant = True


class Frozen(Recomputed):
    """What a LoRA run has: weights that are recomputed with and not trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            for parameter in block.up.parameters():
                parameter.requires_grad_(False)


class Borrowing(Stack):
    """A module without parameters multiplies by the embedding's, which ZeRO-3 finds out, and by
    those of its own child, which are in use by both."""

    class Tied(nn.Module):
        def __init__(self, embed: nn.Embedding) -> None:
            super().__init__()
            self.lent = [embed]
            self.child = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = self.child(x) + x @ self.child.weight
            return mixed @ self.lent[0].weight.t()

    def __init__(self) -> None:
        super().__init__()
        self.head = self.Tied(self.embed)  # type: ignore[assignment]


class Shared(Stack):
    """One block stands in the list twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Sequential()
        self.again.append(self.blocks[0].norm)

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.again(block(x)[0])
        return result


class Changing(Stack):
    """The order of modules changes from the fourth pass on."""

    passes = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        x = self.embed(ids)
        for block in list(self.blocks)[:: -1 if self.passes > 3 else 1]:
            x = self.run(block, x)
        logits: torch.Tensor = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


class ByName(Stack):
    """Arguments by name and a dict as output, of which ZeRO-3 sees the second alone."""

    class Wrapped(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, *, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"x": self.block(x, scale=0.5)[0]}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Wrapped(block) for block in self.blocks)

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = block(x=x)["x"]
        return result


class Joining(Stack):
    """Modules with several inputs and outputs that have gradients."""

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, pair: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first: torch.Tensor = self.first(pair[0])
            return first + x, self.second(pair[1]) * x

    def __init__(self) -> None:
        super().__init__()
        self.joins = nn.ModuleList(self.Join() for _ in self.blocks)

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        join = self.joins[list(self.blocks).index(block)]
        first, second = join([x, super().run(block, x)], x)
        return first + second


class Parametrized(Recomputed):
    """A layer adds a matrix of its child's to the weight of another while that computes, as peft's
    does to stacked weights."""

    class Sum(nn.Module):
        def __init__(self, added: torch.Tensor) -> None:
            super().__init__()
            self.added = [added]

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight + self.added[0]

    class Around(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner, self.more = inner, nn.Linear(8, WIDTH, bias=False)
            inner.weight.requires_grad_(False)
            for parameter in (inner.weight, self.more.weight):
                deepspeed.zero.register_external_parameter(self, parameter)
            deepspeed.zero.register_external_parameter(inner, inner.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            added = Parametrized.Sum(self.more.weight.view(WIDTH, 8))
            parametrize.register_parametrization(self.inner, "weight", added)
            self.inner.parametrizations.weight.original.requires_grad_(False)
            try:
                result: torch.Tensor = self.inner(x)
                return result
            finally:
                parametrize.remove_parametrizations(self.inner, "weight", leave_parametrized=False)

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.down = self.Around(block.down)


@dataclass
class Found:
    """What a training did: the calls to and from the coordinator, and the numbers."""

    calls: list[tuple[str, Any]]
    numbers: list[torch.Tensor]


SETTINGS: dict[str, dict[str, Any]] = {
    "gathered": {"stage3_param_persistence_threshold": 0},
    "persistent": {"stage3_param_persistence_threshold": 20},
    "one ahead": {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 30},
    "none ahead": {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0},
    "few at once": {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 90},
    "soon again": {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 60},
}


def train(
    make: Callable[[], Stack],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    ours: bool,
    prepare: Callable[[Any], None] = lambda _optimizer: None,
) -> Found:
    """Some steps, with a pass without gradients between them."""
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
    if ours:
        host_time = HostTime()
        assert replace_hooks(engine.optimizer, host_time)
    prepare(engine.optimizer)
    depth = len(FWD_MODULE_STACK)
    training = Found([], [])
    with monkeypatch.context() as patched:
        watch(patched, engine, training.calls)
        for step in range(STEPS):
            ids = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(step))
            if step == 3:
                engine.eval()
                with torch.no_grad():
                    training.numbers.append(engine(ids))
                engine.train()
            training.calls.append(("step", step))
            loss = engine(ids)
            engine.backward(loss)
            training.calls.append(("update", step))
            engine.step()
            training.numbers.append(loss.detach())
            training.numbers.append(torch.as_tensor(engine.get_global_grad_norm()))
    training.numbers += [flat.clone() for flat in engine.optimizer.fp32_partitioned_groups_flat]
    if ours:
        # DeepSpeed's own hooks leave more with every step of a recomputed model.
        assert len(FWD_MODULE_STACK) - depth <= len(list(engine.module.modules()))
    engine.destroy()
    hooks = [[*m._forward_hooks, *m._forward_pre_hooks] for m in engine.module.modules()]
    assert sum(map(len, hooks)) == 2  # the engine's own, of the whole model
    return training


def watch(patched: pytest.MonkeyPatch, engine: Any, calls: list[tuple[str, Any]]) -> None:
    """Note every gather and every release, and which parameters were there after each."""
    parameters = list(engine.module.parameters())
    number = {parameter: index for index, parameter in enumerate(parameters)}

    def present() -> list[str]:
        return [p.ds_status.name for p in parameters]

    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    release_rest = coordinator.release_backward_leftovers

    def noted_release() -> None:
        begun = vars(coordinator)["_PartitionedParameterCoordinator__active_backward_submodules"]
        calls.append(("modules that did not end their backward pass", len(begun)))
        release_rest()

    coordinator.release_backward_leftovers = noted_release
    free = partition_parameters.free_param

    def noted_free(parameter: Any) -> None:
        free(parameter)
        # Those of one module come in any order.
        before = calls.pop()[1] if calls[-1][0] == "free" else []
        calls.append(("free", sorted([*before, number[parameter]])))

    patched.setattr(partition_parameters, "free_param", noted_free)
    patched.setattr(zero3_hooks, "free_param", noted_free)
    for parameter in parameters:
        gather = parameter.all_gather_coalesced

        def noted_gather(params: Any, _gather: Any = gather, **options: Any) -> Any:
            handle = _gather(params, **options)
            calls.append(("gather", sorted(number[p] for p in params)))
            return handle

        parameter.all_gather_coalesced = noted_gather
    for block in engine.module.modules():
        if not list(block.children()):
            forward = block.forward

            def noted_forward(
                *args: Any, _of: Any = block, _call: Any = forward, **named: Any
            ) -> Any:
                calls.append((f"forward {type(_of).__name__}", present()))
                return _call(*args, **named)

            block.forward = noted_forward


MODELS = [Stack, Recomputed, Reentrant, Frozen, Borrowing, Shared, Changing, ByName, Joining]
MODELS += [Parametrized]
CASES = [
    *((make, "gathered") for make in MODELS),
    (Borrowing, "none ahead"),
    *(
        pytest.param(make, "none ahead", marks=pytest.mark.slow)
        for make in (Recomputed, Reentrant, Changing)
    ),
    *((Recomputed, name) for name in SETTINGS if name not in ("gathered", "none ahead")),
]


@pytest.mark.parametrize(("make", "settings"), CASES)
def test_hooks_do_what_those_of_deepspeed_do(
    make: Callable[[], Stack], settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = train(make, SETTINGS[settings], monkeypatch, ours=False)
    training = train(make, SETTINGS[settings], monkeypatch, ours=True)
    assert training.calls == theirs.calls
    assert len(training.numbers) == len(theirs.numbers) > STEPS
    assert all(torch.equal(a, b) for a, b in zip(training.numbers, theirs.numbers, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"stage3_module_granularity_threshold": 10**6},  # modules gathered whole
        {"stage": 2},
    ],
    ids=str,
)
def test_what_they_do_not_fit_keeps_its_own(options: dict[str, Any]) -> None:
    engine, *_ = deepspeed.initialize(
        model=Stack(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, **options},
        },
    )
    before = [list(m._forward_hooks.values()) for m in engine.module.modules()]
    assert not replace_hooks(engine.optimizer, HostTime())
    assert before == [list(m._forward_hooks.values()) for m in engine.module.modules()]
    engine.destroy()
