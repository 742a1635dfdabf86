"""Record of a step's kernels on fake CUDA tensors: operations, bytes and part of the step."""

from __future__ import annotations

import bisect
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu_proof.trace import assumed_places, assumed_value
from benchmarks.gpu_roofline.kernel import Kernel

_NO_KERNEL = (
    "aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "aten::lift_fresh",
    "aten::_local_scalar_dense", "aten::set_", "aten::resize_", "aten::empty_like",
    "aten::empty_strided", "aten::new_empty_strided", "aten::alias", "aten::reshape",
)  # fmt: skip
_ONLY_WRITTEN = ("copy_", "zero_", "fill_", "_foreach_zero_", "_foreach_copy_", "normal_")
"""Operations that write their first argument without reading it."""
_PASSES_OF_ROWS = {"aten::_log_softmax": (3, 1), "aten::_log_softmax_backward_data": (2, 1)}
"""Reads and writes of rows that fit no multiprocessor's memory: torch 2.13's cunn_SoftMaxForward
and cunn_SoftMaxBackward (aten/src/ATen/native/cuda/SoftMax.cu) read a row for its maximum, its sum
and its result, and for the sum of the gradient and the result."""
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention")


class KernelRecorder(TorchDispatchMode):
    """Records while it is entered, after `watch` was called with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self._modules: list[str] = []
        # Sequence numbers of autograd at which the innermost module changed, and the module then.
        self._changes: list[int] = []
        self._module_after: list[str] = []

    def watch(self, model: nn.Module) -> None:
        """Note from now on which module of `model` is in its forward pass."""
        for name, module in model.named_modules():
            label = f"{name}:{type(module).__name__}"
            module.register_forward_pre_hook(lambda *_, label=label: self._enter(label))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _enter(self, label: str) -> None:
        self._modules.append(label)
        self._note_change()

    def _leave(self) -> None:
        self._modules.pop()
        self._note_change()

    def _note_change(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        label = self._modules[-1] if self._modules else ""
        if self._changes and self._changes[-1] >= number:
            # A forward pass inside a backward pass (recomputation, chunks) ends an earlier one.
            self._module_after[-1] = label
            return
        self._changes.append(number)
        self._module_after.append(label)

    def _module(self) -> tuple[str, bool]:
        """Return the innermost module that this kernel is computed for, and whether in its backward
        pass."""
        if self._modules:
            return self._modules[-1], False
        node = torch._C._current_autograd_node()
        if node is None:
            return "", False
        if "AccumulateGrad" in node.name():
            return "accumulate", True
        place = bisect.bisect_right(self._changes, node._sequence_nr()) - 1
        return (self._module_after[place] if place >= 0 else ""), True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(subclass.__name__ == "Float8TrainingTensor" for subclass in types):
            return NotImplemented  # torchao's class calls the kernels, which are recorded then
        if func is torch.ops.aten._local_scalar_dense.default:
            return assumed_value(args[0])
        if func is torch.ops.aten.equal.default:
            return True  # Liger's loss compares its gradient with 1, and waits for the answer
        if func is torch.ops.aten.nonzero.default:
            return assumed_places(args[0])
        result = func(*args, **kwargs)
        name = func._schema.name
        on_device = any(t.is_cuda for t in _tensors((args, kwargs, result)))
        if not on_device or name in _NO_KERNEL or _is_view(func) or _copies_itself(func, args):
            return result
        if func.namespace in ("aten", "c10d", "_c10d_functional"):
            self.kernels.append(self._kernel(func, args, kwargs, result))
        return result

    def add_launch(self, name: str, num_bytes: int) -> None:
        """Record a kernel that the dispatcher does not see."""
        module, is_backward = self._module()
        in_layer = ".layers." in module
        part = self.part_of(module)
        self.kernels.append(
            Kernel(name, part, num_bytes, is_in_layer=in_layer, is_backward=is_backward)
        )

    def _kernel(self, func: Any, args: Any, kwargs: Any, result: Any) -> Kernel:
        name = func._schema.name.removeprefix("aten::")
        module, is_backward = self._module()
        in_layer = ".layers." in module or module.startswith("layers.")
        if func.namespace != "aten":
            widest = max(_tensors((args, kwargs)), key=torch.Tensor.numel)
            exchanged = widest.numel() * widest.element_size()
            ranks = max((g.size() for g in _groups(args)), default=1)
            moved = exchange_bytes(func._opname, args) if ranks > 1 else 0
            return Kernel(
                name, "exchange", moved, exchanged_bytes=exchanged, num_ranks=ranks,
                is_in_layer=in_layer, is_backward=is_backward,
            )  # fmt: skip
        counter = flop_registry.get(func._overloadpacket)
        flops = int(counter(*args, **kwargs, out_val=result)) if counter else 0
        product, part = None, ""
        if any(text in name for text in _ATTENTION):
            part = "attention"
            if _is_causal(func, args, kwargs):
                flops //= 2
        elif name == "_grouped_mm":
            part = "experts"
            product = _grouped_product(*args[:2], args[2] if len(args) > 2 else kwargs["offs"])
            flops = 2 * math.prod(product)
        elif flops:
            part = "products"
            product = _product_of(name, args)
        elif _is_dispatch(module, name, args, result):
            part = "dispatch"
        first = next(iter(_tensors(args)), None)
        return Kernel(
            name,
            part or self.part_of(module),
            _moved_bytes(func, args, kwargs, result),
            flops,
            product,
            first.element_size() if first is not None else 2,
            head_size=int(first.shape[-1]) if first is not None and part == "attention" else 0,
            is_in_layer=in_layer,
            is_backward=is_backward,
        )

    def part_of(self, module: str) -> str:
        """Return the part of an elementwise kernel or reduction computed for `module`, "" outside
        of any."""
        name, _, kind = module.partition(":")
        if not module:
            return _part_of_callers()
        if module == "accumulate":
            return "gradients"
        if kind == "Linear" and ".layers." in name:
            return "products"  # casts of autocast
        if "Norm" in kind:
            return "norms"
        if "Rotary" in kind or "Attention" in kind:
            return "rotary"
        if "MLP" in kind or ".mlp" in name:
            return "activations"
        if "Layer" in kind or "Embedding" in kind:
            return "residuals"
        return "loss"


def _part_of_callers() -> str:
    """Return the part of a kernel outside of forward and backward computations by the functions
    that asked for it."""
    frame = sys._getframe(1)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    if names & {"_take_model_step", "clip_grad_norm_", "zero_grad", "_engine_step", "update"}:
        return "optimizer"
    if names & {"cross_entropy", "_compute", "summed_loss"}:
        return "loss"
    in_backward = {"allreduce_gradients", "backward", "_backward", "_finish", "hook"}
    if names & (in_backward | {"_add_to_bucket"}):
        return "gradients"
    return "loss"


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _groups(args: Any) -> Iterator[Any]:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                yield torch.distributed.ProcessGroup.unbox(value)
            except (RuntimeError, AttributeError):
                continue


def _is_view(func: Any) -> bool:
    """Whether the result shares its memory with an argument, and nothing is written."""
    infos = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    return bool(infos) and not any(info.is_write for info in infos)


def _copies_itself(func: Any, args: Any) -> bool:
    """Whether a copy has its own memory as its source, for which CUDA copies nothing."""
    if func is not torch.ops.aten.copy_.default or not isinstance(args[1], torch.Tensor):
        return False
    target, source = args[:2]
    return (
        target.untyped_storage()._cdata == source.untyped_storage()._cdata
        and target.storage_offset() == source.storage_offset()
        and target.dtype == source.dtype
    )


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))
    return False


def _is_dispatch(module: str, name: str, args: Any, result: Any) -> bool:
    """Return whether a kernel is of a router, or moves rows to experts and back: all of experts but
    their products and the activations between, whose factors have equal shapes."""
    if not re.search("Experts|Router|MoeBlock", module.partition(":")[2]):
        return False
    is_product = name == "mul" and all(t.shape == result.shape for t in _tensors(args))
    return not ("silu" in name or is_product)


def _grouped_product(left: Any, right: Any, ends: Any) -> tuple[int, int, int, int]:
    """Return rows, inner size, columns and number of the products of a group. left: [rows, inner]
    with right [groups, inner, columns], or, of the gradient of the weights, [rows, tokens] with
    [tokens, columns]. The rows, or the tokens, of a product end where `ends` [groups] says."""
    groups = int(ends.numel())
    rows, inner = left.shape
    columns = int(right.shape[-1])
    if right.dim() == 3:
        return -(-int(rows) // groups), int(inner), columns, groups
    return int(rows), -(-int(inner) // groups), columns, groups


def _product_of(name: str, args: Any) -> tuple[int, int, int, int] | None:
    """Return rows, inner size, columns and number of equal products."""
    matrices = [t for t in _tensors(args) if t.dim() >= 2]
    matrices = matrices[:2] if name == "_scaled_mm" else matrices[-2:]  # scales follow
    if len(matrices) < 2:
        return None
    left, right = matrices
    batch = left.shape[0] if left.dim() == 3 else 1
    if left.dim() > 3 or right.dim() > 3:
        return None
    return int(left.shape[-2]), int(left.shape[-1]), int(right.shape[-1]), int(batch)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that reading `tensor` moves: what is expanded is read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()


def _moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that the kernel reads and writes, each tensor once for each of them."""
    name = func._schema.name.removeprefix("aten::")
    if name == "embedding":
        return 2 * stored_bytes(result)
    if name == "nll_loss_forward":  # reads one element of each row
        return stored_bytes(args[1])
    if name == "nll_loss_backward":  # fills with zeros, and writes one element of each row
        return stored_bytes(result)
    reads, writes = _PASSES_OF_ROWS.get(func._schema.name, (1, 1))
    total, written = 0, set()
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        # Fused optimizers only scale gradients in place if there is a loss scale.
        is_written &= not ("_fused_" in name and argument.name == "grads")
        is_read = not (argument.is_out or (is_written and name in _ONLY_WRITTEN))
        for tensor in _tensors(value):
            if tensor.is_cuda:
                total += stored_bytes(tensor) * (reads * is_read + is_written)
                written |= {id(tensor)} if is_written else set()
    for tensor in _tensors(result):
        if tensor.is_cuda and id(tensor) not in written:
            total += writes * stored_bytes(tensor)
    return total


def exchange_bytes(name: str, args: Any) -> int:
    """Return the least bytes that a collective of torch's `c10d` reads and writes in this rank's
    memory, given its `args`: what the rank sends is read once, what it receives is written once.
    Buffers of NCCL, and rounds of a ring that come back to the same memory, are not counted."""
    tensors = [tensor for tensor in _tensors(args) if tensor.is_cuda]
    total = sum(map(stored_bytes, tensors))
    if name in ("allreduce_", "all_reduce_"):
        return 2 * total
    if name == "reduce_":  # its root writes the sum over what it read
        group = next(_groups(args))
        root = next(value for value in args if type(value) is int)
        return 2 * total if group.rank() == root else total
    if name in ("_allgather_base_", "allgather_base_"):
        output, source = tensors
        # In place, a rank's own part is there already.
        is_in_place = output.untyped_storage()._cdata == source.untyped_storage()._cdata
        return total - stored_bytes(source) * is_in_place
    return total


def update_bytes(
    master: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    weights: torch.Tensor,
) -> int:
    """Return the bytes of `bigtrain.engine.deepspeed_patches.fused_adamw.update`: master and
    moments are read and written, the gradient is read, the 16-bit parameters are written."""
    return 2 * (master.nbytes + mean.nbytes + square.nbytes) + gradient.nbytes + weights.nbytes
