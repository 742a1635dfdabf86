"""Resolves a run, a world size and a DeepSpeed JSON into a `ResolvedRun`, or refuses them. Pure.

`bigtrain check` and `bigtrain/train.py` both use it, so they accept the same runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.accelerate import SOURCE, AccelerateSettings
from bigtrain.settings.batch_plan import BatchPlan, plan_batch
from bigtrain.settings.compatibility.check import Device, Facts, check_compatibility
from bigtrain.settings.deepspeed.engine_config import (
    EngineConfig,
    check_file_alone,
    find_deepspeed_config,
    label_of,
    read_deepspeed_config,
    render,
)
from bigtrain.settings.deepspeed.keys import value_at
from bigtrain.settings.extensions import (
    check_callback_class,
    check_model_class,
    check_samples_class,
    check_schedule,
    import_named,
)
from bigtrain.settings.hf_config_keys import inspect_configuration, key_table
from bigtrain.settings.loading import apply_overrides, find_config, load_run_config, parse_yaml
from bigtrain.settings.objective import (
    check_distillation,
    check_objective,
    check_pairs,
    check_reference,
    check_scores,
    of_teacher,
    rows_per_sample,
    teacher_run,
)
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sample_stream import check_stream
from bigtrain.settings.sections.extensions import GIVEN, is_imported
from bigtrain.settings.topology import Topology, derive_topology


@dataclass(frozen=True)
class ResolvedRun:
    """A run that passed every check of the settings.

    ``config.engine.deepspeed_config`` is the one in use, from whichever source named it.
    """

    config: RunConfig
    topology: Topology
    plan: BatchPlan
    engine: EngineConfig
    phases: tuple[ResolvedRun, ...] = ()
    """the run in each of ``batch.phases``, then in the rest; empty without phases"""
    complete_config: RunConfig | None = None
    """of the run that this is a phase of"""

    @property
    def recorded_config(self) -> RunConfig:
        """Settings that checkpoints record."""
        return self.complete_config or self.config


def resolve_run(
    config: RunConfig,
    world_size: int,
    deepspeed_config: str | None = None,
    device: Device | None = None,
    accelerate: AccelerateSettings | None = None,
    *,
    async_io: bool | None = None,
    scores: bool = False,
) -> ResolvedRun:
    """Resolve `config` for `world_size` ranks.

    `deepspeed_config` (a name or path) wins over ``engine.deepspeed_config``. `device` and
    `async_io` (whether libaio is installed) are None if unknown, as on a login node. `accelerate`:
    the answers of `accelerate launch`, which configure the engine where no JSON is named. `scores`:
    for a pass that scores the data, which reads complete rows like another objective. Raises
    one ConfigError with every problem: batch arithmetic, unknown keys, contradictions between the
    files, illegal combinations, in each of ``batch.phases``.
    """

    def resolved(one: RunConfig) -> ResolvedRun:
        given = world_size, deepspeed_config, device, accelerate
        return _resolve_alone(one, *given, async_io=async_io, scores=scores)

    if not config.batch.phases:
        return resolved(config)
    phases, problems, source = [], _check_phases(config), ""
    for number in range(len(config.batch.phases), -1, -1):  # the keys of the section first
        batch = config.batch.of_phase(number)
        try:
            phases.append(resolved(config.model_copy(update={"batch": batch})))
        except ConfigError as error:
            source = source or error.source
            problems += in_phase(config, number, error.problems, problems)
    if problems:
        raise ConfigError(problems, source or "the run with batch.phases")
    rest = phases[0]
    whole = rest.config.model_copy(update={"batch": config.batch})
    each = tuple(replace(phase, complete_config=whole) for phase in reversed(phases))
    return replace(rest, config=whole, phases=each)


def largest_phase(run: ResolvedRun) -> ResolvedRun:
    """Return the phase with the most tokens in a micro-batch, which needs the most memory; `run`
    without phases."""
    return max(run.phases or (run,), key=lambda one: one.plan.micro_batch_tokens)


def in_phase(
    config: RunConfig, number: int, problems: Sequence[Problem], known: Sequence[Problem] = ()
) -> list[Problem]:
    """Return `problems` of a phase that are not `known`, with the phase's keys; those of the rest
    of the run as they are."""
    new = [problem for problem in problems if problem not in known]
    if number == len(config.batch.phases):
        return new
    name = f"batch.phases[{number}]"
    return [
        replace(
            problem,
            key=problem.key.replace("batch.", f"{name}.", 1)
            if problem.key.startswith("batch.")
            else f"{problem.key} (in {name})",
        )
        for problem in new
    ]


def _check_phases(config: RunConfig) -> list[Problem]:
    """Check what does not go with ``batch.phases``."""
    steps, needed = config.train.steps, config.batch.ends()[-1]
    rules: list[tuple[bool, str, object, str, str]] = [
        (
            steps is None,
            "train.epochs",
            config.train.epochs,
            "steps of batch.phases read different numbers of samples, so an epoch cannot be "
            "counted in steps",
            "train.steps=N train.epochs=null",
        ),
        (
            steps is not None and steps < needed,
            "train.steps",
            steps,
            f"batch.phases have {needed} steps",
            f"train.steps={needed} or more",
        ),
        (
            config.sites is not None,
            "sites",
            "set",
            "sites make rounds of steps of one batch, and batch.phases changes it",
            "omit batch.phases, or train at one site (sites=null)",
        ),
        (
            config.data.packing == "best_fit",
            "data.packing",
            config.data.packing,
            "documents are packed for one batch.sequence_length and one order, and batch.phases "
            "changes it",
            "data.packing=concatenate, with data.document_boundaries=isolate",
        ),
        (
            config.checkpoint.memory is not None,
            "checkpoint.memory",
            "set",
            "checkpoints in memory are of one batch, and batch.phases changes it",
            "checkpoint.memory=null",
        ),
        (
            config.objective.type != "next_token",
            "objective.type",
            config.objective.type,
            "batch.phases are for samples of any length, and pairs and answers have their own",
            "next_token, or omit batch.phases",
        ),
        (
            config.adapters is not None,
            "adapters",
            "set",
            "a run with batch.phases reads all weights from its checkpoint at each phase, which "
            "has none of the base",
            "omit batch.phases, and change the batch when it resumes, by "
            "checkpoint.allow_changes=[batch]",
        ),
        (
            config.data.samples is not None,
            "data.samples",
            "set",
            "samples of your own have one length, and batch.phases changes it",
            "omit batch.phases",
        ),
    ]
    problems = [
        Problem(key, value, rule, fix) for applies, key, value, rule, fix in rules if applies
    ]
    chunk = config.data.chunk_length
    for number in range(len(config.batch.phases)):
        length = config.batch.of_phase(number).sequence_length
        if chunk is not None and chunk % length:
            rule = f"is not a divisor of data.chunk_length = {chunk}"
            nearest = f"nearest: data.chunk_length={-(-chunk // length) * length}"
            key = f"batch.phases[{number}].sequence_length"
            problems.append(Problem(key, length, rule, nearest))
    return problems


def _check_objective_data(config: RunConfig) -> list[Problem]:
    """Check what an objective that is known needs of data and model."""
    return [
        *check_pairs(config),
        *check_scores(config),
        *check_reference(config),
        *check_distillation(config),
    ]


def _check_scoring(config: RunConfig) -> list[Problem]:
    """Check that a run's data can be scored (`bigtrain score`)."""
    problems = []
    if config.objective.scores_samples:
        rule = "its model predicts no tokens, whose log-probabilities would be stored"
        problems.append(Problem("objective.type", config.objective.type, rule, "next_token"))
    if config.data.samples is not None:
        rule = "scores are stored next to documents of shards, and these are samples of your code"
        fix = "data.samples=null scores the shards of data.path; or tokenize rows with input_ids"
        problems.append(Problem("data.samples.type", config.data.samples.type, rule, fix))
    return problems


def _resolve_alone(
    config: RunConfig,
    world_size: int,
    deepspeed_config: str | None,
    device: Device | None,
    accelerate: AccelerateSettings | None,
    *,
    async_io: bool | None,
    scores: bool,
) -> ResolvedRun:
    """Resolve a run without phases."""
    topology, problems = _topology_of(config, world_size)
    problems.extend(_check_profile(config, world_size))
    problems.extend(_check_extensions(config))
    of_objective = check_objective(config.objective)
    problems.extend(of_objective or _check_objective_data(config))
    problems.extend(_check_scoring(config) if scores else ())
    model, of_model = inspect_configuration(config.model)
    problems.extend(of_model)
    plan = None
    if accelerate is not None:
        config = accelerate.fill(config)
    if topology is not None:
        if accelerate is not None:
            config = accelerate.fill_micro_batch(config, topology.data_size)
        of_sites: tuple[Any, ...] = ()
        if config.sites is not None:
            of_sites = config.sites.count, config.sites.index, config.sites.shares or ()
        plan, of_batch = plan_batch(config.batch, topology.data_size, *of_sites)
        problems.extend(of_batch)
        if plan is not None and not of_objective:
            plan = replace(plan, rows_per_sample=rows_per_sample(config.objective))
    name, raw, source, of_file = _choose(config, deepspeed_config, accelerate)
    problems.extend(of_file)
    engine = None
    if raw is not None:
        if accelerate is not None:
            problems.extend(accelerate.contradictions(config, plan, raw, source))
        engine, of_engine = render(config, plan, raw, source)
        problems.extend(of_engine)
        facts = Facts(
            config,
            raw,
            model,
            world_size=world_size,
            device=device,
            async_io=async_io,
            source=source,
            accelerate=source == SOURCE,
            **({"objective": "scores"} if scores else {}),
        )
        problems.extend(check_compatibility(facts))
    if not problems and config.objective.teacher_model is not None:
        try:
            resolve_run(teacher_run(config), world_size)
        except ConfigError as error:
            problems += [of_teacher(config, problem) for problem in error.problems]
    if problems or topology is None or plan is None or engine is None:
        raise ConfigError(problems, f"the run with {source}")
    used = config.engine.model_copy(update={"deepspeed_config": name})
    return ResolvedRun(config.model_copy(update={"engine": used}), topology, plan, engine)


def resolve_teacher(run: ResolvedRun) -> ResolvedRun | None:
    """Return the run of the teacher that `run` computes (`teacher_run`); None without one."""
    if run.config.objective.teacher_model is None:
        return None
    return resolve_run(teacher_run(run.config), run.topology.world_size)


def resolve_run_files(
    name_or_path: str,
    overrides: Sequence[str],
    world_size: int,
    deepspeed_config: str | None = None,
    device: Device | None = None,
    accelerate: AccelerateSettings | None = None,
    *,
    scores: bool = False,
) -> ResolvedRun:
    """Resolve a run from the path of its YAML or a recipe name.

    If the YAML is wrong, the ConfigError also lists the problems of the DeepSpeed JSON on its own,
    so that both files can be corrected at once.
    """
    try:
        config = load_run_config(name_or_path, overrides)
    except ConfigError as error:
        name = deepspeed_config or _deepspeed_config_named_in(name_or_path, overrides)
        raw, source, problems = _read(name) if name else (None, "", [])
        if raw is not None:
            problems = check_file_alone(raw, source)
        if not problems:
            raise
        sources = " and ".join(part for part in (error.source, source) if part)
        raise ConfigError([*error.problems, *problems], sources) from error
    return resolve_run(config, world_size, deepspeed_config, device, accelerate, scores=scores)


def _check_profile(config: RunConfig, world_size: int) -> list[Problem]:
    valid = "rank is 0" if world_size == 1 else f"ranks are 0 to {world_size - 1}"
    rule = f"the only valid {valid}" if world_size == 1 else f"valid {valid}"
    remedy = f"ranks from 0 to {world_size - 1}" if world_size > 1 else "profile.ranks=[0]"
    return [
        Problem("profile.ranks", rank, rule, remedy)
        for rank in config.profile.ranks
        if rank >= world_size > 0
    ]


def _check_extensions(config: RunConfig) -> list[Problem]:
    """Import the user's code that the run names, and check it."""
    schedule = config.schedule
    problems: list[Problem] = []
    if is_imported(schedule.type):
        settings, steps = schedule.settings, config.train.steps
        problems += check_schedule("schedule.type", schedule.type, settings, steps)
    samples = config.data.samples
    if samples is not None and samples.type != GIVEN:
        own = check_samples_class("data.samples.type", samples.type, samples.settings)
        problems += own or check_stream(config, import_named("data.samples.type", samples.type))
    if config.model.type is not None:
        known = key_table()["model_types"]
        problems += check_model_class("model.type", config.model.type, known)
    for number, callback in enumerate(config.callbacks):
        key = f"callbacks.{number}.type"
        problems += check_callback_class(key, callback.type, callback.settings)
    return problems


def _topology_of(config: RunConfig, world_size: int) -> tuple[Topology | None, list[Problem]]:
    if world_size < 1:
        rule = "must be at least 1"
        return None, [Problem("world size", world_size, rule, "start at least one process")]
    return derive_topology(config.parallel, world_size)


def _choose(
    config: RunConfig, deepspeed_config: str | None, accelerate: AccelerateSettings | None
) -> tuple[str, Mapping[str, Any] | None, str, list[Problem]]:
    """Return the engine's configuration: its name, its keys, its label in problems, and
    problems."""
    name: str | None = deepspeed_config or config.engine.deepspeed_config
    if accelerate is not None:
        try:
            name = accelerate.named_file(config, deepspeed_config)
        except ConfigError as error:
            return SOURCE, None, SOURCE, list(error.problems)
        if name is None:
            return SOURCE, accelerate.tree, SOURCE, []
    assert name is not None
    return name, *_read(name)


def _read(name: str) -> tuple[dict[str, Any] | None, str, list[Problem]]:
    label = Path(name).name
    try:
        path = find_deepspeed_config(name)
        label = label_of(path)
        return read_deepspeed_config(path), label, []
    except ConfigError as error:
        return None, label, list(error.problems)


def _deepspeed_config_named_in(name_or_path: str, overrides: Sequence[str]) -> str | None:
    try:
        path = find_config(name_or_path)
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (ConfigError, OSError, UnicodeDecodeError):
        return None
    if not isinstance(tree, dict):
        return None
    apply_overrides(tree, overrides)
    name = value_at(tree, "engine.deepspeed_config")
    return name if isinstance(name, str) else None
