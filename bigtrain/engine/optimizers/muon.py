"""Muon on full matrices, under ZeRO and tensor, expert and pipeline parallelism.

The mathematics of `torch.optim.Muon` (torch 2.13, torch/optim/_muon.py). Momentum is updated
elementwise on the masters; the owner of a matrix orthogonalizes its update by Newton-Schulz
iterations, by default in bfloat16, in which it is also sent: 2 x 2 bytes per element and step.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.optimizers.masters import MasterPart
from bigtrain.engine.optimizers.matrix_exchange import (
    HeldShard,
    MasterRectangle,
    MatrixExchange,
    pieces_of,
)
from bigtrain.engine.optimizers.update_rule import (
    Master,
    RuleInputs,
    UpdateRule,
    chunks,
    names_in_update,
    store,
)
from bigtrain.engine.startup.mesh import Mesh, open_holders
from bigtrain.models.layers.parameters import parameter_of
from bigtrain.models.parallel.hidden_matrices import Matrix, hidden_matrices, matrices_of
from bigtrain.models.parallel.sharding import is_expert, shard_of
from bigtrain.settings.sections.optimizer import MuonSection


class Muon(UpdateRule):
    """State: `momentum_buffer`. Collective over the ranks of a stage. sent_bytes: of parts of
    matrices, there and back."""

    sent_bytes: int

    def __init__(
        self,
        section: MuonSection,
        state_dtype: torch.dtype,
        model: nn.Module,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        """model: this rank's stage, whose hidden matrices are updated. Collective over all ranks.
        Raises ConfigError for a `split` that does not fit the model."""
        self._section, self._state_dtype, self._device = section, state_dtype, device
        self.sent_bytes = 0
        hidden_by_name = hidden_matrices(model)
        self.parameters = {name: parameter_of(model, name) for name in hidden_by_name}
        # By whether they are of experts, like the groups.
        self._matrices: dict[bool, list[Matrix]] = {False: [], True: []}
        for name, hidden in hidden_by_name.items():
            parameter = self.parameters[name]
            matrices = matrices_of([hidden], section.split)
            shard = shard_of(parameter)
            if shard is not None and shard.over == "expert":  # without the experts of other ranks
                matrices = [
                    matrix
                    for matrix in matrices
                    if any(low <= matrix.boxes[0].offsets[0] < high for low, high in shard.ranges)
                ]
            self._matrices[is_expert(parameter)] += matrices
        self._groups = open_holders(mesh)
        self._tensor_ranks = set(dist.get_process_group_ranks(mesh.tensor))
        self._parts: list[MasterPart] | None = None
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}

    @classmethod
    def of(cls, inputs: RuleInputs) -> Self:
        settings = inputs.section.muon
        return cls(settings, inputs.state_dtype, inputs.model, inputs.mesh, inputs.device)

    def attach(self, parts: Sequence[MasterPart]) -> None:
        self._parts = [part for part in parts if part.name in self.parameters]

    def update(self, masters: Sequence[Master], group: Mapping[str, Any]) -> None:
        """`group`: "moe" where it is of experts that ranks divide, as DeepSpeed has it."""
        momentum = self._section.momentum
        for master in masters:
            master.step_count().add_(1)
            buffer = master.moment("momentum_buffer", self._state_dtype)
            for gradient, averages in chunks(master.gradient, buffer):
                store(averages, averages.float().lerp_(gradient, 1 - momentum), gradient)
        if self._parts is None or group["lr"] == 0:
            return  # DeepSpeed or `ensure_optimizer_states` only allocates states
        # The exchange for these masters is planned once, which is collective.
        numbers = {id(master.values): number for number, master in enumerate(masters)}
        key = tuple(numbers)
        if key not in self._exchanges:
            names = set(names_in_update(self._parts, masters, group))
            self._exchanges[key] = self._new_exchange(numbers, names, "moe" in group)
        exchange, dtype = self._exchanges[key], getattr(torch, self._section.ns_dtype)
        self.sent_bytes += exchange.num_elements_sent * dtype.itemsize

        def read(piece: MasterRectangle, part: torch.Tensor) -> None:
            master = masters[piece.master]
            direction = piece.of(master.state["momentum_buffer"]).float()
            if self._section.nesterov:
                direction = piece.of(master.gradient).lerp(direction, momentum)
            part.copy_(direction)

        def write(piece: MasterRectangle, update: torch.Tensor) -> None:
            matrix = self._matrices["moe" in group][piece.matrix]
            scale = update_scale(matrix.shape, self._section.adjust_lr)
            values = piece.of(masters[piece.master].values)
            values.mul_(1 - group["lr"] * group["weight_decay"])
            values.add_(update, alpha=-group["lr"] * scale)

        exchange.run(dtype, read, self._orthogonalized, write)

    def _orthogonalized(self, matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Orthogonalize `matrices`; on a GPU equally shaped matrices in a batch, since small
        products leave it idle."""
        section = self._section
        options = (section.ns_coefficients, section.ns_steps, section.eps)
        if self._device.type != "cuda":
            return [orthogonalized(matrix, *options) for matrix in matrices]
        numbers_by_shape: dict[torch.Size, list[int]] = {}
        for number, matrix in enumerate(matrices):
            numbers_by_shape.setdefault(matrix.shape, []).append(number)
        outputs = list(matrices)
        for numbers in numbers_by_shape.values():
            results = orthogonalized(torch.stack([matrices[n] for n in numbers]), *options)
            for number, result in zip(numbers, results, strict=True):
                outputs[number] = result
        return outputs

    def _new_exchange(
        self, numbers: Mapping[int, int], names: Container[str], is_of_experts: bool
    ) -> MatrixExchange:
        assert self._parts is not None
        numbered: dict[str, list[tuple[int, Matrix]]] = {}
        matrices = self._matrices[is_of_experts]
        matrix_numbers = [n for n, matrix in enumerate(matrices) if matrix.parameter in names]
        for number in matrix_numbers:
            numbered.setdefault(matrices[number].parameter, []).append((number, matrices[number]))
        group = self._groups[is_of_experts]
        ranks = dist.get_process_group_ranks(group)
        holdings = [
            HeldShard(piece, partial(self._sends, part, ranks))
            for part in self._parts
            if part.name in numbered
            for piece in pieces_of(part, numbers[id(part.master)], numbered)
        ]
        return MatrixExchange(
            {n: matrices[n].shape for n in matrix_numbers},
            lambda shape: cost(*shape, self._section.ns_steps),
            holdings,
            group,
            self._device,
        )

    def _sends(self, part: MasterPart, ranks: Sequence[int], owner: int) -> bool:
        """Return whether this rank sends `part` to the owner: of replicas of a part, the replica in
        the owner's tensor-parallel group does."""
        return part.shard.primary and (not part.is_replicated or ranks[owner] in self._tensor_ranks)


RULE = Muon


def update_scale(shape: tuple[int, int], adjust_lr: str) -> float:
    """Return the factor of the learning rate for a matrix [rows, columns]."""
    rows, columns = shape
    if adjust_lr == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


Coefficients = tuple[float, float, float]


def orthogonalized(
    matrices: torch.Tensor, coefficients: Coefficients, num_steps: int, eps: float
) -> torch.Tensor:
    """Return approximately U V^T per matrix U S V^T: singular values end near 1, not at it. The
    iteration X <- a X + (b A + c A A) X, with A = X X^T, of `torch.optim.Muon` (Jordan 2024,
    https://kellerjordan.github.io/posts/muon/), in the dtype of `matrices` [..., rows, columns]."""
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = _fused(None, x, x.mT)
        update = _fused(gram, gram, gram, b, c)
        x = _fused(x, update, x, a, 1.0)
    return x.mT if is_tall else x


def _fused(
    added: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Return beta added + alpha a b. On a CPU in 16 bit it computes in float32 and rounds the
    result: bit for bit like the CPU's 16-bit products, which are thirty times slower if the
    processor has no instruction for them."""
    if a.dtype != torch.float32 and a.device.type == "cpu":
        wide = None if added is None else added.float()
        return _fused(wide, a.float(), b.float(), beta, alpha).to(a.dtype)
    if added is None:
        return a @ b
    product = torch.addmm if added.ndim == 2 else torch.baddbmm
    return product(added, a, b, beta=beta, alpha=alpha)


def cost(rows: int, columns: int, num_steps: int) -> int:
    """Floating-point operations of `orthogonalized` on one matrix."""
    short, long = sorted((rows, columns))
    return num_steps * (4 * short * short * long + 2 * short**3)
