"""Optimizer of the run by torch's own implementation, on full masters in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from bigtrain.errors import ConfigError, Problem
from bigtrain.models.layers.parameter_roles import parameter_roles
from bigtrain.models.parallel.hidden_matrices import Matrix, hidden_matrices, matrices_of
from bigtrain.models.weights.quantized import import_bitsandbytes
from bigtrain.settings.run_config import OptimizerSection


class PlainOptimizer(Protocol):
    """Interface of an optimizer in a plain PyTorch training loop."""

    param_groups: list[dict[str, Any]]

    def step(self) -> object:
        """Update once, by the gradients."""


Groups = list[dict[str, Any]]
"""torch's parameter groups of masters."""


def plain_optimizer(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    masters: Mapping[str, torch.Tensor],
    section: OptimizerSection,
) -> PlainOptimizer:
    """Return the optimizer that updates `masters`, of `parameters` by name. Set the learning rate
    in its groups. Weight decay follows their roles."""
    chosen = {} if section.facts.beside is None else hidden_matrices(model)
    roles = parameter_roles(model)
    decay, no_decay = [], []
    for name in parameters:
        if name in chosen:
            continue
        if roles[name].role.decays(decay_embeddings=section.decay_embeddings):
            decay.append(masters[name])
        else:
            no_decay.append(masters[name])
    groups = [
        {"params": decay, "weight_decay": section.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    facts = section.facts
    plain = PLAIN[facts.beside or section.type](groups, section)
    if facts.beside is None:
        return plain
    own = section.own_settings
    ratio = 1.0 if getattr(own, "lr", None) is None else own.lr / section.lr
    matrices = matrices_of(chosen.values(), getattr(own, "split", {}))
    return CombinedOptimizer(
        [(PLAIN_OF_MATRICES[section.type](matrices, masters, section), ratio), (plain, 1.0)]
    )


def check_comparable(section: OptimizerSection) -> None:
    """Raise ConfigError for an optimizer without a plain one to compare with."""
    known = PLAIN.keys() | PLAIN_OF_MATRICES.keys()
    if section.type not in known:
        rule = "has no plain optimizer for comparison"
        raise ConfigError(Problem("optimizer.type", section.type, rule, f"one of {sorted(known)}"))


class CombinedOptimizer:
    """Optimizers that step together; the learning rate of each is the common one times its
    ratio."""

    def __init__(self, parts: Sequence[tuple[PlainOptimizer, float]]) -> None:
        self._parts = parts
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]

    def step(self) -> None:
        """Update once."""
        for optimizer, ratio in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = self.param_groups[0]["lr"] * ratio
            optimizer.step()


class _MuonOfParts:
    """Muon on matrices that are slices of masters."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        masters: Mapping[str, torch.Tensor],
        section: OptimizerSection,
    ) -> None:
        self._matrices = matrices
        self._masters = [masters[matrix.parameter] for matrix in matrices]
        self._copies = [_taken(*pair) for pair in zip(self._masters, matrices, strict=True)]
        self._optimizer = _muon(self._copies, section)
        self.param_groups = self._optimizer.param_groups

    def step(self) -> None:
        every = zip(self._copies, self._masters, self._matrices, strict=True)
        held = [entry for entry in every if entry[1].grad is not None]
        for copy, master, matrix in held:
            assert master.grad is not None
            copy.copy_(_taken(master, matrix))
            copy.grad = _taken(master.grad, matrix)
        self._optimizer.step()
        for copy, master, matrix in held:
            sizes = [box.sizes[matrix.output_dim] for box in matrix.boxes]
            for box, part in zip(matrix.boxes, copy.split(sizes, matrix.output_dim), strict=True):
                master[box.slices] = part.view(box.sizes)


def _taken(tensor: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    parts = [tensor[box.slices].reshape(box.sizes[-2:]) for box in matrix.boxes]
    return torch.cat(parts, matrix.output_dim)


def _adamw(groups: Groups, section: OptimizerSection) -> PlainOptimizer:
    return torch.optim.AdamW(groups, betas=section.betas, eps=section.eps)


def _adafactor(groups: Groups, section: OptimizerSection) -> PlainOptimizer:
    own = section.adafactor
    return torch.optim.Adafactor(
        groups, beta2_decay=own.beta2_decay, eps=(own.eps1, own.eps2), d=own.clip_threshold
    )


def _muon(matrices: Sequence[torch.Tensor], section: OptimizerSection) -> PlainOptimizer:
    own = section.muon
    decay = section.weight_decay if own.weight_decay is None else own.weight_decay
    if own.ns_dtype == "float32":
        return _WideMuon(matrices, section, decay)
    return torch.optim.Muon(
        matrices,
        momentum=own.momentum,
        nesterov=own.nesterov,
        ns_steps=own.ns_steps,
        ns_coefficients=own.ns_coefficients,
        eps=own.eps,
        weight_decay=decay,
        adjust_lr_fn=own.adjust_lr,
    )


class _WideMuon:
    """`torch.optim.Muon` with its iteration in float32; torch's is always in bfloat16."""

    def __init__(
        self, matrices: Sequence[torch.Tensor], section: OptimizerSection, decay: float
    ) -> None:
        self._matrices, self._own, self._decay = matrices, section.muon, decay
        self._moments = [torch.zeros_like(matrix) for matrix in matrices]
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]

    def step(self) -> None:
        lr, own = self.param_groups[0]["lr"], self._own
        for matrix, moment in zip(self._matrices, self._moments, strict=True):
            gradient = matrix.grad
            if gradient is None:
                continue
            moment.lerp_(gradient, 1 - own.momentum)
            update = gradient.lerp(moment, own.momentum) if own.nesterov else moment
            rows, columns = matrix.shape
            scale = 0.2 * math.sqrt(max(rows, columns))
            if own.adjust_lr == "original":
                scale = math.sqrt(max(1.0, rows / columns))
            matrix.mul_(1 - lr * self._decay)
            matrix.add_(self._newton_schulz(update), alpha=-lr * scale)

    def _newton_schulz(self, update: torch.Tensor) -> torch.Tensor:
        a, b, c = self._own.ns_coefficients
        is_tall = update.shape[0] > update.shape[1]
        x: torch.Tensor = update.T if is_tall else update
        x = x / x.norm().clamp(min=self._own.eps)
        for _ in range(self._own.ns_steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if is_tall else x


class _Lion:
    """Lion (Chen et al. 2023, arXiv 2302.06675, algorithm 2); torch has none."""

    def __init__(self, groups: Groups, section: OptimizerSection) -> None:
        self.param_groups = groups
        self._betas = section.betas
        self._moments = {
            id(master): torch.zeros_like(master) for group in groups for master in group["params"]
        }

    def step(self) -> None:
        for group in self.param_groups:
            for master in group["params"]:
                moment, gradient = self._moments[id(master)], master.grad
                if gradient is None:
                    continue
                direction = self._betas[0] * moment + (1 - self._betas[0]) * gradient
                master.mul_(1 - group["lr"] * group["weight_decay"])
                master.add_(direction.sign(), alpha=-group["lr"])
                moment.mul_(self._betas[1]).add_(gradient, alpha=1 - self._betas[1])


def _adamw_8bit(groups: Groups, section: OptimizerSection) -> PlainOptimizer:
    optimizer: PlainOptimizer = import_bitsandbytes().optim.AdamW8bit(
        groups, betas=section.betas, eps=section.eps
    )
    return optimizer


PLAIN: dict[str, Callable[[Groups, OptimizerSection], PlainOptimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "lion": _Lion,
    "adafactor": _adafactor,
}
"""Optimizers by ``optimizer.type``: on full masters, in groups with and without decay."""

PLAIN_OF_MATRICES: dict[
    str, Callable[[Sequence[Matrix], Mapping[str, torch.Tensor], OptimizerSection], PlainOptimizer]
] = {"muon": _MuonOfParts}
"""Optimizers by ``optimizer.type``: on the matrices of hidden layers only."""
