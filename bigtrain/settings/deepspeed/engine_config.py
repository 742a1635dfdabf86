"""Reading, checking and rendering of the DeepSpeed JSON; the result has no ``"auto"``.

Pure: imports neither torch nor deepspeed. The run YAML owns what changes the mathematics, the JSON
owns how the engine computes it; if both set a value, they must agree.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.deepspeed.accepted import (
    REFUSED_BLOCKS,
    ROWS,
    check_values,
    leaves,
    not_tried,
)
from bigtrain.settings.deepspeed.keys import (
    AUTO,
    check_keys,
    numbers_and_switches,
    suggestion,
    value_at,
    with_integers,
)
from bigtrain.settings.deepspeed.ownership import (
    check_refused_blocks,
    has_other_optimizer,
    optimizer_is_torch,
    owned_values,
)
from bigtrain.settings.deepspeed.spellings import omitted_keys, with_known_names, without_keys
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.shipped_files import ds_configs
from bigtrain.system.text_files import TextFileError, read_text
from bigtrain.system.units import DEEPSPEED_DTYPES

NEVER_PRINT_STEPS = 1_000_000_000
"""``steps_per_print`` of a run whose JSON has none: DeepSpeed would print progress and throughput
in addition to bigtrain's."""

# Elements. DeepSpeed's 5e8 would reserve 2 GB where gradients are reduced in float32.
_AUTO_BUCKET_SIZE = 50_000_000

# Values for "auto" where Hugging Face derives a size from the model. None: omit the key, so that
# DeepSpeed's default holds, which it also uses for "auto" (runtime/config_utils.py:53).
_AUTO_SIZES: dict[str, int | None] = {
    **dict.fromkeys(numbers_and_switches("zero_optimization")),
    "zero_optimization.reduce_bucket_size": _AUTO_BUCKET_SIZE,
    "zero_optimization.allgather_bucket_size": _AUTO_BUCKET_SIZE,
    "zero_force_ds_cpu_optimizer": None,
    "communication_data_type": None,
    "data_types.keep_in_fp32_modules": None,
}

# Keys that the run owns even if it has no value for them (no plan, or another dtype).
_OWNED_WITHOUT_VALUE = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "fp16.initial_scale_power",
}


@dataclass(frozen=True)
class EngineConfig:
    """Configuration passed to DeepSpeed, and its values that other modules need.

    ``deepspeed`` is the dictionary for ``deepspeed.initialize``; ``offload_*`` is "cpu", "nvme" or
    None; ``source`` is the JSON it was read from; ``not_tried`` are its keys whose values no test
    has trained with; ``notes`` are lines on keys that are not passed to DeepSpeed.
    """

    deepspeed: dict[str, Any]
    zero_stage: int
    offload_optimizer: str | None
    offload_param: str | None
    source: str
    not_tried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def deepspeed_config_names() -> list[str]:
    """Return names that `--deepspeed_config` takes instead of a path."""
    return sorted(path.stem for path in ds_configs().glob("*.json"))


def find_deepspeed_config(name_or_path: str) -> Path:
    """Return the file meant by `--deepspeed_config`: a path, or a name in ``ds_configs/``.

    Raises ConfigError listing the names if it is neither.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.parent.name in ("", "ds_configs"):
        shipped = ds_configs() / f"{path.name.removesuffix('.json')}.json"
        if shipped.is_file():
            return shipped
    names = deepspeed_config_names()
    close = difflib.get_close_matches(path.name.removesuffix(".json"), names, n=1)
    remedy = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        Problem(
            "--deepspeed_config",
            name_or_path,
            "neither a file nor the name of a DeepSpeed configuration",
            f"{remedy}names: {', '.join(names) or 'none'}",
        )
    )


def label_of(path: Path) -> str:
    """Return how problems name the file: by name if it ships with bigtrain, else by path."""
    is_shipped = path.resolve().parent == ds_configs()
    return path.name if is_shipped else str(path)


def read_deepspeed_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, with the names of docs/reference/deepspeed_keys.md. Raises
    ConfigError with line and column if it is invalid."""
    label = label_of(path)
    try:
        tree = json.loads(
            read_text(path),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as error:
        position = f"line {error.lineno} column {error.colno}"
        raise ConfigError(
            Problem(label, None, f"is not JSON: {error.msg} at {position}", "correct the file")
        ) from error
    except TextFileError as error:
        raise ConfigError(Problem(label, None, error.rule, error.fix)) from error
    except ValueError as error:
        raise ConfigError(Problem(label, None, f"cannot be read: {error}")) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            Problem(label, tree, "must hold one object", 'begin with {"zero_optimization": ...}')
        )
    return with_known_names(tree, label)


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in pairs:
        if name in tree:
            raise ValueError(f"key {name!r} is given twice")
        tree[name] = value
    return tree


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_file_alone(raw: Mapping[str, Any], source: str) -> list[Problem]:
    """Return problems of a DeepSpeed JSON that do not depend on the run: unknown keys, illegal
    values, blocks that bigtrain does not allow, values that have not been compared with plain
    PyTorch."""
    accepted_keys = frozenset(row.key for row in ROWS)
    raw = without_keys(raw, {key for key, _ in omitted_keys(raw, REFUSED_BLOCKS)})
    problems = [
        problem
        for problem in check_keys(raw, source, lambda path: suggestion(path, accepted_keys))
        if not _is_refused(problem.key.removeprefix(f"{source}: "))
    ]
    problems += check_refused_blocks(raw, source, lambda path: suggestion(path, accepted_keys))
    # The values of keys that have a problem already are not checked.
    skipped_keys = {problem.key.removeprefix(f"{source}: ") for problem in problems}
    if has_other_optimizer(raw):
        skipped_keys.add("optimizer.params")
    return [*problems, *check_values(raw, source, skipped_keys)]


def _is_refused(path: str) -> bool:
    """Return whether a dotted key is a refused block, or in one."""
    return any(f"{path}.".startswith(f"{block}.") for block in REFUSED_BLOCKS)


def render(
    config: RunConfig, plan: BatchPlan | None, raw: Mapping[str, Any], source: str
) -> tuple[EngineConfig | None, list[Problem]]:
    """Return the configuration of the engine; None and the problems if there are any.

    raw: the JSON; source: its name in problems. Without a plan (the batch does not divide) the JSON
    is only checked. ``train_batch_size`` is omitted: DeepSpeed would check it against the world
    size without the tensor-parallel degree; micro-batch size and accumulation imply it.
    """
    problems = check_file_alone(raw, source)
    omitted = dict(omitted_keys(raw, REFUSED_BLOCKS))
    raw = without_keys(raw, set(omitted))
    tree = with_integers(raw)
    stage = zero_stage_of(raw)

    # Values that the run owns must agree with the JSON, and every "auto" must have a value.
    owned_keys = owned_values(config, plan, raw, stage)
    skips_parameters = has_other_optimizer(raw)  # the type of the optimizer is a problem already
    for owned in owned_keys:
        if skips_parameters and owned.key.startswith("optimizer.params."):
            continue
        contradiction = owned.contradiction(raw, source)
        if contradiction is not None:
            problems.append(contradiction)
    auto_keys = {owned.key for owned in owned_keys} | set(_AUTO_SIZES) | _OWNED_WITHOUT_VALUE
    for path, value in leaves(tree):
        # A refused key must be removed, so it needs no value.
        if value == AUTO and path not in auto_keys and not _is_refused(path):
            rule = "cannot be resolved: the run has no such value"
            remedy = "give a value, or omit it for DeepSpeed's default"
            problems.append(Problem(f"{source}: {path}", AUTO, rule, remedy))
    if problems or plan is None:
        return None, problems

    notes = [
        f"{source}: {key} {reason}; not passed to DeepSpeed" for key, reason in omitted.items()
    ]
    engine = EngineConfig(
        deepspeed=_assemble(config, plan, tree, stage),
        zero_stage=stage,
        offload_optimizer=offload_device(raw, "offload_optimizer"),
        offload_param=offload_device(raw, "offload_param"),
        source=source,
        not_tried=tuple(not_tried(raw, config.precision.dtype)),
        notes=tuple(notes),
    )
    return engine, []


def zero_stage_of(raw: Mapping[str, Any]) -> int:
    """Return ``zero_optimization.stage``; 0 where it is absent or not a stage."""
    stage = value_at(raw, "zero_optimization.stage")
    return stage if isinstance(stage, int) and stage in (0, 1, 2, 3) else 0


def offload_device(raw: Mapping[str, Any], block: str) -> str | None:
    """Return the device that `block` (``offload_optimizer`` or ``offload_param``) names; None for
    none."""
    device = value_at(raw, f"zero_optimization.{block}.device")
    return device if device in ("cpu", "nvme") else None


def _assemble(
    config: RunConfig, plan: BatchPlan, tree: dict[str, Any], stage: int
) -> dict[str, Any]:
    """Return the dictionary for ``deepspeed.initialize``, made of a checked `tree`, from which it
    removes keys."""
    # Sizes that Hugging Face derives from the model get a fixed value, or DeepSpeed's default.
    for path, size in _AUTO_SIZES.items():
        *parents, name = path.split(".")
        block: Any = tree
        for parent in parents:
            block = block.get(parent, {})
        if block.get(name) == AUTO:
            if size is None:
                del block[name]
            else:
                block[name] = size

    # Blocks that the run owns are written from its values.
    tree.pop("train_batch_size", None)
    bf16, fp16 = tree.pop("bf16", {}), tree.pop("fp16", {})
    optimizer, data_types = tree.pop("optimizer", {}), tree.pop("data_types", {})
    zero = {**tree.pop("zero_optimization", {}), "stage": stage}
    if stage == 3:
        # By default the blocks of several mixtures of experts are leaf modules, and with frozen
        # weights the hook that ends a leaf's backward runs before its gradients exist. bigtrain
        # needs no leaf modules: experts are stacks, which the ranks read in equal order.
        zero["leaf_module"] = {"classes": [], **zero.get("leaf_module", {})}
    if config.parallel.pipeline > 1:
        # By default DeepSpeed partitions both, and allocates a bucket of 2 GB at every step.
        tree["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
        zero.setdefault("reduce_bucket_size", _AUTO_BUCKET_SIZE)

    # DeepSpeed prints its throughput every ``steps_per_print`` steps. To time it, it would wait for
    # the device twice in each micro-batch, and once in each evaluated one, from the third step on,
    # even if it never prints (utils/timer.py, `ThroughputTimer`).
    is_timed = "steps_per_print" in tree or "timers" in tree
    timers = tree.pop("timers", {})
    throughput = {"enabled": is_timed, "synchronized": False, **timers.get("throughput", {})}

    # Batch, optimizer and number formats of the run.
    defaults = {"steps_per_print": NEVER_PRINT_STEPS, "wall_clock_breakdown": False}
    rendered: dict[str, Any] = {
        **defaults,
        **tree,
        "timers": {**timers, "throughput": throughput},
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        # Always written: DeepSpeed's default is 1.0, not off.
        "gradient_clipping": config.optimizer.clip_norm,
        "zero_optimization": zero,
    }
    if config.optimizer.is_own:
        rendered["zero_allow_untested_optimizer"] = True
    else:
        rendered["optimizer"] = _render_optimizer(config, optimizer, tree, zero)
    if config.precision.dtype == "bfloat16":
        rendered["bf16"] = {**bf16, "enabled": True}
    if config.precision.dtype == "float16":
        power = config.precision.initial_loss_scale_power
        rendered["fp16"] = {**fp16, "enabled": True, "initial_scale_power": power}
    gradient_dtype = gradient_dtype_of(config, stage)
    if gradient_dtype is not None:
        data_types["grad_accum_dtype"] = gradient_dtype
        # By default, DeepSpeed reduces in the dtype of the parameters.
        rendered.setdefault("communication_data_type", gradient_dtype)
    if data_types:
        rendered["data_types"] = {
            name: value for name, value in data_types.items() if value != AUTO
        }

    # Without this key DeepSpeed would refuse offload of an optimizer that is not its CPU Adam.
    offload = zero.get("offload_optimizer") or {}
    is_foreign = config.optimizer.is_own or optimizer_is_torch(optimizer, tree, zero)
    if offload.get("device", "none") != "none" and is_foreign:
        rendered["zero_force_ds_cpu_optimizer"] = False
    return rendered


def gradient_dtype_of(config: RunConfig, stage: int) -> str | None:
    """Return DeepSpeed's name of the dtype in which gradients are accumulated; None: its default.

    Its default is the dtype of the parameters, and ZeRO 0 supports no other (deepspeed 0.19.8,
    runtime/engine.py:2294).
    """
    gradient_dtype = config.precision.gradient_dtype
    if config.precision.dtype == "float32" or stage == 0:
        return None
    if gradient_dtype is not None:
        return DEEPSPEED_DTYPES[gradient_dtype]
    return "fp32" if config.precision.dtype == "bfloat16" else None


def _render_optimizer(
    config: RunConfig, block: Mapping[str, Any], tree: Mapping[str, Any], zero: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the block of AdamW: torch's unless the JSON asks for DeepSpeed's
    (`optimizer_is_torch`), by default with its fused kernel, which needs no compiler at run time.
    With ``torch_adam`` DeepSpeed passes keys it does not know to ``torch.optim.AdamW``
    (runtime/engine.py:2377)."""
    json_params = dict(block.get("params", {}))
    params: dict[str, Any] = {
        "lr": config.optimizer.lr,
        "betas": list(config.optimizer.betas),
        "eps": config.optimizer.eps,
        "weight_decay": config.optimizer.weight_decay,
    }
    if optimizer_is_torch(block, tree, zero):
        foreach = json_params.get("foreach", False)
        params["torch_adam"] = True
        params["fused"] = json_params.get("fused", not foreach)
        if "foreach" in json_params:
            params["foreach"] = foreach
    return {"type": "AdamW", "params": params}
