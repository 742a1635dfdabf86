"""`bigtrain parity`: the user's own model, made small, on every legal topology against one process.

The reference is a loop of the plain transformers model and `torch.optim.AdamW` here in this
process; nothing of the engine is in it. Each topology then trains the same few steps in real
processes on CPUs (`bigtrain.run.parity_worker`), and losses, gradient norms and weights are
compared.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bigtrain.config import (
    BatchSection,
    ModelSection,
    OptimizerSection,
    OutputSection,
    ParallelSection,
    PrecisionSection,
    RunConfig,
    ScheduleSection,
    TrainSection,
)
from bigtrain.data.loader import IGNORED_LABEL, MicroBatch
from bigtrain.engine.checkpoint_io import read_full_masters
from bigtrain.engine.resolve import resolve_run
from bigtrain.errors import BigtrainError, ConfigError, ModelError
from bigtrain.models.choices import try_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.huggingface import build_model, split_by_decay
from bigtrain.models.small_copy import VOCABULARY, small_copy, with_heads
from bigtrain.models.tensor_degree import check_tensor_size
from bigtrain.models.thresholds import document_positions
from bigtrain.run.local_world import run_local_world
from bigtrain.topology import BatchPlan

STEPS = 5
LOSS_TOLERANCE = 1e-5
"""In nats, at every step; float32 rounding is a tenth of it."""
NORM_TOLERANCE = 1e-4
"""Of the gradient norm, at every step."""
WEIGHT_TOLERANCE = 1e-5
"""Of any weight, at the end."""

_ENGINES = ("zero0", "zero1", "zero2", "zero3", "pipeline_zero1")
_CLIP_NORM = 0.5
_CHUNK_TOKENS = 7


@dataclass(frozen=True)
class Point:
    """A topology, and why it is refused; None where it is legal."""

    name: str
    engine: str
    parallel: ParallelSection
    refusal: str | None = None


@dataclass
class Figures:
    """What a training run of `STEPS` steps looks like.

    layers: sums of squares of each layer's output before the first step, in model order. first and
    last: the weights after the first and the last step, by name.
    """

    losses: list[float]
    norms: list[float]
    layers: dict[str, float]
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    last: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """How a topology compares: the worst difference of each kind, and where the first arises."""

    point: Point
    loss: float
    norm: float
    weight: float
    where: str = ""

    @property
    def passed(self) -> bool:
        """Whether all is within tolerance. Not a number is a difference."""
        return (
            self.loss <= LOSS_TOLERANCE
            and self.norm <= NORM_TOLERANCE
            and self.weight <= WEIGHT_TOLERANCE
        )


def points(config: RunConfig, world_size: int) -> list[Point]:
    """Every topology of `world_size` processes for the small copy's `config`, legal or not."""
    found = []
    refused_by_model = cache(partial(_model_refusal, config))  # a second or so each
    for parallel in _degrees(world_size):
        for engine in _ENGINES:
            if (engine == "pipeline_zero1") != (parallel.pipeline > 1) and engine != "zero0":
                continue
            degrees = ", ".join(
                f"{name} {getattr(parallel, name)}"
                for name in ("tensor", "pipeline", "sequence")
                if getattr(parallel, name) > 1
            )
            data_size = world_size // (parallel.tensor * parallel.pipeline * parallel.sequence)
            name = ", ".join(part for part in (engine, f"data {data_size}", degrees) if part)
            refusal = _rule_refusal(config, engine, parallel, world_size)
            refusal = refusal or refused_by_model(parallel)
            found.append(Point(name, engine, parallel, refusal))
    return found


def _degrees(world_size: int) -> Iterator[ParallelSection]:
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for tensor in divisors:
        for pipeline in divisors:
            for sequence in divisors:
                if world_size % (tensor * pipeline * sequence) == 0:
                    yield ParallelSection(tensor=tensor, pipeline=pipeline, sequence=sequence)


def _rule_refusal(
    config: RunConfig, engine: str, parallel: ParallelSection, world_size: int
) -> str | None:
    try:
        resolve_run(_at(config, parallel), world_size, engine, "cpu")
    except ConfigError as error:
        return "; ".join(problem.rule for problem in error.problems)
    return None


def _model_refusal(config: RunConfig, parallel: ParallelSection) -> str | None:
    hf_config = load_hf_config(config.model)
    try:
        problems = check_tensor_size(hf_config, parallel.tensor)
    except ModelError as error:
        return str(error)
    problems = problems or try_model(_at(config, parallel), hf_config)[0]
    return "; ".join(problem.rule for problem in problems) or None


def _at(config: RunConfig, parallel: ParallelSection) -> RunConfig:
    return config.model_copy(update={"parallel": parallel})


def shrink(config: RunConfig, world_size: int, directory: Path) -> RunConfig:
    """`config` with a small copy of its model (written to `directory`) and a batch for all points.

    The architecture and its options stay; weights are random, numbers are float32, and the clipping
    norm is one that bites. Raises ModelError where no small copy can be built.
    """
    tokens = 8 * max(2, world_size)
    try:
        model = small_copy(
            load_hf_config(config.model),
            config.model.attention,
            [with_heads(max(2, world_size))],
            sequence_length=config.batch.sequence_length,
            tokens=tokens,
        )
    except ValueError as error:
        raise ModelError(f"no small copy of the model can be built: {error}") from error
    if getattr(model.config, "output_router_logits", False):
        # The router's loss is a micro-batch's, and the points cut the batch differently.
        model.config.output_router_logits = False
    model.config.save_pretrained(directory)
    section = config.model
    return RunConfig(
        model=ModelSection(
            config=str(directory),
            attention=section.attention,
            gradient_checkpointing=section.gradient_checkpointing,
            # Several chunks in a micro-batch; Liger's kernel does not run on a CPU.
            loss="chunked" if section.loss in ("chunked", "liger") else "plain",
            loss_chunk_tokens=_CHUNK_TOKENS,
        ),
        data=config.data,
        batch=BatchSection(sequence_length=tokens, global_samples=2 * world_size),
        train=TrainSection(steps=STEPS),
        # A larger eps than usual: with Adam's own, a gradient of rounding errors moves a weight
        # as far as any other, and every topology would differ.
        optimizer=OptimizerSection(lr=1e-2, eps=1e-3, clip_norm=_CLIP_NORM),
        schedule=ScheduleSection(type="constant"),
        precision=PrecisionSection(dtype="float32"),
        output=OutputSection(directory=str(directory)),
        seed=config.seed,
    )


def micro_batches(
    config: RunConfig, plan: BatchPlan, step: int, data_rank: int
) -> list[MicroBatch]:
    """The batches of a step for `data_rank`: random tokens, the same samples at every topology."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (plan.global_samples, plan.sequence_length + 1)
    tokens = torch.randint(1, VOCABULARY, shape, generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORED_LABEL
    parts = [inputs, labels]
    if config.data.isolates:
        positions = document_positions(plan.global_samples, plan.sequence_length)
        labels[:, :-1][positions[:, 1:] == 0] = IGNORED_LABEL
        parts.append(positions)
    rows = torch.arange(plan.global_samples).reshape(
        plan.accumulation, plan.data_size, plan.micro_samples
    )[:, data_rank]
    return [MicroBatch(*(part[row] for part in parts)) for row in rows]


def train_reference(config: RunConfig) -> Figures:
    """Train plain transformers with torch's AdamW in this process, whole batches at a time."""
    model = build_model(config.model, load_hf_config(config.model), seed=config.seed)
    samples = config.batch.samples_per_step
    plan = BatchPlan(samples, samples, 1, 1, config.batch.sequence_length)
    groups = split_by_decay(model, decay_embeddings=config.optimizer.decay_embeddings)
    optimizer = torch.optim.AdamW(
        [
            {"params": groups.decay, "weight_decay": config.optimizer.weight_decay},
            {"params": groups.no_decay, "weight_decay": 0.0},
        ],
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
    )
    figures = Figures([], [], {})
    with torch.no_grad():
        model.eval()
        (batch,) = micro_batches(config, plan, 0, 0)
        figures.layers = layer_outputs(model, lambda: _logits(model, batch))
    model.train()
    for step in range(STEPS):
        (batch,) = micro_batches(config, plan, step, 0)
        logits = _logits(model, batch)
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=IGNORED_LABEL
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        figures.losses.append(float(loss.detach()))
        figures.norms.append(float(norm))
        if step == 0:
            figures.first = _weights(model)
    figures.last = _weights(model)
    return figures


def _logits(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Logits [B, T, V] of plain transformers, of every document alone where they are kept apart."""

    def of(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return logits

    if batch.position_ids is None:
        return of(batch.input_ids)
    samples = []
    for ids, positions in zip(batch.input_ids, batch.position_ids, strict=True):
        edges = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        documents = ids.split([stop - start for start, stop in pairwise(edges)])
        samples.append(torch.cat([of(document[None])[0] for document in documents]))
    return torch.stack(samples)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def layer_outputs(model: torch.nn.Module, forward: Callable[[], object]) -> dict[str, float]:
    """Sums of squares of what every layer of `model` puts out during `forward`, by name.

    Layers are what module lists hold, as far as they have parameters (those of other pipeline
    stages have none here). Sums over tokens, so those of disjoint batches or parts add up.
    """
    sums: dict[str, float] = {}
    handles = []
    lists = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}
    outer = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    for prefix in outer:
        for index, layer in enumerate(lists[prefix]):
            if not any(True for _ in layer.parameters()):
                continue

            def record(
                _module: object, _inputs: object, output: Any, name: str = f"{prefix}.{index}"
            ) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                if isinstance(hidden, torch.Tensor):
                    sums[name] = sums.get(name, 0.0) + float(hidden.double().square().sum())

            handles.append(layer.register_forward_hook(record))
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return sums


def train_points(
    config: RunConfig, legal: list[Point], world_size: int, directory: Path
) -> dict[str, Figures]:
    """Train every legal point in one world of `world_size` processes; figures by name.

    Raises LaunchError with the end of their output where they fail.
    """
    (directory / "cases.json").write_text(
        json.dumps(
            [
                {
                    "config": _at(config, p.parallel).model_dump(mode="json"),
                    "engine": p.engine,
                    "directory": str(directory / f"point{number}"),
                }
                for number, p in enumerate(legal)
            ]
        )
    )
    run_local_world(
        world_size,
        ["-m", "bigtrain.run.parity_worker", str(directory / "cases.json")],
        {"CUDA_VISIBLE_DEVICES": ""},
    )
    found = {}
    for number, point in enumerate(legal):
        place = directory / f"point{number}"
        scalars = json.loads((place / "figures.json").read_text())
        found[point.name] = Figures(
            scalars["losses"],
            scalars["norms"],
            scalars["layers"],
            read_full_masters(place / "first"),
            read_full_masters(place / "last"),
        )
    return found


def compare(point: Point, reference: Figures, found: Figures) -> Verdict:
    """The worst differences of `found`, and where the first arises if they are too large."""
    verdict = Verdict(
        point,
        max(_distance(a, b) for a, b in zip(reference.losses, found.losses, strict=True)),
        max(_distance(a, b) / a for a, b in zip(reference.norms, found.norms, strict=True)),
        max(_weight_distance(reference.last, found.last).values()),
    )
    if verdict.passed:
        return verdict
    where = _first_difference(reference, found)
    return Verdict(point, verdict.loss, verdict.norm, verdict.weight, where)


def _distance(first: float, second: float) -> float:
    distance = abs(first - second)
    return distance if distance == distance else float("inf")


def _weight_distance(
    reference: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> dict[str, float]:
    return {
        name: _distance(float((found[name] - weight).abs().max()), 0.0)
        if name in found and found[name].shape == weight.shape
        else float("inf")
        for name, weight in reference.items()
    }


def _first_difference(reference: Figures, found: Figures) -> str:
    for name, expected in reference.layers.items():
        seen = found.layers.get(name)
        if seen is None or _distance(seen, expected) > 1e-4 * expected:
            return f"the output of {name}, in the forward pass"
    if _distance(reference.losses[0], found.losses[0]) > LOSS_TOLERANCE:
        return "after the last layer: norm, head or loss"
    distances = _weight_distance(reference.first, found.first)
    name = max(distances, key=lambda key: distances[key])
    if distances[name] > WEIGHT_TOLERANCE:
        return f"the gradient of {name}, in the backward pass of the first step"
    return "after the first step: gradient norm, clipping or optimizer"


def run_parity(
    config: RunConfig, world_size: int, report: Callable[[Point, Verdict | None], None]
) -> bool:
    """Compare every legal topology of `world_size` processes; calls `report` for every point.

    Returns whether all passed. Raises ModelError where the model cannot be made small, LaunchError
    where the processes fail.
    """
    with tempfile.TemporaryDirectory(prefix="bigtrain-parity-") as name:
        directory = Path(name)
        small = shrink(config, world_size, directory / "model")
        all_points = points(small, world_size)
        for point in all_points:
            if point.refusal is not None:
                report(point, None)
        legal = [point for point in all_points if point.refusal is None]
        if not legal:
            raise BigtrainError(f"no topology of {world_size} processes is legal")
        reference = train_reference(small)
        found = train_points(small, legal, world_size, directory)
        verdicts = [compare(point, reference, found[point.name]) for point in legal]
        for verdict in verdicts:
            report(verdict.point, verdict)
        return all(verdict.passed for verdict in verdicts)
