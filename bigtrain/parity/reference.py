"""Reference for every topology: plain transformers and torch.optim in one process. Of bigtrain's
code it uses only the tokens, and the formulas of objectives other than the next token; passes,
cross-entropy, units, decay, freezing and clipping are implemented again."""

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
from bigtrain.errors import ModelError, one_line
from bigtrain.models.layers.adapter_names import base_name
from bigtrain.models.layers.parameters import decoder_layers
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.objectives.losses.passes import make_objective
from bigtrain.objectives.section import ObjectiveSection
from bigtrain.parity.adapters import with_adapters, without_adapters
from bigtrain.parity.batches import RATES, STEPS, micro_batches
from bigtrain.parity.optimizers import PlainOptimizer, plain_optimizer
from bigtrain.parity.routers import RouterTerms, StepDivision
from bigtrain.parity.sums_in_parts import SumsInParts
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig

_SUM_PARTS = (2, 3, 4)
"""Partial sums of linear layers in the reordered runs."""
_NUM_DIVISIONS = 8
"""Reference runs in 16 bit; four give too low a limit (tests/parity/plain.py)."""


@dataclass
class TrainingTrace:
    """Measurements of a training run of `STEPS` steps. layers: sums of squares of layer outputs
    before the first step, in model order. first and last: the weights after the first and the last
    step, by name, and averages of weights (`average_name`). distances: by name of a threshold at
    which the computation changes, the distance of its value from it at every step."""

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
    dtype in which gradients of micro-batches are accumulated; None: the parameters' dtype.
    division: of the compared topology, if router losses depend on it. Raises ModelError if plain
    transformers fails.
    """
    try:
        if config.precision.dtype == "float32":
            samples = config.batch.samples_per_step
            chunks = [torch.arange(samples)]
            if division is not None:
                chunks = division.chunks(samples, config.moe)
            return [_train(config, [chunks] * STEPS, torch.float32)]
        # In 16 bit the division of a step into micro-batches changes results: train with several.
        runs = []
        for number in range(_NUM_DIVISIONS):
            generator = torch.Generator().manual_seed(number)
            order = torch.randperm(config.batch.samples_per_step, generator=generator)
            # In turn all samples, a half, a quarter or an eighth in a micro-batch.
            micro_batch_size = max(1, len(order) >> (number % 4))
            chunks = list(order.split(micro_batch_size))
            runs.append(_train(config, [chunks] * STEPS, sum_dtype))
        return runs
    except (RuntimeError, ValueError, TypeError) as error:
        reason = one_line(error)
        raise ModelError(f"plain transformers cannot train the proxy model: {reason}") from error


def train_reordered(config: RunConfig, division: StepDivision | None = None) -> list[TrainingTrace]:
    """Run `train_reference` in float32, with the sums of linear layers in other orders, as a
    division of the work over ranks has them: the runs differ only by rounding."""
    runs = []
    for num_parts in _SUM_PARTS:
        with SumsInParts(num_parts):
            runs += train_reference(config, division=division)
    return runs


@dataclass(frozen=True)
class _PlainModel:
    """Plain transformers' model of a run, in the run's precision. parameters: trained parameters by
    name; masters: their float32 copies, which `optimizer` updates; terms: of routers."""

    model: Any
    parameters: dict[str, nn.Parameter]
    masters: dict[str, torch.Tensor]
    optimizer: PlainOptimizer
    terms: RouterTerms


def _plain_model(config: RunConfig, dtype: torch.dtype) -> _PlainModel:
    """Load the model of a run, freeze parameters or add adapters, and make its optimizer."""
    section = config.model
    model_class = AutoModelForCausalLM
    if config.objective.kind.scores_samples:
        model_class = AutoModelForSequenceClassification
    model = _load(model_class, section.path, config, dtype)
    # Masters are the tensors of the files, without rounding.
    float32_model = model_class.from_pretrained(section.path, dtype=torch.float32)
    float32_parameters = dict(float32_model.named_parameters())
    for name, value in section.overrides.items():
        setattr(model.config, name, value)
    terms = RouterTerms(model, config.moe, config.batch.sequence_length)
    if config.adapters is not None:
        model = with_adapters(model, config.adapters, config.seed)
    else:
        # A tied parameter has several names: it is frozen if any name matches.
        frozen_ids = {
            id(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if any(fnmatchcase(name, pattern) for pattern in section.frozen)
        }
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) not in frozen_ids)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {
        name: float32_parameters.get(base_name(name), parameter).detach().float().clone()
        for name, parameter in parameters.items()
    }
    lr_ratio = None if config.adapters is None else config.adapters.loraplus_lr_ratio
    optimizer = plain_optimizer(model, parameters, masters, config.optimizer, lr_ratio)
    return _PlainModel(model, parameters, masters, optimizer, terms)


def _load(model_class: Any, path: str | None, config: RunConfig, dtype: torch.dtype) -> Any:
    """Load a model with the run's attention."""
    assert path is not None
    attention = None if config.model.attention == "auto" else config.model.attention
    model = model_class.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    fit_experts(model)  # grouped products do not support every width
    return model


def _train(
    config: RunConfig, chunks: Sequence[Sequence[torch.Tensor]], sum_dtype: torch.dtype | None
) -> TrainingTrace:
    """Train. chunks: by step, the samples per micro-batch."""
    dtype = getattr(torch, config.precision.dtype)
    plain = _plain_model(config, dtype)
    model, masters = plain.model, plain.masters
    # Batches, objective and teacher of the run.
    samples = config.batch.samples_per_step
    num_rows = config.objective.kind.rows_per_sample
    plan = BatchPlan(samples, samples, 1, 1, config.batch.sequence_length, rows_per_sample=num_rows)
    objective = make_objective(config.objective)
    teacher: Any = None
    if config.objective.teacher_model is not None:
        teacher_path = config.objective.teacher_model
        teacher = _load(AutoModelForCausalLM, teacher_path, config, dtype).eval()
    # Outputs of layers before the first step locate a difference in the forward pass.
    trace = TrainingTrace([], [], {})
    with torch.no_grad():
        model.eval()
        (batch,) = micro_batches(config, plan, 0, 0)
        if config.objective.kind.scores_samples:
            # transformers finds the last token of a row, which has the score, by padding after it.
            is_past_end = batch.labels == IGNORED_LABEL
            padding = model.config.get_text_config().pad_token_id
            batch = replace(batch, input_ids=batch.input_ids.masked_fill(is_past_end, padding))
        trace.layers = layer_outputs(model, lambda: _outputs(model, batch))
    model.train()
    averages: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        (batch,) = micro_batches(config, plan, step, 0)
        if teacher is not None:
            batch = _with_teacher_tokens(batch, teacher, config.objective)
        rows_by_part = [_rows(chunk, num_rows) for chunk in chunks[step]]
        parts = [batch.moved(operator.itemgetter(rows)) for rows in rows_by_part]
        passes = PlainPasses(model, config.objective)
        objective.prepare(passes, [batch])
        if passes.summed is not None:  # KTO: the loss has a kink at a mean divergence of 0
            divergence_sum, count = passes.summed.tolist()
            trace.distances.setdefault("divergence of KTO", []).append(divergence_sum / count)
        loss = _backward(
            (objective.summed_loss(passes, part, part) for part in parts),
            plain,
            num_units=_num_units(config.objective, batch),
            num_parts=len(parts),
            sum_dtype=sum_dtype or dtype,
        )
        # Clipping and the update, on masters in float32; the model gets rounded masters.
        clip_norm = config.optimizer.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), clip_norm or math.inf)
        for group in plain.optimizer.param_groups:
            group["lr"] = RATES[step]
        plain.optimizer.step()
        with torch.no_grad():
            for name, parameter in plain.parameters.items():
                parameter.copy_(masters[name])
        plain.terms.update_biases()
        trace.losses.append(loss)
        trace.norms.append(float(norm))
        if clip_norm:
            excess = float(norm) / clip_norm - 1
            trace.distances.setdefault("optimizer.clip_norm", []).append(excess)
        if config.optimizer.ema is not None:
            for name, master in masters.items():
                average = averages.setdefault(name, master.clone())
                average.lerp_(master, 1 - config.optimizer.ema.decay)
        if step == 0:
            trace.first = _weights(model, masters, plain.terms)
    trace.last = _weights(model, masters, plain.terms)
    trace.last |= {average_name(name): average for name, average in averages.items()}
    return trace


@torch.no_grad()
def _with_teacher_tokens(batch: MicroBatch, teacher: Any, section: ObjectiveSection) -> MicroBatch:
    """Return `batch` with the most probable tokens of the model `teacher` at each position."""
    _, logits = _outputs(teacher, batch)
    log_probs = (logits.float() / section.temperature).log_softmax(-1)
    values, ids = log_probs.topk(section.teacher_top_k)
    return replace(batch, teacher_values=values, teacher_ids=ids)


def _num_units(section: ObjectiveSection, batch: MicroBatch) -> float:
    """Return the divisor of a step's mean loss: its units, or the sum of the weights of losses."""
    if batch.weights is not None:
        return float(batch.weights.double().sum())
    targets = batch.labels != IGNORED_LABEL
    if section.kind.unit == "tokens":
        return int(targets.sum())
    return int(targets.any(-1).sum()) // section.kind.rows_per_sample


def _rows(samples: torch.Tensor, rows_per_sample: int) -> torch.Tensor:
    """Return the rows of `samples`, in their order."""
    return (samples.unsqueeze(-1) * rows_per_sample + torch.arange(rows_per_sample)).flatten()


def _backward(
    losses: Iterable[tuple[torch.Tensor, list[Any]]],
    plain: _PlainModel,
    *,
    num_units: float,
    num_parts: int,
    sum_dtype: torch.dtype,
) -> float:
    """Set the gradients of masters for a step's mean loss and router losses; return the mean
    loss. losses: of `num_parts` micro-batches, the loss summed over units, and the model's
    outputs."""
    plain.terms.begin_step()
    sums: dict[str, torch.Tensor] = {}
    total = 0.0
    for loss, outputs in losses:
        mean_loss = loss / num_units
        if plain.terms.is_on:
            mean_loss = mean_loss + plain.terms.of(outputs) / num_parts
        mean_loss.backward()
        total += float(loss.detach())
        for name, parameter in plain.parameters.items():
            if parameter.grad is not None:
                gradient_sum = sums.setdefault(name, torch.zeros_like(parameter, dtype=sum_dtype))
                gradient_sum += parameter.grad.to(sum_dtype)
            parameter.grad = None
    for name, master in plain.masters.items():
        master.grad = sums[name].float() if name in sums else None
    return total / num_units


class PlainPasses:
    """Passes of plain transformers in one process, from which an objective computes its loss.
    summed: the last values that the objective summed over replicas; None if it sums none."""

    reports_loss = True

    def __init__(self, model: Any, section: ObjectiveSection) -> None:
        self._model, self._section = model, section
        self.summed: torch.Tensor | None = None

    def cross_entropy(
        self, batch: MicroBatch, moved: MicroBatch, factor: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[Any]]:
        """Return the loss of the next token, summed over targets, with the terms of the run; and
        the model's outputs."""
        outputs, logits = _outputs(self._model, batch)
        is_target = batch.labels != IGNORED_LABEL
        logits, labels = logits[is_target].float(), batch.labels[is_target]
        smoothing, alpha = self._section.label_smoothing, self._section.alpha
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        # z-loss: coefficient (log sum exp logits)^2 (PaLM, arXiv 2204.02311, section 5).
        losses = losses + self._section.z_loss * logits.exp().sum(-1).log().square()
        # Distillation: (1 - alpha) CE + alpha T^2 KL(teacher || student) at temperature T, on the
        # teacher's k tokens and all other tokens as one.
        if batch.teacher is not None:
            temperature = self._section.temperature
            values, ids = (part[is_target] for part in batch.teacher)
            softened = (logits / temperature).softmax(-1).gather(-1, ids)
            divergences = F.kl_div(
                _with_remainder(softened).log(), _with_remainder(values.exp()), reduction="none"
            ).sum(-1)
            losses = (1 - alpha) * losses + alpha * temperature**2 * divergences
        if batch.weights is not None:
            losses = losses * batch.weights[is_target]
        return losses.sum(), outputs

    def log_probabilities(
        self, batch: MicroBatch, moved: MicroBatch
    ) -> tuple[torch.Tensor, list[Any]]:
        """Return the log-probability per target, float32 [R, T], 0 elsewhere; and the model's
        outputs."""
        outputs, logits = _outputs(self._model, batch)
        target_ids = batch.labels.clamp(min=0).unsqueeze(-1)
        values = logits.float().log_softmax(-1).gather(-1, target_ids).squeeze(-1)
        return values * (batch.labels != IGNORED_LABEL), outputs

    def scores(self, batch: MicroBatch, moved: MicroBatch) -> tuple[torch.Tensor, list[Any]]:
        """Return the scores per row, float32 [R, L], of a pass up to the row's end."""
        outputs: list[Any] = []
        for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
            row_ids = ids[: int((labels != IGNORED_LABEL).sum())]
            outputs.append(self._model(input_ids=row_ids.unsqueeze(0), use_cache=False))
        return torch.cat([row_outputs.logits for row_outputs in outputs]).float(), outputs

    def row_sums(
        self, batches: Iterable[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, MicroBatch, torch.Tensor]]:
        """Yield every micro-batch twice, since there is no other device, and the log-probability
        per row, float32 [R]. Dropout is off anyway."""
        for batch in batches:
            log_probs, _ = self.log_probabilities(batch, batch)
            yield batch, batch, log_probs.sum(-1)

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`: there is one process."""
        self.summed = values
        return values

    def reference(self) -> AbstractContextManager[None]:
        """Return a context in which the model is without its adapters."""
        return without_adapters(self._model)


def _with_remainder(top_k: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of k tokens, [N, k], and of every further token together: [N,
    k + 1]."""
    return torch.cat([top_k, 1 - top_k.sum(-1, keepdim=True)], -1)


def _outputs(model: Any, batch: MicroBatch) -> tuple[list[Any], torch.Tensor]:
    """Return plain transformers' outputs, and logits [B, T, V]. If documents are isolated, each
    document has a forward pass, and so an output."""
    outputs: list[Any] = []

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        outputs.append(model(input_ids=ids, use_cache=False))
        logits: torch.Tensor = outputs[-1].logits
        return logits

    if batch.position_ids is None:
        return outputs, logits_of(batch.input_ids)
    samples = []
    for ids, positions in zip(batch.input_ids, batch.position_ids, strict=True):
        bounds = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]  # positions restart
        documents = ids.split([stop - start for start, stop in pairwise(bounds)])
        samples.append(torch.cat([logits_of(document[None])[0] for document in documents]))
    return outputs, torch.stack(samples)


def _weights(
    model: nn.Module, masters: dict[str, torch.Tensor], terms: RouterTerms
) -> dict[str, torch.Tensor]:
    """Return masters, frozen parameters and selection biases; with adapters without the frozen
    parameters, which no run saves."""
    parameters = dict(model.named_parameters())
    if any(".lora_" in name for name in masters):
        parameters = {name: parameters[name] for name in masters}
    with_biases = {**parameters, **{bias.name: bias.tensor for bias in terms.biases}}
    return {
        name: masters.get(name, tensor).detach().float().clone()
        for name, tensor in with_biases.items()
    }


def layer_outputs(model: torch.nn.Module, forward: Callable[[], object]) -> dict[str, float]:
    """Return the sum of squares of the output of every layer of `model` during `forward`, by name.
    Layers of other pipeline stages, which have no parameters here, are not included. The sums of
    disjoint batches, or parts of tokens, add up."""
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
