"""Faults that the traces of `make gpu-proof` must show, planted in an engine before its steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bigtrain.engine.optimizers import muon
from bigtrain.engine.train_engine import TrainEngine


def _mask_on_the_cpu(engine: TrainEngine) -> None:
    def add(module: Any, args: Any, kwargs: Any) -> Any:
        tokens = kwargs["hidden_states"].shape[1]
        mask = torch.zeros(1, 1, tokens, tokens, device="cpu", dtype=torch.bfloat16)
        return args, {**kwargs, "attention_mask": mask}

    engine.module.model.layers[0].self_attn.register_forward_pre_hook(add, with_kwargs=True)


def _item_in_the_loop(engine: TrainEngine) -> None:
    engine.module.model.layers[0].register_forward_hook(lambda *args: float(args[2].sum()) and None)


def _reduction_in_16_bits(engine: TrainEngine) -> None:
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float32 and tensor.numel() > 1:
            tensor = tensor.bfloat16()
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce


def _count_on_the_cpu(engine: TrainEngine) -> None:
    def count(micro_batches: Any) -> torch.Tensor:
        total = torch.tensor(sum(batch.labels.numel() for batch in micro_batches))
        dist.all_reduce(total, group=engine.mesh.replicas)
        return total.to(engine.device)

    engine._count_targets = count  # type: ignore[method-assign]


def _functional_sum_on_the_cpu(engine: TrainEngine) -> None:
    from torch.distributed._functional_collectives import all_reduce

    def count(micro_batches: Any) -> torch.Tensor:
        total = torch.tensor(sum(batch.labels.numel() for batch in micro_batches))
        return all_reduce(total, "sum", engine.mesh.replicas).to(engine.device)

    engine._count_targets = count  # type: ignore[method-assign]


def _places_on_the_host(engine: TrainEngine) -> None:
    def take(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        output[:, torch.tensor([0, 1])]

    engine.module.model.layers[0].register_forward_hook(take, with_kwargs=True)


def _objects_in_an_evaluation(engine: TrainEngine) -> None:
    loss_of = engine._objective.summed_loss

    def summed_loss(passes: Any, batch: Any, moved: Any, *args: Any) -> Any:
        result = loss_of(passes, batch, moved, *args)
        if not engine.module.training:
            dist.all_gather_object([None] * dist.get_world_size(), f"{result[0].sum()}")
        return result

    engine._objective.summed_loss = summed_loss  # type: ignore[method-assign]


def _another_group(engine: TrainEngine) -> None:
    """Of as many ranks as the right one."""
    others = [rank ^ 1 for rank in dist.get_process_group_ranks(engine.mesh.replicas)]
    wrong = dist.new_group([dist.get_rank(), *others[1:]])
    reduce, right = dist.all_reduce, engine.mesh.replicas

    def all_reduce(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        return reduce(tensor, *args, group=wrong if group is right else group, **kwargs)

    dist.all_reduce = all_reduce


def _no_wait_in_the_feed(engine: TrainEngine) -> None:
    engine.feed._when_copied = lambda batch, copied: (batch, copied.batch)  # type: ignore[method-assign]


def _copy_that_blocks(engine: TrainEngine) -> None:
    def copy(module: Any, args: Any) -> None:
        torch.tensor([1.0, 2.0]).to(engine.device)

    engine.module.model.layers[0].register_forward_pre_hook(copy)


def _item_for_each_evaluated_batch(engine: TrainEngine) -> None:
    loss_of = engine._objective.summed_loss

    def summed_loss(passes: Any, batch: Any, moved: Any, *args: Any) -> Any:
        result = loss_of(passes, batch, moved, *args)
        if not engine.module.training:
            float(result[0])
        return result

    engine._objective.summed_loss = summed_loss  # type: ignore[method-assign]


def _activations_in_float32(engine: TrainEngine) -> None:
    """Only of the first stage."""
    from deepspeed.runtime.pipe import p2p

    send = p2p.send

    def send_wide(tensor: torch.Tensor, stage: int) -> Any:
        return send(tensor.float() if tensor.is_floating_point() else tensor, stage)

    if engine.mesh.coordinates.pipeline_rank == 0:
        p2p.send = send_wide


def _timed_throughput(engine: TrainEngine) -> None:
    """As DeepSpeed does by default, from the third step on."""
    timer = engine.engine.tput_timer
    timer.config = timer.config.model_copy(update={"enabled": True, "synchronized": True})


def _read_of_each_matrix(engine: TrainEngine) -> None:
    orthogonalized = muon.orthogonalized

    def checked(matrices: torch.Tensor, *options: Any) -> torch.Tensor:
        result = orthogonalized(matrices, *options)
        float(result.sum())
        return result

    muon.orthogonalized = checked


def _update_in_float32(engine: TrainEngine) -> None:
    """Only of the first rank."""
    from bigtrain.engine.deepspeed_patches.optimizers import inner_optimizer

    if dist.get_rank() == 0:
        rule: Any = inner_optimizer(engine.engine)
        rule = rule.rules["muon"]
        rule._section = rule._section.model_copy(update={"ns_dtype": "float32"})


FAULTS = {
    "count on the CPU": _count_on_the_cpu,
    "functional sum on the CPU": _functional_sum_on_the_cpu,
    "places on the host": _places_on_the_host,
    "text and objects of each evaluated batch": _objects_in_an_evaluation,
    "another group of the same size": _another_group,
    "no wait in the feed": _no_wait_in_the_feed,
    "copy that blocks": _copy_that_blocks,
    "item for each evaluated batch": _item_for_each_evaluated_batch,
    "mask on the CPU": _mask_on_the_cpu,
    "item in the loop": _item_in_the_loop,
    "reduction in 16 bits": _reduction_in_16_bits,
    "activations in float32 from one stage": _activations_in_float32,
    "timed throughput": _timed_throughput,
    "read of each matrix": _read_of_each_matrix,
    "update in float32 on one rank": _update_in_float32,
}
"""By name."""
