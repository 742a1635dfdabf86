"""Settings of `accelerate config`, read from the environment variables of `accelerate launch`.

accelerate 1.15 (utils/launch.py, prepare_deepspeed_cmd_env) passes the answers about DeepSpeed to
the program as ``ACCELERATE_*``. Here they become the engine configuration, or are compared with the
DeepSpeed JSON that was named. If the run YAML does not set a value that it owns, the answer is
used; if it does, the two must agree, unless the answer is the wizard's default: then the run's
value is used, and a line says so. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bigtrain.errors import ConfigError, LaunchError, Problem
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.deepspeed.engine_config import find_deepspeed_config
from bigtrain.settings.deepspeed.keys import value_at
from bigtrain.settings.deepspeed.ownership import owned_values
from bigtrain.settings.run_config import RunConfig

SOURCE = "accelerate config"
_DTYPES = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
_OTHER_ENGINES = {
    "ACCELERATE_USE_FSDP": "FullyShardedDataParallel",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}

_WIZARD_DEFAULTS: Mapping[str, object] = {
    f"{SOURCE}: gradient_accumulation_steps": 1,
    f"{SOURCE}: mixed_precision": "no",
    f"{SOURCE}: zero_optimization.stage": 2,
    f"{SOURCE}: zero_optimization.offload_optimizer.device": "none",
    f"{SOURCE}: zero_optimization.offload_param.device": "none",
}
"""Answers that a user gets by pressing Enter (accelerate 1.15, commands/config/cluster.py)."""

_DYNAMO_ANSWERS = {
    "BACKEND": "inductor",
    "MODE": "default",
    "USE_FULLGRAPH": "false",
    "USE_DYNAMIC": "false",
}
"""The answers about torch dynamo that match `model.compile`, which always compiles by regions."""


@dataclass(frozen=True)
class AccelerateSettings:
    """Answers to the questions of `accelerate config`.

    tree: the answers as a DeepSpeed JSON; empty if a JSON was named instead. config_file: the
    DeepSpeed JSON that was named. mixed_precision: None if it was not answered. compiles: whether
    torch dynamo was chosen. on_engine: whether DeepSpeed was chosen. accumulates_once: whether the
    answered accumulation is 1, also the wizard's default; then the tree has no accumulation.
    """

    tree: Mapping[str, Any]
    config_file: str | None
    mixed_precision: str | None
    compiles: bool = False
    on_engine: bool = True
    accumulates_once: bool = False

    def fill(self, config: RunConfig) -> RunConfig:
        """Return `config` in which precision, clipping and compilation, unless it sets them, are
        as answered."""
        update: dict[str, Any] = {}
        dtype = _DTYPES.get(self.mixed_precision or "")
        if dtype is not None and "dtype" not in config.precision.model_fields_set:
            update["precision"] = config.precision.model_copy(update={"dtype": dtype})
        clip = self.tree.get("gradient_clipping")
        if isinstance(clip, float) and "clip_norm" not in config.optimizer.model_fields_set:
            update["optimizer"] = config.optimizer.model_copy(update={"clip_norm": clip})
        if self.compiles and "compile" not in config.model.model_fields_set:
            update["model"] = config.model.model_copy(update={"compile": "on"})
        return config.model_copy(update=update)

    def fill_micro_batch(self, config: RunConfig, num_data_ranks: int) -> RunConfig:
        """Return `config` with the micro-batch size that gives the answered accumulation, if it
        sets none."""
        accumulation = self.tree.get("gradient_accumulation_steps")
        if not isinstance(accumulation, int) or "micro_batch_size" in config.batch.model_fields_set:
            return config
        samples_per_rank, remainder = divmod(config.batch.samples_per_step, num_data_ranks)
        if remainder or samples_per_rank % accumulation:
            return config  # the batch plan, or the comparison with the answers, reports it
        micro_batch_size = samples_per_rank // accumulation
        batch = config.batch.model_copy(update={"micro_batch_size": micro_batch_size})
        return config.model_copy(update={"batch": batch})

    def named_file(self, config: RunConfig, deepspeed_config: str | None) -> str | None:
        """Return the DeepSpeed JSON to read; None where the answers themselves configure the
        engine.

        `deepspeed_config`: of the command line. Raises ConfigError where two files are named.
        """
        run_file, key = deepspeed_config, "--deepspeed_config"
        if run_file is None and "deepspeed_config" in config.engine.model_fields_set:
            run_file, key = config.engine.deepspeed_config, "engine.deepspeed_config of the run"
        if run_file == SOURCE:  # `config` is already resolved
            return None
        if not self.on_engine:
            return run_file or config.engine.deepspeed_config
        if self.config_file is None or run_file is None:
            return self.config_file or run_file
        if find_deepspeed_config(self.config_file).samefile(find_deepspeed_config(run_file)):
            return run_file
        raise ConfigError(
            Problem(
                f"{SOURCE}: deepspeed_config_file",
                self.config_file,
                f"contradicts {key} = {run_file}",
                "name one of them only",
            )
        )

    def contradictions(
        self, config: RunConfig, plan: BatchPlan | None, json_tree: Mapping[str, Any], source: str
    ) -> list[Problem]:
        """Return problems where the answers differ from the run or from the JSON, and are not
        the wizard's defaults."""
        differences = self._differences(config, plan, json_tree, source)
        return [problem for problem in differences if not _is_wizard_default(problem)]

    def notes(
        self, config: RunConfig, plan: BatchPlan | None, json_tree: Mapping[str, Any], source: str
    ) -> list[str]:
        """Return lines on answers that the run or the JSON replaces, since they are the
        wizard's defaults."""
        return [
            f"{problem.key} = {problem.value} is the wizard's default and counts as not answered: "
            f"it {problem.rule}"
            for problem in self._differences(config, plan, json_tree, source)
            if _is_wizard_default(problem)
        ]

    def _differences(
        self, config: RunConfig, plan: BatchPlan | None, json_tree: Mapping[str, Any], source: str
    ) -> list[Problem]:
        """Return a problem for each answer that differs from the run or from the JSON."""
        # Answers about values that the run owns, and that are not in the DeepSpeed JSON.
        problems = []
        if self.accumulates_once and plan is not None and plan.accumulation != 1:
            key = f"{SOURCE}: gradient_accumulation_steps"
            rule = f"contradicts the accumulation of the run, which owns it: {plan.accumulation}"
            problems.append(Problem(key, 1, rule))
        dtype = _DTYPES.get(self.mixed_precision or "")
        if self.mixed_precision is not None and dtype != config.precision.dtype:
            answers = {run_dtype: answer for answer, run_dtype in _DTYPES.items()}
            answer = answers[config.precision.dtype]
            problems.append(
                Problem(
                    f"{SOURCE}: mixed_precision",
                    self.mixed_precision,
                    f"contradicts precision.dtype = {config.precision.dtype} of the run, which "
                    "owns it",
                    f"answer {answer}, or change precision.dtype in the run",
                )
            )
        if self.compiles and config.model.compile == "off":
            rule = "contradicts model.compile = off of the run, which owns it"
            remedy = "answer no, or set model.compile=on"
            problems.append(Problem(f"{SOURCE}: torch dynamo", "yes", rule, remedy))
        if json_tree is self.tree:  # the answers are the JSON: rendering it finds other differences
            return problems

        # Next to a JSON of the user, the answers must agree with the values that the run owns, and
        # with the JSON.
        stage = value_at(self.tree, "zero_optimization.stage") or 0
        for owned in owned_values(config, plan, self.tree, stage):
            problem = owned.contradiction(self.tree, SOURCE)
            if problem is not None:
                problems.append(problem)
        for path in ("stage", "offload_optimizer.device", "offload_param.device"):
            key = f"zero_optimization.{path}"
            answer = value_at(self.tree, key)
            configured = value_at(json_tree, key) or (0 if path == "stage" else "none")
            if answer is not None and answer != configured:
                rule = (
                    f"contradicts {key} = {configured!r} of {source}, which the run is started with"
                )
                remedy = f"answer as {source} sets it, or omit the DeepSpeed JSON"
                problems.append(Problem(f"{SOURCE}: {key}", answer, rule, remedy))
        return problems


def _is_wizard_default(problem: Problem) -> bool:
    """Return whether the answer that a problem is about is the wizard's default."""
    return problem.key in _WIZARD_DEFAULTS and _WIZARD_DEFAULTS[problem.key] == problem.value


def read_accelerate(environment: Mapping[str, str]) -> AccelerateSettings | None:
    """Return the answers in `environment`; None if no answer concerns bigtrain.

    Raises LaunchError for an engine other than DeepSpeed, ConfigError for an answer that bigtrain
    does not support.
    """
    for name, engine in _OTHER_ENGINES.items():
        if environment.get(name) == "true":
            raise LaunchError(
                f"{SOURCE}: {engine} was chosen, and bigtrain runs under DeepSpeed: answer yes to "
                "DeepSpeed, or no to both"
            )
    # accelerate 1.15 itself ignores the answers about torch dynamo where DeepSpeed was chosen too.
    compiles = environment.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO"
    for name, supported in _DYNAMO_ANSWERS.items():
        answer = environment.get(f"ACCELERATE_DYNAMO_{name}", supported)
        if compiles and answer.lower() != supported:
            key, rule = f"{SOURCE}: dynamo_{name.lower()}", "is not how bigtrain compiles layers"
            remedy = f"answer {supported}, or no to torch dynamo, and see model.compile"
            raise ConfigError(Problem(key, answer, rule, remedy))

    if environment.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return AccelerateSettings({}, None, None, compiles, on_engine=False) if compiles else None
    classes = environment.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
    if classes:
        key = f"{SOURCE}: deepspeed_moe_layer_cls_names"
        raise ConfigError(Problem(key, classes, "bigtrain marks no layers as leaves", "answer no"))
    fields = environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    # "no" is also the value if the question was not asked; the fields list the answered questions.
    answered = precision != "no" or "mixed_precision" in fields
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    tree = _deepspeed_tree(environment) if file == "none" else {}
    accumulates_once = tree.get("gradient_accumulation_steps") == 1
    if accumulates_once:
        del tree["gradient_accumulation_steps"]
    return AccelerateSettings(
        tree=tree,
        config_file=None if file == "none" else file,
        mixed_precision=precision if answered else None,
        compiles=compiles,
        accumulates_once=accumulates_once,
    )


def _deepspeed_tree(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the answers about DeepSpeed as a DeepSpeed JSON."""
    prefix = "ACCELERATE_DEEPSPEED_"
    # 2 is accelerate's own default where DeepSpeed was chosen without a stage.
    zero: dict[str, Any] = {"stage": _number(environment, f"{prefix}ZERO_STAGE", int, 2)}
    for block in ("offload_optimizer", "offload_param"):
        device = environment.get(f"{prefix}{block.upper()}_DEVICE")
        if device is None:
            continue
        zero[block] = {"device": device}
        path = environment.get(f"{prefix}{block.upper()}_NVME_PATH", "none")
        if device == "nvme" and path != "none":
            zero[block]["nvme_path"] = path
    tree: dict[str, Any] = {"zero_optimization": zero}
    for name, number_type in (("gradient_accumulation_steps", int), ("gradient_clipping", float)):
        value = _number(environment, f"ACCELERATE_{name.upper()}", number_type, None)
        if value is not None:
            tree[name] = value
    return tree


def _number(
    environment: Mapping[str, str],
    name: str,
    number_type: type[int] | type[float],
    default: int | None,
) -> int | float | None:
    """Return the number in the variable `name`, or `default`. Raises ConfigError for a text."""
    text = environment.get(name, "auto")
    if text in ("auto", "none"):
        return default
    try:
        return number_type(text)
    except ValueError:
        raise ConfigError(Problem(f"{SOURCE}: {name}", text, "is not a number")) from None
