"""The same steps by plain transformers and `torch.optim.AdamW` on the same device.

Nothing here is bigtrain's but tokens and learning rates. Masters are float32 in every dtype. What a
run promises of loss, decay, clipping and loss scaling is written out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from benchmarks.gpu_check.results import Setup
from benchmarks.gpu_check.training import CLIP_NORM, DTYPES, Case, Trained, batch_of, rate
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL


def num_orders(dtype: str, *, tiny: bool) -> int:
    """Return the number of plain runs to compare with. In 16 bit four are too few to bound the next
    (tests/parity/plain.py); float32's are only for weights."""
    if dtype == "float32":
        return 2 if tiny else 4
    return 5 if tiny else 8


@dataclass
class Scaler:
    """Dynamic loss scaling as DeepSpeed does it (runtime/fp16/loss_scaler.py), for few steps.

    ZeRO 1 to 3 let `hysteresis` - 1 overflows pass before they halve the scale; ZeRO 0 none.
    """

    scale: float
    hysteresis: int

    def overflowed(self) -> None:
        if self.hysteresis > 1:
            self.hysteresis -= 1
        else:
            self.scale = max(self.scale / 2, 1.0)


def orders_of(samples: int, number_of: int) -> list[list[torch.Tensor]]:
    """Divisions of a step's samples into micro-batches: the first, full; then others, shuffled."""
    orders = [[torch.arange(samples)]]
    for number in range(1, number_of):
        generator = torch.Generator().manual_seed(number)
        order = torch.randperm(samples, generator=generator)
        orders.append(list(order.split(max(1, samples >> (number % 4)))))
    return orders


def train_plain(
    setup: Setup,
    case: Case,
    directory: Path,
    chunks: Sequence[torch.Tensor],
    sum_dtype: torch.dtype,
    *,
    plainest: bool,
) -> Trained:
    """Return `case` from the weights in `directory`, samples in micro-batches as in `chunks`.

    sum_dtype: in which gradients of micro-batches are added up. plainest: whether attention is
    computed as it is written down, or by the kernel that torch takes. These round differently, and
    so do the kernels that are compared.
    """
    device = torch.device(setup.device)
    dtype = DTYPES[case.dtype]
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).train()
    full: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device)
    masters = {name: p.detach().clone() for name, p in full.named_parameters()}
    del full
    if case.float8 != "none":
        _cast_to_float8(model, case.float8)
    optimizer = _adamw(masters)
    scaler = None
    if case.dtype == "float16":
        scaler = Scaler(2.0**case.scale_power, 1 if case.engine == "zero0" else 2)
    trained = Trained()
    attention = partial(sdpa_kernel, SDPBackend.MATH) if plainest else nullcontext
    for step in range(case.num_steps):
        batch = batch_of(setup, step, isolate=case.isolate)
        scale = 1.0 if scaler is None else scaler.scale
        with attention():
            loss = _backward(model, masters, batch, chunks, scale, sum_dtype, device)
        norm = float(_norm(masters))
        trained.scales.append(scale)
        trained.updated.append(norm < float("inf"))
        if not trained.updated[-1]:
            assert scaler is not None, "a gradient is not finite"
            scaler.overflowed()
            continue
        trained.losses.append(loss)
        trained.norms.append(norm)
        _update(model, masters, optimizer, norm, rate(step))
        if not trained.first:
            trained.first = _copy(masters)
    trained.last = _copy(masters)
    return trained


def _cast_to_float8(model: Any, recipe: str) -> None:
    """Let torchao replace the linear layers of the decoder; on a CPU it casts and multiplies in the
    parameters' dtype."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulates = next(model.parameters()).device.type == "cpu"
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulates)
    convert_to_float8_training(model, module_filter_fn=_is_in_a_layer, config=config)


def _is_in_a_layer(_module: Any, name: str) -> bool:
    return ".layers." in name


def _adamw(masters: dict[str, torch.Tensor]) -> torch.optim.AdamW:
    """Matrices decay, vectors do not."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in masters.values() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in masters.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-3,
    )


def _backward(
    model: Any,
    masters: dict[str, torch.Tensor],
    batch: MicroBatch,
    chunks: Sequence[torch.Tensor],
    scale: float,
    sum_dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Give `masters` the gradient of the step's mean loss; returns that loss in nats."""
    num_targets = int((batch.labels != IGNORED_LABEL).sum())
    parameters = dict(model.named_parameters())
    sums = {name: torch.zeros_like(p, dtype=sum_dtype) for name, p in parameters.items()}
    total = 0.0
    for rows in chunks:
        positions = None if batch.position_ids is None else batch.position_ids[rows]
        part = MicroBatch(batch.input_ids[rows], batch.labels[rows], positions)
        logits = logits_of(model, part, device).flatten(0, 1).float()
        labels = part.labels.to(device).flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        (loss / num_targets * scale).backward()
        total += float(loss.detach())
        for name, parameter in parameters.items():
            sums[name] += parameter.grad.to(sum_dtype)
            parameter.grad = None
    for name, master in masters.items():
        master.grad = sums[name].float() / scale
    return total / num_targets


def logits_of(model: Any, batch: MicroBatch, device: torch.device) -> torch.Tensor:
    """Logits [B, T, V], of every separate document if `batch` isolates them."""
    if batch.position_ids is None:
        logits: torch.Tensor = model(input_ids=batch.input_ids.to(device), use_cache=False).logits
        return logits
    samples = []
    for ids, positions in zip(batch.input_ids, batch.position_ids, strict=True):
        edges = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        documents = ids.split([stop - start for start, stop in pairwise(edges)])
        parts = [model(input_ids=d[None].to(device), use_cache=False).logits for d in documents]
        samples.append(torch.cat([part[0] for part in parts]))
    return torch.stack(samples)


def _norm(masters: dict[str, torch.Tensor]) -> torch.Tensor:
    gradients = [master.grad for master in masters.values() if master.grad is not None]
    return torch.stack([gradient.norm() for gradient in gradients]).norm()


@torch.no_grad()
def _update(
    model: Any,
    masters: dict[str, torch.Tensor],
    optimizer: torch.optim.AdamW,
    norm: float,
    lr: float,
) -> None:
    torch.nn.utils.clip_grad_norm_(masters.values(), CLIP_NORM)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    for name, parameter in model.named_parameters():
        parameter.copy_(masters[name])


def _copy(masters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: master.detach().float().cpu().clone() for name, master in masters.items()}
