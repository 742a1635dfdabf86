"""Inputs of recomputed layers in other memory: gradients stay the same, and with copies that run as
late as the waits allow, too."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.errors import ModelError
from bigtrain.models.layers import activation_offload
from bigtrain.models.layers.activation_offload import offload_checkpoints
from tests.unit.models.layers.test_compilation import COMMON, LAYERS, gradients, model_of, recompute


def test_inputs_of_checkpointed_layers_may_lie_elsewhere() -> None:
    """They alone are copied; all but the last return."""
    every = 2
    models = [model_of("llama"), model_of("llama")]
    for model in models:
        model.train()
        recompute(model, every)
    assert offload_checkpoints(models[1], "cpu") == LAYERS // every
    ids = torch.randint(1, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    hidden = [[*ids.shape, COMMON["hidden_size"]]] * 2
    gradients_of_models, num_copies = [], []
    for model in models:
        with profile(record_shapes=True, acc_events=True) as recorded:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            gradients_of_models.append(gradients(model, loss))
        copies = [e for e in recorded.events() if e.name == "aten::copy_"]
        num_copies.append(sum(e.input_shapes[:2] == hidden for e in copies))
    assert num_copies[1] - num_copies[0] == 2 * (LAYERS // every) - 1
    assert all(
        torch.equal(gradients_of_models[1][name], gradient)
        for name, gradient in gradients_of_models[0].items()
    )


def test_offload_needs_layers_that_recompute() -> None:
    with pytest.raises(ModelError, match=r"model\.activation_offload: a llama has no checkpointed"):
        offload_checkpoints(model_of("llama"), "cpu")


class Stream:
    """A queue of copies. Those of a side stream run when another stream waits for them."""

    def __init__(self, is_main: bool = False) -> None:
        self.is_main, self.num_done = is_main, 0
        self.queue: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        if self.is_main:
            self.run_to(self.num_done + len(self.queue))

    def run_to(self, end: int) -> None:
        while self.num_done < end:
            self.num_done += 1
            self.queue.pop(0)()

    def record_event(self) -> tuple[Stream, int]:
        return self, self.num_done + len(self.queue)

    def wait_event(self, event: tuple[Stream, int]) -> None:
        self.add(lambda: event[0].run_to(event[1]))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Device(TorchDispatchMode):
    """Stands for a device module. Copies on side streams are late; memory that they write holds NaN
    until then, and memory that nobody else holds any more has been given out again."""

    def __init__(self) -> None:
        super().__init__()
        self.main = self.current = Stream(is_main=True)

    Stream = Stream

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is not torch.ops.aten.copy_.default or self.current is self.main:
            return function(*args, **(kwargs or {}))
        target, source = args[0], args[1].detach()
        target.fill_(torch.nan)

        def copy() -> None:
            is_held = torch._C._storage_Use_Count(source.untyped_storage()._cdata) > ALONE
            target.copy_(source if is_held else torch.full_like(source, torch.nan))

        self.current.add(copy)
        return target


def _uses_alone() -> int:
    tensor = torch.zeros(1).detach()
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


ALONE = _uses_alone()


def trained(device: Device | None, num_steps: int = 2) -> dict[str, torch.Tensor]:
    """Gradients of `num_steps` steps of two micro-batches, the second before the first's backward
    pass as in pipelines."""
    model = model_of("llama").train()
    recompute(model, 1)
    if device is not None:
        offload_checkpoints(model, "cpu")
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        batches = [torch.randint(1, 97, (2, 16), generator=generator) for _ in range(2)]
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in batches]
        for loss in losses:
            loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return device


def test_waits_suffice(late: Device) -> None:
    expected = trained(None)
    with late:
        gradients_by_name = trained(late)
    assert expected.keys() == gradients_by_name.keys()
    assert all(
        torch.equal(gradients_by_name[name], gradient) for name, gradient in expected.items()
    )


def test_at_most_one_input_leaves_and_one_returns(
    late: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And host memory is used again."""
    every: weakref.WeakSet[Any] = weakref.WeakSet()
    made: list[torch.Tensor] = []
    most = []
    copies = activation_offload.HostCopies
    pack, unpack, new = copies.pack, copies.unpack, copies._new

    def count() -> None:
        kept = list(every)
        leaving = sum(one.tensor is not None for one in kept)
        most.append((leaving, sum(one.returning is not None for one in kept)))

    def packed(self: Any, tensor: torch.Tensor) -> Any:
        kept = pack(self, tensor)
        every.add(kept)
        count()
        return kept

    def unpacked(self: Any, kept: Any) -> torch.Tensor:
        tensor = unpack(self, kept)
        count()
        return tensor

    def counted(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        made.append(new(self, tensor))
        return made[-1]

    monkeypatch.setattr(copies, "pack", packed)
    monkeypatch.setattr(copies, "unpack", unpacked)
    monkeypatch.setattr(copies, "_new", counted)
    with late:
        trained(late, num_steps=3)
    assert max(leaving for leaving, _ in most) == 1
    assert max(returning for _, returning in most) == 1
    assert len(made) == 2 * LAYERS  # of two micro-batches
    gc.collect()
    assert not list(every)


def test_an_input_changed_in_place_is_refused() -> None:
    own = activation_offload.HostCopies("cpu")
    tensor = torch.ones(2, 3)
    kept = own.pack(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="has written into the input"):
        own.unpack(kept)
    kept = own.pack(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="has written into the input"):
        own.pack(tensor)
