"""The contenders of cpu_step.py and gpu_step.py, and what is the same for all of them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.support.points import LOG_EVERY_STEPS, Point
from bigtrain.data.loading.loader import TrainingBatches
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.build import build_engine
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.models import build
from bigtrain.models.build import WHOLE, Partitioning, build_model
from bigtrain.models.layers.compilation import compile_layers
from bigtrain.models.layers.parameter_roles import split_by_decay
from bigtrain.models.weights.checksums import sum_of
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.run.callbacks import Callbacks
from bigtrain.run.checkpointing.memory_saver import memory_saver_of
from bigtrain.run.checkpointing.resume import Recovery
from bigtrain.run.checkpointing.saver import Saver
from bigtrain.run.context import RunContext
from bigtrain.run.diagnostics.step_clock import PartMemory
from bigtrain.run.evaluation import Evaluator
from bigtrain.run.loop import Loop
from bigtrain.run.outer_steps import OuterSteps
from bigtrain.run.preflight import Inputs
from bigtrain.run.segment_context import BaseWeights, SegmentContext
from bigtrain.run.session import begin_writing
from bigtrain.run.state import TrainState
from bigtrain.settings.deepspeed.engine_config import find_deepspeed_config
from bigtrain.settings.resolve import ResolvedRun


@torch.no_grad()
def tile_weights(model: Any, seed: int, partitioning: Partitioning = WHOLE) -> None:
    """Replace `bigtrain.models.build.initialize_weights`: matrices from one block of random
    numbers, over and over, vectors all ones. Only for measurements of speed."""
    generator = torch.Generator().manual_seed(seed)
    block = 0.02 * torch.randn(1 << 20, generator=generator)
    for parameter in model.parameters():
        with partitioning.gather([parameter]):
            if not partitioning.writes_weights:
                continue
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            if block.device != parameter.device:
                block = block.to(parameter.device, parameter.dtype)
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), block.numel()):
                part = flat[start : start + block.numel()]
                part.copy_(block[: part.numel()])


def weights_of(point: Point) -> AbstractContextManager[Any]:
    """Give models inside the initial weights that `point` sets."""
    if not point.quick_weights:
        return nullcontext()
    return mock.patch.object(build, "initialize_weights", tile_weights)


def plain_model(run: ResolvedRun, hf_config: Any, device: torch.device) -> Any:
    """Return the model of the run on `device`: in float32, with adapters over frozen weights in
    bfloat16, which are filled."""
    config = run.config
    if config.adapters is None:
        return build_model(config.model, hf_config, seed=config.seed).to(device)
    model = build_model(
        config.model, hf_config, seed=config.seed, dtype=torch.bfloat16, weights="left",
        adapters=config.adapters,
    ).to(device)  # fmt: skip
    tile_weights(model, config.seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


class BareLoop:
    """The arithmetic of a step and nothing else; compiled and recomputed as the run is."""

    def __init__(
        self, run: ResolvedRun, hf_config: Any, steps: list[list[MicroBatch]], device: torch.device
    ) -> None:
        config = run.config
        self.model = plain_model(run, hf_config, device).train()
        if config.model.compile == "on":
            compile_layers(self.model)
        groups = split_by_decay(self.model, decay_embeddings=config.optimizer.decay_embeddings)
        decay, no_decay = (
            [p for p in group if p.requires_grad] for group in (groups.decay, groups.no_decay)
        )
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": config.optimizer.weight_decay},
                {"params": no_decay, "weight_decay": 0.0},
            ],
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            fused=True,
        )
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.clip_norm = config.optimizer.clip_norm
        self.autocast = config.precision.dtype == "bfloat16"
        self.steps = iter(steps)
        self.device = device
        self.losses: list[torch.Tensor] = []

    def run(self, num_steps: int) -> None:
        """Train `num_steps` optimizer steps."""
        for _ in range(num_steps):
            micro_batches = next(self.steps)
            num_targets = sum(batch.labels.numel() for batch in micro_batches)
            total = torch.zeros((), device=self.device)
            for batch in micro_batches:
                loss = self.summed_loss(batch) / num_targets
                loss.backward()
                total += loss.detach()
            self.update()
            self.losses.append(total)

    def update(self) -> None:
        """Clip, update and clear the gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def summed_loss(self, batch: MicroBatch) -> torch.Tensor:
        """Cross-entropy in nats summed over the targets of `batch`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(input_ids=batch.input_ids.to(self.device), use_cache=False).logits
        labels = batch.labels.to(self.device)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def _unread_base(run: ResolvedRun, hf_config: Any) -> BaseWeights:
    """Return the base of the run's adapters without checksums of its files, which would be read to
    the end; nothing is saved that they are compared with."""
    assert run.config.model.path is not None
    folder = Path(run.config.model.path)
    sums = {str(folder / "model.safetensors"): sum_of(folder / "config.json")}
    return BaseWeights(find_weights(str(folder), hf_config), sums)


class _RoundOver(Exception):
    """Raised where the loop asks for a step beyond the round."""


class _RoundBatches:
    """bigtrain's own batches, which end a round by raising."""

    def __init__(self, batches: TrainingBatches) -> None:
        self.batches = batches
        self.steps_left = 0

    def step(self, first_sample: int) -> list[MicroBatch]:
        if self.steps_left == 0:
            raise _RoundOver
        self.steps_left -= 1
        return self.batches.step(first_sample)


class Bigtrain:
    """The calls of `bigtrain.train.train_run`, a few steps at a time."""

    def __init__(self, launch: RunContext, inputs: Inputs, batches: TrainingBatches) -> None:
        run = launch.run
        self.memory = PartMemory(launch.device.type)
        self.batches = _RoundBatches(batches)
        self.engine = build_engine(
            run.config,
            run.engine,
            run.plan,
            inputs.hf_config,
            launch.device,
            open_mesh(run.topology, launch.world.rank),
        )
        base = None
        if run.config.adapters is not None:
            tile_weights(self.engine.module, run.config.seed)
            base = _unread_base(run, inputs.hf_config)
        context = SegmentContext(**vars(launch), inputs=inputs, engine=self.engine, base=base)
        self.context = context
        self.evaluator = Evaluator(context, [])
        self.state = TrainState()
        begin_writing(context, self.state)
        self.saver = Saver(context)
        self.outer = OuterSteps(context)
        self._stack = ExitStack()
        self.memory_saver = self._stack.enter_context(memory_saver_of(context, self.saver, None))
        self.recovery = Recovery(context, self.saver, self.memory_saver, 0)

    def close(self) -> None:
        """Remove the checkpoints in memory."""
        if self.memory_saver is not None:
            self.memory_saver.finish()
        self._stack.close()

    def run(self, num_steps: int) -> None:
        """Train `num_steps` optimizer steps."""
        self.batches.steps_left = num_steps
        try:
            loop = Loop(
                self.context,
                self.engine,
                self.batches,
                self.evaluator,
                self.saver,
                self.outer,
                Callbacks(self.context),
                roll_back=self.recovery.roll_back,
                memory=self.memory,
                memory_saver=self.memory_saver,
            )
            loop.run(self.state)
        except _RoundOver:
            for _ in range(num_steps):
                self.state = self.state.after_step(self.context.plan)


@dataclass
class Stopwatch:
    """Seconds and CPU seconds of every round, the warm-up among them, by contender."""

    device: torch.device
    threads: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)

    def start(self) -> None:
        if torch.get_num_threads() != self.threads:
            raise RuntimeError(f"a contender set {torch.get_num_threads()} torch threads")
        self._synchronize()
        self._begun = (time.perf_counter(), time.process_time())

    def stop(self, contender: str) -> None:
        self._synchronize()
        wall, cpu = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
        self.seconds.setdefault(contender, []).append(wall)
        self.cpu_seconds.setdefault(contender, []).append(cpu)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _WindowsOfSteps(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The samples of the steps one by one; transformers shifts labels itself."""

    def __init__(self, steps: list[list[MicroBatch]]) -> None:
        self.rows = torch.cat([batch.input_ids for step in steps for batch in step])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def run_hf_trainer(
    point: Point,
    run: ResolvedRun,
    hf_config: Any,
    steps: list[list[MicroBatch]],
    directory: Path,
    others: Callable[[], None],
    watch: Stopwatch,
) -> None:
    """Train with transformers.Trainer; `others` has its turn before each of the Trainer's.

    A turn goes from the beginning of its first step to the beginning of the step after its last.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % point.steps_per_round:
                return
            if state.global_step:
                watch.stop("hf")
            if state.global_step == point.total_steps:
                raise _RoundOver
            others()
            watch.start()

    config = run.config
    arguments = TrainingArguments(
        output_dir=str(directory / "hf"),
        deepspeed=str(find_deepspeed_config(point.engine_name)),
        per_device_train_batch_size=point.micro_batch_size,
        gradient_accumulation_steps=point.accumulation,
        max_steps=point.total_steps + 1,
        learning_rate=config.optimizer.lr,
        adam_beta1=config.optimizer.betas[0],
        adam_beta2=config.optimizer.betas[1],
        adam_epsilon=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.clip_norm,
        lr_scheduler_type="constant",
        bf16=point.dtype == "bf16",
        use_cpu=watch.device.type == "cpu",
        train_sampling_strategy="sequential",
        logging_steps=LOG_EVERY_STEPS,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=config.seed,
    )
    # The Trainer moves it to the device itself.
    model = plain_model(run, hf_config, torch.device("cpu"))
    trainer = Trainer(
        model=model, args=arguments, train_dataset=_WindowsOfSteps(steps), callbacks=[Turns()]
    )
    try:
        trainer.train()
    except _RoundOver:
        pass


def describe_machine(threads: int) -> dict[str, Any]:
    """Return the versions and hardware on which the results depend."""
    names = ("torch", "deepspeed", "transformers", "accelerate")
    cpu_info = Path("/proc/cpuinfo")
    models = [
        line.split(":", 1)[1].strip()
        for line in (cpu_info.read_text().splitlines() if cpu_info.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": threads,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }
