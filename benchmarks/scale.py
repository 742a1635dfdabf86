"""Cost per rank as the run grows to thousands of ranks, by the real functions; simulated ranks.

save        divide a checkpoint of 1,000 parameters under ZeRO 3 and write this rank's file
commit      list all ranks' files in the manifest, on the main rank, from what the tree brings it
resume      read manifest and layout, find and read what this rank needs, on as many ranks
half        the same on half as many ranks
commit_3d   commit, of tensor x pipeline x data and ZeRO 1 (8 x 8 x 64 of 4,096)
resume_3d   resume of that
write       write 250 MB a rank, during training, on disk and where the disk is not the limit
agree       find the newest complete checkpoint in memory of all hosts
fetch       the same, and send a host with empty memory what it lacks
hosts       hosts of all ranks and their versions, on every rank at the start
groups      make the process groups of tensor 8 x pipeline 8 x data
data        open a dataset of 24 shards a rank, on every rank of a host but the first
table       make the table of its shards, on the first rank of a host
hostfile    check a hostfile of a host for every rank
doctor      `bigtrain doctor --quick` of as many hosts, which answer at once
trials      take up what the trials of proxy models found, of Llama 405B
moe_first   make those of DeepSeek-V3, with an empty cache, on one rank of a host
moe         take up what they found
metrics     take up a metrics.jsonl of 250 lines a rank
watchdog    read where all ranks are, from a real store, while two others read as well
stragglers  name the slow ones among all ranks' work times, on the main rank

Collectives go through torch's "fake" backend, which moves nothing: their cost on a network is
not included. In `agree` and `fetch` all ranks are there, in threads that exchange messages in
memory: `rounds` counts messages one after the other, `bytes` those of the busiest rank, beside
`fetched_bytes` of files. Each point is a process of its own; its results are seconds of processor
time, of the clock (wall), memory above what the imports take (mib), and bytes written or read. The
exponent is that of ranks to which they grow, fitted over all points: 0 does not grow, 1 doubles
with the ranks.
The parts are in `benchmarks/support/scale_*.py`. `--output FILE` writes JSON, `--picture FILE` an
SVG.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.support import scale_checkpoints, scale_memory, scale_starts, scale_steps
from benchmarks.support.pictures import log_log_picture
from benchmarks.support.simulated import Cost

RANKS = (8, 64, 512, 4096)

PARTS: dict[str, Callable[[int, int, Path], Cost]] = {
    name.removeprefix("measure_"): function
    for module in (scale_checkpoints, scale_memory, scale_starts, scale_steps)
    for name, function in vars(module).items()
    if name.startswith("measure_")
}


def measure(part: str, num_ranks: int, size: int) -> Cost:
    """Return the cost of one part, in a process of its own, forked from this one that has the
    imports."""
    with tempfile.TemporaryDirectory() as directory:
        place, cost_file = Path(directory, "work"), Path(directory, "cost.json")
        place.mkdir()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                cost_file.write_text(json.dumps(PARTS[part](num_ranks, size, place)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"scale.py: {part} of {num_ranks} ranks failed")
        cost: Cost = json.loads(cost_file.read_text())
        return cost


def exponent(points: dict[int, float]) -> float:
    """Return the exponent of the power law of ranks that fits the points best; least squares of the
    logarithms."""
    pairs = [(math.log(ranks), math.log(max(cost, 1e-9))) for ranks, cost in points.items()]
    mean_x, mean_y = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    return above / sum((x - mean_x) ** 2 for x, _ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--parameters", type=int, default=1000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    costs: dict[str, dict[int, Cost]] = {}
    for part in args.parts:
        costs[part] = {ranks: measure(part, ranks, args.parameters) for ranks in args.ranks}
        seconds = {ranks: cost["seconds"] for ranks, cost in costs[part].items()}
        memory = {ranks: cost["mib"] for ranks, cost in costs[part].items()}
        slope = f"ranks^{exponent(seconds):+.2f}" if len(seconds) > 1 else ""
        shown = "  ".join(f"{ranks}: {cost:.3f} s" for ranks, cost in seconds.items())
        print(
            f"{part:10} {shown}  {slope}  memory up to {max(memory.values()):.0f} MiB", flush=True
        )
    if args.output:
        args.output.write_text(json.dumps(costs, indent=1) + "\n")
    if args.picture:
        lines = {
            part: {ranks: cost["seconds"] for ranks, cost in points.items()}
            for part, points in costs.items()
        }
        title = "Processor seconds of one rank by number of ranks"
        args.picture.write_text(log_log_picture(title, lines))


if __name__ == "__main__":
    main()
