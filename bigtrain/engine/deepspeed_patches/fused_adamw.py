"""AdamW in one kernel that also clips, and writes the 16-bit parameters: 30 bytes of memory traffic
for each parameter, where clipping (8), torch's fused AdamW (28) and a copy (6) take 42."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.utils import all_gather_dp_groups

from bigtrain.system.machine import triton_problem

log = logging.getLogger(__name__)

_CLIP_EPS = 1e-6
"""Added to the norm by DeepSpeed 0.19.8's clipping (runtime/utils.py,
`clip_tensors_by_global_norm`; runtime/zero/stage_1_and_2.py, `unscale_and_clip_grads`)."""


def gradient_factor(norm: torch.Tensor, clip_norm: float, num_summed: int) -> torch.Tensor | None:
    """Return the factor by which the update multiplies gradients, float32 []; None for 1. The
    gradients are sums over `num_summed` replicas. norm: of the mean gradient. clip_norm: largest
    norm; 0: no clipping."""
    if clip_norm > 0.0:
        # The clamp is on the device, so that the host does not wait for the norm.
        return (clip_norm / (norm + _CLIP_EPS)).clamp(max=1.0) / num_summed
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
    """Update master, moments and 16-bit weights of parameters in place, all 1-D and equally long.
    factors: float32 [4]: factor of the gradient, factor of the master's decay, step size divided by
    the first moment's bias correction, and the square root of the second moment's.

    The order of operations equals torch 2.13's fused kernel
    (aten/src/ATen/native/cuda/fused_adam_utils.cuh, `adam_math`).
    """
    gradient_factor, decay, step_size, square_root = factors.unbind()
    beta1, beta2 = betas
    clipped = gradient * gradient_factor
    decayed = master * decay
    new_mean = beta1 * mean + (1 - beta1) * clipped
    new_square = beta2 * square + (1 - beta2) * clipped * clipped
    new_master = decayed - step_size * new_mean / (new_square.sqrt() / square_root + eps)
    mean.copy_(new_mean)
    square.copy_(new_square)
    master.copy_(new_master)
    weights.copy_(new_master)


def compile_update() -> Callable[..., None]:
    """Return the update, which is compiled at its first call for each size of a master."""
    return torch.compile(update, dynamic=False, fullgraph=True)


def trial_problem(device: torch.device) -> str | None:
    """Return what is wrong with the compiled update on `device`, or None: compile it, and compare
    it with the update without a compiler on a few numbers."""
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
    except Exception as error:  # a compiler may raise any class
        first_line = str(error).strip().splitlines()[0] if str(error) else ""
        return f"{type(error).__name__}: {first_line}"
    plain, compiled = results
    for name, expected, actual in zip(_TENSOR_NAMES, plain, compiled, strict=True):
        # Weights may differ by one rounding of bfloat16.
        rtol = 2**-8 if name == "weights" else 1e-5
        if not torch.allclose(expected, actual, rtol=rtol, atol=1e-7):
            return f"{name} differ by {float((expected - actual).abs().max()):.2g}"
    return None


_TENSOR_NAMES = ("masters", "gradients", "means", "squares", "weights")


class FusedAdamW:
    """Replacement of `step` of a torch AdamW whose groups have one flat master each; the state
    stays in the optimizer.

    gradient_factor: of the next update (`gradient_factor`), float32 []; None for 1.
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
        """Return whether `optimizer` is torch's AdamW as DeepSpeed makes it, and the update can be
        compiled; log a warning if it cannot."""
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
            if not state:  # begins as in torch
                state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                state["exp_avg"] = torch.zeros_like(master)
                state["exp_avg_sq"] = torch.zeros_like(master)
            state["step"] += 1
            # The factors of `update`, computed on the device in float64. The moments have the bias
            # corrections 1 - beta^step.
            num_steps, lr = state["step"].double(), float(group["lr"])
            mean_correction, square_correction = (1 - beta**num_steps for beta in group["betas"])
            factor = torch.ones_like(num_steps)
            if self.gradient_factor is not None:
                factor = self.gradient_factor.double()
            decay = torch.full_like(num_steps, 1 - lr * group["weight_decay"])
            step_size, square_root = lr / mean_correction, square_correction.sqrt()
            factors = torch.stack([factor, decay, step_size, square_root]).float()
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
        """Update the parameters of `zero`, a DeepSpeed optimizer whose masters have gradients, and
        gather `weights`: the flat 16-bit parameters of each group. partitions: parts of the flat
        parameters by group and rank. Collective over replicas."""
        self._has_written = False
        zero.optimizer.step()
        zero._lazy_init_hp_params_optimizer_state()
        if not self._has_written:  # the guard has skipped `step`: copy the masters, as DeepSpeed
            zero.update_lp_params()
            return
        all_gather_dp_groups(
            groups_flat=weights,
            partitioned_param_groups=partitions,
            dp_process_group=zero.real_dp_process_group,
            start_alignment_factor=zero.nccl_start_alignment_factor,
            allgather_bucket_size=zero.allgather_bucket_size,
        )
