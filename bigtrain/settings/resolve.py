"""Resolves a run, a world size and a DeepSpeed JSON into a `ResolvedRun`, or refuses them. Pure.

`bigtrain check` and `bigtrain/train.py` both use it, so they accept equal runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.accelerate import SOURCE, AccelerateSettings
from bigtrain.settings.batch_plan import BatchPlan, check_phases, in_phase, plan_batch
from bigtrain.settings.compatibility.check import check_compatibility
from bigtrain.settings.compatibility.facts import Device, Facts, read_facts
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
from bigtrain.settings.hf_config_keys import (
    ModelDimensions,
    inspect_configuration,
    key_table,
)
from bigtrain.settings.loading import apply_overrides, find_config, load_run_config, parse_yaml
from bigtrain.settings.run_config import RunConfig
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
    """the run in each of ``batch.phases``, then after them; empty without phases"""
    complete_config: RunConfig | None = None
    """settings of the complete run, if this is one of its phases"""

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
    draft = _Draft(
        config, world_size, deepspeed_config, device, accelerate, async_io=async_io, scores=scores
    )
    if not config.batch.phases:
        return _resolve_draft(draft)

    # Resolve the run once for every phase, with its batch, from last to first. The batch after the
    # last phase is the section ``batch``: its problems have keys of the section, and a phase adds
    # only the problems that are not among them.
    reversed_phases, problems, source = [], check_phases(config), ""
    for number in range(len(config.batch.phases), -1, -1):
        phase_config = config.model_copy(update={"batch": config.batch.of_phase(number)})
        try:
            reversed_phases.append(_resolve_draft(replace(draft, config=phase_config)))
        except ConfigError as error:
            source = source or error.source
            problems += in_phase(config, number, error.problems, problems)
    if problems:
        raise ConfigError(problems, source or "the run with batch.phases")
    last_phase = reversed_phases[0]
    complete_config = last_phase.config.model_copy(update={"batch": config.batch})
    phases = [replace(run, complete_config=complete_config) for run in reversed(reversed_phases)]
    return replace(last_phase, config=complete_config, phases=tuple(phases))


def largest_phase(run: ResolvedRun) -> ResolvedRun:
    """Return the phase with the most tokens in a micro-batch, which needs the most memory; `run`
    without phases."""
    return max(run.phases or (run,), key=lambda phase: phase.plan.micro_batch_tokens)


@dataclass(frozen=True)
class _EngineJson:
    """DeepSpeed JSON of a run, or the answers to `accelerate config` in the form of a JSON.

    name: as the run names the file. tree: contents; None if there are `problems`. label: the file
    in problems."""

    name: str
    tree: Mapping[str, Any] | None
    label: str
    problems: Sequence[Problem] = ()


def _read_json(name: str) -> _EngineJson:
    label = Path(name).name
    try:
        path = find_deepspeed_config(name)
        label = label_of(path)
        return _EngineJson(name, read_deepspeed_config(path), label)
    except ConfigError as error:
        return _EngineJson(name, None, label, error.problems)


@dataclass
class _Draft:
    """A run without phases while it is resolved: the arguments of `resolve_run`, then what the
    checks derive in the order of `_CHECKS`. A value that could not be derived is None."""

    config: RunConfig
    world_size: int
    deepspeed_config: str | None
    device: Device | None
    accelerate: AccelerateSettings | None
    async_io: bool | None
    scores: bool
    topology: Topology | None = None
    rows_per_sample: int = 1
    model: ModelDimensions | None = None
    plan: BatchPlan | None = None
    json: _EngineJson | None = None
    engine: EngineConfig | None = None


def _derive_topology(draft: _Draft) -> list[Problem]:
    if draft.world_size < 1:
        rule = "must be at least 1"
        return [Problem("world size", draft.world_size, rule, "start at least one process")]
    draft.topology, problems = derive_topology(draft.config.parallel, draft.world_size)
    return problems


def _check_profile(draft: _Draft) -> list[Problem]:
    """Check that the profiled ranks exist."""
    world_size = draft.world_size
    if world_size == 1:
        rule, remedy = "the only valid rank is 0", "profile.ranks=[0]"
    else:
        rule = f"valid ranks are 0 to {world_size - 1}"
        remedy = f"ranks from 0 to {world_size - 1}"
    return [
        Problem("profile.ranks", rank, rule, remedy)
        for rank in draft.config.profile.ranks
        if rank >= world_size > 0  # `_derive_topology` refuses a world without ranks
    ]


def _check_extensions(draft: _Draft) -> list[Problem]:
    """Import the user's code that the run names, and check it."""
    config, problems = draft.config, []
    if is_imported(config.schedule.type):
        settings, num_steps = config.schedule.settings, config.train.steps
        problems += check_schedule("schedule.type", config.schedule.type, settings, num_steps)
    samples = config.data.samples
    if samples is not None and samples.type != GIVEN:
        key = "data.samples.type"
        class_problems = check_samples_class(key, samples.type, samples.settings)
        from bigtrain.settings.sample_stream import check_stream

        # Whether the class yields a stream is known only if the class has no problems.
        problems += class_problems or check_stream(config, import_named(key, samples.type))
    if config.model.type is not None:
        model_types = key_table()["model_types"]
        problems += check_model_class("model.type", config.model.type, model_types)
    for number, callback in enumerate(config.callbacks):
        key = f"callbacks.{number}.type"
        problems += check_callback_class(key, callback.type, callback.settings)
    return problems


def _check_objective(draft: _Draft) -> list[Problem]:
    """Check the user's code of the objective; if it can be imported, also check what the objective
    needs of data and model."""
    objective = draft.config.objective.kind
    if problems := objective.import_problems():
        return problems
    draft.rows_per_sample = objective.rows_per_sample
    return objective.problems(draft.config)


def _check_scoring(draft: _Draft) -> list[Problem]:
    """Check that a run's data can be scored (`bigtrain score`)."""
    if not draft.scores:
        return []
    config, problems = draft.config, []
    if config.objective.kind.scores_samples:
        rule = "its model predicts no tokens, whose log-probabilities would be stored"
        problems.append(Problem("objective.type", config.objective.type, rule, "next_token"))
    if config.data.samples is not None:
        rule = "scores are stored next to documents of shards, and these are samples of your code"
        fix = "data.samples=null scores the shards of data.path; or tokenize rows with input_ids"
        problems.append(Problem("data.samples.type", config.data.samples.type, rule, fix))
    return problems


def _inspect_model(draft: _Draft) -> list[Problem]:
    draft.model, problems = inspect_configuration(draft.config.model)
    return problems


def _plan_batch(draft: _Draft) -> list[Problem]:
    """Plan the batch, after the answers to accelerate have set the settings that the run omits."""
    if draft.accelerate is not None:
        draft.config = draft.accelerate.fill(draft.config)
    if draft.topology is None:
        return []
    data_size = draft.topology.data_size
    if draft.accelerate is not None:
        draft.config = draft.accelerate.fill_micro_batch(draft.config, data_size)
    batch, sites = draft.config.batch, draft.config.sites
    if sites is None:
        plan, problems = plan_batch(batch, data_size)
    else:
        plan, problems = plan_batch(batch, data_size, sites.count, sites.index, sites.shares or ())
    if plan is not None:
        draft.plan = replace(plan, rows_per_sample=draft.rows_per_sample)
    return problems


def _read_engine_json(draft: _Draft) -> list[Problem]:
    """Read the DeepSpeed JSON; without one, the answers to accelerate take its place."""
    name: str | None = draft.deepspeed_config or draft.config.engine.deepspeed_config
    if draft.accelerate is not None:
        try:
            name = draft.accelerate.named_file(draft.config, draft.deepspeed_config)
        except ConfigError as error:
            draft.json = _EngineJson(SOURCE, None, SOURCE, error.problems)
            return list(error.problems)
        if name is None:
            draft.json = _EngineJson(SOURCE, draft.accelerate.tree, SOURCE)
            return []
    assert name is not None
    draft.json = _read_json(name)
    return list(draft.json.problems)


def _render_engine(draft: _Draft) -> list[Problem]:
    """Render the engine's configuration, and check the run, the JSON and the model together."""
    if draft.json is None or draft.json.tree is None:
        return []
    config, tree, label = draft.config, draft.json.tree, draft.json.label
    problems = []
    if draft.accelerate is not None:
        problems += draft.accelerate.contradictions(config, draft.plan, tree, label)
    draft.engine, engine_problems = render(config, draft.plan, tree, label)
    if draft.accelerate is not None and draft.engine is not None:
        answers = draft.accelerate.notes(config, draft.plan, tree, label)
        draft.engine = replace(draft.engine, notes=(*answers, *draft.engine.notes))
    facts = read_facts(config, tree, draft.model) | Facts(
        world_size=draft.world_size,
        device=draft.device,
        async_io=draft.async_io,
        source=label,
        accelerate=label == SOURCE,
    )
    if draft.scores:
        facts |= Facts(objective="scores")
    return [*problems, *engine_problems, *check_compatibility(facts)]


_CHECKS: tuple[Callable[[_Draft], list[Problem]], ...] = (
    _derive_topology,
    _check_profile,
    _check_extensions,
    _check_objective,
    _check_scoring,
    _inspect_model,
    _plan_batch,
    _read_engine_json,
    _render_engine,
)
"""Checks in order. Each returns its problems, and writes what it derives into the draft, where
later checks read it."""


def _resolve_draft(draft: _Draft) -> ResolvedRun:
    """Return the run of a draft. Raises a ConfigError with the problems of every check."""
    problems = [problem for check in _CHECKS for problem in check(draft)]
    # If the model refuses a degree, the degree must change, and with it the legal world sizes.
    if any(problem.key.startswith("parallel.") for problem in problems):
        problems = [problem for problem in problems if problem.key != "world size"]
    config, json = draft.config, draft.json
    assert json is not None
    # The teacher's run copies settings of this run, so it is checked only if they have no problems.
    if not problems and config.objective.teacher_model is not None:
        from bigtrain.settings.teacher import of_teacher, teacher_run

        try:
            resolve_run(teacher_run(config), draft.world_size)
        except ConfigError as error:
            problems = [of_teacher(config, problem) for problem in error.problems]
    if problems or draft.topology is None or draft.plan is None or draft.engine is None:
        raise ConfigError(problems, f"the run with {json.label}")
    section = config.engine.model_copy(update={"deepspeed_config": json.name})
    config = config.model_copy(update={"engine": section})
    return ResolvedRun(config, draft.topology, draft.plan, draft.engine)


def resolve_teacher(run: ResolvedRun) -> ResolvedRun | None:
    """Return the run of the teacher that `run` computes (`teacher_run`); None without one."""
    if run.config.objective.teacher_model is None:
        return None
    from bigtrain.settings.teacher import teacher_run

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
        if not name:
            raise
        json = _read_json(name)
        problems = json.problems if json.tree is None else check_file_alone(json.tree, json.label)
        if not problems:
            raise
        sources = " and ".join(part for part in (error.source, json.label) if part)
        raise ConfigError([*error.problems, *problems], sources) from error
    return resolve_run(config, world_size, deepspeed_config, device, accelerate, scores=scores)


def _deepspeed_config_named_in(name_or_path: str, overrides: Sequence[str]) -> str | None:
    """Return ``engine.deepspeed_config`` of a YAML whose other settings may be wrong."""
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
