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
    loraplus_lr_ratio: float | None = None,
) -> PlainOptimizer:
    """Return the optimizer that updates `masters`, float32 copies of `parameters`, by name; the
    caller sets the learning rate in its groups. `loraplus_lr_ratio`: see `AdaptersSection`."""
    if loraplus_lr_ratio is not None:
        # LoRA+: matrices B, and vectors such as DoRA's magnitudes, have a larger learning rate.
        fast = {n: p for n, p in parameters.items() if ".lora_B." in n or p.ndim == 1}
        slow = {name: p for name, p in parameters.items() if name not in fast}
        return CombinedOptimizer(
            [
                (plain_optimizer(model, slow, masters, section), 1.0),
                (plain_optimizer(model, fast, masters, section), loraplus_lr_ratio),
            ]
        )
    # Weight decay by role, without matrices that a second optimizer updates.
    matrix_names = {} if section.facts.beside is None else hidden_matrices(model)
    roles = parameter_roles(model)
    decay, no_decay = [], []
    for name in parameters:
        if name in matrix_names:
            continue
        if roles[name].role.decays(decay_embeddings=section.decay_embeddings):
            decay.append(masters[name])
        else:
            no_decay.append(masters[name])
    groups = [
        {"params": decay, "weight_decay": section.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    # One optimizer for all parameters, or another one (`beside`) for all but the matrices.
    facts = section.facts
    plain = PLAIN[facts.beside or section.type](groups, section)
    if facts.beside is None:
        return plain
    settings = section.own_settings
    lr_ratio = 1.0 if getattr(settings, "lr", None) is None else settings.lr / section.lr
    matrices = matrices_of(matrix_names.values(), getattr(settings, "split", {}))
    matrix_optimizer = PLAIN_OF_MATRICES[section.type](matrices, masters, section)
    return CombinedOptimizer([(matrix_optimizer, lr_ratio), (plain, 1.0)])


def check_comparable(section: OptimizerSection) -> None:
    """Raise ConfigError for an optimizer without a plain one to compare with."""
    types = PLAIN.keys() | PLAIN_OF_MATRICES.keys()
    if section.type not in types:
        rule = "has no plain optimizer for comparison"
        raise ConfigError(Problem("optimizer.type", section.type, rule, f"one of {sorted(types)}"))


class CombinedOptimizer:
    """Optimizers that step together. parts: optimizers, and their learning rates as multiples of
    the common learning rate."""

    def __init__(self, parts: Sequence[tuple[PlainOptimizer, float]]) -> None:
        self._parts = parts
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]

    def step(self) -> None:
        """Update once."""
        for optimizer, ratio in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = self.param_groups[0]["lr"] * ratio
            optimizer.step()


class _Muon:
    """`torch.optim.Muon` on matrices that are slices of masters, with the iteration in float32
    (torch's iteration is always in bfloat16)."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        masters: Mapping[str, torch.Tensor],
        section: OptimizerSection,
    ) -> None:
        self._matrices, self._settings = matrices, section.muon
        self._masters = [masters[matrix.parameter] for matrix in matrices]
        self._moments = [torch.zeros(matrix.shape) for matrix in matrices]
        decay = section.muon.weight_decay
        self._decay = section.weight_decay if decay is None else decay
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]

    def step(self) -> None:
        """Update once. A matrix may have slices in several boxes of its master."""
        lr, settings = self.param_groups[0]["lr"], self._settings
        zipped = zip(self._matrices, self._masters, self._moments, strict=True)
        for matrix, master, moment in zipped:
            if master.grad is None:
                continue
            values, gradient = (
                torch.cat(
                    [tensor[box.slices].reshape(box.sizes[-2:]) for box in matrix.boxes],
                    matrix.output_dim,
                )
                for tensor in (master, master.grad)
            )
            moment.lerp_(gradient, 1 - settings.momentum)
            update = gradient.lerp(moment, settings.momentum) if settings.nesterov else moment
            rows, columns = values.shape
            scale = 0.2 * math.sqrt(max(rows, columns))
            if settings.adjust_lr == "original":
                scale = math.sqrt(max(1.0, rows / columns))
            values.mul_(1 - lr * self._decay)
            values.add_(self._newton_schulz(update), alpha=-lr * scale)
            sizes = [box.sizes[matrix.output_dim] for box in matrix.boxes]
            box_values = values.split(sizes, matrix.output_dim)
            for box, values_of_box in zip(matrix.boxes, box_values, strict=True):
                master[box.slices] = values_of_box.view(box.sizes)

    def _newton_schulz(self, update: torch.Tensor) -> torch.Tensor:
        """Return the orthogonalized update: X <- a X + (b A + c A A) X, A = X X^T (Jordan 2024)."""
        a, b, c = self._settings.ns_coefficients
        is_tall = update.shape[0] > update.shape[1]
        x: torch.Tensor = update.T if is_tall else update
        x = x / x.norm().clamp(min=self._settings.eps)
        for _ in range(self._settings.ns_steps):
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
        """Update once."""
        for group in self.param_groups:
            for master in group["params"]:
                moment, gradient = self._moments[id(master)], master.grad
                if gradient is None:
                    continue
                beta1, beta2 = self._betas
                direction = beta1 * moment + (1 - beta1) * gradient
                master.mul_(1 - group["lr"] * group["weight_decay"])
                master.add_(direction.sign(), alpha=-group["lr"])
                moment.mul_(beta2).add_(gradient, alpha=1 - beta2)


PLAIN: dict[str, Callable[[Groups, OptimizerSection], PlainOptimizer]] = {
    "adamw": lambda groups, section: torch.optim.AdamW(
        groups, betas=section.betas, eps=section.eps
    ),
    "adamw_8bit": lambda groups, section: import_bitsandbytes().optim.AdamW8bit(
        groups, betas=section.betas, eps=section.eps
    ),
    "lion": _Lion,
    "adafactor": lambda groups, section: torch.optim.Adafactor(
        groups,
        beta2_decay=section.adafactor.beta2_decay,
        eps=(section.adafactor.eps1, section.adafactor.eps2),
        d=section.adafactor.clip_threshold,
    ),
}
"""Optimizers by ``optimizer.type``: on full masters, in groups with and without decay."""

PLAIN_OF_MATRICES: dict[
    str, Callable[[Sequence[Matrix], Mapping[str, torch.Tensor], OptimizerSection], PlainOptimizer]
] = {"muon": _Muon}
"""Optimizers by ``optimizer.type``: on the matrices of hidden layers only."""
