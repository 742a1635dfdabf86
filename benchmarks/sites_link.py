"""Time per token over a slow link: two sites against synchronous data parallelism.

python benchmarks/sites_link.py [--rate 100mbit] [--inner-steps 10] [--codecs float32 int8]
Two hosts in network namespaces on one machine (root, iproute2), one rank each, whose links tc slows
down. The quickstart's model and text (`make quickstart` makes it) under ZeRO 1 as one world of both
ranks, then as two sites that exchange directly or by a server on the first host, then with an
overlap of exchange and steps; all with the same global batch. Seconds of steps and of outer steps
are those of the runs' metrics, bytes those that the link of the first host has carried, with all
headers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bigtrain.train import __file__ as train_file
from tests.support.cluster.network import Network, network, why_no_network


def settings(args: argparse.Namespace, directory: Path) -> list[str]:
    """Return the settings of every run."""
    return [
        *("--config", "quickstart", "--deepspeed_config", "zero1"),
        f"data.path={Path(args.data).resolve()}",
        f"batch.sequence_length={args.length}",
        f"batch.global_batch_size={args.samples}",
        f"batch.micro_batch_size={args.samples // 2}",
        f"train.steps={args.steps}",
        f"schedule.warmup_steps={args.steps // 4}",
        f"output.directory={directory}",
        *("output.export=false", "logging.trackers=[]", "logging.every_steps=1"),
        *("checkpoint.every_steps=null", "evaluation.every_steps=null", "evaluation.samples=8"),
    ]


def run(net: Network, args: argparse.Namespace, directory: Path, sites: dict[str, Any]) -> Any:
    """Both hosts train; what the first has measured. sites: of the section, none for one world."""
    directory.mkdir()
    before = net.sent_bytes("s0")
    processes = []
    for index in (0, 1):
        words = settings(args, directory / (str(index) if sites else "run"))
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if sites:
            token = directory / "token"
            token.write_text("0123456789abcdef")
            own = {
                "exchange": "direct",
                **sites,
                "index": index,
                "server": f"http://{net.address('s0')}:29700",
                "token_file": token,
                "start_server": True,
            }
            words += [f"sites.{key}={value}" for key, value in own.items()]
        else:
            env |= {"RANK": str(index), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
            env |= {"MASTER_ADDR": net.address("s0"), "MASTER_PORT": "29500"}
        log = directory / f"{index}.log"
        processes.append((net.start(f"s{index}", log, train_file, *words, **env), log))
    for process, log in processes:
        assert process.wait(args.limit) == 0, log.read_text()[-3000:]
    sent = net.sent_bytes("s0") - before
    metrics = directory / ("0" if sites else "run") / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line["step_seconds"] for line in lines if "loss" in line][1:]
    outer = [line for line in lines if "outer_step" in line]
    waited = "waited_seconds" if sites.get("overlap_steps") else "seconds"
    # The last one exchanges all fragments, and waits for the slower site to end.
    seconds = [line[waited] for line in outer if line["step"] < args.steps]
    per_step = statistics.median(steps)
    if seconds:
        per_step += statistics.median(seconds) / (sites["inner_steps"] / sites.get("fragments", 1))
    tokens = args.samples * args.length
    return {
        "step_seconds": statistics.median(steps),
        "outer_seconds": statistics.median(seconds) if seconds else 0.0,
        "seconds_per_token": per_step / tokens,
        "link_bytes_per_step": sent / args.steps,
        "counted_bytes": sum(line["sent_bytes"] for line in outer),
        "sent_bytes": sent,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit", help="of each host's link, as tc writes it")
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--codecs", nargs="*", default=["float32", "int8"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of a run")
    parser.add_argument("--data", default="runs/quickstart/shards", help="make quickstart's")
    parser.add_argument("--output", help="a file for all results, as JSON")
    args = parser.parse_args()
    reason = why_no_network()
    if reason is not None:
        print(f"no network namespaces here: {reason}")
        return 1
    cases: dict[str, dict[str, Any]] = {"synchronous": {}}
    for codec in args.codecs:
        cases[f"sites, {codec}"] = {"codec": codec, "count": 2, "inner_steps": args.inner_steps}
        # The server is on the first host: its own site's messages are not on a link.
        cases[f"sites, {codec}, by the server"] = {**cases[f"sites, {codec}"], "exchange": "server"}
    overlap = args.inner_steps // 2 - 1
    if args.codecs and overlap > 0:
        more = {"fragments": 2, "overlap_steps": overlap}
        cases[f"sites, {args.codecs[-1]}, 2 fragments during {overlap} steps"] = {
            **cases[f"sites, {args.codecs[-1]}"],
            **more,
        }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch, network(["s0", "s1"]) as net:
        for host in ("s0", "s1"):
            net.limit(host, args.rate)
        for number, (name, sites) in enumerate(cases.items()):
            results[name] = run(net, args, Path(scratch) / str(number), sites)
    base = results["synchronous"]["seconds_per_token"]
    print(f"link {args.rate}, {args.samples} x {args.length} tokens a step")
    print("| | step | outer step | time per token | bytes a step on the link |")
    print("|---|---|---|---|---|")
    for name, one in results.items():
        print(
            f"| {name} | {one['step_seconds']:.3f} s | {one['outer_seconds']:.2f} s | "
            f"{1e6 * one['seconds_per_token']:.0f} us ({one['seconds_per_token'] / base:.2f} x) | "
            f"{one['link_bytes_per_step']:,.0f} |"
        )
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
