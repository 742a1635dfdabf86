"""DeepSpeed's pipeline engine: instructions that bigtrain executes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from torch import nn

from bigtrain.metrics.recording import recording_if
from bigtrain.settings.deepspeed.engine_config import NEVER_PRINT_STEPS


def replace_loss(engine: Any, loss: Callable[..., torch.Tensor]) -> None:
    """Let the last stage compute `loss` of outputs and labels. DeepSpeed 0.19.8 takes a loss only
    in `PipelineModule`, before there is an engine, and calls the attribute at each forward pass
    (runtime/pipe/engine.py:755)."""
    engine.module.loss_fn = loss


def replace_instructions(
    engine: Any,
    reduce_tied_gradients: Callable[[Any], None],
    optimizer_step: Callable[[Any], None],
) -> None:
    """Replace instructions of `engine`'s schedule, in a table for this engine (0.19.8,
    runtime/pipe/engine.py:1360, `_INSTRUCTION_MAP`). DeepSpeed ties only layers that it built, and
    sums the wrong attribute of some gradients; bigtrain needs the norm before the update; and a
    recomputed forward pass must not record metrics again."""
    deepspeed_backward = engine._INSTRUCTION_MAP[schedule.BackwardPass]

    def backward(engine: Any, *arguments: Any, **values: Any) -> None:
        with recording_if(False):
            deepspeed_backward(engine, *arguments, **values)

    engine._INSTRUCTION_MAP = {
        **engine._INSTRUCTION_MAP,
        schedule.BackwardPass: backward,
        schedule.ReduceTiedGrads: reduce_tied_gradients,
        schedule.OptimizerStep: optimizer_step,
    }


def run_optimizer_step(engine: Any) -> None:
    """Run DeepSpeed's own instruction for the update (0.19.8, runtime/pipe/engine.py:1221)."""
    engine._exec_optimizer_step()


def forget_batch_times(engine: Any) -> None:
    """Forget the times of batches, which DeepSpeed keeps until it prints (0.19.8,
    runtime/pipe/engine.py:375): two CUDA events a step, for ever in a run that never prints."""
    if engine.steps_per_print() == NEVER_PRINT_STEPS:
        engine.timers(TRAIN_BATCH_TIMER).reset()


def fill_gradient(parameter: nn.Parameter, optimizer: Any) -> None:
    """Give a parameter without a gradient zeros, also in the tensor of `accumulated_gradient`."""
    parameter.grad = torch.zeros_like(parameter)
    if hasattr(optimizer, "fp32_groups_gradient_dict"):  # BF16_Optimizer
        for group_index, group in enumerate(optimizer.bf16_groups):
            for index, member in enumerate(group):
                if member is parameter:
                    optimizer._update_hp_grad(parameter, group_index, index, clear_lp_grads=False)
    elif getattr(optimizer, "use_grad_accum_attribute", False):
        optimizer._fill_param_grad_accum_attribute(parameter)


def accumulated_gradient(parameter: nn.Parameter, optimizer: Any) -> torch.Tensor | None:
    """Return the tensor in which DeepSpeed 0.19.8 accumulates a parameter's gradient before
    reducing it: `_hp_grad` (runtime/bf16_optimizer.py:524), or `grad_accum` of ZeRO-1 with float32
    gradients (runtime/zero/stage_1_and_2.py:402), which DeepSpeed's sum of tied gradients
    ignores."""
    if hasattr(optimizer, "fp32_groups_gradient_dict"):  # BF16_Optimizer
        return getattr(parameter, "_hp_grad", None)  # which makes it with the first gradient
    if getattr(optimizer, "use_grad_accum_attribute", False):
        return parameter.grad_accum  # type: ignore[attr-defined, no-any-return]
    return parameter.grad
