"""Cost and benefit of other optimizers.

python benchmarks/optimizers.py [--hidden-sizes 128 256 512] [--steps 60] [--output FILE]
Cost: seconds, processor time and bytes of a step of each optimizer, which take turns, on two
processes of one thread under ZeRO 2, against AdamW and DeepSpeed's own Muon, by the size of
matrices; samples of 16 tokens, so that the optimizer is most of a step. Loss: AdamW and Muon on the
quickstart's text (`make quickstart` makes it) after equal steps, each at the best of several
learning rates; the complete search is printed. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.run_config import ModelSection
from bigtrain.system.local_world import run_local_world

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).parent / "support" / "optimizer_worker.py"
SECTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "adamw"},
    "adamw, bfloat16 states": {"type": "adamw", "state_dtype": "bfloat16"},
    "adamw, 8-bit": {"type": "adamw_8bit"},
    "muon": {"type": "muon"},
    "lion": {"type": "lion"},
    "adafactor": {"type": "adafactor"},
}
# Small buckets, or they would be most of what a step allocates.
ZERO2 = {"stage": 2, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
DEEPSPEED_MUON = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "Muon",
        "params": {"lr": 1e-4, "momentum": 0.95, "weight_decay": 0.1, "ns_method": "standard"},
    },
    "zero_optimization": ZERO2,
    "steps_per_print": 1_000_000_000,
}
TIMES = ("seconds", "cpu_seconds")
OPTIMIZERS = ("adamw", "muon")
"""Whose losses are compared."""
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)


def model_of(hidden_size: int, directory: Path) -> Path:
    """Return a Llama of two layers, as a Hugging Face directory."""
    config = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 64,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(load_hf_config(ModelSection(config=config)))
    model.save_pretrained(directory)
    return directory


def cases_of(hidden_size: int, directory: Path) -> list[dict[str, Any]]:
    """Return the cases that take turns at one size of matrices."""
    model = model_of(hidden_size, directory / f"model-{hidden_size}")
    engine = directory / "zero2.json"
    engine.write_text(json.dumps({"zero_optimization": ZERO2}))
    cases = []
    for name, section in SECTIONS.items():
        config = {
            "model": {"path": str(model)},
            "data": {"path": "unread"},
            "batch": {"sequence_length": 16, "global_batch_size": 2, "micro_batch_size": 1},
            "train": {"steps": 1},
            "optimizer": {"lr": 1e-4, **section},
            "precision": {"dtype": "float32"},
            "output": {"directory": "unused"},
        }
        cases.append({"key": name, "config": config, "engine": str(engine)})
    cases.append({**cases[0], "key": "DeepSpeed's muon", "deepspeed": DEEPSPEED_MUON})
    return cases


def costs(hidden_sizes: Sequence[int], rounds: int, directory: Path) -> dict[int, dict[str, Any]]:
    """Return the results of `optimizer_worker.measure` by size and optimizer."""
    turns = [cases_of(size, directory) for size in hidden_sizes]
    output, order = directory / "found.jsonl", directory / "order.json"
    order.write_text(json.dumps({"turns": turns, "rounds": rounds, "output": str(output)}))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    run_local_world(2, [str(WORKER), str(order)], {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    rows = iter([json.loads(line) for line in output.read_text().splitlines()])
    return {
        size: {case["key"]: next(rows) for case in cases}
        for size, cases in zip(hidden_sizes, turns, strict=True)
    }


def show(hidden_size: int, costs_by_name: dict[str, Any]) -> None:
    base = costs_by_name["adamw"]
    print(f"hidden size {hidden_size} (of a step: seconds, processor time, MiB; against adamw):")
    for name, row in costs_by_name.items():
        times = (f"{row[k] * 1e3:8.1f} ms {row[k] / base[k]:5.2f} x" for k in TIMES)
        states = f"{row['bytes'] / 2**20:6.2f} MiB {row['bytes'] / base['bytes']:.2f} x"
        print(
            f"  {name:24} {'  '.join(times)}  states {states}"
            f"  a step allocates {row['step_bytes'] / 2**20:6.1f} MiB"
            f"  sends {row['sent_bytes'] / 2**20:5.2f} MiB"
        )


def final_loss(optimizer: str, rate: float, args: argparse.Namespace, directory: Path) -> float:
    """Held-out loss of the quickstart's model after `--steps` steps of `--length` tokens."""
    run = directory / f"{optimizer}-{rate:g}"
    command = [
        sys.executable,
        "bigtrain/train.py",
        *("--config", "quickstart", "--deepspeed_config", "zero0"),
        f"data.path={Path(args.data).resolve()}",
        f"model.config.vocab_size={args.vocabulary}",
        f"optimizer.type={optimizer}",
        f"optimizer.lr={rate}",
        f"train.steps={args.steps}",
        f"schedule.warmup_steps={min(20, args.steps // 4)}",
        f"batch.sequence_length={args.length}",
        f"evaluation.samples={args.samples}",
        f"output.directory={run}",
        *("output.export=false", "logging.trackers=[]", "checkpoint.every_steps=null"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([row["held_out_loss"] for row in rows if "held_out_loss" in row][-1])


def search(optimizer: str, args: argparse.Namespace, directory: Path) -> dict[float, float]:
    """Held-out loss by learning rate: of `--rates`, two at a time, and of rates beyond them until
    the best one has a worse one on either side, `--more` at most."""
    loss_by_rate: dict[float, float] = {}

    def add(rates: Sequence[float]) -> None:
        with ThreadPoolExecutor(2) as pool:
            losses = pool.map(lambda rate: final_loss(optimizer, rate, args, directory), rates)
            loss_by_rate.update(zip(rates, losses, strict=True))

    add(args.rates)
    for _ in range(args.more):
        best = min(loss_by_rate, key=lambda rate: loss_by_rate[rate])
        if best not in (min(loss_by_rate), max(loss_by_rate)):
            break
        add([best / 2 if best == min(loss_by_rate) else best * 2])
    return dict(sorted(loss_by_rate.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-sizes", type=int, nargs="*", default=[128, 256, 512])
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each optimizer")
    parser.add_argument("--steps", type=int, default=60, help="of a run to its loss; 0: none")
    parser.add_argument("--length", type=int, default=128, help="tokens of its samples")
    parser.add_argument("--samples", type=int, default=128, help="held-out ones")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES)
    parser.add_argument("--more", type=int, default=3, help="rates beyond those, at most")
    parser.add_argument("--data", default="runs/quickstart/shards", help="make quickstart's")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of the model's")
    parser.add_argument("--output", help="a file for all results, as JSON")
    args = parser.parse_args()
    disable_progress_bar()
    report: dict[str, Any] = {"cost": {}, "loss": {}}
    with tempfile.TemporaryDirectory() as scratch:
        if args.hidden_sizes:
            report["cost"] = costs(args.hidden_sizes, args.rounds, Path(scratch))
        for hidden_size, costs_by_name in report["cost"].items():
            show(hidden_size, costs_by_name)
        if args.steps and not Path(args.data).is_dir():
            print(f"{args.data}: no shards (make quickstart), so that no loss is compared")
            args.steps = 0
        for name in OPTIMIZERS if args.steps else ():
            losses = search(name, args, Path(scratch))
            report["loss"][name] = losses
            shown = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items())
            print(f"{name}: held-out loss after {args.steps} steps, by learning rate: {shown}")
    if report["loss"]:
        best = {name: min(losses.values()) for name, losses in report["loss"].items()}
        print(f"muon's best is {best['muon'] - best['adamw']:+.4f} from adamw's best")
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
