"""Plain transformers and torch.optim.AdamW in one process: what all training is compared with.

Of bigtrain there is only which sample comes when; tokens and masks are read from the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from bigtrain.data.samples.shuffle import SampleOrder
from tests.support.datasets import END_OF_DOCUMENT

IGNORED = -100
Samples = torch.Tensor | slice
"""Indices of samples in a step."""
Chunks = Callable[[int], Sequence[Samples]]
"""From a step to the samples of each of its micro-batches."""


@dataclass(frozen=True)
class Step:
    """The samples of a step: token ids [S, T], labels [S, T], positions in documents or None."""

    inputs: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None


def read_steps(data: Path, config: dict[str, Any]) -> list[Step]:
    """Every step of a run, cut from the one shard of `data` (uint16 tokens, a bit mask)."""
    length, size = config["batch"]["sequence_length"], config["batch"]["global_batch_size"]
    tokens = np.fromfile(data / "train_00000.bin", np.uint16).astype(np.int64)
    mask = None
    if (file := data / "train_00000.mask").exists():
        mask = np.unpackbits(np.fromfile(file, np.uint8), bitorder="little", count=len(tokens))
    isolate = config["data"].get("document_boundaries") == "isolate"
    ends_are_inputs = not isolate and not config["data"].get("mask_end_of_document")
    order = SampleOrder((len(tokens) - 1) // length, config["seed"])
    steps = []
    for step in range(config["train"]["steps"]):
        starts = order.windows(step * size, size) * length
        rows = torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)])
        inputs, labels, positions = rows[:, :-1], rows[:, 1:].clone(), None
        if mask is not None:
            wanted = mask[starts[:, None] + np.arange(1, length + 1)]
            labels[torch.from_numpy(wanted == 0)] = IGNORED
        if not ends_are_inputs:
            labels[inputs == END_OF_DOCUMENT] = IGNORED
        if isolate:
            positions = torch.stack([_positions(row) for row in inputs])
        steps.append(Step(inputs, labels, positions))
    return steps


def _positions(row: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.arange(high - low) for low, high in pairwise(_bounds(row))])


def _bounds(row: torch.Tensor) -> list[int]:
    """Where the documents of a sample begin, and its end."""
    begins = (torch.nonzero(row == END_OF_DOCUMENT).flatten() + 1).tolist()
    return sorted({0, *begins, len(row)})


def summed_loss(
    model: Any, step: Step, samples: Samples, *, separate: bool
) -> tuple[torch.Tensor, Any]:
    """Cross-entropy in nats summed over the targets of `samples` of a step, and what the model
    returned.

    separate: every document in a forward pass of its own (then None is returned).
    """
    inputs, labels = step.inputs[samples], step.labels[samples]
    if step.positions is None or not separate:
        positions = None if step.positions is None else step.positions[samples]
        outputs = model(input_ids=inputs, position_ids=positions, use_cache=False)
        summed = _cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return summed, outputs
    total = torch.zeros(())
    for row, targets in zip(inputs, labels, strict=True):
        for low, high in pairwise(_bounds(row)):
            logits = model(input_ids=row[None, low:high], use_cache=False).logits[0]
            total = total + _cross_entropy(logits, targets[low:high])
    return total, None


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def whole(_step: int) -> list[Samples]:
    """All samples of a step at once."""
    return [slice(None)]


def divided(micro_batch_size: int) -> Chunks:
    """A step's 8 samples, `micro_batch_size` at a time."""
    return lambda _step: torch.arange(8).split(micro_batch_size)


def permuted(micro_batch_size: int, seed: int) -> Chunks:
    """A step's 8 samples in another order, `micro_batch_size` at a time."""

    def chunks(step: int) -> Sequence[Samples]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        return torch.randperm(8, generator=generator).split(micro_batch_size)

    return chunks


@dataclass(frozen=True)
class Training:
    """Figures of a run, by step, and the trained weights at its end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def plain_training(
    data: Path, hf_directory: Path, config: dict[str, Any], **options: Any
) -> Training:
    """Train `config` with nothing of bigtrain but which sample comes when; `options` of `train`."""
    return train(hf_directory, read_steps(data, config), config, **options)


def train(
    hf_directory: Path,
    steps: list[Step],
    config: dict[str, Any],
    *,
    num_steps: int | None = None,
    chunks: Chunks = whole,
    dtype: torch.dtype = torch.float32,
    sum_dtype: torch.dtype = torch.float32,
    aux_coefficient: float = 0.0,
    frozen: str = "nothing",
    exact_masters: bool = False,
    halves: bool = False,
    halves_seed: int | None = None,
    watch: Callable[[Any], object] = bool,
    adapt: Callable[[Any], Any] | None = None,
    optimizer_of: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any] | None = None,
    experts: str = "grouped_mm",
    added: Callable[[int, Any], torch.Tensor] | None = None,
    skipped: Container[int] = (),
    after_update: Callable[[Any], object] = bool,
    after_step: Callable[[], object] = bool,
    quantization: Any = None,
) -> Training:
    """Train from `hf_directory`; masters are float32 whatever `dtype` the model computes in.

    num_steps: all of them, if not given. sum_dtype: in which the gradients of micro-batches are
    added up. aux_coefficient: what the mean of the micro-batches' auxiliary losses counts for.
    frozen: a regular expression of the names of parameters that are not trained. exact_masters:
    they begin with what the files hold, and not with that in `dtype`. halves: matrix products in
    two parts (`compute_in_halves`, which is given halves_seed). watch: called with the model before
    it is trained. adapt: makes of it the one that is trained. optimizer_of: what updates the
    masters, from them by name and the run's `optimizer`; AdamW. experts: how transformers computes
    them, if there are any. added: to the loss of a micro-batch, of its number in the step and of
    what the model returned. skipped: steps without an update. after_update: called with the model
    after each update; after_step: after each step, then. quantization: what `from_pretrained` is
    told of it.
    The loss that is reported is the cross-entropy, in nats, as the mean over the targets of a step.
    """
    options = {} if quantization is None else {"quantization_config": quantization}
    model: Any = AutoModelForCausalLM.from_pretrained(hf_directory, dtype=dtype, **options).train()
    if model._can_set_experts_implementation():
        model.set_experts_implementation(experts)
    watch(model)
    if adapt is not None:
        model = adapt(model).train()
    if halves:
        compute_in_halves(model, halves_seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.match(frozen, name) is None)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().float().clone() for name, p in parameters.items()}
    if exact_masters:
        written = AutoModelForCausalLM.from_pretrained(hf_directory, dtype=torch.float32)
        masters = {name: written.get_parameter(name).detach().clone() for name in parameters}
    if optimizer_of is None:
        exempt = [master for name, master in masters.items() if re.search(NEVER_DECAYED, name)]
        optimizer: Any = adamw(list(masters.values()), config["optimizer"], exempt)
    else:
        optimizer = optimizer_of(masters, config["optimizer"])
    training = Training([], [], masters)
    for number, step in enumerate(steps[:num_steps]):
        num_targets = int((step.labels != IGNORED).sum())
        sums: dict[str, torch.Tensor] = {}
        total = 0.0
        parts = chunks(number)
        for part, samples in enumerate(parts):
            # Separate documents are the more independent reference, and in 16 bit a coarser one
            # than packed ones: the gradient of a weight is rounded once for each.
            summed, outputs = summed_loss(model, step, samples, separate=dtype == torch.float32)
            auxiliary = getattr(outputs, "aux_loss", None)
            loss = summed / num_targets
            if added is not None:
                loss = loss + added(part, outputs) / len(parts)
            if aux_coefficient and auxiliary is not None:
                loss = loss + aux_coefficient * auxiliary / len(parts)
            loss.backward()
            total += float(summed.detach())
            for name, parameter in parameters.items():
                if parameter.grad is None:
                    continue
                zeros = torch.zeros_like(parameter, dtype=sum_dtype)
                sums[name] = sums.get(name, zeros) + parameter.grad.to(sum_dtype)
                parameter.grad = None
        for name, master in masters.items():
            master.grad = sums[name].float() if name in sums else None
        limit = config["optimizer"]["clip_norm"] or math.inf
        training.norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), limit)))
        training.losses.append(total / num_targets)
        for group in optimizer.param_groups:
            group["lr"] = _rate(number, config)
        if number not in skipped:
            optimizer.step()
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(masters[name])
            after_update(model)
        after_step()
    return training


def compute_in_halves(model: Any, seed: int | None = None) -> None:
    """Round the matrix products of a Llama where Megatron's division in two rounds them.

    Of the projections back to the hidden size each half of the inner dimension gives a sum that is
    rounded before the two are added; of all others that goes for the gradient of the input. Of an
    adapter, the one of its two matrices that peft's rule leaves whole stays whole. seed: of which
    elements are a half; without one it is the first and the second, as for two ranks.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            layer, _, matrix = name.partition(".lora_")
            inner = layer.removesuffix(".base_layer").endswith(("o_proj", "down_proj"))
            if matrix and inner != matrix.startswith("A"):
                continue
            size = module.weight.shape[1 if inner else 0]
            order = torch.arange(size)
            if generator is not None:
                order = torch.randperm(size, generator=generator)
            module.forward = partial(_product_of_halves, module.weight, inner, order)


def _product_of_halves(
    weight: torch.Tensor, inner: bool, order: torch.Tensor, inputs: torch.Tensor
) -> torch.Tensor:
    if inner:
        first, second = (F.linear(inputs[..., h], weight[:, h]) for h in order.chunk(2))
        return first + second
    outputs = torch.cat([F.linear(inputs, weight[h]) for h in order.chunk(2)], -1)
    return outputs[..., order.argsort()]


def adamw(
    masters: list[torch.Tensor], section: dict[str, Any], exempt: Sequence[torch.Tensor] = ()
) -> torch.optim.Optimizer:
    """Matrices decay but those of `exempt`, vectors do not; `section` is the run's `optimizer`."""
    return torch.optim.AdamW(
        decay_groups(masters, section, exempt),
        lr=section["lr"],
        betas=(0.9, 0.95),
        eps=section.get("eps", 1e-8),
    )


NEVER_DECAYED = r"(bias|bias_\w+|A_log|\.D|time_mix_\w+|sinks|(norm|ln)\w*\.weight)$"
"""Names of biases, norms, recurrent states and shares of the token before, which may have several
dimensions."""


def decay_groups(
    masters: Iterable[torch.Tensor], section: dict[str, Any], exempt: Sequence[torch.Tensor] = ()
) -> list[dict[str, Any]]:
    """Groups of matrices with decay, and of vectors and `exempt` without."""
    never = {id(master) for master in exempt}
    decay: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for master in masters:
        (decay if master.ndim >= 2 and id(master) not in never else others).append(master)
    return [
        {"params": decay, "weight_decay": section.get("weight_decay", 0.1)},
        {"params": others, "weight_decay": 0.0},
    ]


def _rate(step: int, config: dict[str, Any]) -> float:
    """The learning rate of a cosine schedule with warm-up to a tenth of the peak, or a constant."""
    peak = float(config["optimizer"]["lr"])
    if config["schedule"]["type"] == "constant":
        return peak
    warmup = config["schedule"]["warmup_steps"]
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step + 1 - warmup) / (config["train"]["steps"] - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class Spread:
    """How far runs of one training in 16 bit are apart that only add up in other orders.

    losses, norms: the means over the runs, by step. loss, norm, weight: of the run farthest from
    them, the largest distance at any step: in nats, of the norm, and the root mean square over
    all weights at the end.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    loss: float
    norm: float
    weight: float

    @classmethod
    def of(cls, runs: list[Training]) -> Spread:
        losses = np.array([run.losses for run in runs])
        norms = np.array([run.norms for run in runs])
        ends = [run.weights for run in runs]
        centre = {name: torch.stack([e[name] for e in ends]).mean(0) for name in ends[0]}
        return cls(
            losses.mean(0).tolist(),
            norms.mean(0).tolist(),
            centre,
            float(np.abs(losses - losses.mean(0)).max()),
            float((np.abs(norms - norms.mean(0)) / norms.mean(0)).max()),
            max(root_mean_square(end, centre) for end in ends),
        )


def root_mean_square(
    weights_by_name: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> float:
    """Of the differences of all weights."""
    squares = [
        (weights_by_name[name] - weight).double().square() for name, weight in expected.items()
    ]
    return math.sqrt(sum(float(s.sum()) for s in squares) / sum(s.numel() for s in squares))


def orders() -> Iterator[Chunks]:
    """The same 8 samples in other orders and divisions.

    Of four runs the farthest says too little of the next: of sixteen more one had a norm 2.9 times
    as far from their mean.
    """
    yield whole
    for seed, micro_batch_size in enumerate((4, 2, 1, 8, 4, 2, 1), 1):
        yield permuted(micro_batch_size, seed)
