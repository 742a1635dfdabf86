"""Launch of a run, from checked inputs to its result: build, resume, train, finish.

Verification of all data before a run, if configured (``data.verify: contents``).

Prediction of the run's time and memory, from its model and device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.data.loading.loader import (
    TrainingBatches,
    open_held_out,
    open_held_out_sets,
    open_training_data,
)
from bigtrain.data.shards.block_checksums import NOT_VERIFIED
from bigtrain.data.shards.verification import ListedShards, rank_slice
from bigtrain.engine.build import build_engine
from bigtrain.engine.startup.mesh import Mesh, open_mesh, warm_up
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import ConfigError, DataError, ModelError
from bigtrain.models.equivalence.model_plan import KIND, trial_key
from bigtrain.models.equivalence.tensor_parallel import check_tensor_plan
from bigtrain.models.layers.chunked_loss import LossPlan
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.models.weights.import_hf import Weights
from bigtrain.planner.run_prediction import RunPrediction, predict_run, refuse_too_large
from bigtrain.planner.tables.engines import MeasuredEngine, kept_calibration
from bigtrain.planner.tables.hardware import Device, find_device
from bigtrain.run.checkpointing.initialize import WeightsSource, weights_source
from bigtrain.run.checkpointing.resume import acquire_run_directory, restore_or_start
from bigtrain.run.checkpointing.saver import Saver, refuse_small_disk
from bigtrain.run.evaluation.evaluator import Evaluator, is_over
from bigtrain.run.finish import closing_result, finish, is_complete, stop_early
from bigtrain.run.loop import train
from bigtrain.run.outer_steps import OuterSteps, refuse_other_run
from bigtrain.run.preflight import Inputs
from bigtrain.run.reporting.closing import TrainingResult
from bigtrain.run.session import Session, open_session
from bigtrain.run.state import TrainState
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.system.stop_signals import StopSignals
from bigtrain.system.user_cache import cache_get, cache_put
from bigtrain.system.world import World


def train_inputs(
    run: ResolvedRun,
    inputs: Inputs,
    world: World,
    signals: StopSignals,
    notes: Sequence[str] = (),
) -> TrainingResult:
    """Train `run` to its end or until a signal, resuming from its directory.

    `notes`: lines for log.txt from before. Returns its result, on every rank. Collective over all
    ranks of `world`.
    """
    source = weights_source(run.config)
    weights = source.find(run.config, inputs)
    with open_session(run, inputs, world, signals) as session:
        for line in notes:
            session.log_to_file(line)
        if run.config.data.verify == "contents":
            verify_data(session)
        refuse_other_run(session, inputs)
        limit = run.config.watchdog.collective_timeout_seconds
        _predict(session, inputs)
        mesh = open_mesh(run.topology, world.rank, limit)
        session.heartbeat.set_phase("opening the connections of all groups", slow=True)
        warm_up(mesh, session.device)
        session.heartbeat.set_phase("building the model", slow=True)
        engine = _build(session, inputs, source, mesh)
        session.log_to_file(f"DeepSpeed speed patches: {', '.join(engine.speed_patches) or 'none'}")
        outer = OuterSteps(session, inputs, engine)
        _say_plan(session, inputs)
        begun = _begin(session, engine, inputs, mesh, source, weights)
        if begun is None:
            engine.close()
            return closing_result(session, None)
        state, batches, evaluator = begun
        resumed, state = state, outer.begin(state)
        session.begin_writing(state)
        with Saver(session, engine, inputs.data_hash) as saver:
            if resumed.step < state.step >= run.config.train.steps:
                saver.save(state, {})  # other sites have trained to the end without this one
            elif is_over(run.config, state):
                saver.finish_retention(state.step)
            state, received = train(session, engine, batches, evaluator, state, saver, outer)
        batches.close()
        if received is not None:
            outer.close()
            stop_early(session, engine, state, received)
            return closing_result(session, state.step, received)
        outer.close()
        finish(session, engine, state)
        return closing_result(session, state.step)


def _predict(session: Session, inputs: Inputs) -> None:
    """Log the predicted time and memory; refuse a run that cannot fit its device. Collective."""

    def find() -> RunPrediction | None:
        prediction, reason = predict(
            session.run, inputs.hf_config, inputs.model_plan.loss, session.device
        )
        session.log(f"no prediction: {reason}" if prediction is None else prediction.line())
        if prediction is not None and session.device.type == "cuda":
            memory = torch.cuda.get_device_properties(session.device).total_memory
            refuses = session.run.config.engine.refuse_too_large
            if warning := refuse_too_large(prediction, float(memory), refuses=refuses):
                session.log(warning)
        return prediction

    session.prediction = session.long_work.on_main_rank(find)


def _build(session: Session, inputs: Inputs, source: WeightsSource, mesh: Mesh) -> TrainEngine:
    run = session.run
    if run.topology.tensor_size > 1:
        _check_tensor_plan(session, inputs, mesh)
    return build_engine(
        source.building(run.config),
        run.engine,
        run.plan,
        inputs.hf_config,
        session.device,
        mesh,
        inputs.model_plan,
    )


def _check_tensor_plan(session: Session, inputs: Inputs, mesh: Mesh) -> None:
    """Verify the model's tensor-parallel plan in the main rank's tensor-parallel group, unless the
    result is cached. Collective; raises ModelError on every rank."""
    config, work = session.run.config, session.long_work
    settings = config.model.attention, config.batch.sequence_length
    size, adapters = session.run.topology.tensor_size, config.adapters
    beside = None if adapters is None else adapters.model_dump(mode="json")
    key = trial_key(inputs.hf_config, "tensor", size, settings, beside)
    if key is not None and work.on_main_rank(lambda: cache_get(KIND, key) is not None):
        return
    failure: ModelError | None = None
    if 0 in dist.get_process_group_ranks(mesh.tensor):
        try:
            check_tensor_plan(inputs.hf_config, *settings, mesh.tensor, session.device, adapters)
        except ModelError as error:
            failure = error

    def decide() -> None:
        if failure is not None:
            raise failure
        if key is not None:
            cache_put(KIND, key, {"is_right": True})

    work.on_main_rank(decide)


def _say_plan(session: Session, inputs: Inputs) -> None:
    topology = session.run.topology
    engine = session.run.engine
    if engine.not_tried:
        session.log(
            f"{engine.source}: not covered by bigtrain's tests: {', '.join(engine.not_tried)} "
            "(docs/reference/deepspeed_keys.md)"
        )
    placement = [topology.describe(), *topology.crossings(session.hosts)]
    plan = inputs.model_plan.lines(session.run.plan.accumulation)
    for line in (*placement, *plan, *inputs.notes):
        if line:
            session.log(line)
    for report in inputs.packing:
        session.log(str(report))
    for dataset in inputs.datasets:
        if not dataset.table.has_blocks:
            session.log(f"{dataset.path}: {NOT_VERIFIED}")


def _begin(
    session: Session,
    engine: TrainEngine,
    inputs: Inputs,
    mesh: Mesh,
    source: WeightsSource,
    weights: Weights | None,
) -> tuple[TrainState, TrainingBatches, Evaluator] | None:
    """Resume or start, with the run token acquired; return None if the run is complete."""
    run = session.run
    pin = session.device.type == "cuda"
    if run.config.adapters is not None:
        # Checkpoints do not contain the base weights, so these are read first.
        source.fill(session, engine, weights)
    while True:
        state = restore_or_start(session, engine)
        if is_complete(session, state):
            return None
        if state.step == 0 and run.config.adapters is None:
            source.fill(session, engine, weights)
        data = run.config, run.plan, mesh.coordinates.data_rank, state.phases[-1]
        batches = open_training_data(*data, datasets=inputs.datasets, device_pin=pin)
        held_out = open_held_out(*data, datasets=inputs.datasets, device_pin=pin)
        # They count in the mean over all sets only if the data has no held-out documents.
        weight = 0 if held_out else 1
        held_out += open_held_out_sets(
            *data[:3], inputs.held_out_sets, weight=weight, device_pin=pin
        )
        evaluator = Evaluator(session, engine, held_out)
        if not is_over(run.config, state):
            refuse_small_disk(session, engine)
        # Before any rank writes; a signal from here on takes effect after the first step.
        session.signals.listen()
        if acquire_run_directory(session, state):
            return state, batches, evaluator
        batches.close()


_NAMED = 10


def verify_data(session: Session) -> None:
    """Compare the run's dataset files with their checksums; each rank reads a part. Collective.

    Raises DataError on every rank, listing all corrupt files.
    """
    begun = time.perf_counter()
    shards = ListedShards(session.run.config.data)
    share = rank_slice(shards.num_bytes.tolist(), session.world.rank, session.world.size)
    texts_by_rank = session.long_work.on_every_rank(
        lambda: [text for number in share for text in shards[number].problems()]
    )
    corrupt = sorted(text for texts in texts_by_rank for text in texts)
    if corrupt:
        shown = corrupt[:_NAMED]
        if len(corrupt) > _NAMED:
            shown.append(f"and {len(corrupt) - _NAMED} more")
        raise DataError(
            f"{len(corrupt)} of {shards.num_files} files of the data are corrupt -> restore them, "
            "or remove the dataset and tokenize again:\n" + "\n".join(f"  {text}" for text in shown)
        )
    gigabytes = shards.num_bytes.sum() / 1e9
    session.log(
        f"data verified: {shards.num_files} files, {gigabytes:.3g} GB of tokens in "
        f"{time.perf_counter() - begun:.1f} s"
    )


def predict(
    run: ResolvedRun, hf_config: Any, loss: LossPlan, device: torch.device
) -> tuple[RunPrediction | None, str]:
    """Predict the time and memory of `run`; if impossible, return None and the reason.

    Not collective; takes a second or two.
    """
    try:
        model, _ = model_costs(run.config, hf_config)
    except (ConfigError, ModelError) as error:
        return None, " ".join(str(error).split())
    chunk = loss.chunk_tokens if loss.kind == "chunked" else None
    is_cpu = device.type == "cpu"
    return predict_run(run, model, chunk, *_device(device), is_cpu=is_cpu), ""


def _device(device: torch.device) -> tuple[Device | None, MeasuredEngine | None]:
    """Return a GPU of the tables, or this machine's CPUs if ``bigtrain plan --calibrate`` was
    run."""
    if device.type == "cpu":
        return kept_calibration() or (None, None)
    try:
        return find_device(torch.cuda.get_device_name(device)), None
    except ConfigError:
        return None, None
