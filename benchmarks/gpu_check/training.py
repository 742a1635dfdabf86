"""A few optimizer steps of bigtrain's engine, to be compared with `plain.py`'s.

Model, tokens and learning rates of a comparison are the same for both. Everything is in one
process, which is what one GPU can show; how work is divided is compared on CPUs (tests/parity).
"""

from __future__ import annotations

import gc
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu_check.results import Setup
from benchmarks.gpu_check.stand_ins import float16_on_cpu
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.engine.build import build_engine
from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.engine.checkpoint.snapshot import read_weights, save_engine
from bigtrain.engine.optimizers.skip_step import StepStats
from bigtrain.engine.startup.mesh import open_mesh, warm_up
from bigtrain.engine.startup.process_group import process_group
from bigtrain.engine.startup.runtime import runtime_settings
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.transformers_patches import without_progress
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.run.reporting.metrics import memory_gib
from bigtrain.settings.deepspeed.engine_config import find_deepspeed_config
from bigtrain.settings.resolve import ResolvedRun, resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ALONE = World(0, 1, 0)
STEPS = 5
CLIP_NORM = 0.5
"""Bites at every step, so that a wrong norm shows in the weights."""


@dataclass(frozen=True)
class Case:
    """A run to compare. engine: a name in ds_configs/, changed by `json` (dotted keys).

    scale_power: of float16's first loss scale; large, so that steps are skipped until it fits.
    model: more keys of the section.
    """

    name: str
    engine: str = "zero1"
    dtype: str = "float32"
    isolate: bool = False
    num_steps: int = STEPS
    scale_power: int = 16
    model: dict[str, Any] = field(default_factory=dict)
    json: dict[str, Any] = field(default_factory=dict)
    gradient_dtype: str | None = None
    float8: str = "none"


@dataclass
class Trained:
    """Record of a run by step; a skipped step has no norm, and its loss is not counted.

    updated: whether each step changed the weights. scales: float16's, before each step; last_scale:
    after the last. first and last: masters after the first update and at the end. saved_in and
    scalars: the checkpoint of the end.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    updated: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    last: dict[str, torch.Tensor] = field(default_factory=dict)
    last_scale: float = 1.0
    saved_in: Path = Path()
    scalars: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    peak_gib: float = 0.0


@dataclass(frozen=True)
class Size:
    """The model and batch of comparisons: of one head size that every kernel takes."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    tokens: int
    samples: int = 8
    micro_batch_size: int = 4


def size_of(setup: Setup) -> Size:
    """Tiny for tests; else large enough that CUDA's own kernels run."""
    return Size(96, 32, 2, 4, 24, 4, 2) if setup.tiny else Size(4096, 512, 4, 8, 512)


def rate(step: int) -> float:
    """Return the learning rate of step `step`, from 0: another one each time, so that a late one
    shows."""
    return 1e-2 * (0.5 + 0.25 * (step % 4))


def write_model(setup: Setup) -> Path:
    """Return a small Llama as transformers initializes and saves it; its directory."""
    size, directory = size_of(setup), setup.directory / "model"
    if directory.exists():
        return directory
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=size.tokens,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # ones and zeros hide what is done with them
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def batch_of(setup: Setup, step: int, *, isolate: bool) -> MicroBatch:
    """Return all samples of a step; with `isolate`, two documents in each, of different lengths."""
    size = size_of(setup)
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (size.samples, size.tokens + 1)
    tokens = torch.randint(1, size.vocabulary, shape, generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = IGNORED_LABEL
    if not isolate:
        return MicroBatch(inputs, labels)
    rows = []
    for number in range(size.samples):
        first = size.tokens // 3 + number
        rows.append(torch.cat([torch.arange(first), torch.arange(size.tokens - first)]))
    positions = torch.stack(rows)
    labels[:, :-1][positions[:, 1:] == 0] = IGNORED_LABEL
    return MicroBatch(inputs, labels, positions)


def run_of(setup: Setup, case: Case) -> ResolvedRun:
    """Return `case` as a run of bigtrain; what it reads of data is made here (`batch_of`)."""
    size = size_of(setup)
    config: dict[str, Any] = {
        "model": {"path": str(write_model(setup)), "loss": "plain", **case.model},
        "data": {"path": "none", "document_boundaries": "isolate" if case.isolate else "ignore"},
        "batch": {
            "sequence_length": size.tokens,
            "global_batch_size": size.samples,
            "micro_batch_size": size.micro_batch_size,
        },
        "train": {"steps": case.num_steps},
        # With Adam's own eps a gradient of rounding errors would move a weight as far as any other.
        "optimizer": {"lr": rate(3), "eps": 1e-3, "clip_norm": CLIP_NORM},
        "schedule": {"type": "constant"},
        "precision": {
            "dtype": case.dtype,
            "initial_loss_scale_power": case.scale_power,
            "gradient_dtype": case.gradient_dtype,
            "float8": case.float8,
        },
        "output": {"directory": str(setup.directory / "run")},
    }
    # As for CUDA: `stand_ins` makes CUDA-only features run on a CPU.
    return resolve_run(
        RunConfig.model_validate(config), 1, write_engine(setup.directory, case), "cuda"
    )


def write_engine(directory: Path, case: Case) -> str:
    """Return the DeepSpeed JSON of `case`: a shipped one's name, or the path of a changed copy."""
    if not case.json:
        return case.engine
    tree = json.loads(find_deepspeed_config(case.engine).read_text())
    for path, value in case.json.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is None:
            node.pop(name, None)
        else:
            node[name] = value
    file = next(path for n in count() if not (path := directory / f"engine{n}.json").exists())
    file.write_text(json.dumps(tree))
    return str(file)


@contextmanager
def alone(setup: Setup, run: ResolvedRun) -> Iterator[torch.device]:
    """Make this process the full world, with the settings of a run. One at a time in a process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        with (
            warnings.catch_warnings(),
            float16_on_cpu(setup.device),
            without_progress(),
            runtime_settings(run, ALONE),
            process_group(ALONE) as joined,
        ):
            # DeepSpeed's own calls, as in `bigtrain.run.session`.
            warnings.filterwarnings("ignore", ".*_tensor", FutureWarning)
            assert joined.device.type == setup.device
            yield joined.device
    finally:
        os.environ.update(before)


@contextmanager
def engine_of(setup: Setup, run: ResolvedRun, device: torch.device) -> Iterator[TrainEngine]:
    """Open the engine of `run`, filled with the model's weights, and closed at the end."""
    mesh = open_mesh(run.topology, 0)
    warm_up(mesh, device)
    hf_config = load_hf_config(run.config.model)
    engine = build_engine(run.config, run.engine, run.plan, hf_config, device, mesh)
    assert run.config.model.path is not None
    read_weights(engine, find_weights(run.config.model.path, hf_config))
    try:
        yield engine
    finally:
        engine.close()


def train_engine(
    setup: Setup,
    case: Case,
    device: torch.device,
    around_steps: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Trained:
    """Train `case` by bigtrain's engine on `device`, in the group that `alone` has opened."""
    run, trained = run_of(setup, case), Trained()
    held = 0.0
    if setup.on_gpu:
        gc.collect()  # what an engine before has left
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = memory_gib(setup.device)
    with engine_of(setup, run, device) as engine:
        begun = time.perf_counter()
        for step in range(case.num_steps):
            with around_steps():
                step_engine(setup, case, engine, step, trained)
            if any(trained.updated) and not trained.first:
                trained.first = masters_of(engine, setup.directory)
        synchronize(setup)
        trained.seconds = time.perf_counter() - begun
        trained.last = masters_of(engine, setup.directory, trained)
        trained.peak_gib = memory_gib(setup.device) - held
    return trained


def step_engine(setup: Setup, case: Case, engine: TrainEngine, step: int, trained: Trained) -> None:
    """Do one optimizer step; append to the lists of `trained`."""
    judged: list[StepStats] = []

    def approve(figures: StepStats) -> bool:
        judged.append(figures)
        return True

    scale = loss_scale_of(engine)
    batch = batch_of(setup, step, isolate=case.isolate)
    parts = batch.split(engine.plan.micro_batch_size)
    result = engine.train_step(parts, rate(step), approve)
    loss, norm = engine.step_loss(result), engine.gradient_norm()
    updated = bool(judged) and norm < float("inf")
    trained.updated.append(updated)
    trained.scales.append(scale)
    if updated:
        trained.losses.append(loss)
        trained.norms.append(norm)


def loss_scale_of(engine: TrainEngine) -> float:
    """Return float16's loss scale of the next backward pass; 1 for other dtypes."""
    return float(getattr(engine.engine.optimizer, "loss_scale", 1.0))


def masters_of(
    engine: TrainEngine, directory: Path, trained: Trained | None = None
) -> dict[str, torch.Tensor]:
    """Return all fp32 masters on the CPU, read from a checkpoint's files, which `trained`
    records."""
    place = next(path for n in count() if not (path := directory / f"tensors{n}").exists())
    scalars = save_engine(engine, place)
    if trained is not None:
        trained.saved_in, trained.scalars = place, scalars
        trained.last_scale = loss_scale_of(engine)
    return {name: tensor.float().clone() for name, tensor in read_full_masters(place).items()}


def synchronize(setup: Setup) -> None:
    if setup.on_gpu:
        torch.cuda.synchronize()
