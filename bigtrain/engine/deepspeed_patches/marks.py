"""Marks on parameters that DeepSpeed's gradient norms read."""

from __future__ import annotations

from typing import Any


def is_model_parallel(parameter: Any) -> bool:
    """Return whether every rank of a tensor-parallel group counts `parameter`, not only the first.
    The mark is Megatron's, set by `bigtrain.models.parallel.sharding.tag_shard`. DeepSpeed 0.19.8
    reads it in runtime/utils.py:134 (`is_model_parallel_parameter`)."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def mark_model_parallel(gradient: Any) -> None:
    """Mark a bare gradient as its parameter is marked, for norms that read only gradients.
    DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py:214 (`step`)."""
    gradient.tensor_model_parallel = True


def is_replicated(parameter: Any) -> bool:
    """Return whether another pipeline stage counts `parameter`. DeepSpeed 0.19.8 reads the mark in
    runtime/utils.py:517 and in every optimizer (runtime/constants.py:408, `PIPE_REPLICATED`)."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def mark_replicated(parameter: Any, replicated: bool) -> None:
    """Set whether another pipeline stage counts `parameter`; see `is_replicated`. `PipelineModule`
    sets it on the parameters that it contains (0.19.8, runtime/pipe/module.py:287)."""
    parameter.ds_pipe_replicated = replicated
