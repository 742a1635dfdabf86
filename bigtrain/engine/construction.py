"""What `deepspeed.initialize` is given: parameters where they will lie, in groups, and settings."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from bigtrain.config import OptimizerSection, RunConfig
from bigtrain.engine.deepspeed_config import EngineConfig
from bigtrain.engine.mesh import Mesh
from bigtrain.engine.tensor import tensor_partitioning
from bigtrain.models.huggingface import WHOLE, Partitioning, split_by_decay


def build_dtype(config: RunConfig, engine_config: EngineConfig) -> torch.dtype:
    """In which parameters are constructed."""
    # ZeRO-3 partitions parameters as they are built, so they are born in their final dtype. The
    # other stages cast the whole model when they take it over and make the fp32 masters from that,
    # so all of them start from the same, rounded weights.
    return _DTYPES[config.precision.dtype] if engine_config.zero_stage == 3 else torch.float32


_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class _Init(deepspeed.zero.Init):  # type: ignore[misc]
    """As DeepSpeed's (0.19.8), but nobody is sent the first process's uninitialized parameters.

    All of them would be whole in memory for that, one after the other, and the pieces that are
    kept lie between, so that none of it is given back.
    """

    def _zero_init_param(self, param: nn.Parameter) -> None:
        self._convert_to_deepspeed_param(param)
        param.partition()  # type: ignore[attr-defined]


def partitioning_of(engine_config: EngineConfig, mesh: Mesh) -> Partitioning:
    """How parameters are cut and partitioned while the model is constructed."""
    if mesh.topology.tensor_size > 1:
        zero3 = copy_of(engine_config.deepspeed) if engine_config.zero_stage == 3 else None
        return tensor_partitioning(mesh, zero3)
    if engine_config.zero_stage != 3:
        return WHOLE

    def construct() -> AbstractContextManager[Any]:
        # No overrides: constructors keep the dtype they ask for, so rotary buffers stay float32.
        context: AbstractContextManager[Any] = _Init(
            config_dict_or_path=copy_of(engine_config.deepspeed), tensor_overrides=[]
        )
        return context

    def gather(parameters: list[nn.Parameter]) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
            parameters, modifier_rank=0
        )
        return context

    return Partitioning(construct, gather, dist.get_rank() == 0)


def parameter_groups(model: nn.Module, section: OptimizerSection) -> list[dict[str, Any]]:
    """What decays and what does not, in this order; either may be without parameters."""
    split = split_by_decay(model, decay_embeddings=section.decay_embeddings)
    return [
        {"params": split.decay, "weight_decay": section.weight_decay, "name": "decay"},
        {"params": split.no_decay, "weight_decay": 0.0, "name": "no_decay"},
    ]


def copy_of(value: Any) -> Any:
    """A deep copy of JSON values; `deepspeed.initialize` writes into what it is given."""
    if isinstance(value, dict):
        return {key: copy_of(item) for key, item in value.items()}
    return [copy_of(item) for item in value] if isinstance(value, (list, tuple)) else value
