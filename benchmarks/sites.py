"""Cost of local steps between sites in loss.

python benchmarks/sites.py [--inner-steps 1 10 50 200] [--sites 2 4] [--codecs float32 int8 int4]
    [--seeds 1]
Held-out loss of a small Llama on the quickstart's text (`make quickstart` makes it) after the same
tokens: trained synchronously, and by so many sites with an outer step every so many steps. Sites
are copies in one process, in turn; what they exchange goes through the run's own code, `SiteGroup`
and `outer_update`, between threads over gloo. Each seed is a model of its own; with several, a last
table has the spread of the losses over them, which is large compared with
differences between codecs.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bigtrain.data.loading.loader import open_held_out, open_training_data
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.torch_patches import gloo_group
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.lr_schedule import learning_rate_at
from bigtrain.settings.run_config import RunConfig, SitesSection
from bigtrain.sites.codecs import CODECS, sent_bytes
from bigtrain.sites.exchange import SiteGroup
from bigtrain.sites.outer_optimizer import outer_update

MEET = {"server": "http://127.0.0.1:1", "token_file": "unused"}

Batch = tuple[torch.Tensor, torch.Tensor]


def config_of(args: argparse.Namespace) -> RunConfig:
    """Return the run, but for its sites."""
    return RunConfig.model_validate(
        {
            "model": {
                "config": {
                    "model_type": "llama",
                    "vocab_size": args.vocabulary,
                    "hidden_size": args.hidden_size,
                    "intermediate_size": 3 * args.hidden_size,
                    "num_hidden_layers": args.layers,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                    "max_position_embeddings": args.length,
                    "tie_word_embeddings": True,
                }
            },
            "data": {"path": str(Path(args.data).resolve())},
            "batch": {
                "sequence_length": args.length,
                "global_batch_size": args.samples,
                "micro_batch_size": args.samples,
            },
            "train": {"steps": args.steps},
            "optimizer": {"lr": args.lr},
            "schedule": {"type": "cosine", "warmup_steps": min(20, args.steps // 4)},
            "precision": {"dtype": "float32"},
            "evaluation": {"samples": args.held_out},
            "output": {"directory": "unused"},
        }
    )


def read(config: RunConfig) -> tuple[list[Batch], list[Batch]]:
    """Inputs and labels of every step, and of the held-out samples."""
    plan, problems = plan_batch(config.batch, 1)
    assert plan is not None, problems
    batches = open_training_data(config, plan, 0)
    steps = []
    for step in range(config.train.total_steps):
        (batch,) = batches.step(step * plan.global_batch_size)
        steps.append((batch.input_ids.clone(), batch.labels.clone()))
    batches.close()
    (source,) = open_held_out(config, plan, 0)
    held_out = [(batch.input_ids.clone(), batch.labels.clone()) for batch in source.batches]
    return steps, held_out


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@torch.no_grad()
def held_out_loss(model: Any, batches: list[Batch]) -> float:
    losses = [float(loss_of(model, batch)) for batch in batches]
    return sum(losses) / len(losses)


class Copies:
    """So many sites with models of their own, and the global weights."""

    def __init__(self, model: Any, config: RunConfig, sites: SitesSection) -> None:
        self.config, self.sites = config, sites
        self.models = [copy.deepcopy(model) for _ in range(sites.count)]
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
            for m in self.models
        ]
        flat = self.flat(0)
        self.weights = flat.clone()
        self.momentum = torch.zeros_like(flat) if sites.outer.has_momentum else None
        self.codec = CODECS[sites.codec]
        self.errors = [
            torch.zeros_like(flat) if self.codec.keeps_error else None for _ in self.models
        ]
        store, count = dist.HashStore(), sites.count
        self.threads = ThreadPoolExecutor(count)

        def exchange(site: int) -> SiteGroup:
            limit = timedelta(seconds=300)
            group = gloo_group(store, site, count, limit, "127.0.0.1") if count > 1 else None
            return SiteGroup(group, sites.weights())

        self.exchanges = list(self.threads.map(exchange, range(count)))

    def flat(self, site: int) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.models[site].parameters()])

    def step(self, number: int, batch: Batch) -> None:
        """Do an inner step of every site, on its block of the samples."""
        config = self.config
        lr = learning_rate_at(
            number, config.optimizer.lr, config.schedule, config.train.total_steps
        )
        count = self.sites.count
        for site, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            own = slice(site * len(batch[0]) // count, (site + 1) * len(batch[0]) // count)
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            loss_of(model, (batch[0][own], batch[1][own])).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if count > 1 and self.sites.sent_after(number + 1, config.train.total_steps):
            self.outer_step()

    def outer_step(self) -> None:
        def mean(site: int) -> torch.Tensor:
            local = self.flat(site)
            return self.exchanges[site].mean(self.codec, local, self.weights, self.errors[site])

        means = list(self.threads.map(mean, range(self.sites.count)))
        assert all(torch.equal(one, means[0]) for one in means)
        outer_update(self.weights, self.momentum, means[0].clone(), self.sites)
        for model in self.models:
            begin = 0
            for parameter in model.parameters():
                part = self.weights[begin : begin + parameter.numel()]
                parameter.data.copy_(part.view_as(parameter))
                begin += parameter.numel()


def final_loss(
    model: Any, config: RunConfig, sites: dict[str, Any], data: tuple[list[Batch], list[Batch]]
) -> float:
    """Held-out loss after all steps."""
    section = SitesSection.model_validate(MEET | sites)
    copies = Copies(model, config, section)
    for number, batch in enumerate(data[0]):
        copies.step(number, batch)
    copies.threads.shutdown()
    return held_out_loss(copies.models[0], data[1])


def spread_table(losses_by_seed: dict[int, dict[str, float]], first: str) -> list[str]:
    """Return rows of Markdown: mean and standard deviation of a case's losses over the seeds, and
    of its differences, seed by seed, to the same case with the codec `first`."""
    lines = ["| sites | inner steps | codec | loss | relative to " + first + " |", "|" + "---|" * 5]
    for case in next(iter(losses_by_seed.values())):
        count, inner, codec = case.split()
        losses = [losses[case] for losses in losses_by_seed.values()]
        relative = [
            loss[case] / loss[f"{count} {inner} {first}"] - 1 for loss in losses_by_seed.values()
        ]
        cells = f"{mean(losses):.4f} +- {stdev(losses):.4f}"
        other = f"{100 * mean(relative):+.2f} +- {100 * stdev(relative):.2f} %"
        lines.append(f"| {count} | {inner} | {codec} | {cells} | {other} |")
    return lines


def table(
    loss_by_case: dict[str, float], synchronous: float, args: argparse.Namespace
) -> list[str]:
    """Return rows of Markdown: loss, and how much more than the synchronous one."""
    lines = [
        "| sites | inner steps | " + " | ".join(args.codecs) + " |",
        "|" + "---|" * (2 + len(args.codecs)),
    ]
    for count in args.sites:
        for inner in args.inner_steps:
            cells = []
            for codec in args.codecs:
                loss = loss_by_case[f"{count} {inner} {codec}"]
                cells.append(f"{loss:.4f} ({100 * (loss / synchronous - 1):+.2f} %)")
            lines.append(f"| {count} | {inner} | " + " | ".join(cells) + " |")
    return lines


def losses_of(
    seed: int,
    config: RunConfig,
    data: tuple[list[Batch], list[Batch]],
    args: argparse.Namespace,
) -> tuple[dict[str, float], float]:
    """Losses of all cases, and of synchronous training, from the initial weights of a seed."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(load_hf_config(config.model))
    num_elements = sum(p.numel() for p in model.parameters())
    one = {"count": 1, "inner_steps": args.steps}
    synchronous = final_loss(model, config, one, data)
    print(
        f"{num_elements:,} parameters, {args.steps} steps of {args.samples} x {args.length} tokens"
    )
    print(f"synchronous: held-out loss {synchronous:.4f}", flush=True)
    loss_by_case: dict[str, float] = {}
    for count, inner, codec in product(args.sites, args.inner_steps, args.codecs):
        sites: dict[str, Any] = {"count": count, "inner_steps": inner, "codec": codec}
        sites["outer"] = {"type": args.outer, "lr": args.outer_lr}
        loss = final_loss(model, config, sites, data)
        loss_by_case[f"{count} {inner} {codec}"] = loss
        sent = sent_bytes(num_elements, count, codec) / inner
        print(
            f"{count} sites, {inner} inner steps, {codec}: {loss:.4f}, {sent:,.0f} bytes a step",
            flush=True,
        )
    return loss_by_case, synchronous


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inner-steps", type=int, nargs="*", default=[1, 10, 50, 200])
    parser.add_argument("--sites", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--codecs", nargs="*", default=["float32", "int8", "int4"])
    parser.add_argument("--outer", default="nesterov", help="sites.outer.type")
    parser.add_argument("--outer-lr", type=float, help="sites.outer.lr (default: the run's)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=8, help="of a step, of all sites")
    parser.add_argument("--held-out", type=int, default=128, help="samples of the loss")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--data", default="runs/quickstart/shards", help="make quickstart's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of the initial weights")
    parser.add_argument("--output", help="a file for all results, as JSON")
    args = parser.parse_args()
    disable_progress_bar()
    config = config_of(args)
    data = read(config)
    begun = time.perf_counter()
    by_seed, synchronous = {}, {}
    for seed in args.seeds:
        print(f"seed {seed}")
        by_seed[seed], synchronous[seed] = losses_of(seed, config, data, args)
        print("\n".join(table(by_seed[seed], synchronous[seed], args)))
    if len(args.seeds) > 1:
        print("\n".join(spread_table(by_seed, args.codecs[0])))
    print(f"{time.perf_counter() - begun:.0f} s")
    if args.output:
        report = {"synchronous": synchronous, "sites": by_seed, "arguments": vars(args)}
        Path(args.output).write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
