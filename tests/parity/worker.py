"""One process of a world that trains many small cases after each other in one process group.

Started by `tests/parity/conftest.py` with RANK, WORLD_SIZE and a rendezvous in the environment.
Arguments: a JSON file with the cases, and a file for rank 0 to write the results to.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cache, partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.shard_table import read_table
from bigtrain.engine.build import build_engine
from bigtrain.engine.checkpoint.fragments import MASTER, ensure_optimizer_states, owned_fragments
from bigtrain.engine.checkpoint.snapshot import read_weights, restore_engine, save_engine
from bigtrain.engine.deepspeed_patches.optimizers import inner_optimizer
from bigtrain.engine.deepspeed_patches.startup import destroyed_groups
from bigtrain.engine.optimizers.skip_step import StepStats
from bigtrain.engine.principal_adapters import begin_principal_adapters
from bigtrain.engine.startup.long_work import on_every_rank, on_main_rank
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.startup.process_group import process_group
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.document_isolation import plan_isolation
from bigtrain.models.equivalence.loss import choose_loss
from bigtrain.models.equivalence.model_plan import ModelPlan, choose_float8
from bigtrain.models.equivalence.parameter_plan import (
    GradientReach,
    find_gradient_reach,
    plan_parameters,
)
from bigtrain.models.equivalence.pipeline_stages import plan_stages
from bigtrain.models.equivalence.tiles import choose_tiles
from bigtrain.models.layers.adapter_names import has_adapters
from bigtrain.models.layers.document_attention import Isolation
from bigtrain.models.parallel.stage_layout import StagePlan
from bigtrain.models.weights.import_hf import Weights, find_weights
from bigtrain.models.weights.vocabulary import (
    VocabularyResize,
    base_configuration,
    grown_configuration,
    grown_weights,
)
from bigtrain.run.context import step_seed
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.lr_schedule import learning_rate_at
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import ModelSection, RunConfig
from bigtrain.sites.outer_step import OuterStep
from bigtrain.system.processes import exit_process
from bigtrain.system.world import World, read_world
from tests.parity.routing import Choices, checksum


def run_case(case: dict[str, Any], world: World, device: torch.device) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    torch.compiler.set_default_backend(case.get("compile_backend", "inductor"))
    if "optimizer_module" in case:
        import_module(case["optimizer_module"]).register()
    config = RunConfig.model_validate(case["config"])
    run = resolve_run(config, world.size, case["deepspeed_config"], device.type)
    if "optimizer" in case:
        run.engine.deepspeed["optimizer"] = case["optimizer"]
        run.engine.deepspeed["zero_allow_untested_optimizer"] = True
    mesh = open_mesh(run.topology, world.rank)
    tokens = read_table(Path(str(config.data.path))).tokenizer.vocab_size
    hf_config, growth = grown_configuration(config.model, load_hf_config(config.model), tokens)
    plan_of_main: list[Any] = [model_plan_of(config, run.plan) if world.is_main else None]
    dist.broadcast_object_list(plan_of_main)
    (model_plan,) = plan_of_main
    engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh, model_plan)
    outer: OuterStep | None = None
    if config.sites is not None:
        outer = OuterStep(
            engine,
            config.sites,
            world,
            case.get("facts", {}),
            last_step=config.train.total_steps,
            run=f"{config.sites.index:032x}",
        )
    if config.model.path is not None:
        read_weights(engine, weights_of(config, hf_config, growth))
    place = mesh.coordinates
    batches = open_training_data(config, run.plan, place.data_rank)
    losses, norms, samples = [], [], []
    masks = DropoutMasks(engine.module) if case.get("watch_dropout") else None
    choices = Choices(engine.module) if case.get("watch_routing") else None
    graphs: list[int] = []
    loads: list[dict[str, Any]] = []
    calls: dict[str, dict[str, int]] = {}
    outer_steps: list[dict[str, Any]] = []
    first, scalars = case.get("first_step", 0), {}
    if first:
        scalars = json.loads(Path(case["restore_from"], "scalars.json").read_text())
        restore_engine(engine, Path(case["restore_from"], "tensors"), scalars)
    if config.adapters is not None and config.adapters.init == "pissa":
        begin_principal_adapters(
            engine,
            config,
            hf_config,
            weights_of(config, hf_config, growth),
            is_new=not first,
            gather=on_every_rank,
        )
    keep_weights(engine, case, 0, world)
    if outer is not None:
        assert config.sites is not None
        number = first // config.sites.steps_between
        outer.begin(number, first, is_new=first == 0, pending_fragment=scalars.get("under_way"))
    if first:
        if "save_again_to" in case:
            save(engine, Path(case["save_again_to"]), world, outer)
    if case.get("save_at") == 0:
        save(engine, Path(case["save_to"]), world)
    last = case.get("last_step", config.train.total_steps) - 1
    for step in range(first, last + 1):
        seat = replace(place, data_rank=run.plan.reader(place.data_rank))
        torch.manual_seed(step_seed(config.seed, step, seat))
        lr = learning_rate_at(step, config.optimizer.lr, config.schedule, config.train.total_steps)
        micro_batches = batches.step(step * run.plan.global_batch_size)
        samples.append([checksum(row) for batch in micro_batches for row in batch.input_ids])
        is_watched = case.get("watch_calls") and step == last
        with watched(calls, "step") if is_watched else nullcontext():
            policy = skip if step in case.get("skipped", ()) else approve
            observe = bool(case.get("observe"))
            result = engine.train_step(micro_batches, lr, policy, observe=observe)
            if observe and (load := engine.expert_load.read()) is not None:
                loads.append(vars(load))
        with watched(calls, "log") if is_watched else nullcontext():
            losses.append(engine.step_loss(result))
            norms.append(engine.gradient_norm())
        # What bad steps are told by is what is logged.
        assert result.stats is not None
        assert math.isclose(result.stats.grad_norm, norms[-1], rel_tol=1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
        if outer is not None and outer.is_due(step + 1):
            outer_steps += map(asdict, outer.after_step(step + 1))
        if step + 1 == case.get("save_at"):
            if outer is not None:
                outer_steps += map(asdict, outer.settle())
            save(engine, Path(case["save_to"]), world, outer)
        keep_weights(engine, case, step + 1, world)
    logits = engine.logits(torch.tensor(case["probe"])).tolist() if "probe" in case else None
    held_out = evaluations_of_ranks(engine, micro_batches, world) if case.get("evaluates") else []
    sent_bytes = engine.optimizer_sent_bytes()
    batches.close()
    engine.close()
    if outer is not None:
        outer.close()
    results = {
        "losses": losses,
        "norms": norms,
        "accumulation": run.plan.accumulation,
        "graphs": graphs,
        "graph_breaks": dict(counters["graph_break"]),
        "loads": loads,
        "calls": calls,
        "outer_steps": outer_steps,
        "samples": samples_of_steps(samples, place.data_rank, world),
        "secondary_size": secondary_size(),
        "logits": logits,
        "optimizer_sent_bytes": sent_bytes,
        "held_out": held_out,
    }
    if choices is not None:
        results["choices"] = choices.of_all_ranks(samples, place.sequence_rank)
    return results if masks is None else results | {"masks": masks.of_all_processes()}


def evaluations_of_ranks(
    engine: TrainEngine, batches: list[MicroBatch], world: World
) -> list[tuple[float, int]]:
    """Return what every rank evaluates the batches to, where each rounds a loss differently."""
    objective = engine._objective
    summed_loss = objective.summed_loss

    def rounded(*arguments: Any) -> tuple[torch.Tensor, Any]:
        loss, rest = summed_loss(*arguments)
        return loss.double() * (1 + 1e-9 * world.rank), rest

    with patch.object(objective, "summed_loss", rounded):
        evaluation = engine.evaluate(batches)
        evaluated = evaluation.loss, evaluation.num_units
    of_ranks: list[Any] = [None] * world.size
    dist.all_gather_object(of_ranks, evaluated)
    return of_ranks


def weights_of(config: RunConfig, hf_config: Any, growth: VocabularyResize | None) -> Weights:
    """Those that the run starts from."""
    assert config.model.path is not None
    if growth is None:
        return find_weights(config.model.path, hf_config)
    base = find_weights(config.model.path, base_configuration(hf_config, growth))
    return grown_weights(
        base, hf_config, growth, config.model, config.seed, on_main_rank=on_main_rank
    )


def secondary_size() -> int | None:
    """Processes that hold whole parameters together between passes (ZeRO++'s hpZ), if any do."""
    group = groups._get_zero_param_intra_parallel_group()
    return None if group is None else dist.get_world_size(group)


def approve(_figures: StepStats) -> bool:
    """As a run's guard judges every step that is not bad."""
    return True


def model_plan_of(config: RunConfig, plan: BatchPlan) -> ModelPlan:
    """What a run would choose. It takes a third of a small case, so that one rank finds it out."""
    model = config.model.model_dump_json()
    stages = stages_of(model, config.parallel.pipeline, plan.sequence_length)
    isolation = isolation_of(model, config.data.isolates, config)
    loss, problems = choose_loss(config, load_hf_config(config.model), plan)
    assert not problems
    reach = reach_of(
        config.model,
        json.dumps([config.model.path, config.model.config]),
        config.batch.sequence_length,
    )
    parameters = plan_parameters(config, load_hf_config(config.model), reach)
    float8, problems = choose_float8(config, load_hf_config(config.model), plan)
    assert not problems
    tiles, problems = choose_tiles(
        config, load_hf_config(config.model), plan, parameters.float32_names
    )
    assert not problems
    return ModelPlan(stages, isolation, loss, parameters, float8, tiles)


def skip(_figures: StepStats) -> bool:
    """As a run's guard judges a bad step."""
    return False


@cache
def stages_of(model: str, num_stages: int, sequence_length: int) -> StagePlan | None:
    """Where a model is cut; found once for all cases, it takes a second."""
    if num_stages == 1:
        return None
    section = ModelSection.model_validate_json(model)
    plan, problems = plan_stages(
        load_hf_config(section), section.attention, num_stages, sequence_length
    )
    assert not problems
    return plan


REACHED: dict[tuple[str, str, int], GradientReach] = {}


def reach_of(section: ModelSection, model: str, sequence_length: int) -> GradientReach:
    """What gets a gradient; found once for all cases of a `model`."""
    key = model, section.attention, sequence_length
    if key not in REACHED:
        REACHED[key] = find_gradient_reach(
            load_hf_config(section), sequence_length, section.attention
        )
    return REACHED[key]


FOUND: dict[tuple[str, bool], Isolation] = {}


def isolation_of(model: str, isolates: bool, config: RunConfig) -> Isolation:
    """How a model is told of documents; found once for all cases."""
    if (model, isolates) not in FOUND:
        isolation, problems = plan_isolation(config, load_hf_config(config.model))
        assert not problems
        FOUND[model, isolates] = isolation
    return FOUND[model, isolates]


def keep_weights(engine: TrainEngine, case: dict[str, Any], step: int, world: World) -> None:
    """Write the masters after `step` steps to the file that the case names for it, if any.

    All ranks that hold an element hold the same bits of it, but for adapters that are whole beside
    a layer that is cut: tensor ranks compute those on their own, where the widths of their parts
    differ in other places of memory, and products may end otherwise in their last bit.
    """
    file = case.get("weights", {}).get(str(step))
    if file is None:
        return
    optimizer = inner_optimizer(engine.engine)
    is_new = not optimizer.state
    ensure_optimizer_states(engine.engine)
    own = [
        (fragment.name, fragment.shard.shape, box, view.detach().clone())
        for fragment in owned_fragments(engine.engine, engine.module)
        if fragment.shard.primary or not has_adapters(engine.module)
        for box, view in fragment.parts(MASTER)
    ]
    if is_new:
        optimizer.state.clear()
    gathered: Any = [None] * world.size if world.is_main else None
    dist.gather_object(own, gathered)
    if world.is_main:
        full: dict[str, torch.Tensor] = {}
        for name, shape, box, part in (item for parts in gathered for item in parts):
            whole = full.setdefault(name, torch.full(shape, torch.nan))
            held = whole[box.slices]
            known = ~held.isnan()
            assert torch.equal(held[known], part[known]), f"{name} differs by rank"
            whole[box.slices] = part
        torch.save(full, file)


class Watch(TorchDispatchMode):
    """Counts what makes processes wait for each other, or the host for a device, by who asks.

    Keys are an operation and the function of bigtrain that calls it, or ``deepspeed`` alone.
    """

    def __init__(self, counts: dict[str, int]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" or func is torch.ops.aten._local_scalar_dense.default:
            key = f"{func.name().partition('.')[0]} in {self.caller()}"
            self.counts[key] = self.counts.get(key, 0) + 1
        return func(*args, **(kwargs or {}))

    @staticmethod
    def caller() -> str:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if package == "deepspeed":
                return package
            if package == "bigtrain" and not frame.f_code.co_name.startswith("<"):
                return frame.f_code.co_name
        return "nobody"


@contextmanager
def watched(calls: dict[str, dict[str, int]], part: str) -> Iterator[None]:
    """Count the calls inside as those of `part` of a step."""
    with Watch(calls.setdefault(part, {})):
        yield


class DropoutMasks:
    """What dropout layers let through, as checksums by layer, one for each call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.seen: dict[str, list[int]] = {}
        for name, layer in module.named_modules():
            if isinstance(layer, torch.nn.Dropout) and layer.p > 0:
                layer.register_forward_hook(partial(self.note, name))

    def note(self, name: str, _layer: object, inputs: Any, output: torch.Tensor) -> None:
        if not inputs[0].any():
            return  # of embeddings that a later pipeline stage does not have
        mask = (output != 0).flatten().to(torch.uint8).numpy().tobytes()
        self.seen.setdefault(name, []).append(crc32(mask))

    def of_all_processes(self) -> list[dict[str, list[int]]]:
        """By rank. Collective."""
        seen_by_process: Any = [None] * dist.get_world_size()
        dist.all_gather_object(seen_by_process, self.seen)
        return list(seen_by_process)


def samples_of_steps(own: list[list[int]], data_rank: int, world: World) -> list[list[int]]:
    """Checksums of the samples of every global batch, in no order."""
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, (data_rank, own))
    replicas = dict(everyone).values()  # processes that share samples have the same
    return [sorted(chain.from_iterable(parts)) for parts in zip(*replicas, strict=True)]


def save(
    engine: TrainEngine, directory: Path, world: World, outer: OuterStep | None = None
) -> None:
    if world.is_main:
        directory.mkdir(parents=True)
    dist.barrier()
    scalars = save_engine(engine, directory / "tensors")
    if outer is not None:
        scalars["under_way"] = outer.pending_fragment
    if world.is_main:
        (directory / "scalars.json").write_text(json.dumps(scalars))
    dist.barrier()


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    world = read_world(os.environ)
    results = {}
    with process_group(world) as joined:
        for name, case in cases.items():
            with destroyed_groups():
                results[name] = run_case(case, world, joined.device)
    if world.is_main:
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    exit_process(0)
