"""Each private part of torch that bigtrain uses is there, and does what it is used for."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from bigtrain.models import torch_patches
from tests.support.contracts import Contract, has, public_functions, takes, title

CALLED: list[Any] = []


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLED.append(func.overloadpacket)
        return torch.zeros(1)


def sees_operators() -> bool:
    seen: list[str] = []

    class Mode(torch_patches.OperatorMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.zeros(2, device="meta") + 1
    return seen[-1] == "aten::add.Tensor"


def tells_storages_apart_without_memory() -> bool:
    first, second = (torch.empty(4, device="meta") for _ in range(2))
    key = torch_patches.storage_of(first)
    return key == torch_patches.storage_of(first.view(2, 2)) != torch_patches.storage_of(second)


def names_the_compilers_error() -> bool:
    def without_compiler(graph: Any, inputs: Any) -> Any:
        raise OSError("no compiler\nin any line")

    errors: list[BaseException] = [RuntimeError("of a kernel")]
    try:
        torch.compile(torch.sin, backend=without_compiler)(torch.zeros(1))
    except RuntimeError as error:
        errors.append(error)
    finally:
        torch.compiler.reset()
    texts = [torch_patches.compiler_error(error) for error in errors]
    return texts == ["", "OSError: no compiler in any line"]


def calls_shadow_inside_hooks() -> bool:
    """Of forward methods, whose modules keep their hooks."""
    module = nn.Linear(1, 1)
    seen: list[Any] = []
    module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    torch_patches.shadow(module, "forward", lambda _x: "shadow")
    called = module(torch.zeros(1))
    torch_patches.unshadow(module, "forward")
    return called == "shadow" and seen == ["shadow"] and torch.is_tensor(module(torch.zeros(1)))


def finds_shadow_before_parameter() -> bool:
    module = nn.Linear(1, 1, bias=False)
    with torch_patches.shadowed(module, {"weight": torch.full((1, 1), 3.0)}):
        inside = float(module(torch.ones(1)))
    return inside == 3.0 and module.weight is dict(module.named_parameters())["weight"]


def calls_shadow_of_step() -> bool:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    torch_patches.shadow(optimizer, "step", lambda: "shadow")
    result = optimizer.step()
    torch_patches.unshadow(optimizer, "step")
    return result == "shadow" and "step" not in vars(optimizer)


def counts_writes() -> bool:
    tensor = torch.zeros(2)
    before = torch_patches.version_of(tensor)
    tensor.add_(1)
    return torch_patches.version_of(tensor) == before + 1


def tells_buffers_alone() -> bool:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(1))
    alone = torch_patches.has_buffers_alone(module)
    module.register_parameter("bias", None)
    return alone and not torch_patches.has_buffers_alone(module)


def wraps() -> bool:
    tensor = torch_patches.wrapper_tensor(Wrapper, (2, 3), torch.float64)
    return (type(tensor), tensor.shape, tensor.dtype) == (Wrapper, (2, 3), torch.float64)


def converts_by_to_copy() -> bool:
    tensor = torch_patches.wrapper_tensor(Wrapper, (1,), torch.float64)
    CALLED.clear()
    tensor.to(torch.float32)
    return CALLED == [torch_patches.ATEN_TO_COPY]


def maps() -> bool:
    tree = {"a": [1, (2, "b")], "c": None}
    mapped = torch_patches.map_instances(int, lambda number: -number, tree)
    return mapped == {"a": [-1, (-2, "b")], "c": None}


def dumps_trace() -> bool:
    trace = torch_patches.flight_recorder_trace()
    return trace is None or isinstance(trace, bytes)


def makes_a_group_of_one() -> bool:
    group = torch_patches.gloo_group(dist.HashStore(), 0, 1, timedelta(seconds=9), "127.0.0.1")
    return (group.rank(), group.size()) == (0, 1)


def waits_by_wait() -> bool:
    """Of a collective of one rank; nothing is observed of another thread, or afterwards."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        seconds: list[float] = []
        with torch_patches.observed_waits(seconds.append):
            dist.all_reduce(torch.ones(1))
            waited = len(seconds)
            thread = threading.Thread(target=dist.barrier)
            thread.start()
            thread.join()
            dist.all_reduce(torch.ones(1), async_op=True).wait()
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
    return (waited, len(seconds)) == (1, 2) and min(seconds) >= 0


def is_observed_on_a_device() -> bool:
    """A collective and the wait for it; nothing of another thread, or afterwards."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    num_seen = 0

    @contextmanager
    def around() -> Iterator[None]:
        nonlocal num_seen
        num_seen += 1
        yield

    try:
        with torch_patches.observed_device_waits(around, lambda: "compute"):
            work = dist.all_reduce(torch.ones(1), async_op=True)
            seen = [num_seen]
            work.wait()
            seen.append(num_seen)
            for collective in (
                lambda: dist.all_reduce(torch.ones(1)),
                lambda: dist.broadcast(torch.ones(1), 0),
                dist.barrier,
            ):
                collective()
                seen.append(num_seen)
            thread = threading.Thread(target=dist.barrier)
            thread.start()
            thread.join()
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
    return seen == [1, 2, 4, 6, 8] and num_seen == 8


def collectives_called() -> set[str]:
    """Methods of a group by which torch.distributed communicates, by its own source."""
    called = set(re.findall(r"\bgroup\.(\w+)\(", inspect.getsource(dist.distributed_c10d)))
    collectives = {name for name in called if hasattr(dist.ProcessGroup, name)} - _NO_COLLECTIVES
    assert {"allreduce", "broadcast", "barrier"} <= collectives
    return collectives


_NO_COLLECTIVES = {"_start_coalescing", "_end_coalescing", "_get_backend", "rank", "set_timeout"}
_NO_COLLECTIVES |= {"size"}


def knows_backward() -> bool:
    """Also where a checkpointed layer is computed again."""
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_patches.is_in_backward())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    return seen == [False, True] and not torch_patches.is_in_backward()


def attends() -> bool:
    """Gradients of a block, from the output and log-sum-exp over two, are its part of all."""
    torch.manual_seed(0)
    query, *blocks = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(5))
    keys, values = torch.cat(blocks[:2], 2), torch.cat(blocks[2:], 2)
    scores = query @ keys.mT * 0.5
    out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    gradient = torch.randn_like(out)
    expected = torch.autograd.grad(out, [blocks[1], blocks[3]], gradient)
    own = (query.detach(), blocks[1].detach(), blocks[3].detach())
    gradients = torch_patches.flash_attention_gradients(
        gradient, own, out.detach(), lse.detach(), is_causal=False, scale=0.5
    )
    _, alone = torch_patches.flash_attention(*own, is_causal=False, scale=0.5)
    close = torch.allclose(alone, scores[..., 8:].logsumexp(-1), atol=1e-5)
    pairs = zip(gradients[1:], expected, strict=True)
    return close and all(torch.allclose(*pair, atol=1e-5) for pair in pairs)


def attends_on_cuda() -> bool:
    """Shapes and dtypes only: no kernel runs."""
    with FakeTensorMode():
        query = torch.empty(2, 4, 16, 8, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(2, 4, 24, 8, dtype=torch.bfloat16, device="cuda")
        out, lse = torch_patches.flash_attention(query, key, key, is_causal=False, scale=0.5)
        gradients = torch_patches.flash_attention_gradients(
            out, (query, key, key), out, lse, is_causal=False, scale=0.5
        )
        shapes = [x.shape for x in (out, *gradients)]
        return lse.dtype == torch.float32 and [lse.shape, *shapes] == [
            query.shape[:3],
            query.shape,
            query.shape,
            key.shape,
            key.shape,
        ]


CONTRACTS = [
    Contract(
        torch_patches.is_in_backward,
        "torch._C._current_graph_task_id does not say any more that a backward pass is under way",
        knows_backward,
    ),
    Contract(
        torch_patches.shadow,
        "nn.Module does not call the forward in a module's own dict inside of its hooks any more",
        calls_shadow_inside_hooks,
    ),
    Contract(
        torch_patches.unshadow,
        "an optimizer's own dict does not come before the step of its class any more",
        calls_shadow_of_step,
    ),
    Contract(
        torch_patches.shadowed,
        "nn.Module finds a parameter before what a module's own dict has",
        finds_shadow_before_parameter,
    ),
    Contract(
        torch_patches.wrapper_tensor,
        "Tensor._make_wrapper_subclass does not make tensors of a subclass any more",
        wraps,
    ),
    Contract(
        "torch_patches.ATEN_TO_COPY", "Tensor.to is not aten._to_copy any more", converts_by_to_copy
    ),
    Contract(
        torch_patches.map_instances,
        "torch.utils._pytree.tree_map_only does not map tuples, lists and dicts any more",
        maps,
    ),
    Contract(
        "torch_patches.OperatorMode",
        "a TorchDispatchMode does not see operators of the meta device any more",
        sees_operators,
    ),
    Contract(
        torch_patches.storage_of,
        "UntypedStorage._cdata does not tell storages without memory apart any more",
        tells_storages_apart_without_memory,
    ),
    Contract(
        torch_patches.version_of,
        "Tensor._version does not count writes in place any more",
        counts_writes,
    ),
    Contract(
        torch_patches.has_buffers_alone,
        "nn.Module does not keep _buffers and _parameters, None included, any more",
        tells_buffers_alone,
    ),
    Contract(
        torch_patches.own_parameter,
        "nn.Module does not keep parameters in _parameters any more",
        lambda: (
            torch_patches.own_parameter(module := nn.Linear(1, 1), "weight")
            is next(module.parameters())
        ),
    ),
    Contract(
        torch_patches.observed_waits,
        "collectives of torch.distributed do not wait by Work.wait any more",
        waits_by_wait,
    ),
    Contract(
        torch_patches.observed_device_waits,
        "collectives of torch.distributed are no methods of ProcessGroup any more",
        lambda: (
            collectives_called() <= set(torch_patches.COLLECTIVES) and is_observed_on_a_device()
        ),
    ),
    has(torch_patches.default_store, lambda: dist.distributed_c10d, "_get_default_store"),
    takes(torch_patches.default_store, lambda: dist.distributed_c10d._get_default_store),
    has(
        torch_patches.divide_graphs_in_callees,
        lambda: torch._dynamo.config,
        "nested_graph_breaks",
    ),
    has(torch_patches.keep_graphs, lambda: torch._dynamo.config, "recompile_limit"),
    has(torch_patches.allow_any_length, lambda: torch._dynamo, "maybe_mark_dynamic"),
    Contract(
        torch_patches.compiler_error,
        "errors of torch's compiler are no TorchDynamoException with inner_exception any more",
        names_the_compilers_error,
    ),
    has(torch_patches.named_group, lambda: dist.distributed_c10d, "_resolve_process_group"),
    Contract(
        torch_patches.gloo_group,
        "torch.distributed.ProcessGroupGloo takes no _Options with _timeout and _devices any more",
        makes_a_group_of_one,
    ),
    Contract(
        torch_patches.flight_recorder_trace,
        "torch._C._distributed_c10d has no _dump_fr_trace or gives no bytes any more",
        lambda: hasattr(torch._C._distributed_c10d, "_dump_fr_trace") and dumps_trace(),
    ),
    has(torch_patches.set_allocator, lambda: torch._C, "_accelerator_setAllocatorSettings"),
    Contract(
        torch_patches.is_forked_from_cuda,
        "torch.cuda has no _is_in_bad_fork, which is false in a process of its own, any more",
        lambda: torch_patches.is_forked_from_cuda() is False,
    ),
    Contract(
        torch_patches.flash_attention,
        "aten._scaled_dot_product_flash_attention of CUDA has other arguments or results",
        attends_on_cuda,
    ),
    Contract(
        torch_patches.flash_attention_gradients,
        "aten._scaled_dot_product_flash_attention_for_cpu gives no log-sum-exp, or its backward "
        "takes none over more keys, any more",
        attends,
    ),
    Contract(
        torch_patches.dump_memory_snapshot,
        "torch.cuda.memory._dump_snapshot does not take a file name first any more",
        lambda: (
            next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"
        ),
    ),
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=title)
def test_torch_is_as_it_was_read(contract: Contract) -> None:
    contract.check("torch")


def test_every_patch_has_a_contract() -> None:
    wanted = public_functions(torch_patches)
    assert wanted - {contract.name for contract in CONTRACTS} == set()


@pytest.fixture
def store() -> Iterator[dist.Store]:
    made = dist.HashStore()
    dist.init_process_group("gloo", store=made, rank=0, world_size=1)
    yield made
    dist.destroy_process_group()


def test_the_default_store_is_the_one_that_the_group_was_opened_with(store: dist.Store) -> None:
    torch_patches.default_store().set("key", "value")
    # torch puts a prefix before each key of a group.
    assert torch_patches.default_store().get("key") == b"value"
    assert store.num_keys() > 0


def test_waits_for_other_streams_are_the_compute_stream_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own waiting for a stream, and the host's for one that is not it; nested calls once."""
    seen: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            seen.append("waited")

        def wait_event(self, event: object) -> None:
            self.wait_stream(event)

        def synchronize(self) -> None:
            seen.append("synchronized")

    @contextmanager
    def around() -> Iterator[None]:
        seen.append("begin")
        yield
        seen.append("end")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    computing, reducing = Stream(), Stream()
    with torch_patches.observed_device_waits(around, lambda: computing):
        computing.wait_stream(reducing)
        reducing.wait_stream(computing)
        reducing.synchronize()
        computing.synchronize()
        computing.wait_event(object())
    reducing.synchronize()
    assert seen == [
        *("begin", "waited", "end"),
        "waited",
        *("begin", "synchronized", "end"),
        "synchronized",
        *("begin", "waited", "end"),
        "synchronized",
    ]
