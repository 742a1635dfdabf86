"""What another optimizer costs, and what it brings.

python benchmarks/optimizers.py [--hidden-sizes 128 256 512] [--steps 150]
Cost: seconds of a step and bytes of states of each optimizer on two processes under ZeRO 2, against
AdamW and against DeepSpeed's own Muon, by the size of matrices; samples are short, so that the
optimizer is most of a step. Loss: AdamW and Muon on the quickstart's text (`make quickstart` makes
it), each at several learning rates; the search is printed whole.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bigtrain.launchers.local_world import run_local_world
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.run_config import ModelSection

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).parent / "support" / "optimizer_worker.py"
SECTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "adamw"},
    "adamw, bfloat16 states": {"type": "adamw", "state_dtype": "bfloat16"},
    "muon": {"type": "muon"},
    "lion": {"type": "lion"},
    "adafactor": {"type": "adafactor"},
}
DEEPSPEED_MUON = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "Muon",
        "params": {"lr": 1e-4, "momentum": 0.95, "weight_decay": 0.1, "ns_method": "standard"},
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 50_000_000},
    "steps_per_print": 1_000_000_000,
}
RATES = {"adamw": (1e-3, 3e-3, 6e-3), "muon": (1e-3, 3e-3, 6e-3)}


def model_of(hidden_size: int, directory: Path) -> Path:
    """A Llama of two layers, as a Hugging Face directory."""
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


def cost(hidden_size: int, steps: int, directory: Path) -> dict[str, dict[str, Any]]:
    """Seconds and bytes by optimizer."""
    model = model_of(hidden_size, directory / "model")
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
        cases.append({"key": name, "config": config, "engine": "zero2"})
    cases.append({**cases[0], "key": "DeepSpeed's muon", "deepspeed": DEEPSPEED_MUON})
    output = directory / "found.jsonl"
    order = directory / "order.json"
    order.write_text(json.dumps({"cases": cases, "steps": steps, "output": str(output)}))
    run_local_world(2, [str(WORKER), str(order)], {})
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return {row.pop("key"): row for row in rows}


def final_loss(optimizer: str, rate: float, steps: int, directory: Path) -> float:
    """Held-out loss after `steps` steps of the quickstart."""
    run = directory / f"{optimizer}-{rate}"
    command = [
        sys.executable,
        "bigtrain/train.py",
        *("--config", "quickstart", "--deepspeed_config", "zero0"),
        f"optimizer.type={optimizer}",
        f"optimizer.lr={rate}",
        f"train.steps={steps}",
        f"output.directory={run}",
        "output.export=false",
        "logging.trackers=[]",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([row["held_out_loss"] for row in rows if "held_out_loss" in row][-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-sizes", type=int, nargs="*", default=[128, 256, 512])
    parser.add_argument("--steps", type=int, default=150, help="of a run to its loss; 0: none")
    args = parser.parse_args()
    disable_progress_bar()
    report: dict[str, Any] = {"cost": {}, "loss": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for hidden_size in args.hidden_sizes:
            place = Path(scratch, str(hidden_size))
            place.mkdir()
            found = cost(hidden_size, 2, place)
            report["cost"][hidden_size] = found
            base = found["adamw"]
            print(f"hidden size {hidden_size}:")
            for name, row in found.items():
                print(
                    f"  {name:24} {row['seconds'] * 1e3:8.1f} ms a step, "
                    f"{row['seconds'] / base['seconds']:5.2f} x; "
                    f"{row['bytes'] / 2**20:7.1f} MiB of states a rank, "
                    f"{row['bytes'] / base['bytes']:.2f} x"
                )
        for name, rates in RATES.items() if args.steps else ():
            losses = {rate: final_loss(name, rate, args.steps, Path(scratch)) for rate in rates}
            report["loss"][name] = losses
            shown = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items())
            print(f"{name}: held-out loss after {args.steps} steps, by learning rate: {shown}")
    if args.steps:
        best = {name: min(losses.values()) for name, losses in report["loss"].items()}
        print(f"muon's best is {best['muon'] - best['adamw']:+.4f} from adamw's best")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
