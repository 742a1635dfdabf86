"""`bigtrain check`: print whether a run can start, or all its problems."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bigtrain.commands.arguments import Config, DeepSpeedConfig, Overrides
from bigtrain.errors import CheckpointError, ConfigError, ModelError, Problem, one_line
from bigtrain.system.next_commands import next_lines, train_line

if TYPE_CHECKING:
    from bigtrain.settings.resolve import ResolvedRun


@dataclass(frozen=True, kw_only=True)
class CheckArguments:
    """Command line of `bigtrain check`."""

    config: Config
    world_size: Annotated[int, "N"] = 1
    """number of ranks (default: 1)"""
    deepspeed_config: DeepSpeedConfig = None
    device: Literal["cpu", "cuda"] | None = None
    """also refuse settings that this kind of device does not support (default: unknown)"""
    gpu: Annotated[str | None, "NAME"] = None
    """predict time and memory on this device (e.g. H100-80GB), and refuse what cannot fit"""
    inputs: bool = False
    """also open the data and test the model's own code, like the run before its rendezvous (some
    seconds; default: the settings only)"""
    resolved: bool = False
    """also print all settings of the run and the DeepSpeed configuration, as YAML (default: a
    summary)"""
    show: Annotated[str | None, "SECTION.KEY"] = None
    """print only this setting of the run, for scripts (e.g. output.directory)"""
    overrides: Overrides = ()


@contextmanager
def _no_pydantic_plugins() -> Iterator[None]:
    """Keep pydantic from searching every installed package for plugins, which takes a tenth of the
    time of a check, by pydantic's variable. Plugins are for observing models in services."""
    name = "PYDANTIC_DISABLE_PLUGINS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "__all__"
    try:
        yield
    finally:
        del os.environ[name]


@_no_pydantic_plugins()
def run(args: CheckArguments) -> int:
    """Print the batch of the run, its predicted time and memory, and the command that starts it.
    Raises ConfigError with all problems, LaunchError if it cannot fit `--gpu`, CheckpointError if
    the run's directory has another run; with `--inputs` ModelError for a model that cannot be
    found."""
    from bigtrain.python_api.configuring import checked, resolve
    from bigtrain.run.named_files import unread_files
    from bigtrain.settings.resolve import largest_phase

    device = args.device
    if device is None and args.gpu is not None:
        device = "cuda"
    world_size, deepspeed_config = args.world_size, args.deepspeed_config
    # Only one setting, for scripts.
    if args.show is not None:
        resolved = resolve(args.config, args.overrides, world_size, deepspeed_config, device=device)
        if resolved.config.epoch_settings:
            from bigtrain.run.length import with_steps_if_known

            resolved, _ = with_steps_if_known(resolved)
        print(setting(resolved, args.show))
        return 0
    try:
        resolved, notes = checked(
            args.config, args.overrides, world_size, deepspeed_config, device, inputs=args.inputs
        )
    except CheckpointError:
        # The settings are valid: show them regardless of the run's directory.
        resolved = resolve(args.config, args.overrides, world_size, deepspeed_config, device=device)
        print(describe(resolved) if args.resolved else "\n".join(equations(resolved)))
        raise
    predicted = notes + prediction(largest_phase(resolved), args.gpu)
    # In YAML the lines are comments.
    if args.resolved:
        print(describe(resolved))
        print(*(f"# {line}" for line in predicted), sep="\n")
        return 0
    unread = unread_files(resolved.config)
    json_words = [] if deepspeed_config is None else ["--deepspeed_config", deepspeed_config]
    words = ["--config", args.config, *json_words, *args.overrides]
    print(*equations(resolved), *predicted, *unread, sep="\n")
    if not args.inputs:
        print("not read: tokens of the data, code of the model (--inputs reads them, in seconds)")
    if (weights := resolved.config.checkpoint.initialize_from) is not None:
        print(f"not read: weights of checkpoint.initialize_from = {weights}")
    verdict = "this run can start where these can be used" if unread else "this run can start"
    print(f"{verdict}; {next_lines(train_line(words, world_size))}")
    return 0


def prediction(resolved: ResolvedRun, gpu: str | None) -> list[str]:
    """Return lines on the predicted time and memory. Without `gpu` torch is not imported, and the
    model's costs come from an earlier trace, or from a closed form. Raises LaunchError if the run
    cannot fit `gpu`, ConfigError for an unknown `gpu`."""
    from bigtrain.planner.run_prediction import refuse_too_large
    from bigtrain.planner.tables.hardware import find_device
    from bigtrain.python_api.planning import predicted_run

    device = None if gpu is None else find_device(gpu, "--gpu")
    try:
        predicted, remark = predicted_run(resolved, device)
    except (ConfigError, ModelError) as error:
        reason = one_line(error, None)
        remedy = "" if gpu else " -> --gpu NAME traces the model"
        return [f"no prediction: {reason}{remedy}"]
    lines = [predicted.line()]
    if resolved.config.checkpoint.memory is not None:
        from bigtrain.run.shared_memory import memory_lines

        lines += memory_lines(predicted, resolved.config.checkpoint.memory)
    if remark:
        lines.append("the model's costs are " + remark)
    if device is not None:
        refuses = resolved.config.engine.refuse_too_large
        lines.append(refuse_too_large(predicted, device.memory_bytes, refuses=refuses))
    return [line for line in lines if line]


def setting(resolved: ResolvedRun, key: str) -> str:
    """Return one setting of the run: strings unchanged, other values as JSON. Raises
    ConfigError."""
    value: Any = resolved.config.model_dump(mode="json")
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ConfigError(Problem("--show", key, "the run has no such setting"))
        value = value[name]
    return value if isinstance(value, str) else json.dumps(value)


def describe(resolved: ResolvedRun) -> str:
    """Return the resolved run as text: a stream of two YAML documents (JSON is YAML) with
    comments."""
    import yaml

    run_yaml = yaml.safe_dump(resolved.config.model_dump(mode="json"), sort_keys=False)
    engine = resolved.engine
    world_size = resolved.topology.world_size
    return "\n".join(
        [
            f"# The run, resolved for {world_size} rank{'s' if world_size != 1 else ''}",
            run_yaml,
            *(f"# {equation}" for equation in equations(resolved)),
            "---",
            f"# DeepSpeed configuration ({engine.source}, ZeRO {engine.zero_stage})",
            json.dumps(engine.deepspeed, indent=2),
        ]
    )


def equations(resolved: ResolvedRun) -> list[str]:
    """Return the arithmetic of the batch: one line, or a line for each phase."""
    if not resolved.phases:
        return [resolved.plan.equation()]
    ends = (*resolved.config.batch.ends(), resolved.config.train.total_steps)
    spans = zip((0, *ends[:-1]), ends, resolved.phases, strict=True)  # steps before, last step, run
    return [
        f"steps {before + 1} to {last}: {run.plan.equation()}"
        for before, last, run in spans
        if before < last
    ]
