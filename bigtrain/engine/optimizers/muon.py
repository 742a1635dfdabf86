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
    """State: `momentum_buffer`. Collective over the ranks of a stage. sent_bytes: of the parts of
    matrices that this rank sends, in both directions."""

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
        # By whether they belong to experts, as the groups of `open_holders`.
        self._matrices: dict[bool, list[Matrix]] = {False: [], True: []}
        for name, hidden in hidden_by_name.items():
            parameter = self.parameters[name]
            matrices = matrices_of([hidden], section.split)
            shard = shard_of(parameter)
            if shard is not None and shard.over == "expert":  # only experts of this rank
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
        """Update `masters`; `group` has the key "moe" if it has experts that ranks divide, as in
        DeepSpeed."""
        momentum = self._section.momentum
        for master in masters:
            master.step_count().add_(1)
            buffer = master.moment("momentum_buffer", self._state_dtype)
            for gradient, averages in chunks(master.gradient, buffer):
                store(averages, averages.float().lerp_(gradient, 1 - momentum), gradient)
        if self._parts is None or group["lr"] == 0:
            return  # DeepSpeed or `ensure_optimizer_states` only allocates states
        # Plan the exchange for these masters, once; the planning is collective.
        number_by_id = {id(master.values): number for number, master in enumerate(masters)}
        key = tuple(number_by_id)
        if key not in self._exchanges:
            names = set(names_in_update(self._parts, masters, group))
            self._exchanges[key] = self._new_exchange(number_by_id, names, "moe" in group)
        exchange, dtype = self._exchanges[key], getattr(torch, self._section.ns_dtype)
        self.sent_bytes += exchange.num_elements_sent * dtype.itemsize

        def read(piece: MasterRectangle, part: torch.Tensor) -> None:
            """Fill `part` with the direction: m, or with Nesterov (1 - momentum) g + momentum m."""
            master = masters[piece.master]
            direction = piece.of(master.state["momentum_buffer"]).float()
            if self._section.nesterov:
                direction = piece.of(master.gradient).lerp(direction, momentum)
            part.copy_(direction)

        def write(piece: MasterRectangle, update: torch.Tensor) -> None:
            """Apply x <- (1 - lr decay) x - lr scale update."""
            matrix = self._matrices["moe" in group][piece.matrix]
            scale = update_scale(matrix.shape, self._section.adjust_lr)
            values = piece.of(masters[piece.master].values)
            values.mul_(1 - group["lr"] * group["weight_decay"])
            values.add_(update, alpha=-group["lr"] * scale)

        exchange.run(dtype, read, self._orthogonalized, write)

    def _orthogonalized(self, matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Orthogonalize `matrices`; on a GPU equally shaped matrices in a batch, since products of
        single small matrices leave a GPU idle."""
        section = self._section
        options = (section.ns_coefficients, section.ns_steps, section.eps)
        if self._device.type != "cuda":
            return [orthogonalized(matrix, *options) for matrix in matrices]
        numbers_by_shape: dict[torch.Size, list[int]] = {}
        for number, matrix in enumerate(matrices):
            numbers_by_shape.setdefault(matrix.shape, []).append(number)
        outputs = list(matrices)
        for numbers in numbers_by_shape.values():
            batch = torch.stack([matrices[number] for number in numbers])
            for number, result in zip(numbers, orthogonalized(batch, *options), strict=True):
                outputs[number] = result
        return outputs

    def _new_exchange(
        self, number_by_id: Mapping[int, int], names: Container[str], has_experts: bool
    ) -> MatrixExchange:
        """Plan the exchange of the matrices of the parameters `names`. number_by_id: numbers of the
        masters. Collective."""
        assert self._parts is not None
        # The matrices by number, and by parameter.
        shapes: dict[int, tuple[int, int]] = {}
        matrices_by_name: dict[str, list[tuple[int, Matrix]]] = {}
        for number, matrix in enumerate(self._matrices[has_experts]):
            if matrix.parameter in names:
                shapes[number] = matrix.shape
                matrices_by_name.setdefault(matrix.parameter, []).append((number, matrix))
        group = self._groups[has_experts]
        ranks = dist.get_process_group_ranks(group)
        holdings = []
        for part in self._parts:
            if part.name in matrices_by_name:
                is_sent = partial(self._sends, part, ranks)
                master = number_by_id[id(part.master)]
                pieces = pieces_of(part, master, matrices_by_name)
                holdings += [HeldShard(piece, is_sent) for piece in pieces]

        def matrix_cost(shape: tuple[int, int]) -> int:
            return cost(*shape, self._section.ns_steps)

        return MatrixExchange(shapes, matrix_cost, holdings, group, self._device)

    def _sends(self, part: MasterPart, ranks: Sequence[int], owner: int) -> bool:
        """Return whether this rank sends `part` to the owner (a rank of `ranks`, by index). If
        replicas hold the part, the replica in the owner's tensor-parallel group sends it."""
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
    """Return approximately U V^T for each matrix U S V^T: the singular values end near 1. The
    iteration X <- a X + (b A + c A A) X, with A = X X^T, of `torch.optim.Muon` (Jordan 2024,
    https://kellerjordan.github.io/posts/muon/), in the dtype of `matrices` [..., rows, columns]."""
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = _product(None, x, x.mT)
        polynomial = _product(gram, gram, gram, b, c)
        x = _product(x, polynomial, x, a, 1.0)
    return x.mT if is_tall else x


def _product(
    added: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Return beta added + alpha a b. On a CPU in 16 bits compute in float32 and round the result:
    the bits equal the CPU's 16-bit products, which are thirty times slower if the processor has no
    instruction for 16 bits."""
    if a.dtype != torch.float32 and a.device.type == "cpu":
        wide = None if added is None else added.float()
        return _product(wide, a.float(), b.float(), beta, alpha).to(a.dtype)
    if added is None:
        return a @ b
    product = torch.addmm if added.ndim == 2 else torch.baddbmm
    return product(added, a, b, beta=beta, alpha=alpha)


def cost(rows: int, columns: int, num_steps: int) -> int:
    """Return the floating-point operations of `orthogonalized` for a matrix."""
    # In a step: X X^T and (b A + c A A) X, of 2 short^2 long each, and A A, of 2 short^3.
    short, long = sorted((rows, columns))
    return num_steps * (4 * short * short * long + 2 * short**3)
