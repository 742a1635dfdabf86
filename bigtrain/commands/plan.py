"""`bigtrain plan`: what fits a number of devices, and how fast it will be."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.commands.arguments import add_count, positive_int, size
from bigtrain.errors import ConfigError, OutputError, Problem

if TYPE_CHECKING:
    from bigtrain.planner.layout import Layout
    from bigtrain.planner.model_costs import ModelCosts
    from bigtrain.planner.search import Candidate, Cluster, Request
    from bigtrain.planner.tables.engines import MeasuredEngine
    from bigtrain.planner.tables.hardware import Device as Accelerator
    from bigtrain.settings.compatibility.facts import Device
    from bigtrain.settings.run_config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("--config", help="run YAML, or the name of a recipe")
    parser.add_argument(
        "--gpus",
        metavar="NxDEVICE",
        help="what to plan for: 64xH100-80GB, 8xA100; 4xCPU: processes, by this machine's figures "
        "with --hardware, else by those of the CPUs that bigtrain is developed on",
    )
    parser.add_argument(
        "--nodes-of", type=positive_int, metavar="N", help="devices on each node (default: 8)"
    )
    parser.add_argument(
        "--host-memory",
        type=size,
        metavar="SIZE",
        help="main memory of a node, for offload (default: 1TB)",
    )
    parser.add_argument(
        "--network",
        type=_bits,
        metavar="RATE",
        help="network bandwidth per device, such as 400Gb (default: of the device's usual node)",
    )
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="measurements of --calibrate, for DEVICE"
    )
    add_count(parser, "--top", 10, "N", "layouts to show")
    parser.add_argument("--json", action="store_true", help="print all layouts as JSON")
    parser.add_argument(
        "--write",
        type=Path,
        metavar="DIRECTORY",
        help="write run YAML and DeepSpeed JSON of the chosen layout there",
    )
    add_count(parser, "--choose", 1, "N", "which line of the table --write takes")
    parser.add_argument(
        "--evaluate",
        type=Path,
        metavar="ROWS.csv",
        help="instead: predict published or own measurements, and print the errors",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="instead: measure this machine in about a minute and write --output, for --hardware",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="of --evaluate: rows with predictions, as CSV; of --calibrate: what was measured",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def run(args: argparse.Namespace) -> int:
    """Print a plan, or an evaluation. Raises ConfigError, ModelError, OutputError."""
    if args.evaluate is not None:
        return _evaluate(args.evaluate, args.output)
    if args.calibrate:
        return _calibrate(args.output)
    missing = [name for name in ("config", "gpus") if getattr(args, name) is None]
    if missing:
        names = " and ".join(f"--{name}" for name in missing)
        raise ConfigError(
            Problem(names, None, "is needed for a plan", "or --evaluate ROWS.csv, or --calibrate")
        )
    with _uncollected():
        return _plan(args)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's search for reference cycles, during the plan and at the end of the program:
    imports and layouts make many objects and hardly a cycle, and looking for them is an eighth of a
    plan's time, and again as much when torch is left behind."""
    was_enabled = gc.isenabled()
    gc.disable()
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _evaluate(path: Path, output: Path | None) -> int:
    from bigtrain.planner.published.evaluation import (
        error_table,
        predict,
        read_rows,
        summarize,
        write_rows,
    )

    rows = read_rows(path)
    predictions = [predict(row) for row in rows]
    if output is not None:
        try:
            write_rows(output, rows, predictions)
        except OSError as error:
            raise OutputError(f"--output = {output}: cannot be written: {error}") from error
    print(error_table(summarize(rows, predictions)))
    refused = [(row, p.refused) for row, p in zip(rows, predictions, strict=True) if p.refused]
    for row, reason in refused[:5]:
        print(f"refused: {row['source']}, {row['model']}: {reason}")
    return 0


def _calibrate(output: Path | None) -> int:
    from bigtrain.engine.calibration.device import calibrate
    from bigtrain.engine.calibration.engine import measure_engine
    from bigtrain.planner.tables.calibration_file import keep_calibration, write_calibration

    if output is None:
        raise ConfigError(Problem("--output", None, "is needed for --calibrate", "name a file"))
    try:
        output.touch()
    except OSError as error:
        raise OutputError(f"--output = {output}: cannot be written: {error}") from error
    device = calibrate(print)
    engine = measure_engine() if device.is_cpu else None
    if engine is not None:
        per = ", ".join(f"ZeRO {zero}: {costs.step * 1e9:.2g} + {costs.step_exchange * 1e9:.2g}"
                        for zero, costs in engine.zero.items())  # fmt: skip
        print(f"DeepSpeed, ns of a step per parameter byte, on 1 rank + with a second rank: {per}")
    write_calibration(device, engine, output)
    if device.is_cpu:
        keep_calibration(device, engine)
    devices = f"{device.devices_per_node}x{'CPU' if device.is_cpu else device.name}"
    print(f"wrote {output}; bigtrain plan --hardware {output} --gpus {devices} uses it")
    return 0


@dataclass(frozen=True)
class Ranked:
    """A run's layouts on a cluster: those that fit, fastest first, and others that were looked at,
    of `num_others` that do not. `remark`: what has to be said of the model's costs, or nothing."""

    config: RunConfig
    cluster: Cluster
    model: ModelCosts
    remark: str
    fitting: list[Candidate]
    others: list[Candidate]
    num_others: int


def ranked_layouts(args: argparse.Namespace, *, varies: bool = True) -> Ranked:
    """The layouts that the arguments ask for; `varies`: with loss and buckets other than a run
    decides by itself, too. Raises ConfigError if none fits."""
    from bigtrain.models.traced_costs import model_costs
    from bigtrain.planner.plan_text import nothing_fits
    from bigtrain.planner.search import search
    from bigtrain.planner.tables.engines import engine_named
    from bigtrain.settings.loading import load_run_config

    cluster, measured = _cluster(args)
    config = load_run_config(args.config, args.overrides)
    model, remark = model_costs(config)
    request = replace(_request(config, cluster, model), varies=varies)
    engine = engine_named("deepspeed")
    if measured is not None:
        engine = engine.with_measured(measured)
    found = search(request, cluster, engine)
    if not found.fitting and not found.others:
        raise ConfigError(_no_layout(config, cluster))
    if not found.fitting:
        rule, remedy = nothing_fits(found.others, cluster)
        raise ConfigError(Problem("--gpus", args.gpus, rule, remedy))
    return Ranked(config, cluster, model, remark, found.fitting, found.others, found.num_others)


def _plan(args: argparse.Namespace) -> int:
    from bigtrain.planner.plan_text import as_json, plan_table

    plan = ranked_layouts(args)
    if args.json:
        tree = {
            "device": plan.cluster.device.name,
            "num_devices": plan.cluster.num_devices,
            "model": {"num_parameters": plan.model.num_parameters, "source": plan.model.source},
            "num_layouts_that_do_not_fit": plan.num_others,
            "layouts": as_json([*plan.fitting, *plan.others], plan.cluster),
        }
        print(json.dumps(tree, indent=1))
    else:
        print(_heading(plan))
        if plan.remark:
            print(f"the model's costs are {plan.remark}")
        print(plan_table(plan.fitting, plan.cluster, args.top))
    if args.write is not None:
        _write(args, plan.config, plan.cluster, plan.fitting, plan.model.vocabulary_size)
    return 0


def _cluster(args: argparse.Namespace) -> tuple[Cluster, MeasuredEngine | None]:
    from bigtrain.planner.search import Cluster
    from bigtrain.planner.tables.calibration_file import load_calibration
    from bigtrain.planner.tables.engines import cpu_engine
    from bigtrain.planner.tables.hardware import find_device, with_network

    found = re.fullmatch(r"\s*(\d+)\s*x\s*(\S.*?)\s*", args.gpus)
    if found is None or int(found.group(1)) < 1:
        rule = "is not a number of devices and their name"
        raise ConfigError(Problem("--gpus", args.gpus, rule, "write 64xH100-80GB, say"))
    number, name = int(found.group(1)), found.group(2)
    device: Accelerator
    measured: MeasuredEngine | None = None
    if args.hardware:
        device, measured = load_calibration(args.hardware)
    else:
        device = find_device(name)
        measured = cpu_engine() if device.is_cpu else None
    if args.nodes_of is not None:
        device = replace(device, devices_per_node=args.nodes_of)
    per_node = device.devices_per_node
    if number > per_node and number % per_node:
        below = number // per_node * per_node
        rule = f"is not a whole number of nodes of {per_node} devices (--nodes-of)"
        remedy = f"nearest: {below} or {below + per_node}"
        raise ConfigError(Problem("--gpus", number, rule, remedy))
    if args.network is not None:
        device = with_network(device, args.network)
    return Cluster(device, number, float(args.host_memory or 10**12)), measured


def _bits(text: str) -> float:
    """An argparse type: bits a second, such as 400Gb."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMT])b(?:it)?(?:/s|ps)?\s*", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is not a rate, such as 400Gb")
    value = float(found.group(1)) * {"M": 1e6, "G": 1e9, "T": 1e12}[found.group(2)]
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a rate, such as 400Gb")
    return value


def _request(config: RunConfig, cluster: Cluster, model: Any) -> Request:
    from bigtrain.planner.run_layout import optimizer_costs
    from bigtrain.planner.search import Request
    from bigtrain.settings.deepspeed.engine_config import gradient_dtype_of
    from bigtrain.settings.hf_config_keys import inspect_configuration
    from bigtrain.settings.resolve import facts_of

    figures, problems = inspect_configuration(config.model)
    if problems:
        raise ConfigError(problems, "the run")
    raw = _deepspeed_json(1, "")
    device: Device = "cpu" if cluster.device.is_cpu else "cuda"
    facts = facts_of(config, raw, cluster.num_devices, device, "DeepSpeed JSON", True, figures)
    size_of = {"float32": 4, "bfloat16": 2, "float16": 2}
    gradients = gradient_dtype_of(config, 1) or config.precision.dtype
    return Request(
        model=model,
        facts=replace(facts, torch_adam=True),
        sequence_length=config.batch.sequence_length,
        global_batch_size=config.batch.samples_per_step,
        parameter_bytes=size_of[config.precision.dtype],
        gradient_bytes=size_of.get(str(gradients), 4),
        bucket_elements=int(raw["zero_optimization"]["reduce_bucket_size"]),
        loss=config.model.loss,
        loss_chunk_tokens=config.model.loss_chunk_tokens,
        optimizer=optimizer_costs(config.optimizer),
    )


def _no_layout(config: RunConfig, cluster: Cluster) -> Problem:
    batch = config.batch.samples_per_step
    world = cluster.num_devices
    rule = f"no legal layout divides {batch} samples of a step among {world} devices"
    below = batch // world * world
    remedy = f"batch.global_batch_size: {f'{below} or ' if below else ''}{below + world}"
    return Problem("--gpus", world, rule, remedy)


def _heading(plan: Ranked) -> str:
    batch = plan.config.batch
    return (
        f"{plan.model.num_parameters / 1e9:.3g}B parameters on {plan.cluster.num_devices} x "
        f"{plan.cluster.device.name}, {batch.samples_per_step} samples of {batch.sequence_length} "
        f"tokens a step: {len(plan.fitting)} layouts fit, {plan.num_others} do not"
    )


def _deepspeed_json(zero_stage: int, offload: str) -> dict[str, Any]:
    from bigtrain.settings.deepspeed.engine_config import (
        find_deepspeed_config,
        read_deepspeed_config,
    )

    return read_deepspeed_config(find_deepspeed_config(f"zero{zero_stage}{offload}"))


def run_and_engine(
    config: RunConfig, layout: Layout, vocabulary_size: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run YAML and the DeepSpeed JSON of `config` in another layout, as trees. The loss is
    written where it is not what such a run would decide by itself."""
    from bigtrain.planner.run_layout import usual_chunk

    offload = "_offload" if layout.offload_optimizer else ""
    # Of ZeRO 1 with its optimizer in main memory none is shipped: ZeRO 2's differs in the stage.
    raw = _deepspeed_json(2 if offload and layout.zero_stage == 1 else layout.zero_stage, offload)
    raw["zero_optimization"]["stage"] = layout.zero_stage
    if layout.offload_optimizer and not layout.offload_parameters:
        raw["zero_optimization"].pop("offload_param", None)
    tree = config.model_dump(mode="json", exclude_unset=True)
    parallel = {
        "tensor": layout.tensor_size,
        "pipeline": layout.pipeline_size,
        "sequence": layout.sequence_size,
        "expert": layout.expert_size,
    }
    tree["parallel"] = {name: degree for name, degree in parallel.items() if degree > 1}
    tree["batch"]["micro_batch_size"] = layout.micro_batch_size
    tree["model"]["gradient_checkpointing"] = layout.gradient_checkpointing
    section, tokens = config.model, layout.tokens_per_micro_batch
    if layout.loss_chunk_tokens != usual_chunk(
        section.loss, section.loss_chunk_tokens, vocabulary_size, tokens
    ):
        tree["model"]["loss"] = "plain" if layout.loss_chunk_tokens is None else "chunked"
        if layout.loss_chunk_tokens is not None:
            tree["model"]["loss_chunk_tokens"] = layout.loss_chunk_tokens
    zero = raw["zero_optimization"]
    sizes = {
        "reduce_bucket_size": layout.reduce_bucket_elements,
        "allgather_bucket_size": layout.gather_bucket_elements,
    }
    zero.update({key: size for key, size in sizes.items() if key in zero})
    return tree, raw


def _write(
    args: argparse.Namespace,
    config: RunConfig,
    cluster: Cluster,
    fitting: list[Candidate],
    vocabulary_size: int,
) -> None:
    import yaml

    from bigtrain.settings.resolve import resolve_run
    from bigtrain.settings.run_config import RunConfig as Config
    from bigtrain.system.files import write_new

    if args.choose > len(fitting):
        rule = f"there are {len(fitting)} layouts that fit"
        raise ConfigError(Problem("--choose", args.choose, rule, f"1 to {len(fitting)}"))
    tree, raw = run_and_engine(config, fitting[args.choose - 1].layout, vocabulary_size)
    json_path, yaml_path = args.write / "deepspeed.json", args.write / "run.yaml"
    tree.setdefault("engine", {})["deepspeed_config"] = str(json_path)
    try:
        args.write.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--write = {args.write}: cannot be written: {error}") from error
    write_new(json_path, json.dumps(raw, indent=2) + "\n")
    write_new(yaml_path, yaml.safe_dump(tree, sort_keys=False))
    # Check that a run accepts what was written.
    resolve_run(Config.model_validate(tree), cluster.num_devices)
    print(f"wrote {yaml_path} and {json_path}; start it with:\n  {_launch(cluster, yaml_path)}")


def _launch(cluster: Cluster, yaml_path: Path) -> str:
    nodes = -(-cluster.num_devices // cluster.device.devices_per_node)
    start = f"bigtrain/train.py --config {yaml_path}"
    if nodes == 1:
        return f"deepspeed --num_gpus {cluster.num_devices} {start}"
    return f"deepspeed --hostfile HOSTFILE {start}   # a hostfile of {nodes} nodes"
