"""Reference for every topology: plain transformers and torch.optim in one process. Only the tokens
are bigtrain's, and the formula of another objective; passes, cross-entropy, units, decay, freezing
and clipping are implemented again."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.engine.objectives import make_objective
from bigtrain.errors import ModelError, one_line
from bigtrain.models.layers.adapter_names import base_name
from bigtrain.models.layers.parameters import decoder_layers
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.parity.adapters import with_adapters, without_adapters
from bigtrain.parity.batches import RATES, STEPS, micro_batches
from bigtrain.parity.optimizers import plain_optimizer
from bigtrain.parity.routers import RouterTerms, StepDivision
from bigtrain.parity.sums_in_parts import SumsInParts
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.objective import rows_per_sample, unit_of
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.objective import ObjectiveSection

_PARTS = (2, 3, 4)
_DIVISIONS = 8
"""Reference runs in 16 bit; four give too low a limit (tests/parity/plain.py)."""


@dataclass
class TrainingTrace:
    """Measurements of a training run of `STEPS` steps. layers: sums of squares of each layer's
    output before the first step, in model order. first and last: the weights after the first and
    the last step, by name, and averages of weights (`average_name`). distances: of a value of each
    step from a threshold at which the computation changes, by the name of the threshold."""

    losses: list[float]
    norms: list[float]
    layers: dict[str, float]
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    last: dict[str, torch.Tensor] = field(default_factory=dict)
    distances: dict[str, list[float]] = field(default_factory=dict)


def average_name(name: str) -> str:
    """Return the name of the average of the weights `name` in a `TrainingTrace`."""
    return f"average of {name}"


def train_reference(
    config: RunConfig, sum_dtype: torch.dtype | None = None, division: StepDivision | None = None
) -> list[TrainingTrace]:
    """Train plain transformers with torch's own optimizer in this process.

    In float32 once, full batches at a time. In 16 bit, with float32 masters, several times, with
    samples in other orders and micro-batches: these runs differ only by rounding. sum_dtype: the
    dtype in which gradients of micro-batches are accumulated; None: that of the parameters.
    division: of the compared topology, if router losses depend on it. Raises ModelError if plain
    transformers fails.
    """
    try:
        return _train_divisions(config, sum_dtype, division)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = one_line(error)
        raise ModelError(f"plain transformers cannot train the proxy model: {reason}") from error


def _train_divisions(
    config: RunConfig, sum_dtype: torch.dtype | None, division: StepDivision | None
) -> list[TrainingTrace]:
    """Train with each division of a step into micro-batches."""
    if config.precision.dtype == "float32":
        samples = config.batch.samples_per_step
        chunks = _whole(config) if division is None else division.chunks(samples, config.moe)
        return [_train(config, [chunks] * STEPS, torch.float32)]
    runs = []
    for number in range(_DIVISIONS):
        generator = torch.Generator().manual_seed(number)
        order = torch.randperm(config.batch.samples_per_step, generator=generator)
        size = max(1, len(order) >> (number % 4))
        chunks = list(order.split(size))
        runs.append(_train(config, [chunks] * STEPS, sum_dtype))
    return runs


def train_reordered(config: RunConfig, division: StepDivision | None = None) -> list[TrainingTrace]:
    """Run `train_reference` in float32, with the sums of linear layers in other orders. Dividing
    the work over ranks reorders sums in the same way: these runs differ only by rounding."""
    runs = []
    for num_parts in _PARTS:
        with SumsInParts(num_parts):
            runs += train_reference(config, division=division)
    return runs


def _whole(config: RunConfig) -> list[torch.Tensor]:
    return [torch.arange(config.batch.samples_per_step)]


def _train(
    config: RunConfig, chunks: Sequence[Sequence[torch.Tensor]], sum_dtype: torch.dtype | None
) -> TrainingTrace:
    """Train. chunks: the samples of each micro-batch of each step."""
    section, dtype = config.model, getattr(torch, config.precision.dtype)
    assert section.path is not None
    attention = None if section.attention == "auto" else section.attention
    kind = AutoModelForCausalLM
    if config.objective.scores_samples:
        kind = AutoModelForSequenceClassification
    model: Any = kind.from_pretrained(section.path, dtype=dtype, attn_implementation=attention)
    fit_experts(model)  # grouped products do not support every width
    # Masters are the tensors of the files, without rounding.
    full = kind.from_pretrained(section.path, dtype=torch.float32)
    values = dict(full.named_parameters())
    for name, value in section.overrides.items():
        setattr(model.config, name, value)
    terms = RouterTerms(model, config.moe)
    if config.adapters is not None:
        model = with_adapters(model, config.adapters, config.seed)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    else:
        parameters = _trained(model, section.frozen)
    masters = {
        name: values.get(base_name(name), parameter).detach().float().clone()
        for name, parameter in parameters.items()
    }
    optimizer = plain_optimizer(model, parameters, masters, config.optimizer)
    samples = config.batch.samples_per_step
    num_rows = rows_per_sample(config.objective)
    plan = BatchPlan(samples, samples, 1, 1, config.batch.sequence_length, rows_per_sample=num_rows)
    objective = make_objective(config)
    teacher: Any = None
    if config.objective.teacher_model is not None:
        name = config.objective.teacher_model
        teacher = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation=attention
        ).eval()
        fit_experts(teacher)
    figures = TrainingTrace([], [], {})
    with torch.no_grad():
        model.eval()
        (batch,) = micro_batches(config, plan, 0, 0)
        if config.objective.scores_samples:
            ended = batch.labels == IGNORED_LABEL
            padding = model.config.get_text_config().pad_token_id
            batch = replace(batch, input_ids=batch.input_ids.masked_fill(ended, padding))
        figures.layers = layer_outputs(model, lambda: _outputs(model, batch)[1])
    model.train()
    averages: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        (batch,) = micro_batches(config, plan, step, 0)
        if teacher is not None:
            batch = _taught(batch, teacher, config.objective.teacher_top_k)
        parts = [batch.moved(operator.itemgetter(_rows(chunk, num_rows))) for chunk in chunks[step]]
        passes = PlainPasses(model, config.objective)
        objective.prepare(passes, [batch])
        if passes.summed is not None:
            total, count = passes.summed.tolist()
            figures.distances.setdefault("divergence of KTO", []).append(total / count)
        num_units = _num_units(config.objective, batch)
        losses = (objective.summed_loss(passes, part, part) for part in parts)
        loss = _backward(
            losses, num_units, len(parts), parameters, masters, sum_dtype or dtype, terms
        )
        norm = torch.nn.utils.clip_grad_norm_(
            masters.values(), config.optimizer.clip_norm or math.inf
        )
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
        terms.update_biases()
        figures.losses.append(loss)
        figures.norms.append(float(norm))
        if config.optimizer.clip_norm:
            excess = float(norm) / config.optimizer.clip_norm - 1
            figures.distances.setdefault("optimizer.clip_norm", []).append(excess)
        if config.optimizer.ema is not None:
            for name, master in masters.items():
                average = averages.setdefault(name, master.clone())
                average.lerp_(master, 1 - config.optimizer.ema.decay)
        if step == 0:
            figures.first = _weights(model, masters, terms)
    figures.last = _weights(model, masters, terms)
    figures.last |= {average_name(name): average for name, average in averages.items()}
    return figures


def _trained(model: nn.Module, frozen: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return trained parameters: those without a name (tied ones have several) that `frozen`
    matches."""
    is_frozen = {
        id(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if any(fnmatchcase(name, pattern) for pattern in frozen)
    }
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) not in is_frozen)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def _taught(batch: MicroBatch, teacher: Any, top_k: int) -> MicroBatch:
    """Return `batch` with the most probable tokens of the model `teacher` at each position."""
    values, ids = _outputs(teacher, batch)[1].float().log_softmax(-1).topk(top_k)
    return replace(batch, teacher_values=values, teacher_ids=ids)


def _num_units(section: ObjectiveSection, batch: MicroBatch) -> float:
    """Return the units of which a step's loss is the mean, or the sum of the weights of losses."""
    if batch.weights is not None:
        return float(batch.weights.double().sum())
    targets = batch.labels != IGNORED_LABEL
    if unit_of(section) == "tokens":
        return int(targets.sum())
    return int(targets.any(-1).sum()) // rows_per_sample(section)


def _rows(samples: torch.Tensor, rows_per_sample: int) -> torch.Tensor:
    """Return the rows of `samples`, in their order."""
    return (samples.unsqueeze(-1) * rows_per_sample + torch.arange(rows_per_sample)).flatten()


def _backward(
    losses: Iterable[tuple[torch.Tensor, list[Any]]],
    num_units: float,
    num_parts: int,
    parameters: dict[str, nn.Parameter],
    masters: dict[str, torch.Tensor],
    sum_dtype: torch.dtype,
    terms: RouterTerms,
) -> float:
    """Set the gradients of `masters` for a step's mean loss and router losses; return the former.
    losses: of each of `num_parts` micro-batches, summed over its units, and the model's outputs."""
    terms.begin_step()
    sums: dict[str, torch.Tensor] = {}
    total = 0.0
    for loss, outputs in losses:
        whole = loss / num_units
        if terms.is_on:
            whole = whole + terms.of(outputs) / num_parts
        whole.backward()
        total += float(loss.detach())
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                own = sums.setdefault(name, torch.zeros_like(parameter, dtype=sum_dtype))
                own += parameter.grad.to(sum_dtype)
            parameter.grad = None
    for name, master in masters.items():
        master.grad = sums[name].float() if name in sums else None
    return total / num_units


class PlainPasses:
    """Passes of plain transformers in one process, that an objective makes its loss of. summed: the
    values that the objective added up over all samples of a step, if any."""

    reports_loss = True

    def __init__(self, model: Any, section: ObjectiveSection) -> None:
        self._model, self._section = model, section
        self.summed: torch.Tensor | None = None

    def cross_entropy(
        self, batch: MicroBatch, moved: MicroBatch, factor: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[Any]]:
        """Return the loss of the next token, summed over targets, with the terms of the run."""
        outputs, logits = _outputs(self._model, batch)
        is_target = batch.labels != IGNORED_LABEL
        logits, labels = logits[is_target].float(), batch.labels[is_target]
        smoothing, alpha = self._section.label_smoothing, self._section.alpha
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        losses = losses + self._section.z_loss * logits.exp().sum(-1).log().square()
        if batch.teacher is not None:
            values, ids = (part[is_target] for part in batch.teacher)
            probabilities = _with_rest(logits.softmax(-1).gather(-1, ids))
            divergences = F.kl_div(
                probabilities.log(), _with_rest(values.exp()), reduction="none"
            ).sum(-1)
            losses = (1 - alpha) * losses + alpha * divergences
        if batch.weights is not None:
            losses = losses * batch.weights[is_target]
        loss = losses.sum()
        return loss, outputs

    def log_probabilities(
        self, batch: MicroBatch, moved: MicroBatch
    ) -> tuple[torch.Tensor, list[Any]]:
        """Return the log-probability of each target, float32 [R, T]; 0 elsewhere."""
        outputs, logits = _outputs(self._model, batch)
        known = batch.labels.clamp(min=0).unsqueeze(-1)
        values = logits.float().log_softmax(-1).gather(-1, known).squeeze(-1)
        return values * (batch.labels != IGNORED_LABEL), outputs

    def scores(self, batch: MicroBatch, moved: MicroBatch) -> tuple[torch.Tensor, list[Any]]:
        """Return the scores of each row, float32 [R, L], of a pass of it up to its end."""
        outputs: list[Any] = []
        for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
            own = ids[: int((labels != IGNORED_LABEL).sum())]
            outputs.append(self._model(input_ids=own.unsqueeze(0), use_cache=False))
        return torch.cat([one.logits for one in outputs]).float(), outputs

    def row_sums(
        self, batches: Iterable[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, MicroBatch, torch.Tensor]]:
        """Yield each micro-batch, itself as the one on the device, and the log-probability of each
        of its rows, float32 [R]. Dropout is off anyway."""
        for batch in batches:
            yield batch, batch, self.log_probabilities(batch, batch)[0].sum(-1)

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`: there is one process."""
        self.summed = values
        return values

    def reference(self) -> AbstractContextManager[None]:
        """Return a context in which the model is without its adapters."""
        return without_adapters(self._model)


def _with_rest(known: torch.Tensor) -> torch.Tensor:
    """Add the probability of all other tokens to those of k tokens: [N, k + 1]."""
    return torch.cat([known, 1 - known.sum(-1, keepdim=True)], -1)


def _outputs(model: Any, batch: MicroBatch) -> tuple[list[Any], torch.Tensor]:
    """Return plain transformers' outputs, and logits [B, T, V]; isolated documents pass one by
    one."""
    outputs: list[Any] = []

    def of(ids: torch.Tensor) -> torch.Tensor:
        outputs.append(model(input_ids=ids, use_cache=False))
        logits: torch.Tensor = outputs[-1].logits
        return logits

    if batch.position_ids is None:
        return outputs, of(batch.input_ids)
    samples = []
    for ids, positions in zip(batch.input_ids, batch.position_ids, strict=True):
        edges = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        documents = ids.split([stop - start for start, stop in pairwise(edges)])
        samples.append(torch.cat([of(document[None])[0] for document in documents]))
    return outputs, torch.stack(samples)


def _weights(
    model: nn.Module, masters: dict[str, torch.Tensor], terms: RouterTerms
) -> dict[str, torch.Tensor]:
    """Return masters, frozen parameters (of no adapters' base, which no run saves) and selection
    biases."""
    kept = dict(model.named_parameters())
    if any(".lora_" in name for name in masters):
        kept = {name: kept[name] for name in masters}
    kept_too = {**kept, **terms.named_biases()}
    return {
        name: masters.get(name, tensor).detach().float().clone()
        for name, tensor in kept_too.items()
    }


def layer_outputs(model: torch.nn.Module, forward: Callable[[], object]) -> dict[str, float]:
    """Return the sum of squares of the output of every layer of `model` during `forward`, by name.
    Layers of other pipeline stages, which have no parameters here, are not included. Sums over
    tokens, so those of disjoint batches or parts add up."""
    sums: dict[str, float] = {}

    def record(name: str, _layer: object, _inputs: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor):
            sums[name] = sums.get(name, 0.0) + float(hidden.double().square().sum())

    with ExitStack() as hooks:
        for name, layer in decoder_layers(model):
            if any(True for _ in layer.parameters()):
                hooks.enter_context(layer.register_forward_hook(partial(record, name)))
        forward()
    return sums
