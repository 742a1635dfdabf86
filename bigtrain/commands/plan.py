"""`bigtrain plan`: find the layouts that fit a number of devices, and their speed."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bigtrain.commands.arguments import Config
from bigtrain.errors import ConfigError, OutputError, Problem
from bigtrain.system.arguments import Argument, File, Positive, Size, command_words
from bigtrain.system.next_commands import next_lines, train_line

if TYPE_CHECKING:
    from bigtrain.python_api.planning import Plan


def rate(text: str) -> float:
    """Parse bits per second, such as 400Gb."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMT])b(?:it)?(?:/s|ps)?\s*", text)
    value = float(match[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]] if match else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a rate, such as 400Gb")
    return value


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Command line of `bigtrain plan`."""

    config: Config | None = None
    gpus: Annotated[str | None, "NxDEVICE"] = None
    """devices: 64xH100-80GB, 8xA100; 4xCPU: processes, with this machine's measurements by
    --hardware, else with those of bigtrain's development CPUs"""
    nodes_of: Positive | None = None
    """devices on each node (default: 8)"""
    host_memory: Size | None = None
    """main memory of a node, for offload (default: 1TB)"""
    network: Annotated[float | None, rate, "RATE"] = None
    """network bandwidth per device, such as 400Gb (default: of the device's usual node)"""
    hardware: File | None = None
    """measurements of --calibrate, for DEVICE"""
    as_configured: bool = False
    """with the loss and buckets that the configuration gives a run, as the shipped recipes
    (default: others where a step is more than a percent faster)"""
    longest: bool = False
    """for the longest sample that fits, instead of the run's length and batch"""
    top: Positive = 10
    """layouts to show (default: 10)"""
    json: bool = False
    """print all layouts as JSON"""
    write: Annotated[Path | None, "DIRECTORY"] = None
    """write run YAML and DeepSpeed JSON of the chosen layout there"""
    choose: Positive | None = None
    """line of the table that --write uses (default: the first that is not tight)"""
    evaluate: Annotated[Path | None, "ROWS.csv"] = None
    """instead: predict published or own measurements, and print the errors"""
    calibrate: bool = False
    """instead: measure this machine in about a minute and write --output, for --hardware"""
    output: File | None = None
    """of --evaluate: rows with predictions, as CSV; of --calibrate: measurements"""
    overrides: Annotated[
        tuple[str, ...],
        "section.key=value",
        Argument(
            "overrides",
            nargs="*",
            help="settings of the run to change; parallel.tensor, parallel.pipeline, "
            "parallel.sequence, parallel.expert, batch.micro_batch_size, "
            "model.gradient_checkpointing, model.activation_offload, model.tiled_mlp and "
            "engine.deepspeed_config, which a plan otherwise chooses, hold every layout to their "
            "value; one that changes nothing in a plan is an error without --write (default: none)",
        ),
    ] = ()


def run(args: PlanArguments) -> int:
    """Print a plan, or an evaluation. Raises ConfigError, ModelError, OutputError."""
    if problems := _unread(args):
        raise ConfigError(problems)
    if args.evaluate is not None:
        return _print_evaluation(args.evaluate, args.output)
    if args.calibrate:
        return _calibrate(args.output)
    missing = [name for name in ("config", "gpus") if getattr(args, name) is None]
    if missing:
        names = " and ".join(f"--{name}" for name in missing)
        raise ConfigError(
            Problem(names, None, "is required for a plan", "or --evaluate ROWS.csv, or --calibrate")
        )
    with _without_garbage_collection():
        return _print_plan(args)


def _unread(args: PlanArguments) -> list[Problem]:
    """Return a problem for every argument that is given and not read together with the other
    arguments."""
    if args.evaluate is not None:
        mode, read = "--evaluate", {"evaluate", "output"}
    elif args.calibrate:
        mode, read = "--calibrate", {"calibrate", "output"}
    else:
        mode, read = "a plan", {field.name for field in fields(args)} - {"output"}
        if args.write is None:
            mode, read = "a plan without --write", read - {"choose"}
    problems = []
    for field in fields(args):
        value, key = getattr(args, field.name), f"--{field.name.replace('_', '-')}"
        if field.name in read or value == field.default:
            continue
        if field.name == "overrides":
            key = " ".join(args.overrides)
        shown_value = None if field.name == "overrides" or value is True else value
        shown_value = str(shown_value) if isinstance(shown_value, Path) else shown_value
        problems.append(Problem(key, shown_value, f"is not read by {mode}", "omit it"))
    return problems


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collection during the plan and at exit. Imports and layouts
    create many objects and few cycles: the search for cycles takes an eighth of a plan's time, and
    as long again at exit with torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    # Frozen objects are not searched at exit; registered once, however many plans there are.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _print_evaluation(path: Path, output: Path | None) -> int:
    """Predict the measurements in `path`, write them to `output`, and print the errors."""
    from bigtrain.planner.published.evaluation import (
        error_table,
        predict,
        read_rows,
        summarize,
        write_rows,
    )

    rows = read_rows(path)
    if output is not None:
        with _writing(output):
            output.touch()  # before minutes are spent on the predictions
    predictions = [predict(row) for row in rows]
    if output is not None:
        with _writing(output):
            write_rows(output, rows, predictions)
    print(error_table(summarize(rows, predictions)))
    refusals = [(row, p.refused) for row, p in zip(rows, predictions, strict=True) if p.refused]
    for row, reason in refusals[:5]:
        print(f"refused: {row['source']}, {row['model']}: {reason}")
    return 0


def _calibrate(output: Path | None) -> int:
    """Measure this machine, write the measurements to `output`, and print how to use them."""
    from bigtrain.engine.calibrate_device import calibrate
    from bigtrain.engine.calibrate_engine import measure_engine
    from bigtrain.planner.tables.engines import keep_calibration, write_calibration

    if output is None:
        raise ConfigError(Problem("--output", None, "is required for --calibrate", "name a file"))
    with _writing(output):
        output.touch()  # before minutes are spent on measurements
    device = calibrate(print)
    engine = measure_engine() if device.is_cpu else None
    if engine is not None:
        costs_text = ", ".join(
            f"ZeRO {stage}: {costs.step * 1e9:.2g} + {costs.step_exchange * 1e9:.2g}"
            for stage, costs in engine.zero.items()
        )
        rank_text = "ns of a step per parameter byte, on 1 rank + with a second rank"
        print(f"DeepSpeed, {rank_text}: {costs_text}")
    with _writing(output):
        write_calibration(device, engine, output)
    if device.is_cpu:
        keep_calibration(device, engine)
    devices = f"{device.devices_per_node}x{'CPU' if device.is_cpu else device.name}"
    print(f"wrote {output}; bigtrain plan --hardware {output} --gpus {devices} uses it")
    return 0


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Raise OutputError if writing the file of --output fails in this context."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"--output = {output}: cannot be written: {error}") from error


def ranked_layouts(args: PlanArguments) -> Plan:
    """Return the layouts for the arguments. Raises ConfigError if none fits."""
    from bigtrain.python_api.planning import plan

    assert args.config is not None
    assert args.gpus is not None
    return plan(
        args.config,
        args.gpus,
        *args.overrides,
        nodes_of=args.nodes_of,
        host_memory_bytes=float(args.host_memory or 10**12),
        network_bits_per_second=args.network,
        hardware=args.hardware,
        varies=not args.as_configured,
        longest=args.longest,
        writes=args.write is not None,
    )


def _print_plan(args: PlanArguments) -> int:
    """Print the layouts as a table or as JSON, write the chosen one, and print the next command."""
    plan = ranked_layouts(args)
    if args.json:
        tree = {
            "device": plan.cluster.device.name,
            "num_devices": plan.cluster.num_devices,
            "model": {"num_parameters": plan.model.num_parameters, "source": plan.model.source},
            "sample_tokens": plan.config.batch.sequence_length,
            "num_layouts_that_do_not_fit": plan.num_others,
            "layouts": plan.layouts(),
        }
        print(json.dumps(tree, indent=1))
    else:
        from bigtrain.planner.plan_text import parameter_count

        # The longest sample, one line on the model and the devices, and the table.
        if args.longest:
            from bigtrain.settings.hf_config_keys import inspect_configuration

            length = plan.config.batch.sequence_length
            line = f"longest sample that fits: {length} tokens"
            dimensions, _ = inspect_configuration(plan.config.model)
            num_positions = dimensions.num_positions
            if num_positions is not None and num_positions < length:
                line += (
                    f"; the model has {num_positions} positions: model.overrides extends them "
                    "(max_position_embeddings, rope_parameters)"
                )
            print(line)
        batch, num_devices = plan.config.batch, plan.cluster.num_devices
        phases_note = ""
        if batch.phases:
            phases_note = "; batch.phases are not planned: bigtrain check predicts the largest"
        print(
            f"{parameter_count(plan.model.num_parameters)} parameters on {num_devices} x "
            f"{plan.cluster.device.name}, {batch.samples_per_step} samples of "
            f"{batch.sequence_length} tokens a step: {len(plan.fitting)} layouts fit, "
            f"{plan.num_others} do not{phases_note}"
        )
        if plan.remark:
            print(f"the model's costs are {plan.remark}")
        print(plan.table(args.top))
    if args.write is not None:
        path = plan.write(args.write, args.choose)
        if args.choose is None:
            print(f"line {plan.default_choice} of the table:")
        ranks_per_node = plan.cluster.device.devices_per_node
        start = train_line(["--config", str(path)], plan.cluster.num_devices, ranks_per_node)
        print(f"wrote {path} and {path.with_name('deepspeed.json')}; {next_lines(start)}")
    elif not args.json:
        words = command_words(args, write="plans/mine")
        print(next_lines(shlex.join(["bigtrain", "plan", *words])))
    return 0
