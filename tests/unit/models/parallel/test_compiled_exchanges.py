"""Exchanges of tensor parallelism in compiled layers: as many as without a graph, and no tensor is
kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from bigtrain.engine.startup.process_group import process_group
from bigtrain.models.layers.compilation import compile_layers
from bigtrain.models.parallel import collectives
from bigtrain.models.parallel.sharding import cut_parameter
from bigtrain.models.parallel.tensor import shard_model, tensor_plan
from bigtrain.system.world import World
from tests.unit.models.layers.test_compilation import LAYERS, model_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with process_group(World(0, 1, 0)):
        yield torch.distributed.new_group([0])


# Of olmo2 the projections read a layer's input itself: its norms come after them.
@pytest.mark.parametrize("model_type", ["llama", "olmo2"])
def test_exchanges_and_memory_are_those_of_uncompiled_layers(
    model_type: str, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counters.clear()
    previous_backend = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("aot_eager_decomp_partition")
    numbers = []
    all_reduce = torch.distributed.all_reduce
    num_sums = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_sums
        num_sums += 1
        return all_reduce(*args, **kwargs)

    monkeypatch.setattr(collectives.dist, "all_reduce", counted)
    for is_compiled in (False, True):
        model = model_of(model_type)
        shard_model(model, tensor_plan(model), group)
        for parameter in model.parameters():
            cut_parameter(parameter)
        if is_compiled:
            compile_layers(model)
        inputs: list[weakref.ref[torch.Tensor]] = []

        def note(_: object, args: Any, noted: list[Any] = inputs) -> None:
            noted.append(weakref.ref(args[0]))

        for layer in model.model.layers:
            layer.register_forward_pre_hook(note)
        ids = torch.randint(1, 97, (2, 16), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            num_sums = 0
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            num_forward_sums = num_sums
            loss.backward()
        norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
        numbers.append([float(loss.detach()), *norms])
        assert num_forward_sums >= 2 * LAYERS
        assert num_sums >= 4 * LAYERS
        numbers[-1] += [num_forward_sums, num_sums]
        del loss
        gc.collect()
        assert len(inputs) == 2 * LAYERS
        assert not any(reference() is not None for reference in inputs)
    torch.compiler.set_default_backend(previous_backend)
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-5, abs=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
