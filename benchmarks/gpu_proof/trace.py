"""Record of a step on fake CUDA tensors: where the host waits, its collectives, its live bytes."""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

_HERE = str(Path(__file__).parent)
_FUNCTIONAL = "_c10d_functional"
_PACKAGES = ("bigtrain", "deepspeed", "transformers", "peft")


@dataclass(frozen=True)
class Collective:
    """One exchange: torch's name of the operation, the ranks of its group, the elements of its
    larger side, their dtype, and the place that asked for it."""

    operation: str
    ranks: tuple[int, ...]
    num_elements: int
    dtype: torch.dtype
    place: str

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def content(self) -> str:
        """The exchanged elements in words."""
        return f"{self.num_elements:,} {str(self.dtype).removeprefix('torch.')}"

    @property
    def signature(self) -> str:
        """What all ranks of the group must agree in."""
        # Ranks send and receive different numbers of elements in an all-to-all.
        dtype = str(self.dtype).removeprefix("torch.")
        content = dtype if self.operation.startswith("alltoall") else self.content
        return f"{self.operation} {content}"

    @property
    def is_point_to_point(self) -> bool:
        return self.operation.startswith(("send", "recv"))

    def is_between(self, operation: str, sender: int, receiver: int) -> bool:
        """Return whether it is `operation` (send, recv) of what `sender` sends to `receiver`."""
        return self.operation.startswith(operation) and self.ranks == (sender, receiver)


@dataclass
class Record:
    """What was traced. waits: how often the host waits for the device, by "kind, place". orders:
    how often one stream waits for another, likewise. peak: the most bytes of tensors on the device
    at once."""

    waits: Counter[str] = field(default_factory=Counter)
    orders: Counter[str] = field(default_factory=Counter)
    collectives: list[Collective] = field(default_factory=list)
    peak: int = 0

    def by_kind(self) -> dict[tuple[str, tuple[int, ...], torch.dtype], int]:
        """Return the elements exchanged by operation, ranks of the group and dtype."""
        sums: Counter[tuple[str, tuple[int, ...], torch.dtype]] = Counter()
        for each in self.collectives:
            sums[each.operation, each.ranks, each.dtype] += each.num_elements
        return dict(sums)


def _place() -> str:
    """Return file and function of the innermost frames of bigtrain and, below it, of a library."""
    inner = ""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(_HERE):
            continue
        parts = Path(frame.filename).parts
        package = next((name for name in _PACKAGES if name in parts), None)
        if package is None:
            continue
        start = len(parts) - 1 - parts[::-1].index(package)
        name = f"{'/'.join(parts[start:])}:{frame.name}"
        if package == "bigtrain":
            return f"{name} -> {inner}" if inner else name
        inner = inner or name
    return inner or "elsewhere"


class Tracer(TorchDispatchMode):
    """Records while it is entered. Values that the host reads are 1, and 0 in flags (bool, uint8),
    unless they are constants."""

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self._live = 0

    def reset(self) -> None:
        """Begin a new record; tensors that are live stay counted."""
        self.record = Record(peak=self._live)

    def waited(self, kind: str) -> None:
        """Record that the host waits for the device, here."""
        self.record.waits[f"{kind}, {_place()}"] += 1

    def ordered(self, kind: str) -> None:
        """Record that a stream waits for another, here."""
        self.record.orders[f"{kind}, {_place()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            return self._value(args[0])
        if func is aten.equal.default:  # as ranks that compare what they have are to find
            if _is_on_device(args[0]):
                self.waited("equal")
            return True
        if func is aten._to_copy.default and _leaves_device(args[0], kwargs):
            self.waited("copy to the host")
        if func is aten.copy_.default and _is_on_device(args[1]) and not _is_on_device(args[0]):
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                self.waited("copy to the host")
        if func is aten._to_copy.default and _reaches_device(args[0], kwargs):
            self.waited("copy to the device")
        if func is aten.copy_.default and _is_on_device(args[0]) and not _is_on_device(args[1]):
            # A number of the host's travels with the kernel.
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if blocks and args[1].dim() > 0:
                self.waited("copy to the device")
        if _is_mixed(func, args):
            self.waited("copy to the device")
        if func is aten._linalg_check_errors.default and _is_on_device(args[0]):
            self.waited("item")
        if func is aten.nonzero.default:  # all elements, since none is known
            if _is_on_device(args[0]):
                self.waited("size of a result")
            return assumed_places(args[0])
        if func.namespace in ("c10d", _FUNCTIONAL):
            self._exchange(func, args)
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._count(tensor)
        return result

    def _value(self, tensor: torch.Tensor) -> Any:
        if _is_on_device(tensor):
            self.waited("item")
        return assumed_value(tensor)

    def read_list(self, tensor: torch.Tensor, total: int) -> Any:
        """Stand in for `Tensor.tolist` of counts [..., n], each row of which adds up to `total`."""
        if _is_on_device(tensor):
            self.waited("list")
        count, left = divmod(total, tensor.shape[-1])
        row: Any = [count + (index < left) for index in range(tensor.shape[-1])]
        for size in reversed(tensor.shape[:-1]):
            row = [row] * size
        return row

    def _exchange(self, func: Any, args: Any) -> None:
        tensors = list(_tensors(args))
        name = func.name().partition("::")[2].strip("_")
        if not tensors or name == "wait_tensor":
            return
        if not all(map(_is_on_device, tensors)) and "barrier" not in func.name():
            # As NCCL does.
            raise RuntimeError(f"{func.name()} of a tensor on the CPU, {_place()}")
        ranks = _ranks_of(args, is_functional=func.namespace == _FUNCTIONAL)
        widest = max(tensors, key=torch.Tensor.numel)
        if name == "barrier":
            self.waited("barrier")
        if name in ("send", "recv"):  # of tensors, group, rank in the group, tag
            peer = ranks[args[2]]
            ranks = (dist.get_rank(), peer) if name == "send" else (peer, dist.get_rank())
        self.record.collectives.append(
            Collective(name, ranks, widest.numel(), widest.dtype, _place())
        )

    def _count(self, tensor: torch.Tensor) -> None:
        if not _is_on_device(tensor):
            return
        storage = tensor.untyped_storage()
        if hasattr(storage, "_is_counted"):
            return
        storage._is_counted = True  # type: ignore[attr-defined]
        num_bytes = storage.nbytes()
        self._live += num_bytes
        self.record.peak = max(self.record.peak, self._live)
        weakref.finalize(storage, self._release, num_bytes)

    def _release(self, num_bytes: int) -> None:
        self._live -= num_bytes


def _ranks_of(args: Any, *, is_functional: bool) -> tuple[int, ...]:
    """Return the ranks of the group among the arguments of a collective; of a functional one it is
    the last, by name."""
    if is_functional:
        group = dist.distributed_c10d._resolve_process_group(args[-1])
        return tuple(dist.get_process_group_ranks(group))
    for value in args:
        if isinstance(value, torch.ScriptObject):
            with suppress(RuntimeError, AttributeError):
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    return tuple(range(dist.get_world_size()))


def mismatches(collectives_by_rank: dict[int, list[Collective]]) -> list[str]:
    """Return where ranks that are traced together would wait for each other for ever, or read what
    was not sent: what one sends and the other receives, and what a group exchanges, in order."""
    problems = []
    for rank, peer in permutations(collectives_by_rank, 2):
        sent, received = (
            [each.content for each in collectives_by_rank[of] if each.is_between(name, rank, peer)]
            for of, name in ((rank, "send"), (peer, "recv"))
        )
        problems += _differences(sent, received, f"rank {rank} sends", f"rank {peer} receives")
    for rank, peer in combinations(collectives_by_rank, 2):
        in_groups = [
            [each for each in collectives_by_rank[of] if not each.is_point_to_point]
            for of in (rank, peer)
        ]
        for ranks in {each.ranks for each in in_groups[0] if peer in each.ranks}:
            first, second = (
                [each.signature for each in exchanged if each.ranks == ranks]
                for exchanged in in_groups
            )
            problems += _differences(first, second, f"rank {rank}", f"rank {peer}")
    return problems


def _differences(first: list[str], second: list[str], name: str, other: str) -> list[str]:
    """Return the first difference of two lists, as a line."""
    for number in range(max(len(first), len(second))):
        values = [each[number] if number < len(each) else "nothing" for each in (first, second)]
        if values[0] != values[1]:
            return [f"exchange {number + 1}: {name} {values[0]}, {other} {values[1]}"]
    return []


def assumed_value(tensor: torch.Tensor) -> Any:
    """Return what the host reads from a fake tensor of one element: its constant if it has one, or
    0 of a flag (bool, uint8), else 1."""
    constant = getattr(tensor, "constant", None)
    if constant is not None:
        return constant.item()
    if tensor.dtype in (torch.bool, torch.uint8):
        return 0
    return 1.0 if tensor.dtype.is_floating_point else 1


def assumed_places(tensor: torch.Tensor) -> torch.Tensor:
    """Return the result of `nonzero` of a fake tensor: as many places as it has elements."""
    shape = (tensor.numel(), tensor.dim())
    return torch.zeros(shape, dtype=torch.int64, device=tensor.device)


_MIXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_foreach_copy_")
"""Operators of a tensor on the device that copy their further arguments to it."""


def _is_mixed(func: Any, args: Any) -> bool:
    """Return whether an operator on the device takes places, or what it copies, from the host."""
    if func.namespace != "aten" or func.name().partition(".")[0] not in _MIXED:
        return False
    tensors = list(_tensors(args))
    from_host = [each for each in tensors[1:] if not _is_on_device(each) and each.dim() > 0]
    return _is_on_device(tensors[0]) and bool(from_host)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _leaves_device(tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    target = kwargs.get("device")
    leaves = target is not None and torch.device(target).type == "cpu" and _is_on_device(tensor)
    return leaves and not kwargs.get("non_blocking", False)


def _reaches_device(tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether a copy blocks the host, which only one that may not block does not."""
    target = kwargs.get("device")
    if target is None or torch.device(target).type != "cuda" or _is_on_device(tensor):
        return False
    return not kwargs.get("non_blocking", False)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return the ranks of a group in words: ``ranks 0 to 3``, ``ranks 0, 2``, ``rank 0``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    step = ranks[1] - ranks[0]
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        by = "" if step == 1 else f" by {step}"
        return f"ranks {ranks[0]} to {ranks[-1]}{by}"
    return f"ranks {', '.join(map(str, ranks))}"
