"""`bigtrain parity`: train a proxy model of the run's model on every legal topology, and
compare."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigtrain.commands.arguments import Config, Overrides
from bigtrain.system.arguments import Positive
from bigtrain.system.next_commands import next_lines

if TYPE_CHECKING:
    from bigtrain.parity.comparison import Verdict
    from bigtrain.parity.topologies import Point

EXIT_DIFFERENT = 1


@dataclass(frozen=True, kw_only=True)
class ParityArguments:
    """Command line of `bigtrain parity`."""

    config: Config
    world_size: Positive = 2
    """ranks, started on this machine's CPUs (default: 2)"""
    refused: bool = False
    """also list the topologies that are refused, and why"""
    overrides: Overrides = ()


def run(args: ParityArguments) -> int:
    """Print a table. Returns 0 if all topologies agree, 1 if one differs or crashes, or if the
    comparison would not detect an error in a setting of the run."""
    from bigtrain.settings.loading import load_run_config

    config = load_run_config(args.config, args.overrides)

    from bigtrain.parity.run import run_parity

    num_refused = 0
    print(f"{'topology':44} {'loss':>9} {'norm':>9} {'weights':>9}  verdict", flush=True)

    def report(point: Point, verdict: Verdict | None) -> None:
        nonlocal num_refused
        if verdict is None:
            num_refused += 1
            if args.refused:
                print(f"{point.name:44} refused: {point.refusal}")
            return
        if verdict.crash:
            print(f"{point.name:44} {'-':>9} {'-':>9} {'-':>9}  crashed: {verdict.crash}")
            return
        result = "same" if verdict.passed else f"DIFFERENT: first in {verdict.first_difference}"
        print(
            f"{point.name:44} {verdict.loss:9.1e} {verdict.norm:9.1e} {verdict.weight:9.1e}  "
            f"{result}"
        )

    # `report` prints a row when the comparison of a topology ends.
    passed = run_parity(config, args.world_size, lambda note: print(f"note: {note}"), report)
    if num_refused and not args.refused:
        print(f"{num_refused} topologies are refused; --refused lists them with the reasons")
    print(
        "differences from plain transformers and torch.optim in one process, the worst of "
        "all steps: of the loss in nats, of the gradient norm relative to it, of the weights; for "
        "these the one closest to its rounding limit, which is 1e-5 or 4 times the distance of "
        "plain transformers from itself with its sums in another order"
    )
    if not passed:
        return EXIT_DIFFERENT
    words = ["--config", args.config, "--world-size", str(args.world_size), *args.overrides]
    print(next_lines(shlex.join(["bigtrain", "check", *words])))
    return 0
