"""AdamW in one kernel that also clips, and writes the 16-bit parameters: 30 bytes of memory traffic
for each parameter, where clipping (8), torch's fused AdamW (28) and a copy (6) take 42."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.utils import all_gather_dp_groups

from bigtrain.system.triton_build import triton_problem

log = logging.getLogger(__name__)

_EPS = 1e-6
"""Of DeepSpeed 0.19.8's clipping (runtime/utils.py, `clip_tensors_by_global_norm`;
runtime/zero/stage_1_and_2.py, `unscale_and_clip_grads`)."""


def gradient_factor(norm: torch.Tensor, clip_norm: float, num_summed: int) -> torch.Tensor | None:
    """Return what the update multiplies gradients by, which are sums over `num_summed` replicas:
    float32 [], None for 1. norm: of their mean. clip_norm: 0 to clip nothing."""
    if clip_norm > 0.0:
        # Of 1 where nothing is clipped: the host does not ask.
        return (clip_norm / (norm + _EPS)).clamp(max=1.0) / num_summed
    return None if num_summed == 1 else torch.full_like(norm, 1 / num_summed)


def update(
    master: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    weights: torch.Tensor,
    *,
    factors: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update in place what is 1-D and equally long. factors: of the gradient, of the master's
    decay, of the step size, and the square root of the second moment's correction: float32 [4].

    The order of operations is that of torch 2.13's fused kernel
    (aten/src/ATen/native/cuda/fused_adam_utils.cuh, `adam_math`).
    """
    gradient_factor, decay, step_size, root = factors.unbind()
    clipped = gradient * gradient_factor
    decayed = master * decay
    new_mean = betas[0] * mean + (1 - betas[0]) * clipped
    new_square = betas[1] * square + (1 - betas[1]) * clipped * clipped
    new_master = decayed - step_size * new_mean / (new_square.sqrt() / root + eps)
    mean.copy_(new_mean)
    square.copy_(new_square)
    master.copy_(new_master)
    weights.copy_(new_master)


def compile_update() -> Callable[..., None]:
    """Return the update, which is compiled at its first call for each size of a master."""
    return torch.compile(update, dynamic=False, fullgraph=True)


def trial_problem(device: torch.device) -> str | None:
    """Return what is wrong with the compiled update on `device`, or None: it is compiled, and
    compared with the update without a compiler, on a few numbers."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.rand(512, generator=generator).to(device) for _ in range(4)]
    factors = torch.tensor([0.5, 0.99, 1e-3, 0.7], device=device)
    results = []
    try:
        for compute in (update, compile_update()):
            tensors = [state.clone() for state in states]
            tensors.append(torch.zeros(512, device=device, dtype=torch.bfloat16))
            compute(*tensors, factors=factors, betas=(0.9, 0.95), eps=1e-8)
            results.append([tensor.float().cpu() for tensor in tensors])
    except Exception as error:  # of a compiler, which may be any
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    plain, compiled = results
    for name, a, b in zip(_NAMES, plain, compiled, strict=True):
        # A rounding of bfloat16 may go the other way.
        if not torch.allclose(a, b, rtol=2**-8 if name == "weights" else 1e-5, atol=1e-7):
            return f"{name} differ by {float((a - b).abs().max()):.2g}"
    return None


_NAMES = ("masters", "gradients", "means", "squares", "weights")


class FusedAdamW:
    """Replaces `step` of a torch AdamW whose groups have one flat master each, and keeps its state.

    gradient_factor: float32 [], that gradients are multiplied by in the update; None for 1.
    """

    def __init__(self, optimizer: torch.optim.AdamW, weights: list[torch.Tensor]) -> None:
        """weights: 16-bit parameters of the groups' masters, 1-D."""
        self._optimizer = optimizer
        self._weights = weights
        self._compiled = compile_update()
        self.gradient_factor: torch.Tensor | None = None
        # Set when `step` has written the parameters.
        self._has_written = False

    @staticmethod
    def supports(optimizer: Any) -> bool:
        """Whether `optimizer` is torch's AdamW as DeepSpeed makes it, and the update can be
        compiled; logs a warning where it can not."""
        is_plain = type(optimizer) is torch.optim.AdamW and all(
            len(group["params"]) == 1 and not (group["amsgrad"] or group["maximize"])
            for group in optimizer.param_groups
        )
        if not is_plain or triton_problem():
            return False
        problem = trial_problem(optimizer.param_groups[0]["params"][0].device)
        if problem is not None:
            log.warning("AdamW is not compiled, and takes longer: %s", problem)
        return problem is None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every group's master and its 16-bit parameters."""
        assert closure is None
        for group, weights in zip(self._optimizer.param_groups, self._weights, strict=True):
            (master,) = group["params"]
            if master.grad is None:
                continue
            state = self._optimizer.state[master]
            if not state:  # as torch's own begins
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state["exp_avg"] = torch.zeros_like(master)
                state["exp_avg_sq"] = torch.zeros_like(master)
            state["step"] += 1
            # What the update multiplies by, computed on the device in float64: float32 [4].
            count, lr = state["step"].double(), float(group["lr"])
            first, second = (1 - beta**count for beta in group["betas"])
            factor = torch.ones_like(count)
            if self.gradient_factor is not None:
                factor = self.gradient_factor.double()
            decay = torch.full_like(count, 1 - lr * group["weight_decay"])
            factors = torch.stack([factor, decay, lr / first, second.sqrt()]).float()
            self._compiled(
                master,
                master.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                weights,
                factors=factors,
                betas=group["betas"],
                eps=group["eps"],
            )
        self._has_written = True

    def update_and_gather(
        self, zero: Any, weights: list[torch.Tensor], partitions: list[list[torch.Tensor]]
    ) -> None:
        """Update `zero`, an optimizer of DeepSpeed whose masters hold their gradients, and gather
        `weights`: the flat 16-bit parameters of each group. partitions: their parts by group and
        rank. Collective over replicas."""
        self._has_written = False
        zero.optimizer.step()
        zero._lazy_init_hp_params_optimizer_state()
        if not self._has_written:  # the guard skipped the update
            zero.update_lp_params()
            return
        all_gather_dp_groups(
            groups_flat=weights,
            partitioned_param_groups=partitions,
            dp_process_group=zero.real_dp_process_group,
            start_alignment_factor=zero.nccl_start_alignment_factor,
            allgather_bucket_size=zero.allgather_bucket_size,
        )
