"""Operations of a forward pass and tensors that autograd keeps, added up by the running layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from bigtrain.models.parallel.stage_layout import tensors_in
from bigtrain.models.torch_patches import OperatorMode, storage_of
from bigtrain.models.tracing.fusion import Dataflow
from bigtrain.planner.model_costs import Attention, FusedCosts, LayerCosts, Matmul, MlpCosts

Side = Literal["in", "out"] | None
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear", "matmul"}


@dataclass
class MlpSums:
    """Sums over the operations of the MLPs of a layer that can be computed in tiles."""

    saved_replicated: float = 0.0
    saved_divided: float = 0.0
    moved: float = 0.0
    products: float = 0.0
    num_kernels: int = 0
    largest: int = 0
    largest_expert: int = 0


@dataclass
class LayerSums:
    """Sums over the operations of a layer. num_replicated, num_divided, num_expert: elements of
    parameters that all tensor-parallel ranks have, that they divide, and of stacked experts;
    num_frozen_replicated, num_frozen_divided, num_frozen_expert: those that are not trained."""

    matmuls: list[Matmul] = field(default_factory=list)
    attention: Attention | None = None
    saved_replicated: float = 0.0
    saved_divided: float = 0.0
    moved_replicated: float = 0.0
    moved_divided: float = 0.0
    num_kernels: int = 0
    num_replicated: int = 0
    num_divided: int = 0
    num_expert: int = 0
    num_frozen_replicated: int = 0
    num_frozen_divided: int = 0
    num_frozen_expert: int = 0
    num_tensors: int = 0
    mlp: MlpSums = field(default_factory=MlpSums)
    passes_states: bool = False
    dataflow: Dataflow = field(default_factory=Dataflow)
    constants: set[int] = field(default_factory=set)
    state_columns: int = 0
    num_equal_parts: int = 0
    num_groups: int = 0

    def costs(self, tokens: int) -> LayerCosts:
        mlp, fused = self.mlp, self.dataflow.sums(self.constants)
        products = sum(m.in_size * m.out_size * m.share for m in self.matmuls)
        return LayerCosts(
            num_parameters_whole=self.num_replicated,
            num_parameters_cut=self.num_divided,
            num_parameters_expert=self.num_expert,
            num_frozen_whole=self.num_frozen_replicated,
            num_frozen_cut=self.num_frozen_divided,
            num_frozen_expert=self.num_frozen_expert,
            num_tensors=self.num_tensors,
            matmuls=tuple(
                replace(matmul, count=number) for matmul, number in Counter(self.matmuls).items()
            ),
            attention=self.attention,
            saved_bytes_whole=self.saved_replicated / tokens,
            saved_bytes_cut=self.saved_divided / tokens,
            moved_bytes_whole=self.moved_replicated / tokens,
            moved_bytes_cut=self.moved_divided / tokens,
            num_kernels=self.num_kernels,
            # Shares of the layer's matrix products and other moved bytes, in addition to sums.
            mlp=MlpCosts(
                mlp.saved_replicated / tokens,
                mlp.saved_divided / tokens,
                mlp.largest,
                mlp.largest_expert,
                mlp.products / max(1.0, products),
                mlp.moved / max(1.0, self.moved_replicated + self.moved_divided),
                mlp.num_kernels,
            ),
            passes_states=self.passes_states,
            num_equal_parts=self.num_equal_parts,
            num_groups=self.num_groups,
            fused=FusedCosts(
                fused.saved_replicated / tokens,
                fused.saved_divided / tokens,
                fused.moved_replicated / tokens,
                fused.moved_divided / tokens,
                fused.mlp_saved_replicated / tokens,
                fused.mlp_saved_divided / tokens,
                fused.mlp_moved / max(1.0, fused.moved_replicated + fused.moved_divided),
                fused.num_kernels,
            ),
            state_columns=self.state_columns,
        )


class OperatorTrace(OperatorMode):
    """Adds up operations by the layer that is running."""

    def __init__(self, tokens: int, hidden_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens, self.hidden_size = tokens, hidden_size
        self.layers: dict[int, LayerSums] = {}
        self.current: LayerSums | None = None
        self.is_divided = False  # whether tensor parallelism divides what is running
        self.side: Side = None  # that is divided in the running product: "in", "out" or None
        self.parameter_storages: set[int] = set()
        self.frozen_storages: set[int] = set()
        self.mlp: MlpSums | None = None  # that is running
        self.mlp_inputs: set[int] = set()
        self.saved_outside = 0.0
        self._saved: dict[int, torch.Tensor] = {}
        # Tensors made before the layers and used by all (rotary embeddings), which no layer saves.
        # They stay alive, or their addresses would be reused.
        self._outside: list[torch.Tensor] = []
        self._inside: list[torch.Tensor] = []
        self.shared: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_grouped_mm":
            # Its shape function supports only bfloat16, while kernels support more.
            rows, stack = args[0], args[1]
            result = rows.new_empty((*rows.shape[:-1], stack.shape[-1]))
        else:
            result = func(*args, **(kwargs or {}))
        if self.current is not None:
            self._count(func, args, result)
        else:
            created = list(tensors_in(result))
            self._outside += created
            self.shared.update(
                storage_of(t) for t in created if t.dim() and t.shape[-1] != self.hidden_size
            )
        return result

    def _count(self, func: Any, args: Any, result: Any) -> None:
        """Add a kernel's costs to the sums of the running layer."""
        assert self.current is not None
        outputs, inputs = list(tensors_in(result)), list(tensors_in(args))
        storages = {storage_of(t) for t in inputs}
        name = func.name().partition("::")[2].partition(".")[0]
        if all(storage_of(t) in storages for t in outputs) and not name.endswith("_"):
            return  # a view, for which no kernel runs
        self.current.num_kernels += 1
        if self.mlp is not None:
            self.mlp.num_kernels += 1
        self._inside += (*inputs, *outputs)
        self.current.dataflow.add(
            name,
            {storage_of(t): t.numel() * t.element_size() for t in inputs},
            {storage_of(t): t.numel() * t.element_size() for t in outputs},
            is_product=name in _PRODUCTS,
            is_divided=self.is_divided,
            is_in_mlp=self.mlp is not None,
        )
        # A matrix product, with a weight or between activations.
        if name in _PRODUCTS:
            output = outputs[0]
            weights = [
                t for t in inputs if storage_of(t) in self.parameter_storages and t.dim() >= 2
            ]
            if not weights:  # scores of an attention outside the registry, or a scan
                left_factor = inputs[-2] if len(inputs) >= 2 else output
                share = output.numel() / output.shape[-1] / self.tokens
                side: Side = "out" if self.is_divided else None
                self.current.matmuls.append(
                    Matmul(left_factor.shape[-1], output.shape[-1], side, 1, share)
                )
            else:
                weight, num_outputs = weights[0], output.shape[-1]
                rows = output.numel() // num_outputs
                groups = weight.shape[0] if weight.dim() == 3 else 1
                num_inputs = (
                    next(n for n in weight.shape[-2:][::-1] if n != num_outputs)
                    if (weight.shape[-1] != weight.shape[-2])
                    else num_outputs
                )
                is_frozen = storage_of(weight) in self.frozen_storages
                share = rows / self.tokens
                self.current.matmuls.append(
                    Matmul(num_inputs, num_outputs, self.side, groups, share, is_frozen=is_frozen)
                )
            if self.mlp is not None:
                last = self.current.matmuls[-1]
                self.mlp.products += last.in_size * last.out_size * last.share
            return
        # All other kernels take the time of the bytes that they read and write.
        size = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        if self.mlp is not None:
            self.mlp.moved += size
        if self.is_divided:
            self.current.moved_divided += size
        else:
            self.current.moved_replicated += size

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count what autograd saves inside, every storage once."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = storage_of(tensor)
            if key in self.parameter_storages or key in self.shared or key in self._saved:
                return tensor
            if self.current is None:
                if tensor.is_floating_point() and tensor.shape[-1:] == (self.hidden_size,):
                    self._saved[key] = tensor
                    self.saved_outside += tensor.untyped_storage().nbytes()
                return tensor
            self._saved[key] = tensor  # alive, or its address would be reused
            size = tensor.untyped_storage().nbytes()
            is_divided = self.is_divided and self.side != "out"
            mlp = None if key in self.mlp_inputs else self.mlp
            self.current.dataflow.save(key, size, is_divided=is_divided, is_in_mlp=mlp is not None)
            for sums in (self.current, mlp):
                if sums is not None and is_divided:
                    sums.saved_divided += size
                elif sums is not None:
                    sums.saved_replicated += size
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
