"""What a traced layer would move and keep if its elementwise operations were fused. Pure.

Compilers and hand-written kernels (Inductor, Liger) compute everything between two products in one
pass over memory: a fused kernel reads what products, attention or other kernels left in memory, and
writes what those need. Operations are one kernel if no product is between them on any path, which
the level of an operation tells: how many products are before it.

For the backward pass autograd keeps what is in memory: instead of a tensor inside of a fused kernel
the inputs of that kernel, from which it is computed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

_SEPARATE = {
    "sort", "topk", "index_put", "index_put_", "index_add", "index_add_", "scatter", "scatter_",
    "scatter_add", "scatter_add_", "histc", "bincount", "nonzero", "cumsum", "convolution",
}  # fmt: skip
"""Operations that have kernels of their own, which move their inputs and outputs."""
_EMPTY = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}
"""What allocates the output of attention and of other kernels."""


@dataclass(frozen=True)
class FusedSums:
    """Bytes of a layer, and how many kernels it launches in the forward pass: of every
    tensor-parallel rank (replicated), and of the part that the ranks divide."""

    moved_replicated: float
    moved_divided: float
    saved_replicated: float
    saved_divided: float
    mlp_saved_replicated: float
    mlp_saved_divided: float
    mlp_moved: float
    num_kernels: int


@dataclass(frozen=True)
class _Operation:
    """An operation; level: how many products, attentions and kernels of their own are before it.
    Tensors by their storage."""

    level: int
    is_fused: bool
    is_product: bool
    is_divided: bool
    is_in_mlp: bool
    input_bytes: Mapping[int, int]
    output_bytes: Mapping[int, int]


@dataclass(frozen=True)
class _Saved:
    num_bytes: int
    is_divided: bool
    is_in_mlp: bool


@dataclass
class Dataflow:
    """Operations of a layer in their order, by the storages that they read and write. Storages must
    stay alive, or their ids would be reused."""

    operations: list[_Operation] = field(default_factory=list)
    _levels: dict[int, int] = field(default_factory=dict)
    _saved: dict[int, _Saved] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)

    def add(
        self,
        name: str,
        input_bytes: Mapping[int, int],
        output_bytes: Mapping[int, int],
        *,
        is_product: bool,
        is_divided: bool,
        is_in_mlp: bool,
    ) -> None:
        """Add an operation with the bytes of the tensors."""
        is_product = is_product or name in _EMPTY
        is_fused = not is_product and name not in _SEPARATE
        level = max((self._levels.get(key, 0) for key in input_bytes), default=0)
        level += not is_fused
        for key, size in (*input_bytes.items(), *output_bytes.items()):
            self._sizes[key] = max(size, self._sizes.get(key, 0))
        for key in output_bytes:
            self._levels[key] = level
        flags = is_fused, is_product, is_divided, is_in_mlp
        self.operations.append(_Operation(level, *flags, input_bytes, output_bytes))

    def save(self, storage: int, num_bytes: int, *, is_divided: bool, is_in_mlp: bool) -> None:
        """Note that autograd keeps a tensor for the backward pass."""
        self._saved.setdefault(storage, _Saved(num_bytes, is_divided, is_in_mlp))

    def sums(self, constants: set[int]) -> FusedSums:
        """Return the sums of the fused layer. constants: storages that a layer reads and autograd
        does not keep for it: of parameters, of masks, of angles."""
        # Level at which a fused operation makes a storage.
        made_at = {
            key: operation.level
            for operation in self.operations if operation.is_fused
            for key in operation.output_bytes
        }  # fmt: skip
        stored_keys = self._in_memory(made_at)
        moved = {True: 0.0, False: 0.0}
        mlp_moved, num_kernels = 0.0, 0
        counted_keys: set[tuple[int, int, str]] = set()
        for operation in self.operations:
            if operation.is_product:
                num_kernels += bool(operation.input_bytes)
                continue
            # Every fused kernel reads and writes a tensor once, however many operations use it.
            passed = [("in", item) for item in operation.input_bytes.items()]
            passed += [("out", item) for item in operation.output_bytes.items()]
            for direction, (key, size) in passed:
                is_made_here = made_at.get(key) == operation.level
                is_inside = operation.is_fused and (
                    key not in stored_keys if direction == "out" else is_made_here
                )
                if is_inside or (operation.level, key, direction) in counted_keys:
                    continue
                counted_keys.add((operation.level, key, direction))
                moved[operation.is_divided] += size
                mlp_moved += size * operation.is_in_mlp
                num_kernels += direction == "out"
        kept_tensors = self._kept(stored_keys, constants)
        mlp_tensors = [saved for saved in kept_tensors if saved.is_in_mlp]
        return FusedSums(
            moved_replicated=moved[False],
            moved_divided=moved[True],
            saved_replicated=sum(s.num_bytes for s in kept_tensors if not s.is_divided),
            saved_divided=sum(s.num_bytes for s in kept_tensors if s.is_divided),
            mlp_saved_replicated=sum(s.num_bytes for s in mlp_tensors if not s.is_divided),
            mlp_saved_divided=sum(s.num_bytes for s in mlp_tensors if s.is_divided),
            mlp_moved=mlp_moved,
            num_kernels=num_kernels,
        )

    def _in_memory(self, made_at: Mapping[int, int]) -> set[int]:
        """Return the storages that are in memory between kernels: made or read by operations that
        are not fused, read at another level than they are made at, or read by none."""
        stored_keys, read = set[int](), set[int]()
        for operation in self.operations:
            if not operation.is_fused:
                stored_keys |= {*operation.input_bytes, *operation.output_bytes}
            for key in operation.input_bytes:
                read.add(key)
                if made_at.get(key) != operation.level:
                    stored_keys.add(key)
        return stored_keys | (set(made_at) - read)

    def _kept(self, stored_keys: set[int], constants: set[int]) -> list[_Saved]:
        """Return what autograd keeps, every tensor once."""
        sources = self._sources(stored_keys)
        kept_tensors: dict[int, _Saved] = {}
        for key, saved in self._saved.items():
            if key in stored_keys:
                kept_tensors[key] = saved
                continue
            for source in sources.get(key, {key}) - constants:
                size = self._sizes.get(source, saved.num_bytes)
                saved_source = self._saved.get(source)
                kept_tensors.setdefault(
                    source, saved_source or _Saved(size, saved.is_divided, saved.is_in_mlp)
                )
        return list(kept_tensors.values())

    def _sources(self, stored_keys: set[int]) -> Mapping[int, set[int]]:
        """Return the tensors in memory that each tensor inside of a kernel is computed from."""
        sources: defaultdict[int, set[int]] = defaultdict(set)
        for operation in self.operations:
            if not operation.is_fused:
                continue
            read = set[int]()
            for key in operation.input_bytes:
                read |= {key} if key in stored_keys else sources.get(key, {key})
            for key in operation.output_bytes:
                if key not in stored_keys:
                    sources[key] |= read
        return sources
