"""Optimizers of plain PyTorch, for `tests.parity.plain.train`: each of whole masters by name.

Of bigtrain there is only `Together`, which sets two rates and steps twice: the engine has no part
of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bigtrain.parity.optimizers import CombinedOptimizer
from tests.parity.plain import adamw, decay_groups

HIDDEN = r".*layers\.\d+\..*(proj|dense|dense_h_to_4h|dense_4h_to_h|key_value)(\.weight)?"
"""Names of the hidden matrices of the models that are tested; nothing else has such names."""


def zeropower(grad: torch.Tensor, coefficients: Any, num_steps: int, eps: float) -> torch.Tensor:
    """torch's Newton-Schulz (optim/_muon.py) in float32; torch itself has it in bfloat16."""
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


Keep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What is kept of a state, from its float32 value and the gradient."""


def in_float32(value: torch.Tensor, _gradient: torch.Tensor) -> torch.Tensor:
    return value


def in_bfloat16(value: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Up or down to a neighbour that bfloat16 has, by lowbias32 of the bits of both (Wellons)."""
    bits, x = (t.contiguous().numpy().view(np.uint32) for t in (value, gradient))
    x = x * np.uint32(3) ^ bits
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    up = bits + (x & np.uint32(0xFFFF))
    return torch.from_numpy((up & np.uint32(0xFFFF0000)).view(np.float32))


class Kept:
    """One of torch's optimizers, whose states are `keep`s of what each step makes of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, keep: Keep) -> None:
        self._optimizer, self._keep = optimizer, keep
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        self._optimizer.step()
        for master, state in self._optimizer.state.items():
            for moment in (state["exp_avg"], state["exp_avg_sq"]):
                moment.copy_(self._keep(moment, master.grad))


def kept_adamw(masters: dict[str, torch.Tensor], section: dict[str, Any]) -> Kept:
    return Kept(adamw(list(masters.values()), section), in_bfloat16)


class KeptMuon:
    """Muon as torch has it, with momentum in bfloat16 and iterations in float32: of whole
    masters."""

    def __init__(self, masters: Sequence[torch.Tensor], weight_decay: float) -> None:
        self._masters, self._decay = masters, weight_decay
        self._moments = [torch.zeros_like(master) for master in masters]
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]

    @torch.no_grad()
    def step(self) -> None:
        lr = self.param_groups[0]["lr"]
        for master, moment in zip(self._masters, self._moments, strict=True):
            assert master.grad is not None
            moment.copy_(in_bfloat16(moment.lerp(master.grad, 0.05), master.grad))
            update = master.grad.lerp(moment, 0.95)
            update = zeropower(update, (3.4445, -4.7750, 2.0315), 5, 1e-7)
            master.mul_(1 - lr * self._decay)
            master.add_(update, alpha=-0.2 * lr * math.sqrt(max(master.shape)))


def kept_muon(masters: dict[str, torch.Tensor], section: dict[str, Any]) -> CombinedOptimizer:
    """Muon and AdamW with states in bfloat16, of a model without experts."""
    hidden = [name for name in masters if re.fullmatch(HIDDEN, name) and masters[name].ndim == 2]
    rest = {name: tensor for name, tensor in masters.items() if name not in hidden}
    matrices = KeptMuon([masters[name] for name in hidden], section.get("weight_decay", 0.1))
    return CombinedOptimizer([(matrices, 1.0), (kept_adamw(rest, section), 1.0)])


class SlicedMuon:
    """torch's Muon of matrices that are slices of masters: [master, slice] pairs."""

    def __init__(
        self, slices: Sequence[tuple[torch.Tensor, Any]], is_wide: bool, **options: Any
    ) -> None:
        self._is_wide = is_wide
        self._slices = slices
        self._own = [master[where].clone() for master, where in slices]
        self._optimizer = torch.optim.Muon(self._own, **options)
        self.param_groups = self._optimizer.param_groups

    def step(self) -> None:
        for own, (master, where) in zip(self._own, self._slices, strict=True):
            own.copy_(master[where])
            own.grad = None if master.grad is None else master.grad[where].clone()
        with pytest.MonkeyPatch.context() as patch:
            if self._is_wide:
                patch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", zeropower)
            self._optimizer.step()
        for own, (master, where) in zip(self._own, self._slices, strict=True):
            master[where] = own


def muon(
    masters: dict[str, torch.Tensor],
    section: dict[str, Any],
    splits: Any = None,
    matrices: str = HIDDEN,
    exempt: Sequence[torch.Tensor] = (),
) -> CombinedOptimizer:
    """torch's Muon of hidden matrices, of stacked experts one by one, and AdamW of the rest.

    splits: from the name of a fused projection to the slices of its matrices. matrices: a regular
    expression of names. exempt: do not decay. What has no gradient is left as it is.
    """
    own = section.get("muon", {})
    hidden = [name for name in masters if re.fullmatch(matrices, name) and masters[name].ndim > 1]
    slices: list[tuple[torch.Tensor, Any]] = []
    for name in hidden:
        master = masters[name]
        wheres = (splits or {}).get(name.rpartition("layers.")[2].partition(".")[2])
        if wheres is None:
            wheres = list(range(len(master))) if master.ndim == 3 else [slice(None)]
        slices += [(master, where) for where in wheres]
    rest = [tensor for name, tensor in masters.items() if name not in hidden]
    options = {
        "momentum": own.get("momentum", 0.95),
        "nesterov": own.get("nesterov", True),
        "ns_steps": own.get("ns_steps", 5),
        "adjust_lr_fn": own.get("adjust_lr", "match_rms_adamw"),
        "weight_decay": own.get("weight_decay", section.get("weight_decay", 0.1)),
    }
    return CombinedOptimizer(
        [
            (
                SlicedMuon(slices, own.get("ns_dtype") == "float32", lr=1.0, **options),
                own.get("lr", section["lr"]) / section["lr"],
            ),
            (adamw(rest, section, exempt), 1.0),
        ]
    )


class _Lion:
    """Algorithm 2 of Chen et al. 2023, word by word."""

    def __init__(
        self,
        masters: list[torch.Tensor],
        section: dict[str, Any],
        keep: Keep,
        exempt: Sequence[torch.Tensor] = (),
    ) -> None:
        self._masters, self._keep = masters, keep
        self._exempt = {id(master) for master in exempt}
        self._betas = section.get("betas", (0.9, 0.99))
        self._decay = section.get("weight_decay", 0.1)
        self._moments = [torch.zeros_like(master) for master in masters]
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]

    def step(self) -> None:
        lr = self.param_groups[0]["lr"]
        for master, m in zip(self._masters, self._moments, strict=True):
            g = master.grad
            if g is None:
                continue
            decays = master.ndim >= 2 and id(master) not in self._exempt
            decay = self._decay if decays else 0.0
            c = self._betas[0] * m + (1 - self._betas[0]) * g
            master -= lr * (torch.sign(c) + decay * master)
            m.copy_(self._keep(self._betas[1] * m + (1 - self._betas[1]) * g, g))


def lion(
    masters: dict[str, torch.Tensor], section: dict[str, Any], exempt: Sequence[torch.Tensor] = ()
) -> Any:
    return _Lion(list(masters.values()), section, in_float32, exempt)


def kept_lion(masters: dict[str, torch.Tensor], section: dict[str, Any]) -> Any:
    return _Lion(list(masters.values()), section, in_bfloat16)


def adafactor(
    masters: dict[str, torch.Tensor], section: dict[str, Any], exempt: Sequence[torch.Tensor] = ()
) -> Any:
    """torch's Adafactor; matrices decay, vectors and `exempt` do not."""
    return torch.optim.Adafactor(
        decay_groups(masters.values(), section, exempt),
        eps=(section.get("adafactor", {}).get("eps1"), 1e-3),
    )


def adamw_8bit(masters: dict[str, torch.Tensor], section: dict[str, Any]) -> Any:
    """bitsandbytes' AdamW8bit; matrices decay, vectors do not."""
    return _of_bitsandbytes(decay_groups(masters.values(), section), section)


def _of_bitsandbytes(groups: Any, section: dict[str, Any]) -> Any:
    library = pytest.importorskip("bitsandbytes")
    eps = section.get("eps", 1e-8)
    return library.optim.AdamW8bit(groups, betas=(0.9, 0.95), eps=eps)


class PartsOfMasters:
    """bitsandbytes' AdamW8bit of flat parts of masters, each with blocks of its own."""

    def __init__(self, groups: list[Any], section: dict[str, Any], num_parts: int) -> None:
        self._masters = [master for group in groups for master in group["params"]]
        self._parts = {id(m): list(m.view(-1).chunk(num_parts)) for m in self._masters}
        own = [
            {**group, "params": [part for m in group["params"] for part in self._parts[id(m)]]}
            for group in groups
        ]
        self._optimizer = _of_bitsandbytes(own, section)
        self.param_groups = self._optimizer.param_groups

    def step(self) -> None:
        for master in self._masters:
            parts = self._parts[id(master)]
            for part, gradient in zip(parts, master.grad.view(-1).chunk(len(parts)), strict=True):
                part.grad = gradient
        self._optimizer.step()


def adamw_8bit_of_parts(
    masters: dict[str, torch.Tensor], section: dict[str, Any], num_parts: int
) -> PartsOfMasters:
    """As `adamw_8bit`, of each part of a master by itself."""
    return PartsOfMasters(decay_groups(masters.values(), section), section, num_parts)
