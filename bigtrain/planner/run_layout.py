"""The layout that a resolved run has. Pure."""

from __future__ import annotations

from bigtrain.planner.layout import Layout, Recompute
from bigtrain.settings.deepspeed.engine_config import offload_device, value_at
from bigtrain.settings.resolve import ResolvedRun

SIZE_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "bf16": 2, "fp16": 2}


def layout_of(run: ResolvedRun, loss_chunk_tokens: int | None = None) -> Layout:
    """What `run` would do. `loss_chunk_tokens` is what a loss of kind auto was decided to take."""
    config, topology = run.config, run.topology
    zero = run.engine.deepspeed.get("zero_optimization", {})
    dtype = config.precision.dtype
    gradients = value_at(run.engine.deepspeed, "data_types.grad_accum_dtype")
    checkpointing = config.model.gradient_checkpointing
    recompute: Recompute = "none" if checkpointing == "none" else "full"
    return Layout(
        data_size=topology.data_size,
        tensor_size=topology.tensor_size,
        pipeline_size=topology.pipeline_size,
        sequence_size=topology.sequence_size,
        expert_size=topology.expert_size,
        zero_stage=run.engine.zero_stage,
        micro_batch_size=run.plan.micro_batch_size,
        num_accumulation=run.plan.accumulation,
        sequence_length=config.batch.sequence_length,
        recompute=recompute,
        recompute_every=checkpointing if isinstance(checkpointing, int) else 1,
        offload_optimizer=offload_device(run.engine.deepspeed, "offload_optimizer") is not None,
        offload_parameters=offload_device(run.engine.deepspeed, "offload_param") is not None,
        loss_chunk_tokens=config.model.loss_chunk_tokens or loss_chunk_tokens,
        parameter_bytes=SIZE_OF[dtype],
        gradient_bytes=SIZE_OF.get(str(gradients), SIZE_OF[dtype]),
        reduce_bucket_elements=int(zero.get("reduce_bucket_size", 500_000_000)),
        gather_bucket_elements=int(zero.get("allgather_bucket_size", 500_000_000)),
        overlap_communication=zero.get("overlap_comm") is True,
    )
