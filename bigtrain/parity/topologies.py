"""Topologies of a world size, and their legality."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from bigtrain.errors import ConfigError, ModelError
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import try_model
from bigtrain.models.equivalence.tensor_parallel import check_tensor_size
from bigtrain.models.experts import has_auxiliary_loss
from bigtrain.parity.proxy import SHIPPED, Proxy
from bigtrain.settings.degrees import MODEL_DEGREES, Degrees
from bigtrain.settings.hf_config_keys import inspect_configuration
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import MoeSection, ParallelSection, RunConfig
from bigtrain.settings.sections.running import SequenceSection


@dataclass(frozen=True)
class Point:
    """Topology to compare. engine: name or path of a DeepSpeed JSON. refusal: why it is refused;
    None if it is legal. is_wrong: True if it is refused because the model's auxiliary loss
    differs there, which happens for no architecture of transformers: an error of bigtrain."""

    name: str
    engine: str
    config: RunConfig
    refusal: str | None = None
    is_wrong: bool = False


def points(proxy: Proxy, world_size: int) -> list[Point]:
    """Return every topology of `world_size` ranks for `proxy`, legal or not; in float32.

    If the run has another dtype, one point is added in that dtype, since errors are visible in
    float32, where rounding does not hide them: the first legal point of the run's engine without
    tensor parallelism, whose partial sums in 16 bit are a different computation.
    """
    config, all_points = proxy.config, []
    # Cached, since a trial of the model takes about a second.
    model_refusal = cache(partial(_model_refusal, config))
    has_other_loss = cache(partial(_has_other_auxiliary_loss, config))
    dimensions, *_ = inspect_configuration(config.model)
    has_experts = dimensions.num_experts is not None
    # Every division of the ranks, with every engine that fits it.
    for parallel in _degrees(world_size, has_experts=has_experts):
        for engine in proxy.engines:
            # A shipped JSON is for pipelines, or for runs without stages; zero0 is for both.
            is_for_stages = engine.config == "pipeline_zero1"
            is_for_both = engine.config == "zero0" or engine.config not in SHIPPED
            if not is_for_both and is_for_stages != (parallel.pipeline > 1):
                continue
            point_config = config.model_copy(update={"parallel": parallel})
            rule_refusal = _rule_refusal(point_config, engine.config, world_size)
            refusal = rule_refusal or model_refusal(parallel)
            is_wrong = rule_refusal is None and refusal is not None and has_other_loss(parallel)
            # The point's name: the engine, and the degrees above 1.
            degrees = Degrees.of_world(world_size, parallel.degrees)
            sizes = {name.removesuffix("_size"): getattr(degrees, name) for name in MODEL_DEGREES}
            if degrees.ring_size > 1:  # then `sequence` is the product of Ulysses and the ring
                renamed = {"sequence": "ulysses"}
                sizes = {renamed.get(name, name): size for name, size in sizes.items()}
                sizes["ulysses"] = degrees.ulysses_size
            words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
            name = ", ".join([engine.label, f"data {degrees.data_size}", *words])
            all_points.append(Point(name, engine.config, point_config, refusal, is_wrong))
    # A point in the run's precision.
    if proxy.precision is not None:
        run_engines = [engine.config for engine in proxy.engines if engine.is_own]
        legal = [p for p in all_points if p.refusal is None and p.engine in run_engines]
        point = next((p for p in legal if p.config.parallel.tensor == 1), None)
        if point is not None:
            # Without router losses, which depend on the division of a step: the reference runs in
            # 16 bit have different divisions.
            model = point.config.model.model_copy(update={"overrides": _WITHOUT_ROUTER_LOSSES})
            update: dict[str, Any] = {"precision": proxy.precision}
            if config.moe.z_loss_coefficient or has_auxiliary_loss(load_hf_config(config.model)):
                update |= {"moe": MoeSection(), "model": model}
            point_config = point.config.model_copy(update=update)
            refusal = _rule_refusal(point_config, point.engine, world_size)
            name = f"{point.name}, {proxy.precision.dtype}"
            all_points.append(Point(name, point.engine, point_config, refusal))
    return all_points


_WITHOUT_ROUTER_LOSSES = {"output_router_logits": False}


def _has_other_auxiliary_loss(config: RunConfig, parallel: ParallelSection) -> bool:
    """Return whether the model's own code is refused under `parallel` only because of its auxiliary
    loss: without that loss it runs."""
    if not has_auxiliary_loss(load_hf_config(config.model)):
        return False
    with_loss = config.model_copy(update={"moe": MoeSection()})
    model = config.model.model_copy(update={"overrides": _WITHOUT_ROUTER_LOSSES})
    without_loss = with_loss.model_copy(update={"model": model})
    is_refused = _model_refusal(with_loss, parallel) is not None
    return is_refused and _model_refusal(without_loss, parallel) is None


def _degrees(world_size: int, *, has_experts: bool) -> Iterator[ParallelSection]:
    """Yield every combination of degrees that divides the ranks."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for tensor, pipeline, ulysses, ring in product(divisors, repeat=4):
        sequence = SequenceSection(ulysses=ulysses, ring=ring) if ring > 1 else ulysses
        parallel = ParallelSection(tensor=tensor, pipeline=pipeline, sequence=sequence)
        if world_size % parallel.degrees.replica_size == 0:
            replicas = Degrees.of_world(world_size, parallel.degrees).partition_size
            for expert in divisors:
                if expert == 1 or (has_experts and replicas % expert == 0):
                    yield parallel.model_copy(update={"expert": expert})


def _rule_refusal(config: RunConfig, engine: str, world_size: int) -> str | None:
    """Return the rules that refuse a run; None if it is legal."""
    try:
        resolve_run(config, world_size, engine, "cpu")
    except ConfigError as error:
        return "; ".join(problem.rule for problem in error.problems)
    return None


def _model_refusal(config: RunConfig, parallel: ParallelSection) -> str | None:
    """Return why the model cannot be divided as in `parallel`, by a trial; None if it can."""
    hf_config = load_hf_config(config.model)
    try:
        problems = check_tensor_size(hf_config, parallel.tensor)
    except ModelError as error:
        return str(error)
    point_config = config.model_copy(update={"parallel": parallel})
    if not problems:
        problems, *_ = try_model(point_config, hf_config)
    return "; ".join(problem.rule for problem in problems) or None
