"""Try every causal LM of transformers under tensor parallelism, and write docs/architectures.md.

    python tools/architectures.py [--output docs/architectures.md] [MODEL_TYPE ...]

Two gloo processes train a tiny model of every architecture with a tensor-parallel plan for three
AdamW steps, cut and whole. *exact*: losses and all final weights agree. *refused*: the start-up
check (`bigtrain.models.plan_check`) or the plan itself stops a run, with the reason. *wrong*: the
numbers differ and nothing says so; there must be none, and the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

PROCESSES = 2
STEPS = 3
LOSS, WEIGHT = 1e-4, 1e-3  # relative; of the largest change of any weight
SILENCE_SECONDS = 60  # of a collective in which some process does not take part
Outcome = tuple[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="default: all")
    parser.add_argument("--output", type=Path, help="Markdown table (default: not written)")
    parser.add_argument(
        "--outcomes", type=Path, help="JSON lines to keep outcomes in between calls"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args.model_types, args.worker)
        return 0
    outcomes = sweep(args.model_types, args.outcomes)
    counts = Counter(result for result, _ in outcomes.values())
    for model_type, (result, reason) in sorted(outcomes.items()):
        print(f"{model_type:32} {result:8} {reason}")
    print(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    if args.output is not None:
        args.output.write_text(table(outcomes), encoding="utf-8")
    return 1 if counts["wrong"] else 0


def sweep(model_types: list[str], kept: Path | None) -> dict[str, Outcome]:
    """Outcome and reason of each architecture (default: all); those in `kept` are not tried."""
    from tools.tiny_models import model_types as every
    from tools.tiny_models import reason_to_leave_out

    outcomes: dict[str, Outcome] = {}
    for model_type in model_types or every():
        reason = reason_to_leave_out(model_type)
        if reason is not None:
            outcomes[model_type] = ("left out", reason)
    left = [name for name in model_types or every() if name not in outcomes]
    with tempfile.TemporaryDirectory() as folder:
        file = kept or Path(folder, "outcomes.jsonl")
        file.touch()
        while True:
            for line in file.read_text().splitlines():
                name, result, reason = json.loads(line)
                outcomes[name] = (result, reason)
            remaining = [name for name in left if name not in outcomes]
            if not remaining:
                break
            done = len(file.read_text())
            code = run_world(remaining, file)
            if len(file.read_text()) == done:
                # Nothing came of it: the first one takes its processes down.
                outcomes[remaining[0]] = ("refused", f"its processes end with code {code}")
    return outcomes


def run_world(model_types: list[str], file: Path) -> int:
    """Try `model_types` in processes of their own until one of them ends badly; the worst code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, __file__, "--worker", str(file), *model_types]
    processes = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, cwd=ROOT)
        for rank in range(PROCESSES)
    ]
    return max(abs(process.wait()) for process in processes)


def work(model_types: list[str], file: Path) -> None:
    """One process: try `model_types` in order; the first process writes the outcomes."""
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SILENCE_SECONDS))
    for model_type in model_types:
        own = attempt(model_type)
        everyone: list[Any] = [None] * PROCESSES
        dist.all_gather_object(everyone, own)
        # The worst of them: wrong before refused before exact.
        result, reason = max(everyone, key=lambda o: ("exact", "refused", "wrong").index(o[0]))
        if dist.get_rank() == 0:
            with file.open("a") as lines:
                lines.write(json.dumps([model_type, result, reason]) + "\n")
    dist.destroy_process_group()


def attempt(model_type: str) -> Outcome:
    """Check and train one architecture. Collective."""
    import torch
    import torch.distributed as dist

    from bigtrain.errors import ModelError
    from bigtrain.models.plan_check import check_tensor_plan
    from bigtrain.models.tensor_degree import check_tensor_size
    from tools.tiny_models import tiny_model

    group: Any = dist.group.WORLD
    try:
        whole = tiny_model(model_type)
    except Exception as error:  # whatever single architectures say to odd sizes
        return "refused", f"no tiny model: {' '.join(str(error).split())[:120]}"
    attention = whole.config._attn_implementation
    try:
        problems = check_tensor_size(whole.config, PROCESSES)
        if problems:
            return "refused", str(problems[0])
        check_tensor_plan(whole.config, attention, group, torch.device("cpu"))
    except ModelError as error:
        return "refused", str(error)
    try:
        return compare_training(whole, group)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def compare_training(whole: Any, group: Any) -> Outcome:
    """Train `whole` and a copy that is cut over `group`, and compare."""
    from bigtrain.models.sharding import cut_parameter, shard_of
    from bigtrain.models.tensor_parallel import shard_model, tensor_plan

    cut = copy.deepcopy(whole)
    before = {name: p.detach().clone() for name, p in whole.named_parameters()}
    shard_model(cut, tensor_plan(cut), group)
    for parameter in cut.parameters():
        cut_parameter(parameter)
    expected, found = train(whole), train(cut)
    for step, (loss, other) in enumerate(zip(expected, found, strict=True)):
        if not abs(other - loss) <= LOSS * abs(loss):
            return "wrong", f"loss of step {step}: {other:.6f} instead of {loss:.6f}"
    wanted = dict(whole.named_parameters())
    change = max(float((wanted[name] - p).detach().abs().max()) for name, p in before.items())
    for name, parameter in cut.named_parameters():
        shard = shard_of(parameter)
        assert shard is not None
        error = float((parameter - shard.take(wanted[name].detach())).detach().abs().max())
        if not error <= WEIGHT * change:
            return "wrong", f"final {name}: off by {error / change:.1e} of the largest change"
    return "exact", ""


def train(model: Any) -> list[float]:
    """Losses of a few AdamW steps; ``eps=1`` so that the scale of gradients matters."""
    import torch

    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 200, (2, 32), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1.0, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def table(outcomes: dict[str, Outcome]) -> str:
    """The outcomes as a Markdown page."""
    import transformers

    counts = Counter(result for result, _ in outcomes.values())
    lines = [
        "# Architectures",
        "",
        "Written by `python tools/architectures.py --output docs/architectures.md` with",
        f"transformers {transformers.__version__}. Tiny models of every causal LM, trained whole",
        f"and with `parallel.tensor: {PROCESSES}`: "
        + ", ".join(f"{counts[name]} {name}" for name in ("exact", "refused", "wrong", "left out"))
        + ".",
        "",
        "| model type | tensor parallel | why |",
        "|---|---|---|",
        *(
            f"| `{name}` | {result} | {_short(reason)} |"
            for name, (result, reason) in sorted(outcomes.items())
        ),
        "",
    ]
    return "\n".join(lines)


def _short(reason: str) -> str:
    """Without what every refusal says, and what to do instead."""
    return reason.split(" -> ")[0].split(" is wrong: ")[-1].replace("|", "/")


if __name__ == "__main__":
    sys.exit(main())
