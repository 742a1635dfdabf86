"""Tensor parallelism as the engine builds it: cut while the model is filled, then partitioned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import deepspeed
from torch import nn

from bigtrain.engine.mesh import Mesh, ModelParallelUnit
from bigtrain.models.huggingface import Partitioning
from bigtrain.models.sharding import cut_parameter
from bigtrain.models.tensor_parallel import shard_model, tensor_plan


def tensor_partitioning(mesh: Mesh, zero3: dict[str, Any] | None) -> Partitioning:
    """How a model is built whose parameters are cut over `mesh.tensor`.

    The constructor's full parameters take no memory until they are filled; that happens for one
    layer at a time, and what remains of it is this process's shard, and under ZeRO-3 (`zero3`: the
    DeepSpeed dict) its part of that.
    """
    partition = _partitioner(mesh, zero3) if zero3 is not None else None

    @contextmanager
    def gather(parameters: list[nn.Parameter]) -> Iterator[None]:
        yield
        for parameter in parameters:
            cut_parameter(parameter)
        if partition is not None:
            partition._convert_to_zero_parameters(parameters)

    def prepare(model: Any) -> None:
        shard_model(model, tensor_plan(model), mesh.tensor)

    return Partitioning(nullcontext, gather, writes_weights=True, prepare=prepare)


def _partitioner(mesh: Mesh, zero3: dict[str, Any]) -> Any:
    """What partitions whole parameters over the replicas, as `zero.Init` does in constructors."""
    return deepspeed.zero.Init(
        module=nn.Module(),
        data_parallel_group=mesh.replicas,
        config_dict_or_path=zero3,
        mpu=ModelParallelUnit(mesh),
        tensor_overrides=[],
    )
