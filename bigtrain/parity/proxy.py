"""Run that is trained at every topology: the user's run with a proxy model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from bigtrain.errors import ConfigError, ModelError, Problem
from bigtrain.models.configuration import (
    load_hf_config,
    scores_samples,
    text_config,
    with_objective_head,
)
from bigtrain.models.equivalence.loss import choose_loss
from bigtrain.models.equivalence.proxy_model import (
    add_noise,
    build_proxy_model,
    rescale_weights,
)
from bigtrain.models.equivalence.reductions import deterministic, with_heads
from bigtrain.models.equivalence.tiles import choose_tiles
from bigtrain.models.experts import has_auxiliary_loss
from bigtrain.models.layers.parameters import KEY as FROZEN
from bigtrain.parity.adapters import comparable_adapters
from bigtrain.parity.batches import RATES, STEPS, TEACHER_TOP_K, save_reference_scores
from bigtrain.parity.optimizers import check_comparable
from bigtrain.parity.routers import (
    AUXILIARY,
    BIAS_RATE,
    Z_LOSS,
    can_join_forward_passes,
)
from bigtrain.parity.visibility import with_crossed_clipping
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.deepspeed.engine_config import (
    find_deepspeed_config,
    label_of,
    read_deepspeed_config,
    zero_stage_of,
)
from bigtrain.settings.deepspeed.keys import AUTO
from bigtrain.settings.deepspeed.ownership import owned_values
from bigtrain.settings.run_config import (
    BatchSection,
    ModelSection,
    OptimizerSection,
    OutputSection,
    PrecisionSection,
    RunConfig,
    ScheduleSection,
    TrainSection,
)
from bigtrain.settings.sections.base import Section
from bigtrain.settings.sections.optimizer import AverageSection
from bigtrain.settings.teacher import teacher_run

SHIPPED = ("zero0", "zero1", "zero2", "zero3", "pipeline_zero1")
_LABELS = ("first", "second", "third")
_SMALLEST_EPS = 1e-3
_CHUNK_TOKENS, _TILES = 7, 3
_MINIMA = {
    "moe": {"z_loss_coefficient": Z_LOSS, "bias_update_rate": BIAS_RATE},
    "objective": {
        "label_smoothing": 0.05,
        "z_loss": 0.01,
        "gamma": 0.1,
        "center_rewards_coefficient": 0.1,
    },
    "optimizer": {"weight_decay": 0.1},
}
"""Minimum of coefficients in a comparison, so that an error in a term is detected."""
_AVERAGE_DECAY = 0.8
"""Maximum of ``optimizer.ema.decay``: five updates move an average by more than rounding."""

SectionT = TypeVar("SectionT", bound=Section)


@dataclass(frozen=True)
class EngineChoice:
    """DeepSpeed JSON: its label in the output, its name or path, and whether it is the run's
    own."""

    label: str
    config: str
    is_own: bool


@dataclass(frozen=True)
class Proxy:
    """Run to train here, in float32. precision: the run's precision, in which the run's engine is
    compared too; None for float32. notes: human-readable lines on its differences from the user's
    run."""

    config: RunConfig
    engines: tuple[EngineChoice, ...]
    precision: PrecisionSection | None
    notes: tuple[str, ...]


def shrink(config: RunConfig, world_size: int, directory: Path) -> Proxy:
    """Return `config` with a proxy model (written to `directory`) and a batch size that suits every
    topology of `world_size` ranks.

    The architecture and its options are kept, as are the run's frozen parameters, loss, decay and
    Adam's betas. The weights are transformers' initial ones plus noise (ones and zeros hide
    errors), and clipping, if on, takes effect. Dropout is off. Raises ModelError if no proxy model
    can be built, ConfigError for conflicts with the run's model or DeepSpeed JSON.
    """
    # The model, and the teacher of a distillation, with few layers and this run's architecture.
    check_comparable(config.optimizer)
    section, notes = config.model, _notes_on_omitted_settings(config)
    hf_config = _with_head(config)
    attention = section.attention
    if attention not in ("auto", "sdpa", "eager"):
        notes.append(f"model.attention = {attention} needs CUDA: sdpa is compared")
        attention = "sdpa"
    tokens = 8 * max(2, world_size)  # of a sample; sequence parallelism divides them
    new_model = partial(
        _proxy_model,
        config,
        attention=attention,
        world_size=world_size,
        tokens=tokens,
        notes=notes,
    )
    model = new_model(hf_config)
    model.save_pretrained(directory)
    objective: dict[str, Any] = {"reference": None, "mtp_weight": 0.0}
    if config.objective.teacher_model is not None:
        # A teacher that differs from the student also in a shared architecture, and whose
        # probabilities depend on positions.
        hf_teacher = load_hf_config(teacher_run(config).model)
        teacher_directory = directory.with_name(f"{directory.name}-teacher")
        rescale_weights(new_model(hf_teacher)).save_pretrained(teacher_directory)
        objective |= {"teacher_model": str(teacher_directory), "teacher_top_k": TEACHER_TOP_K}
    adapters = config.adapters
    if adapters is not None:
        adapters = comparable_adapters(model, adapters, notes)
    # The run, with settings that CPUs support and with which an error is large enough to detect.
    batch = config.batch
    plan = BatchPlan(batch.samples_per_step, batch.micro_batch_size, 1, 1, batch.sequence_length)
    tile_plan, _ = choose_tiles(config, hf_config, plan)
    frozen = _matching_patterns(config, model, notes)
    loss_plan, _ = choose_loss(config, hf_config, plan)
    if loss_plan.kind == "liger":
        notes.append("model.loss = liger needs CUDA: the loss in chunks is compared")
    small = RunConfig(
        model=ModelSection(
            path=str(directory),
            attention=attention,
            gradient_checkpointing=section.gradient_checkpointing,
            frozen=frozen,
            # Several chunks in a micro-batch; Liger's kernel does not run on a CPU.
            loss="plain" if loss_plan.kind == "plain" else "chunked",
            loss_chunk_tokens=_CHUNK_TOKENS,
            tiled_mlp=_TILES if tile_plan.modules else "off",
        ),
        adapters=adapters,
        moe=_with_minima(config.moe, "moe", notes),
        data=config.data,
        batch=BatchSection(sequence_length=tokens, global_batch_size=2 * world_size),
        train=TrainSection(steps=STEPS),
        objective=_with_minima(config.objective, "objective", notes).model_copy(update=objective),
        optimizer=_comparable_optimizer(config.optimizer, notes),
        schedule=ScheduleSection(type="constant"),
        precision=PrecisionSection(dtype="float32"),
        output=OutputSection(directory=str(directory)),
        seed=config.seed,
    )
    save_reference_scores(model, small)
    small = with_crossed_clipping(small)
    precision = None
    if config.precision.dtype == "bfloat16":
        precision = config.precision.model_copy(update={"float8": "none"})
    return Proxy(small, _engine_choices(config, directory), precision, tuple(notes))


def _with_head(config: RunConfig) -> Any:
    """Return the configuration of the run's model with the head of the run's objective. Labels are
    the base's, or three: data are not read. Raises ConfigError as `with_objective_head`."""
    hf_config, objective = load_hf_config(config.model), config.objective
    if not objective.kind.scores_samples:
        hf_config.architectures = None  # the token head also of a base that scores samples
        return hf_config
    labels: tuple[str, ...] = ()
    if objective.kind.rows is not None and objective.kind.rows.has_classes:
        label_names = hf_config.id2label if scores_samples(hf_config) else None
        labels = _LABELS if label_names is None else tuple(label_names.values())
    return with_objective_head(hf_config, config, labels)


def _notes_on_omitted_settings(config: RunConfig) -> list[str]:
    """Return notes on the run's settings that are not compared."""
    section = config.model
    notes = [
        f"model.{name} = {value} needs CUDA or time: not compared"
        for name, value, off in (
            ("kernels", section.kernels, "none"),
            ("compile", section.compile, "off"),
            ("activation_offload", section.activation_offload, False),
        )
        if value not in (off, "auto")
    ]
    # Settings that are random, or round by more than an error would change.
    if section.neftune_noise_alpha is not None:
        notes.append(
            f"model.neftune_noise_alpha = {section.neftune_noise_alpha:g} is off here, like all "
            "dropout: each rank draws other noise"
        )
    if config.objective.mtp_weight:
        notes.append(
            "objective.mtp_weight: layers for multi-token prediction are not compared here, only "
            "the loss of the next token"
        )
    if config.precision.float8 != "none":
        notes.append(
            f"precision.float8 = {config.precision.float8} is off here: it rounds by more than any "
            "tolerance"
        )
    if config.precision.dtype == "float16":
        notes.append("float16 skips steps until its loss scale fits: only float32 is compared")
    return notes


def _proxy_model(
    config: RunConfig,
    hf_config: Any,
    *,
    attention: str,
    world_size: int,
    tokens: int,
    notes: list[str],
) -> Any:
    """Return the proxy model, with noise, for samples of `tokens` tokens. Raises ModelError."""
    # Dropout is off, and the notes name the run's probabilities: what `deterministic` changes.
    without_dropout = deterministic(hf_config)
    probabilities = set()
    for before, after in (
        (hf_config, without_dropout),
        (text_config(hf_config), text_config(without_dropout)),
    ):
        for key, value in vars(before).items():
            if value != vars(after).get(key):
                probabilities.add(f"{key} = {value}")
    if probabilities:
        dropout = ", ".join(sorted(probabilities))
        notes.append(
            f"dropout is off here ({dropout}): its masks depend on the division of the work, so "
            "that training with it cannot be compared step by step"
        )
    try:
        model = build_proxy_model(
            without_dropout,
            attention,
            [with_heads(max(2, world_size))],
            add_noise,
            sequence_length=config.batch.sequence_length,
            tokens=tokens,
        )
    except ValueError as error:
        raise ModelError(f"no proxy model can be built: {error}") from error
    # An auxiliary loss must be large enough to detect, and comparable.
    if has_auxiliary_loss(model.config):
        if config.data.isolates and not can_join_forward_passes(model):
            model.config.output_router_logits = False
            notes.append("the auxiliary loss is off here: it differs for separate documents")
        elif model.config.router_aux_loss_coef < AUXILIARY:
            notes.append(
                f"router_aux_loss_coef = {model.config.router_aux_loss_coef:g} is {AUXILIARY:g} "
                "here, so that an error is detected"
            )
            model.config.router_aux_loss_coef = AUXILIARY
    return model


def _with_minima(section: SectionT, name: str, notes: list[str]) -> SectionT:
    """Return `section` with each coefficient that is not 0 at least as large as in `_MINIMA`."""
    update = {
        key: minimum
        for key, minimum in _MINIMA[name].items()
        if 0 < getattr(section, key) < minimum
    }
    if update:
        changed = ", ".join(f"{name}.{key} = {value:g}" for key, value in update.items())
        notes.append(f"{changed} here, so that an error is detected")
    return section.model_copy(update=update)


def _comparable_optimizer(section: OptimizerSection, notes: list[str]) -> OptimizerSection:
    """Return the run's section, except for settings that would hide differences or amplify
    rounding. With Adam's default eps a gradient that is only a rounding error moves a weight as
    much as any gradient; at a small learning rate no weight would show a difference."""
    if section.facts.settings == "muon":
        muon_update: dict[str, Any] = {"ns_dtype": "float32", "split": {}}
        if section.muon.ns_dtype != "float32":
            notes.append(
                "Muon iterates in float32 here: in bfloat16 the last bits of a gradient change "
                "the third digit of an update"
            )
        if section.muon.split:
            notes.append("optimizer.muon.split is for the widths of the run's model: not compared")
        if section.muon.lr is not None:  # in proportion to the learning rate, which differs here
            muon_update["lr"] = section.muon.lr / section.lr * max(RATES)
        section = section.model_copy(update={"muon": section.muon.model_copy(update=muon_update)})
    if section.state_dtype != "float32":
        notes.append(
            "optimizer states are float32 here: in bfloat16 they are rounded stochastically"
        )
    section = _with_minima(section, "optimizer", notes)
    update: dict[str, Any] = {"lr": max(RATES), "state_dtype": "float32"}
    if section.ema is not None and section.ema.decay > _AVERAGE_DECAY:
        notes.append(f"optimizer.ema.decay = {_AVERAGE_DECAY:g} here, so that an error is detected")
        update["ema"] = AverageSection(decay=_AVERAGE_DECAY)
    if "eps" not in section.facts.unread:
        update["eps"] = max(section.eps, _SMALLEST_EPS)
    return section.model_copy(update=update)


def _matching_patterns(
    config: RunConfig, model: torch.nn.Module, notes: list[str]
) -> tuple[str, ...]:
    """Return the run's patterns that match something in the proxy model, which has fewer layers."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    patterns = config.model.frozen
    matching = tuple(p for p in patterns if any(fnmatchcase(name, p) for name in names))
    unmatched = [pattern for pattern in patterns if pattern not in matching]
    if unmatched:
        notes.append(f"{FROZEN}: {', '.join(unmatched)} match nothing in the proxy model")
    if all(any(fnmatchcase(name, p) for p in matching) for name in names):
        rule = "leaves nothing to train in the proxy model, which has fewer layers"
        raise ConfigError(Problem(FROZEN, list(patterns), rule, "match fewer parameters"))
    return matching


def _engine_choices(config: RunConfig, directory: Path) -> tuple[EngineChoice, ...]:
    """Return the shipped JSON of every ZeRO stage, and the run's JSON if it is not one of them."""
    path = find_deepspeed_config(config.engine.deepspeed_config)
    label = Path(label_of(path)).name.removesuffix(".json")
    if path.name == label_of(path) and label in SHIPPED:
        return tuple(EngineChoice(name, name, name == label) for name in SHIPPED)
    raw = read_deepspeed_config(path)
    plan = BatchPlan(1, 1, 1, 1, config.batch.sequence_length)
    for owned in owned_values(config, plan, raw, zero_stage_of(raw)):
        # The run sets these values: batch sizes, which differ here, and values that agree with the
        # run. A value that contradicts the run stays, and is refused later.
        if owned.key.startswith("train_") or owned.contradiction(raw, label) is None:
            _set_auto(raw, owned.key)
    _set_auto(raw, "gradient_accumulation_steps")
    config_path = directory / f"{label}.json"
    config_path.write_text(json.dumps(raw))
    shipped = (EngineChoice(name, name, is_own=False) for name in SHIPPED)
    return (*shipped, EngineChoice(label, str(config_path), is_own=True))


def _set_auto(tree: dict[str, Any], key: str) -> None:
    """Replace the value at a dotted path, if there is one, by "auto": the run then sets it."""
    *sections, name = key.split(".")
    section: Any = tree
    for section_name in sections:
        section = section.get(section_name) if isinstance(section, dict) else None
    if isinstance(section, dict) and name in section:
        section[name] = AUTO
