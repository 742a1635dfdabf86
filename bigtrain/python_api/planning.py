"""Planning of layouts for a number of devices, with predicted speed: `bigtrain plan`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.errors import ConfigError, OutputError, Problem
from bigtrain.python_api.configuring import Config, load_config
from bigtrain.settings.run_config import ParallelSection, RunConfig

if TYPE_CHECKING:
    from bigtrain.planner.layout import Layout
    from bigtrain.planner.legal_layouts import SearchSpace
    from bigtrain.planner.model_costs import ModelCosts
    from bigtrain.planner.run_prediction import RunPrediction
    from bigtrain.planner.search import Candidate, Cluster
    from bigtrain.planner.tables.engines import MeasuredEngine
    from bigtrain.planner.tables.hardware import Device as Accelerator
    from bigtrain.planner.teacher_costs import TeacherCosts
    from bigtrain.python_api.proposals import Proposal
    from bigtrain.settings.compatibility.facts import Device
    from bigtrain.settings.resolve import ResolvedRun
    from bigtrain.settings.sections.model import LossKind


@dataclass(frozen=True)
class Plan:
    """Layouts of a run on a cluster: those that fit, fastest first, and other assessed ones,
    of `num_others` that do not. `remark`: note on the model's costs, or empty. `chooses_engine`:
    whether the DeepSpeed JSON follows from the layout; else an override names it. `proposals`:
    other runs that fit without offload, where this one does not."""

    config: RunConfig
    cluster: Cluster
    model: ModelCosts
    remark: str
    fitting: list[Candidate]
    others: list[Candidate]
    num_others: int
    chooses_engine: bool = True
    proposals: Sequence[Proposal] = ()

    def table(self, top: int = 10) -> str:
        """Return the `top` fastest layouts, with memory and time of the first by terms, as text."""
        from bigtrain.planner.plan_text import plan_table

        lines = [plan_table(self.fitting, self.cluster, top)]
        if self.proposals:
            from bigtrain.python_api.proposals import proposal_lines

            lines += ["", *proposal_lines(self.proposals, self.cluster.num_devices)]
        return "\n".join(lines)

    def layouts(self) -> list[dict[str, Any]]:
        """Return all layouts with memory (bytes) and time (seconds) by terms; those that fit
        first."""
        from bigtrain.planner.plan_text import as_json

        return as_json([*self.fitting, *self.others], self.cluster)

    @property
    def default_choice(self) -> int:
        """Line of the table (from 1) that is written by default: the fastest layout that leaves at
        least the mean prediction error of memory free."""
        from bigtrain.planner.plan_text import default_choice

        return default_choice(self.fitting, self.cluster)

    def run_tree(self, choose: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return run YAML and DeepSpeed JSON, as trees, for line `choose` of the table (from 1;
        default: `default_choice`). Raises ConfigError for an unknown line."""
        if choose is None:
            choose = self.default_choice
        if not 1 <= choose <= len(self.fitting):
            rule = f"{len(self.fitting)} layouts fit"
            raise ConfigError(Problem("--choose", choose, rule, f"1 to {len(self.fitting)}"))
        candidate = self.fitting[choose - 1]
        named = None if self.chooses_engine else self.config.engine.deepspeed_config
        return run_and_engine(self.config, candidate.layout, candidate.loss, named)

    def write(self, directory: str | Path, choose: int | None = None) -> Path:
        """Write ``run.yaml`` and ``deepspeed.json`` of line `choose` into `directory`, and return
        the path of the YAML. Overwrites nothing. Raises ConfigError, OutputError, LaunchError."""
        import yaml

        from bigtrain.settings.resolve import resolve_run
        from bigtrain.system.files import write_new

        tree, raw = self.run_tree(choose)
        folder = Path(directory)
        json_path, yaml_path = folder / "deepspeed.json", folder / "run.yaml"
        tree.setdefault("engine", {})["deepspeed_config"] = str(json_path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"--write = {folder}: cannot be written: {error}") from error
        write_new(json_path, json.dumps(raw, indent=2) + "\n")
        write_new(yaml_path, yaml.safe_dump(tree, sort_keys=False))
        # Check that a run accepts the written files.
        resolve_run(RunConfig.model_validate(tree), self.cluster.num_devices)
        return yaml_path


def plan(
    config: Config,
    devices: str,
    *overrides: str,
    nodes_of: int | None = None,
    host_memory_bytes: float = 1e12,
    network_bits_per_second: float | None = None,
    hardware: str | Path | None = None,
    varies: bool = True,
    longest: bool = False,
    writes: bool = False,
) -> Plan:
    """Return the layouts of a run on `devices`, such as ``8xH100-80GB`` or ``4xCPU``.

    nodes_of: devices on each node (default: 8). host_memory_bytes: of a node, for offload.
    network_bits_per_second: per device (default: of the device's usual node). hardware: a file of
    ``bigtrain plan --calibrate``. varies: also with loss and buckets that differ from a run's
    defaults. longest: for the longest sample that fits, instead of the run's length and batch,
    which the plan's configuration then has. writes: the plan will be written, with overrides that
    change nothing in it; they are refused otherwise.

    An override of a setting that a plan chooses (`bigtrain.planner.constraints.FIELDS`) holds all
    layouts to its value. Traces a model that was never planned before, which imports torch. Raises
    ConfigError if nothing fits or no layout has such a value, ModelError for an unknown model.
    """
    from bigtrain.models.tracing.traced_costs import model_costs
    from bigtrain.planner.constraints import required_fields, with_implied
    from bigtrain.planner.plan_text import nothing_fits
    from bigtrain.planner.search import longest_sample, search
    from bigtrain.planner.tables.engines import engine_named
    from bigtrain.python_api.proposals import offloads, proposal_lines, proposals

    # The hardware, measured where `hardware` or a CPU is given, and the model's costs.
    cluster, measured = _cluster(
        devices, nodes_of, host_memory_bytes, network_bits_per_second, hardware
    )
    overrides = with_implied(overrides)
    loaded = _loaded(config, overrides, longest=longest, writes=writes)
    model, remark = model_costs(loaded)
    if not remark and (problem := _frozen_problem(loaded, model)):
        raise ConfigError(problem)
    required = required_fields(loaded, overrides)
    request = replace(_request(loaded, cluster, model, required), varies=varies)
    engine = engine_named("deepspeed")
    if measured is not None:
        engine = engine.with_measured(measured)

    # Rank the layouts; an error names the nearest devices or batch with which one fits.
    if longest:
        length, ranking = longest_sample(request, cluster, engine)
        if ranking.fitting:
            loaded = _with_samples_of(loaded, length, ranking.fitting[0].layout)
    else:
        ranking = search(request, cluster, engine)
    if not ranking.fitting and not ranking.others:
        raise ConfigError(_no_layout(request, loaded, cluster, overrides))
    fitting_proposals: list[Proposal] = []
    if not longest and not any(not offloads(candidate) for candidate in ranking.fitting):

        def request_of(changed: RunConfig) -> SearchSpace:
            return _request(changed, cluster, model_costs(changed)[0], required)

        fitting_proposals = proposals(loaded, cluster, engine, request_of)
    if not ranking.fitting:
        rule, remedy = nothing_fits(ranking.others, cluster)
        if fitting_proposals:
            lines = proposal_lines(fitting_proposals, cluster.num_devices)
            remedy += "; or " + "\n    ".join(lines)
        raise ConfigError(Problem("--gpus", devices, rule, remedy))
    if not longest:  # the longest sample may need more positions than the model has
        _refuse_as_check(loaded, ranking.fitting[0], cluster, is_named="zero_stage" in required)
    return Plan(
        loaded, cluster, model, remark, ranking.fitting, ranking.others, ranking.num_others,
        chooses_engine="zero_stage" not in required, proposals=fitting_proposals,
    )  # fmt: skip


def _loaded(config: Config, overrides: Sequence[str], *, longest: bool, writes: bool) -> RunConfig:
    """Return the run with `overrides`. Raises ConfigError for overrides that the plan would not
    keep: with `longest` the plan chooses the batch; unless it `writes` a run, settings without
    influence on a layout change nothing."""
    from bigtrain.planner.constraints import batch_settings, repeated_settings, unused_settings

    loaded, problems = load_config(config, *overrides), repeated_settings(overrides)
    if longest:
        problems += batch_settings(overrides)
    if not writes:
        problems += unused_settings(
            overrides, lambda some_overrides: load_config(config, *some_overrides)
        )
    if problems:
        raise ConfigError(problems, "the plan")
    return loaded


def _frozen_problem(config: RunConfig, model: ModelCosts) -> Problem | None:
    """Return the problem with ``model.frozen`` if nothing of `model` is frozen, or everything."""
    from bigtrain.planner.layout import Layout
    from bigtrain.planner.stages import stage_sizes, stages_of

    patterns = list(config.model.frozen)
    if not patterns:
        return None
    sizes = stage_sizes(stages_of(model, 1, True)[0], model, Layout())
    if sizes.trained >= sizes.total:
        remedy = "a shell pattern of full names, such as model.embed_tokens.*"
        return Problem("model.frozen", patterns, "matches the name of no parameter", remedy)
    if sizes.trained > 0 or config.adapters is not None:
        return None
    return Problem("model.frozen", patterns, "leaves nothing to train", "match fewer parameters")


def _with_samples_of(config: RunConfig, length: int, layout: Layout) -> RunConfig:
    """Return `config` with samples of `length` tokens, as many a step as `layout` has."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    samples = layout.global_batch_size
    tree["batch"] = {"sequence_length": length, "global_batch_size": samples}
    return RunConfig.model_validate(tree)


def _cluster(
    devices: str,
    nodes_of: int | None,
    host_memory_bytes: float,
    network: float | None,
    hardware: str | Path | None,
) -> tuple[Cluster, MeasuredEngine | None]:
    """Return the cluster of `devices` (``64xH100-80GB``), and the engine's measured times, from a
    calibration or for a CPU. `nodes_of`: devices per node. Raises ConfigError."""
    from bigtrain.planner.search import Cluster
    from bigtrain.planner.tables.engines import cpu_engine, load_calibration
    from bigtrain.planner.tables.hardware import find_device, with_network

    match = re.fullmatch(r"\s*(\d+)\s*x\s*(\S.*?)\s*", devices)
    if match is None or int(match.group(1)) < 1:
        rule = "is not a number of devices and their name"
        raise ConfigError(Problem("--gpus", devices, rule, "write e.g. 64xH100-80GB"))
    number, name = int(match.group(1)), match.group(2)
    if re.search(r"[,;+&]", name):
        rule = "names more than one kind of device; the devices of a plan are alike"
        raise ConfigError(
            Problem("--gpus", devices, rule, f"--gpus {re.split('[,;+&]', devices)[0]}")
        )
    # A calibration has the rates of this hardware; otherwise they come from tables.
    device: Accelerator
    measured: MeasuredEngine | None = None
    if hardware is not None:
        device, measured = load_calibration(Path(hardware))
        if device.is_cpu != (name.lower() == "cpu"):
            rule = f"is not the device of --hardware {hardware}"
            calibrated_name = "CPU" if device.is_cpu else device.name
            remedy = f"--gpus {number}x{calibrated_name}"
            raise ConfigError(Problem("--gpus", devices, rule, remedy))
    else:
        device = find_device(name)
        measured = cpu_engine() if device.is_cpu else None
    if nodes_of is not None:
        device = replace(device, devices_per_node=nodes_of)
    # Layouts are searched for complete nodes only.
    per_node = device.devices_per_node
    if number > per_node and number % per_node:
        below = number // per_node * per_node
        rule = f"is not a multiple of the node size of {per_node} devices (--nodes-of)"
        remedy = f"nearest: {below} or {below + per_node}"
        raise ConfigError(Problem("--gpus", number, rule, remedy))
    if network is not None:
        device = with_network(device, network)
    return Cluster(device, number, float(host_memory_bytes)), measured


def _request(
    config: RunConfig, cluster: Cluster, model: Any, required: Mapping[str, Any]
) -> SearchSpace:
    from bigtrain.planner.engine_json import (
        allows_stages,
        derived_fields,
        named_engine,
        shipped_engine,
    )
    from bigtrain.planner.layout import Layout
    from bigtrain.planner.legal_layouts import SearchSpace
    from bigtrain.planner.run_prediction import optimizer_costs
    from bigtrain.settings.compatibility.facts import Facts, read_facts
    from bigtrain.settings.deepspeed.engine_config import find_deepspeed_config, label_of
    from bigtrain.settings.degrees import MODEL_DEGREES
    from bigtrain.settings.fast_path import ANY_CUDA, CPU
    from bigtrain.settings.hf_config_keys import inspect_configuration
    from bigtrain.system.units import DTYPE_BYTES

    # The facts that decide which layouts are legal: of the JSON that an override names, which may
    # have ZeRO++ or NVMe, else of ZeRO 1.
    figures, problems = inspect_configuration(config.model)
    if problems:
        raise ConfigError(problems, "the run")
    device: Device = "cpu" if cluster.device.is_cpu else "cuda"
    named = named_engine(config) if "zero_stage" in required else None
    facts = read_facts(config, named or shipped_engine(1), figures) | Facts(
        torch_adam=True, world_size=cluster.num_devices, device=device, async_io=True
    )
    if named is not None:
        facts |= Facts(source=label_of(find_deepspeed_config(config.engine.deepspeed_config)))
    # What an override requires holds for every layout, so it is a fact of the run; what the run
    # YAML has of other settings that a plan chooses is none.
    facts |= Facts(
        **{name: required.get(name, 1) for name in MODEL_DEGREES},
        activation_offload=required.get("offload_activations", False),
        tiled_mlp=required.get("tiled_mlp", "off"),
    )
    if required.get("offload_optimizer") and not facts.offload_optimizer:
        facts |= Facts(offload_optimizer="cpu")
    if required.get("offload_parameters") and not facts.offload_param:
        facts |= Facts(offload_param="cpu")
    memory = config.checkpoint.memory
    return SearchSpace(
        model=model,
        facts=facts,
        base=Layout(
            sequence_length=config.batch.sequence_length,
            parameter_bytes=DTYPE_BYTES[config.precision.dtype],
            float8=config.precision.float8 != "none",
            optimizer=optimizer_costs(config.optimizer),
            copies_states=config.checkpoint.asynchronous,
            memory_every_steps=None if memory is None else memory.every_steps,
            partner_copies=0 if memory is None or cluster.num_nodes == 1 else memory.copies,
            rows_per_sample=config.objective.kind.trained_rows_per_sample,
            num_counted_rows=config.objective.kind.rows_per_sample,
        ),
        global_batch_size=config.batch.samples_per_step,
        section=config.model,
        machine=CPU if cluster.device.is_cpu else ANY_CUDA,
        has_plain_entropies=config.objective.has_plain_entropies,
        required=required,
        derived_fields=derived_fields(config, named),
        divides_layers="pipeline_size" in required or allows_stages(config),
        teacher=_teacher_costs(config, named),
    )


def _teacher_costs(config: RunConfig, named: Mapping[str, Any] | None) -> TeacherCosts | None:
    """Return the costs of the teacher in the run; None without one. named: the DeepSpeed JSON of
    every layout, None for the shipped ones."""
    if config.objective.teacher_model is None:
        return None
    from bigtrain.models.tracing.traced_costs import model_costs
    from bigtrain.planner.engine_json import derived_fields
    from bigtrain.planner.layout import Layout
    from bigtrain.planner.run_prediction import optimizer_costs
    from bigtrain.planner.teacher_costs import TeacherCosts
    from bigtrain.settings.degrees import Degrees
    from bigtrain.settings.teacher import of_teacher, teacher_run

    run = teacher_run(config)
    try:
        model, _ = model_costs(run)
    except ConfigError as error:
        raise ConfigError([of_teacher(config, problem) for problem in error.problems]) from error
    fields_of, optimizer = derived_fields(run, named), optimizer_costs(run.optimizer)

    def layout_of_teacher(layout: Layout) -> Layout:
        has_stages = layout.pipeline_size > 1
        return Layout(
            **Degrees.degrees(layout),
            zero_stage=layout.zero_stage,
            micro_batch_size=layout.micro_batch_size,
            num_accumulation=layout.num_accumulation,
            sequence_length=layout.sequence_length,
            offload_optimizer=layout.offload_optimizer,
            offload_parameters=layout.offload_parameters,
            parameter_bytes=layout.parameter_bytes,
            optimizer=optimizer,
            **fields_of(layout.zero_stage, layout.offload_optimizer, has_stages),
        )

    return TeacherCosts(model, layout_of_teacher)


def _refuse_as_check(
    config: RunConfig, best: Candidate, cluster: Cluster, *, is_named: bool
) -> None:
    """Raise ConfigError if `bigtrain check` refuses the run in the layout of `best`: some rules are
    about sections that no layout depends on. is_named: `config` names the DeepSpeed JSON."""
    from bigtrain.planner.engine_json import shipped_name
    from bigtrain.settings.resolve import resolve_run

    layout = best.layout
    tree, _ = run_and_engine(config, layout, best.loss)
    name = None
    if not is_named:
        name = shipped_name(layout.zero_stage, offloads_optimizer=layout.offload_optimizer)
    device: Device = "cpu" if cluster.device.is_cpu else "cuda"
    resolve_run(RunConfig.model_validate(tree), cluster.num_devices, name, device)


def _unmet(
    request: SearchSpace, config: RunConfig, cluster: Cluster, overrides: Sequence[str]
) -> list[Problem]:
    """Return the overrides without any of which there would be layouts, with the values that all
    other overrides allow."""
    from bigtrain.planner.constraints import FIELDS, settings_of
    from bigtrain.planner.legal_layouts import legal_values

    problems = []
    for setting in settings_of(overrides):
        name = FIELDS[setting][0]
        required_value = value = request.required[name]
        values = legal_values(request, cluster.num_devices, cluster.device.devices_per_node, name)
        words = "this value"
        if setting == "engine.deepspeed_config":
            value, words = config.engine.deepspeed_config, f"its ZeRO stage {required_value}"
        if values and required_value not in values:
            rule = f"no layout on {cluster.num_devices} devices has {words}"
            remedy = f"possible with the other settings: {', '.join(map(str, values))}"
            problems.append(Problem(setting, value, rule, remedy))
    return problems


def _no_layout(
    request: SearchSpace, config: RunConfig, cluster: Cluster, overrides: Sequence[str]
) -> list[Problem]:
    """Return the overrides that no layout has, else the settings that rule out all layouts, else
    the batch that no layout divides."""
    from bigtrain.settings.compatibility.check import check_compatibility
    from bigtrain.settings.compatibility.facts import Facts

    # What is wrong with the DeepSpeed JSON that an override names, is wrong in every layout.
    problems = check_compatibility(request.facts | Facts(world_size=1))
    json_problems = [p for p in problems if p.key.startswith(request.facts.source)]
    problems = json_problems or _unmet(request, config, cluster, overrides) or problems
    if problems:
        return problems
    batch = config.batch.samples_per_step
    world = cluster.num_devices
    rule = f"no legal layout divides {batch} samples of a step among {world} devices"
    below = batch // world * world
    remedy = f"batch.global_batch_size: {f'{below} or ' if below else ''}{below + world}"
    return [Problem("--gpus", world, rule, remedy)]


def run_and_engine(
    config: RunConfig, layout: Layout, loss: LossKind | None = None, engine: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run YAML and the DeepSpeed JSON of `config` in another layout, as trees. loss:
    another ``model.loss`` of that layout. engine: the DeepSpeed JSON to start from, by name or
    path; None for the shipped one of the layout."""
    from bigtrain.planner.engine_json import shipped_engine
    from bigtrain.settings.deepspeed.engine_config import (
        find_deepspeed_config,
        read_deepspeed_config,
    )

    if engine is not None:
        raw = read_deepspeed_config(find_deepspeed_config(engine))
    else:
        raw = shipped_engine(
            layout.zero_stage,
            offloads_optimizer=layout.offload_optimizer,
            offloads_parameters=layout.offload_parameters,
        )

    # Settings of the layout, if they differ from the run's or from a default.
    tree = config.model_dump(mode="json", exclude_unset=True)
    tree["parallel"] = ParallelSection.tree_of(layout)
    tree["batch"]["micro_batch_size"] = layout.micro_batch_size
    tree["model"]["gradient_checkpointing"] = layout.gradient_checkpointing
    if layout.offload_activations or config.model.activation_offload:
        tree["model"]["activation_offload"] = layout.offload_activations
    if layout.tiled_mlp != config.model.tiled_mlp:
        tree["model"]["tiled_mlp"] = layout.tiled_mlp
    if loss is not None:
        tree["model"]["loss"] = loss
        if layout.loss_chunk_tokens is not None:
            tree["model"]["loss_chunk_tokens"] = layout.loss_chunk_tokens

    # Buckets, where the JSON has them.
    zero = {} if engine is not None else raw["zero_optimization"]
    sizes = {
        "reduce_bucket_size": layout.reduce_bucket_elements,
        "allgather_bucket_size": layout.gather_bucket_elements,
    }
    zero.update({key: size for key, size in sizes.items() if key in zero})
    return tree, raw


def predicted_run(resolved: ResolvedRun, device: Accelerator | None) -> tuple[RunPrediction, str]:
    """Return the prediction for the run, and a remark on the model's costs, which may be empty.
    Without `device` torch is not imported. Raises ConfigError or ModelError if the model is not
    known."""
    from bigtrain.models.tracing.traced_costs import model_costs
    from bigtrain.planner.run_prediction import (
        auto_loss_chunk,
        fast_path_elsewhere,
        predict_run,
        with_teacher,
    )
    from bigtrain.planner.tables.engines import cpu_engine
    from bigtrain.settings.resolve import resolve_teacher

    measured_engine = cpu_engine() if device is not None and device.is_cpu else None
    model, remark = model_costs(resolved.config, traces=device is not None)
    fast_path = fast_path_elsewhere(resolved, is_cpu=measured_engine is not None)
    section, objective = resolved.config.model, resolved.config.objective
    kernels = fast_path.loss_kernels(
        section.loss, has_plain_entropies=objective.has_plain_entropies
    )
    num_rows = resolved.plan.micro_batch_size * objective.kind.trained_rows_per_sample
    num_tokens = num_rows * resolved.plan.sequence_length // resolved.topology.sequence_size
    chunk = auto_loss_chunk(section, model, num_tokens, kernels)
    is_alone = device is not None and resolved.topology.world_size <= device.devices_per_node
    prediction = predict_run(
        resolved, model, chunk, device, measured_engine,
        has_partners=not is_alone, fast_path=fast_path,
    )  # fmt: skip
    if (teacher := resolve_teacher(resolved)) is not None:
        costs, _ = model_costs(teacher.config, traces=device is not None)
        prediction = with_teacher(prediction, teacher, costs, device, measured_engine)
    return prediction, remark
