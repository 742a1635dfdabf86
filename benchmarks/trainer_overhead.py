"""What a trainer costs above the arithmetic: seconds per optimizer step of three contenders.

bare      a plain PyTorch loop: forward, summed cross-entropy, backward, clip_grad_norm_,
          torch.optim.AdamW(fused=True); batches lie in memory. bfloat16: torch.autocast
bigtrain  what train.py runs: `bigtrain.run.loop.train` with its loader, engine and metrics writer
hf        transformers.Trainer with ds_configs/zeroN.json as it stands

All three train the same model from the same weights on the same batches, in one process with one
process group, and take turns of a few steps, so that whatever else the machine does falls on all
of them alike. Every turn is compared with the bare loop's turn of the same round; the ratio
reported is the median over the rounds. See README.md in this directory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
import torch.nn.functional as F

from bigtrain.config import ModelSection, RunConfig
from bigtrain.data.loader import IGNORED_LABEL, MicroBatch, TrainingBatches, open_training_data
from bigtrain.data.manifest import Manifest, OptionsRecord, TokenizerRecord, write_manifest
from bigtrain.data.shards import ShardWriter, token_dtype
from bigtrain.engine.build import build_engine
from bigtrain.engine.deepspeed_config import find_deepspeed_config
from bigtrain.engine.resolve import ResolvedRun, resolve_run
from bigtrain.models.huggingface import build_model, split_by_decay
from bigtrain.run.evaluation import Evaluator
from bigtrain.run.loop import train
from bigtrain.run.preflight import inspect_inputs
from bigtrain.run.session import Session, open_session
from bigtrain.run.state import TrainState
from bigtrain.world import World

CONTENDERS = ("bare", "bigtrain", "hf")
LOG_EVERY_STEPS = 10
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

# Llama's shape; "50m" has 50.0 million parameters.
SIZES: dict[str, dict[str, int]] = {
    "50m": {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "sequence_length": 256,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "sequence_length": 32,
    },
}


@dataclass(frozen=True)
class Point:
    """One comparison: everything that is the same for all contenders."""

    size: str
    zero_stage: int
    accumulation: int
    micro_samples: int
    dtype: str
    rounds: int
    steps_per_round: int
    threads: int
    contenders: tuple[str, ...]

    @property
    def total_steps(self) -> int:
        """Steps of every contender: the first round warms up and is not counted."""
        return (self.rounds + 1) * self.steps_per_round


def write_random_dataset(directory: Path, *, vocab_size: int, num_tokens: int) -> None:
    """One shard of uniformly random tokens, written as `bigtrain tokenize` writes shards."""
    directory.mkdir(parents=True)
    (directory / "tokenizer").mkdir()  # the run directory keeps a copy; nothing here reads text
    dtype = token_dtype(vocab_size)
    tokens = np.random.default_rng(0).integers(1, vocab_size, num_tokens, dtype=np.int64)
    with ShardWriter(directory, "train_00000", dtype) as writer:
        writer.add(tokens, np.array([num_tokens]), num_tokens)
        record = writer.close()
    write_manifest(
        directory,
        Manifest(
            tokenizer=TokenizerRecord(
                name="random",
                hash="0" * 16,
                vocab_size=vocab_size,
                end_of_document_id=0,
                engine="none",
            ),
            token_dtype=dtype,
            sources=(),
            options=OptionsRecord(
                text_key="text", held_out=0.0, shard_tokens=1 << 30, skip_bad=False
            ),
            splits={"train": (record,), "held_out": ()},
        ),
    )


def resolve_point(point: Point, directory: Path) -> ResolvedRun:
    """The point as a run of bigtrain in one process, and its dataset."""
    shape = dict(SIZES[point.size])
    sequence_length = shape.pop("sequence_length")
    global_samples = point.micro_samples * point.accumulation
    # A round more than is trained: the loader reads ahead, and the loop must not reach its end,
    # where it would evaluate and save.
    num_tokens = (point.total_steps + 2) * global_samples * sequence_length + 1
    write_random_dataset(
        directory / "shards", vocab_size=shape["vocab_size"], num_tokens=num_tokens
    )
    config = {
        "model": {
            "config": {
                "model_type": "llama",
                **shape,
                "max_position_embeddings": sequence_length,
                "tie_word_embeddings": True,
                "bos_token_id": None,
                "eos_token_id": None,
            }
        },
        "data": {"path": str(directory / "shards")},
        "batch": {
            "sequence_length": sequence_length,
            "global_samples": global_samples,
            "micro_samples": point.micro_samples,
        },
        "train": {"steps": point.total_steps + 1},
        "optimizer": {"lr": 1e-4, "clip_norm": 1.0},
        "schedule": {"type": "constant"},
        "precision": {"dtype": DTYPES[point.dtype]},
        "logging": {"every_steps": LOG_EVERY_STEPS},
        "output": {"directory": str(directory / "run")},
    }
    return resolve_run(RunConfig.model_validate(config), 1, f"zero{point.zero_stage}")


class BareLoop:
    """The arithmetic of a step and nothing else."""

    def __init__(
        self, run: ResolvedRun, hf_config: Any, steps: list[list[MicroBatch]], device: torch.device
    ) -> None:
        config = run.config
        self.model = build_model(config.model, hf_config, seed=config.seed).to(device).train()
        groups = split_by_decay(self.model, decay_embeddings=config.optimizer.decay_embeddings)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": groups.decay, "weight_decay": config.optimizer.weight_decay},
                {"params": groups.no_decay, "weight_decay": 0.0},
            ],
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            fused=True,
        )
        self.parameters = list(self.model.parameters())
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
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(total)

    def summed_loss(self, batch: MicroBatch) -> torch.Tensor:
        """Cross-entropy in nats summed over the targets of `batch`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(input_ids=batch.input_ids.to(self.device), use_cache=False).logits
        labels = batch.labels.to(self.device)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


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

    def __init__(self, session: Session, batches: TrainingBatches) -> None:
        run = session.run
        self.session = session
        self.batches = _RoundBatches(batches)
        self.engine = build_engine(
            run.config, run.engine, run.plan, session.inputs.hf_config, session.device
        )
        self.evaluator = Evaluator(session, self.engine, None)
        self.state = TrainState()
        session.begin_writing(self.state)

    def run(self, num_steps: int) -> None:
        """Train `num_steps` optimizer steps."""
        self.batches.steps_left = num_steps
        try:
            train(
                self.session,
                self.engine,
                self.batches,
                self.evaluator,
                self.state,
                save=lambda state: None,
            )
        except _RoundOver:
            for _ in range(num_steps):
                self.state = self.state.after_step(self.session.run.plan)


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
) -> list[float]:
    """Train with transformers.Trainer; `others` has its turn before each of the Trainer's.

    A turn goes from the beginning of its first step to the beginning of the step after its last.
    Returns the losses it logged.
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
        deepspeed=str(find_deepspeed_config(f"zero{point.zero_stage}")),
        per_device_train_batch_size=point.micro_samples,
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
    model = build_model(ModelSection.model_validate(config.model), hf_config, seed=config.seed)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=_WindowsOfSteps(steps), callbacks=[Turns()]
    )
    try:
        trainer.train()
    except _RoundOver:
        pass
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def measure(point: Point, directory: Path) -> dict[str, Any]:
    """Run one point in this process. Returns seconds, ratios and losses."""
    torch.set_num_threads(point.threads)
    run = resolve_point(point, directory)
    inputs = inspect_inputs(run)
    with open_session(run, inputs, World(0, 1, 0)) as session:
        batches = open_training_data(run.config, run.plan, 0)
        count = point.total_steps + 1
        steps = [batches.step(i * run.plan.global_samples) for i in range(count)]
        assert not any((b.labels == IGNORED_LABEL).any() for step in steps for b in step)
        watch = Stopwatch(session.device, point.threads)
        bare = BareLoop(run, inputs.hf_config, steps, session.device)
        loops: dict[str, Callable[[int], None]] = {"bare": bare.run}
        if "bigtrain" in point.contenders:
            loops["bigtrain"] = Bigtrain(session, batches).run

        def others() -> None:
            # Every other round backwards, so that nobody always follows the same one.
            turn = len(watch.seconds.get("bare", []))
            for name in list(loops)[:: 1 if turn % 2 == 0 else -1]:
                watch.start()
                loops[name](point.steps_per_round)
                watch.stop(name)

        hf_losses = []
        if "hf" in point.contenders:
            hf_losses = run_hf_trainer(
                point, run, inputs.hf_config, steps, directory, others, watch
            )
        else:
            for _ in range(point.rounds + 1):
                others()
        batches.close()
        num_parameters = sum(p.numel() for p in bare.parameters)
        losses = {"bare": [float(loss) for loss in bare.losses], "hf": hf_losses}
    losses["bigtrain"] = _logged_losses(directory / "run" / "metrics.jsonl")
    difference = _check_losses(point, losses)
    return {
        "point": asdict(point),
        "num_parameters": num_parameters,
        "loss_difference": difference,
        "contenders": summarize(watch, point.steps_per_round),
    }


def _logged_losses(path: Path) -> list[float]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["loss"] for line in lines]


def _check_losses(point: Point, losses: dict[str, list[float]]) -> float | None:
    """Largest difference of bigtrain's logged losses from the bare loop's: the same work?"""
    expected = losses["bare"][LOG_EVERY_STEPS - 1 :: LOG_EVERY_STEPS]
    found = losses["bigtrain"]
    if not found:
        return None
    difference = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    tolerance = 1e-4 if point.dtype == "fp32" else 2e-2
    if not difference <= tolerance:
        raise RuntimeError(f"bigtrain's losses {found} are not those of the bare loop, {expected}")
    return difference


def summarize(watch: Stopwatch, steps_per_round: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds after the first, per step and against the bare loop."""
    found = {}
    for name in watch.seconds:
        wall, cpu = watch.seconds[name][1:], watch.cpu_seconds[name][1:]
        ratios = sorted(_ratios(wall, watch.seconds["bare"][1:]))
        found[name] = {
            "step_seconds": statistics.median(wall) / steps_per_round,
            "ratio": statistics.median(ratios),
            "ratio_lower_quartile": ratios[len(ratios) // 4],
            "ratio_upper_quartile": ratios[-1 - len(ratios) // 4],
            "ratio_of_totals": sum(wall) / sum(watch.seconds["bare"][1:]),
            "cpu_ratio": statistics.median(_ratios(cpu, watch.cpu_seconds["bare"][1:])),
        }
    return found


def _ratios(values: list[float], bases: list[float]) -> list[float]:
    return [value / base for value, base in zip(values, bases, strict=True)]


def describe_machine(threads: int) -> dict[str, Any]:
    """What the figures depend on."""
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


def build_parser() -> argparse.ArgumentParser:
    """The options; without any, the figures of the README."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="50m", help="of the model")
    parser.add_argument("--zero", type=int, nargs="+", choices=(0, 1, 2), default=[0, 1])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--micro-samples", type=int, default=4)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=10, help="counted rounds")
    parser.add_argument("--steps-per-round", type=int, default=2, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    return parser


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every point in a process of its own: DeepSpeed and Accelerate keep state in their modules."""
    points = [
        Point(
            size=args.size,
            zero_stage=zero_stage,
            accumulation=accumulation,
            micro_samples=args.micro_samples,
            dtype=args.dtype,
            rounds=args.rounds,
            steps_per_round=args.steps_per_round,
            threads=args.threads,
            contenders=tuple(args.contenders),
        )
        for zero_stage in args.zero
        for accumulation in args.accumulation
    ]
    results = []
    for point in points:
        with tempfile.TemporaryDirectory(prefix="trainer_overhead_") as directory:
            command = [sys.executable, __file__, "--point", json.dumps(asdict(point)), directory]
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
            if finished.returncode:
                sys.exit(f"{finished.stdout}{finished.stderr}\n{point} failed")
            results.append(json.loads((Path(directory) / "result.json").read_text()))
            print_result(results[-1])
    return results


def print_result(result: dict[str, Any]) -> None:
    """The rows of one point."""
    point = result["point"]
    for name, row in result["contenders"].items():
        print(
            f"{point['zero_stage']:>4}  {point['accumulation']:>12}  {name:<8}  "
            f"{row['step_seconds']:>10.4f}  {row['ratio']:>6.3f}  "
            f"{row['ratio_lower_quartile']:.3f} .. {row['ratio_upper_quartile']:.3f}  "
            f"{row['cpu_ratio']:>9.3f}",
            flush=True,
        )


def main() -> None:
    """Measure, print the table, and write the JSON where one is asked for."""
    if sys.argv[1:2] == ["--point"]:
        measured, directory = json.loads(sys.argv[2]), Path(sys.argv[3])
        point = Point(**{**measured, "contenders": tuple(measured["contenders"])})
        (directory / "result.json").write_text(json.dumps(measure(point, directory)))
        return
    args = build_parser().parse_args()
    # Before a child imports torch; DeepSpeed's operators are built by the ninja beside Python.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    machine = describe_machine(args.threads)
    for key, value in machine.items():
        print(f"{key:<13} {value}")
    print(
        f"{args.size} model, {args.dtype}, micro-batch {args.micro_samples} x "
        f"{SIZES[args.size]['sequence_length']} tokens; {args.rounds} rounds in which the "
        f"contenders take turns of {args.steps_per_round} steps in one process\n"
        "zero  accumulation  contender  s per step   ratio  quartiles       CPU ratio"
    )
    results = measure_all(args)
    if args.output is not None:
        temporary = args.output.with_name(f".{args.output.name}.tmp")
        temporary.write_text(json.dumps({"machine": machine, "points": results}, indent=2) + "\n")
        temporary.rename(args.output)


if __name__ == "__main__":
    main()
