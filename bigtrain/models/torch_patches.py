"""Every private part of torch (2.13) that `models`, `engine` and `run` use, each with why.
`tests/unit/models/test_torch_patches.py` has a contract test for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.errors import one_line

ATEN_TO_COPY = torch.ops.aten._to_copy
"""`Tensor.to` below autograd (aten/src/ATen/native/native_functions.yaml)."""


OperatorMode = TorchDispatchMode
"""Base class of modes that see every operator below autograd, as the profiler's tools do
(torch/utils/_python_dispatch.py; the class has no public name)."""


# --- instance attributes take precedence over the class's and over submodules ---


def shadow(owner: object, name: str, value: Any) -> None:
    """Set attribute `name` of `owner` to `value` without registering it as a submodule.

    Shadows methods that are called through the object: `nn.Module._call_impl` calls
    ``self.forward`` inside of the module's hooks (nn/modules/module.py), and wrappers of optimizers
    call ``optimizer.step`` (optim/optimizer.py). Also shadows parameters and submodules: Python
    calls `nn.Module.__getattr__`, which finds them, only for names not in the object's dict.
    """
    vars(owner)[name] = value


def unshadow(owner: object, name: str) -> None:
    """Undo `shadow`; does nothing for a `name` that is not shadowed."""
    vars(owner).pop(name, None)


@contextmanager
def shadowed(owner: object, values: Mapping[str, Any]) -> Iterator[None]:
    """Shadow attributes of `owner` by `values`; restore the attributes on exit."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]


# --- passes ---


def is_in_backward() -> bool:
    """Return whether this runs inside a backward pass, as the recomputation of a checkpointed layer
    does.

    The autograd engine has an id for the current backward pass, and -1 outside (torch/csrc/
    autograd/engine.h, `get_current_graph_task_id`; torch.utils.checkpoint reads the id too).
    """
    return torch._C._current_graph_task_id() != -1


# --- tensors and modules ---


def wrapper_tensor(
    tensor_class: type[torch.Tensor], shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor of the subclass `tensor_class` on the CPU, without storage, whose operations
    the class defines.

    `Tensor._make_wrapper_subclass` (torch/_tensor.py, torch/csrc/autograd/python_variable.cpp)
    makes the tensors of torch's subclasses; the method has no public name.
    """
    tensor: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        tensor_class, torch.Size(shape), dtype=dtype, device=torch.device("cpu")
    )
    return tensor


def map_instances(leaf_class: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` of tuples, lists and dicts, with `function` applied to instances of
    `leaf_class`. `torch.utils._pytree.tree_map_only` knows all containers of operator arguments."""
    return _pytree.tree_map_only(leaf_class, function, tree)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often `tensor` was written to in place (`Tensor._version`,
    torch/_C/__init__.pyi)."""
    return tensor._version


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id of the storage of `tensor`, unique while the storage exists, also on the meta
    device. `_cdata` of torch/storage.py; `data_ptr` is 0 for every tensor without memory."""
    return int(tensor.untyped_storage()._cdata)


def own_parameter(module: torch.nn.Module, name: str) -> torch.nn.Parameter:
    """Return the parameter that `module` holds as `name`, whatever its attribute `name` returns.
    Reads `Module._parameters` (nn/modules/module.py), a lookup by which, unlike by
    `named_parameters`, ZeRO-3 gathers a parameter that another module reads (DeepSpeed's
    `ZeROOrderedDict`)."""
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def has_buffers_alone(module: nn.Module) -> bool:
    """Return whether `module` itself registered buffers but no parameters; a registered None counts
    as well. Reads `Module._buffers` and `_parameters` (nn/modules/module.py), since `named_buffers`
    and `named_parameters` skip None."""
    return bool(module._buffers and not module._parameters)


# --- compiled graphs ---


def divide_graphs_in_callees() -> None:
    """Let a function that a graph cannot contain divide only the graph of the outermost caller in
    two; by default, every caller in between gets a separate graph. Process-wide;
    torch/_dynamo/config.py, `nested_graph_breaks`, which has no public name."""
    torch._dynamo.config.nested_graph_breaks = True


def allow_any_length(tensor: torch.Tensor) -> None:
    """Let a compiled function have one graph for `tensor` [N, ...] of any N but 1."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def keep_graphs(num_graphs: int) -> None:
    """Let a function have up to `num_graphs` graphs; with more, torch only warns, and runs the
    function uncompiled. The default of 8 (torch/_dynamo/config.py, `recompile_limit`) can be too
    few for kinds of layers, training, evaluation and the lengths of a run's phases. Process-wide.
    """
    torch._dynamo.config.recompile_limit = num_graphs


def compiler_error(error: BaseException) -> str:
    """Return an error of torch's compiler, or of a compiler that it calls, as one line; empty for
    other errors (torch/_dynamo/exc.py)."""
    if not isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return ""
    cause = getattr(error, "inner_exception", error)
    return f"{type(cause).__name__}: {one_line(cause)}"


# --- the process ---


@contextmanager
def observed_waits(observe: Callable[[float], None]) -> Iterator[None]:
    """Call `observe` with the seconds of every wait of this thread for a collective.

    Functions of torch.distributed call `Work.wait` (torch/distributed/distributed_c10d.py), or
    return the work, for which the caller calls `wait`. For collectives on a device, such as NCCL's,
    `wait` blocks the stream and not the host.
    """
    work_class: Any = dist.Work
    original_wait, thread = work_class.wait, threading.get_ident()

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original_wait(work, *args, **kwargs)
        start_time = time.perf_counter()
        try:
            return original_wait(work, *args, **kwargs)
        finally:
            observe(time.perf_counter() - start_time)

    work_class.wait = wait
    try:
        yield
    finally:
        work_class.wait = original_wait


COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "all_gather_single", "all_gather_single_coalesced",
    "allgather", "allgather_coalesced", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "alltoall", "all_to_all_single", "broadcast", "reduce",
    "gather", "gather_single", "scatter", "send", "recv", "recv_anysource", "barrier",
    # Five methods by their names in torch 2.11.
    "_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "alltoall_base",
)  # fmt: skip
"""Methods of `dist.ProcessGroup` by which torch/distributed/distributed_c10d.py communicates, of
the oldest and the newest torch that is supported: none has all of them."""


@contextmanager
def observed_device_waits(
    around: Callable[[], AbstractContextManager[object]],
    computing: Callable[[], object] = torch.cuda.current_stream,
) -> Iterator[None]:
    """Wrap every call by which the compute stream (`computing()` on entry) may wait for other ranks
    in `around()`: an event before and an event after the call on that stream measure the wait.

    The calls are collectives on the compute stream (NCCL's synchronous collectives);
    `Work.wait`, and waits for another stream, on which DeepSpeed reduces and gathers; and the host
    waiting for another stream (`Stream.synchronize`), while nothing is launched. Only calls of this
    thread and its backward passes: other threads launch nothing on the compute stream, but may wait
    for other collectives at the same time.
    """
    stream, thread, is_observing = computing(), threading.get_ident(), False

    def is_observed_thread() -> bool:
        return threading.get_ident() == thread or is_in_backward()

    def observed(method: Any, applies: Callable[[Any], bool]) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_observing
            # Inside a call that is being observed, further calls are part of the same wait.
            if is_observing or not is_observed_thread() or not applies(self):
                return method(self, *args, **kwargs)
            is_observing = True
            try:
                with around():
                    return method(self, *args, **kwargs)
            finally:
                is_observing = False

        return call

    def on_compute_stream(_: Any) -> bool:
        return computing() == stream

    # Class, method name, and whether a call with this `self` counts.
    methods: list[tuple[Any, str, Callable[[Any], bool]]] = [
        *(
            (dist.ProcessGroup, name, on_compute_stream)
            for name in COLLECTIVES
            if hasattr(dist.ProcessGroup, name)
        ),
        (dist.Work, "wait", on_compute_stream),
        (torch.cuda.Stream, "wait_stream", lambda waiting: waiting == stream),
        (torch.cuda.Stream, "wait_event", lambda waiting: waiting == stream),
        (torch.cuda.Stream, "synchronize", lambda synchronized: synchronized != stream),
    ]
    # The originals are read from the dict of the class: a C++ method that is read as an attribute
    # and set again would no longer be bound. An inherited method (None) is deleted on exit.
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in methods]
    for owner, name, applies in methods:
        setattr(owner, name, observed(getattr(owner, name), applies))
    try:
        yield
    finally:
        for owner, name, original in before:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def default_store() -> dist.Store:
    """Return the store that the default process group was opened with.
    torch/distributed/distributed_c10d.py:1433, `_get_default_store`. There is no public function,
    since the code that opens the group (here `deepspeed.init_distributed`) passes the store."""
    return dist.distributed_c10d._get_default_store()


def named_group(name: str) -> dist.ProcessGroup:
    """Return the process group whose `group_name` is `name`, by which operators in a graph refer to
    a group. torch/distributed/distributed_c10d.py, `_resolve_process_group`, as torch's functional
    collectives do (torch/distributed/_functional_collectives.py)."""
    return dist.distributed_c10d._resolve_process_group(dist.GroupName(name))


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, address: str
) -> dist.ProcessGroupGloo:
    """Return a gloo group whose members are in different default process groups.

    This rank listens at `address`, and not at the interface GLOO_SOCKET_IFNAME of the default
    group. The address is an option of `_Options`, which torch/csrc/distributed/c10d/init.cpp binds
    without a public Python name (as in torch/distributed/distributed_c10d.py:2191).
    """
    group_class: Any = dist.ProcessGroupGloo
    options = group_class._Options()
    options._timeout = timeout
    options._devices = [group_class.create_device(hostname=address)]
    group: dist.ProcessGroupGloo = group_class(store, rank, size, options)
    return group


def flight_recorder_trace() -> bytes | None:
    """Return this rank's last collectives from torch's flight recorder (NCCL's or gloo's), in the
    format of torch's reader; None if torch was built without the recorder. Both functions are bound
    in torch/csrc/distributed/c10d/init.cpp; they have no public name."""
    name = "_dump_nccl_trace" if torch.cuda.is_available() else "_dump_fr_trace"
    dump: Any = getattr(torch._C._distributed_c10d, name, None)
    if dump is None:
        return None
    trace: bytes = dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)
    return trace


def set_allocator(settings: str) -> None:
    """Apply `settings` to the device and pinned-memory allocators, as PYTORCH_ALLOC_CONF does.

    The settings hold for later allocations. Raises RuntimeError or ValueError for a key that this
    torch does not know. torch 2.13 has no public function; torch/cuda/memory.py,
    `_set_allocator_settings`, is deprecated in favour of the function that is called here.
    """
    torch._C._accelerator_setAllocatorSettings(settings)


def dump_memory_snapshot(path: str) -> None:
    """Write the blocks of the CUDA allocator to file `path`, for
    https://docs.pytorch.org/memory_viz. torch/cuda/memory.py:1129, `_dump_snapshot`, by which name
    torch's documentation calls the function."""
    torch.cuda.memory._dump_snapshot(path)


def is_forked_from_cuda() -> bool:
    """Return whether this process was forked from one that had initialized CUDA (also to count
    devices), so that it cannot use CUDA, as checked by torch/cuda/__init__.py, `_lazy_init`."""
    return bool(torch.cuda._is_in_bad_fork())


# --- attention with its log-sum-exp, which `scaled_dot_product_attention` does not return ---


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H, m, D] of queries to keys [B, H, n, D], and the log-sum-exp of their
    scores, float32 [B, H, m], by the kernels that `scaled_dot_product_attention` calls
    (aten/src/ATen/native/transformers/attention.cpp): on the CPU, and on CUDA in 16 bit."""
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, False, scale=scale
    )
    return out, lse


def flash_attention_gradients(
    grad_out: torch.Tensor,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value (`states`) by the kernels of `flash_attention`.
    If `out` and `lse` belong to attention over further keys, the result is the part of the
    gradients that the keys of `states` contribute."""
    query, key, value = states
    if query.device.type == "cpu":
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, is_causal, scale=scale
        )
    else:
        unused_seed = torch.zeros((), dtype=torch.int64, device=query.device)  # no dropout
        lengths = (None, None, query.shape[2], key.shape[2])  # cumulative, then the longest
        tensors = (grad_out, query, key, value, out, lse)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(*tensors, *lengths, 0.0, is_causal, unused_seed, unused_seed), scale=scale
        )
    grad_query, grad_key, grad_value = gradients
    return grad_query, grad_key, grad_value
