"""Planner `Layout` of a resolved run. Pure."""

from __future__ import annotations

from bigtrain.planner.layout import Layout, OptimizerCosts, Recompute
from bigtrain.settings.deepspeed.engine_config import offload_device, value_at
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.settings.run_config import OptimizerSection

SIZE_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "bf16": 2, "fp16": 2}


def layout_of(run: ResolvedRun, loss_chunk_tokens: int | None = None) -> Layout:
    """Return the layout of `run`. `loss_chunk_tokens`: the chunk that model.loss = auto resolved
    to."""
    config, topology = run.config, run.topology
    zero = run.engine.deepspeed.get("zero_optimization", {})
    dtype = config.precision.dtype
    gradients = value_at(run.engine.deepspeed, "data_types.grad_accum_dtype")
    checkpointing = config.model.gradient_checkpointing
    recompute: Recompute = "none" if checkpointing == "none" else "full"
    return Layout(
        **topology.degrees(),
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
        copies_states=config.checkpoint.asynchronous,
        optimizer=optimizer_costs(config.optimizer),
    )


def optimizer_costs(section: OptimizerSection) -> OptimizerCosts:
    """Return the costs of a run's optimizer."""
    return OptimizerCosts(
        section.type,
        2 if section.state_dtype == "bfloat16" else 4,
        2 if section.muon.ns_dtype == "bfloat16" else 4,
        section.muon.ns_steps,
    )


LOGITS_BYTES = 256 * 2**20
"""Float32 logits above which `model.loss: auto` computes them in chunks (`loss_chunk_tokens`)."""


def chunk_tokens(vocabulary_size: int, loss_chunk_tokens: int | None) -> int:
    """Return the tokens of a chunk of the loss, by the rule of a run."""
    return loss_chunk_tokens or max(1, LOGITS_BYTES // (4 * vocabulary_size))


def usual_chunk(
    loss: str, loss_chunk_tokens: int | None, vocabulary_size: int, num_tokens: int
) -> int | None:
    """Return how many of the `num_tokens` of a rank's micro-batch have logits at a time, by the
    rule of a run; None if all do."""
    if loss == "plain":
        return None
    chunk = chunk_tokens(vocabulary_size, loss_chunk_tokens)
    return chunk if num_tokens > chunk else None
