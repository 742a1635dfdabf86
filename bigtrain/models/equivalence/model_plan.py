"""Plan of a run's model before it is built, each part tested on a proxy model.

Trials take seconds and up to 2 GB, so one rank makes them and they are cached. The key covers all
that the result depends on: settings, configuration, device, libraries by their checksums, this
package by its source. Refusals are not cached, nor results for code that is not transformers' own.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bigtrain.errors import ConfigError, Problem
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import num_trained_mtp_layers, scores_samples
from bigtrain.models.equivalence.cache_key import trial_key
from bigtrain.models.equivalence.parameter_plan import (
    GradientReach,
    ParameterPlan,
    find_gradient_reach,
    plan_parameters,
)
from bigtrain.models.layers.document_attention import Isolation
from bigtrain.models.layers.kernels import may_compile, may_compile_loss
from bigtrain.models.layers.parameters import check_frozen, freeze
from bigtrain.models.layers.plans import (
    MAY_COMPILE,
    NO_FLOAT8,
    NO_TILES,
    CompilationPlan,
    Float8Plan,
    LossPlan,
    TilePlan,
)
from bigtrain.models.parallel.stage_layout import StagePlan
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.user_cache import cached


@dataclass(frozen=True)
class ModelPlan:
    """Pipeline stages, document isolation and loss of a run's model, which of its parameters are
    trained, which layers compute in float8, and which in tiles, and whether layers may be compiled.
    stages: None without pipeline stages."""

    stages: StagePlan | None
    isolation: Isolation
    loss: LossPlan
    parameters: ParameterPlan = field(default_factory=ParameterPlan)
    float8: Float8Plan = NO_FLOAT8
    tiles: TilePlan = NO_TILES
    compilation: CompilationPlan = MAY_COMPILE

    def lines(self, accumulation: int) -> list[str]:
        """Return the plan as human-readable lines; `accumulation`: micro-batches in a pipeline at
        once."""
        stages = self.stages.describe(accumulation) if self.stages else ""
        parts = (self.isolation, self.loss, self.parameters, self.float8, self.tiles)
        reasons = (part.reason for part in (*parts, self.compilation))
        return [line for line in (stages, *reasons) if line]


def find_wrong_values(hf_config: PreTrainedConfig, failure: str) -> dict[str, str]:
    """Return the texts of a configuration that make the code of its model fail, by dotted key: a
    text that the error quotes, or one where the class has a number by default."""
    class_defaults: dict[str, Any] = {}
    if not getattr(hf_config, "has_no_defaults_at_init", False):
        class_defaults = type(hf_config)().to_dict()
    trees: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]]
    trees = [((), hf_config.to_dict(), class_defaults)]
    wrong_values = {}
    for path, tree, defaults in trees:  # which grows by the dictionaries that are found
        for name, value in tree.items():
            default = defaults.get(name)
            if isinstance(value, dict):
                trees.append(((*path, name), value, default if isinstance(default, dict) else {}))
                continue
            is_suspected = f"'{value}'" in failure or isinstance(default, (int, float))
            if isinstance(value, str) and is_suspected:
                wrong_values[".".join((*path, name))] = value
    return wrong_values


def choose(
    config: RunConfig, hf_config: PreTrainedConfig, plan: BatchPlan
) -> tuple[ModelPlan | None, list[Problem]]:
    """Return the plan for a run with the micro-batches of `plan`, or the settings that the model's
    code rules out. Takes a second or so for each of parallelism and packing; call
    `check_tensor_size` first."""
    length = config.batch.sequence_length
    if num_trained_mtp_layers(hf_config):
        from bigtrain.models.equivalence.multi_token import check_mtp_layers

        if problems := check_mtp_layers(hf_config, config.objective.mtp_weight, length):
            return None, problems
    # Does the code of the model run at all, and which parameters get gradients?
    reach = find_gradient_reach(hf_config, length, config.model.attention)
    if reach.failure:
        key = "model.path" if config.model.path is not None else "model.config"
        rule = (
            f"the code of a {hf_config.model_type} fails with this configuration: {reach.failure}"
        )
        if config.model.type is not None:
            return None, [Problem("model.type", config.model.type, rule, "correct the class")]
        wrong_values = find_wrong_values(hf_config, reach.failure)
        problems = []
        for name, value in wrong_values.items():
            choices = (*ACT2FN, *ROPE_INIT_FUNCTIONS)
            similar = difflib.get_close_matches(value, choices, n=1)
            fix = f"did you mean {similar[0]}?" if similar else "a number or a name of transformers"
            owner = f"{key}." if config.model.path is None else f"{config.model.path}/config.json: "
            if name.partition(".")[0] in config.model.overrides:
                owner = "model.overrides."
            problems.append(Problem(f"{owner}{name}", value, rule, fix))
        return None, problems or [Problem(key, config.model.path, rule, "correct its sizes")]
    # Each trial compares a proxy model with and without one change.
    problems, stages, isolation = try_model(config, hf_config, reach)
    if problems:
        return None, problems
    from bigtrain.models.equivalence.loss import choose_loss

    loss, problems = choose_loss(config, hf_config, plan)
    float8, float8_problems = choose_float8(config, hf_config, plan)
    parameters = plan_parameters(config, hf_config, reach)
    tiles, tile_problems = NO_TILES, list[Problem]()
    if config.model.tiled_mlp != "off":
        from bigtrain.models.equivalence.tiles import choose_tiles

        tiles, tile_problems = choose_tiles(config, hf_config, plan, parameters.float32_names)
    problems += float8_problems + tile_problems
    compilation = MAY_COMPILE
    if may_compile(config.model):
        from bigtrain.models.equivalence.compiled_layers import plan_compilation

        compilation, compilation_problems = plan_compilation(config, hf_config, isolation)
        problems += compilation_problems
    return ModelPlan(stages, isolation, loss, parameters, float8, tiles, compilation), problems


def choose_float8(
    config: RunConfig, hf_config: PreTrainedConfig, plan: BatchPlan
) -> tuple[Float8Plan, list[Problem]]:
    """Return the layers of a run that compute in float8, or why none can."""
    if config.precision.float8 == "none":
        return NO_FLOAT8, []
    from bigtrain.models.layers.float8 import plan_float8

    model = empty_model(hf_config)
    num_tokens = plan.micro_batch_tokens // config.parallel.degrees.sequence_size
    return plan_float8(model, config.precision.float8, config.parallel.tensor, num_tokens)


def require_model_plan(
    config: RunConfig, hf_config: PreTrainedConfig, plan: BatchPlan
) -> ModelPlan:
    """Return the plan of `choose`. Raises ConfigError with what is ruled out."""
    model_plan, problems = choose(config, hf_config, plan)
    if model_plan is None or problems:
        raise ConfigError(problems, "the run's inputs")
    return model_plan


def try_model(
    config: RunConfig, hf_config: PreTrainedConfig, reach: GradientReach | None = None
) -> tuple[list[Problem], StagePlan | None, Isolation]:
    """Return problems of `config` with the model's code, and the model's stages and document
    isolation. `reach`: gradient reach of the model, if it is known."""
    attention, parallel = config.model.attention, config.parallel
    degrees = parallel.degrees
    length = config.batch.sequence_length
    moe = config.moe
    router_losses = moe.auxiliary_loss == "global_batch" or moe.z_loss_coefficient > 0
    problems: list[Problem] = []
    # Checks of single settings; most need no proxy model.
    key = "model.path" if config.model.path is not None else "model.config"
    if scores_samples(hf_config):
        from bigtrain.models.equivalence.scoring import check_scoring

        problems += check_scoring(hf_config, attention, length, key)
    else:
        from bigtrain.models.equivalence.causality import check_causality

        problems += check_causality(hf_config, attention, length, key)
    if config.model.frozen:
        problems += check_frozen(empty_model(hf_config), config.model.frozen)
    if config.model.neftune_noise_alpha is not None:
        from bigtrain.models.equivalence.embedding_noise import check_embedding_noise

        alpha = config.model.neftune_noise_alpha
        problems += check_embedding_noise(hf_config, alpha, attention, length)
    if config.adapters is not None:
        from bigtrain.models.layers.adapter_checks import check_adapters

        problems += check_adapters(empty_model(hf_config), config.adapters)
    if config.optimizer.facts.beside is not None and not problems:
        from bigtrain.models.parallel.hidden_matrices import check_matrices

        model = empty_model(hf_config)
        freeze(model, config.model.frozen)
        problems += check_matrices(model, config.optimizer)
    if router_losses or moe.bias_update_rate:
        from bigtrain.models.equivalence.expert_parallel import check_expert_balance

        problems += check_expert_balance(config, hf_config, reach)
    from bigtrain.models.equivalence.document_isolation import plan_isolation

    isolation, isolation_problems = plan_isolation(config, hf_config)
    problems += isolation_problems
    # Trials of parallelism take a second or more each: none after a problem.
    if degrees.sequence_size > 1 and not problems:
        from bigtrain.models.equivalence.sequence_parallel import check_sequence_parallel

        problems += check_sequence_parallel(
            hf_config,
            attention,
            degrees.sequence_size,
            sequence_length=length,
            isolate=config.data.isolates,
            tensor_size=parallel.tensor,
            ring_size=degrees.ring_size,
        )
    if parallel.expert > 1 and not problems:
        from bigtrain.models.equivalence.expert_parallel import check_expert_parallel

        problems += check_expert_parallel(
            hf_config, attention, parallel.expert, sequence_length=length
        )
    stages = None
    if parallel.pipeline > 1 and not problems:
        from bigtrain.models.equivalence.pipeline_stages import plan_stages

        stages, problems = plan_stages(
            hf_config, attention, parallel.pipeline, length, router_losses=router_losses
        )
    return problems, stages, isolation


KIND = "trials"
_PLAN = TypeAdapter(ModelPlan)


class _RefusedError(Exception):
    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems


def cached_model_plan(
    config: RunConfig, hf_config: PreTrainedConfig, plan: BatchPlan
) -> tuple[ModelPlan | None, list[Problem]]:
    """Call `choose` on one rank of the ranks that share a cache; every other rank waits."""
    key = trial_key(
        hf_config,
        config.model.model_dump(mode="json", exclude={"path", "config", "overrides"}),
        config.parallel.model_dump(mode="json"),
        config.precision.model_dump(mode="json"),
        config.optimizer.model_dump(mode="json", include={"type", "muon"}),
        config.moe.model_dump(mode="json"),
        config.adapters and config.adapters.model_dump(mode="json"),
        [config.data.isolates, config.data.packing, config.batch.sequence_length],
        [may_compile(config.model), may_compile_loss(config, hf_config)],
        vars(plan),
    )
    if key is None:
        return choose(config, hf_config, plan)

    def find() -> dict[str, Any]:
        model_plan, problems = choose(config, hf_config, plan)
        if model_plan is None or problems:
            raise _RefusedError(problems)
        plan_json: dict[str, Any] = _PLAN.dump_python(model_plan, mode="json")
        return plan_json

    try:
        return _PLAN.validate_python(cached(KIND, key, find)), []
    except _RefusedError as refused:
        return None, refused.problems
