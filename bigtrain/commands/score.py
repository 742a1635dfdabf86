"""`bigtrain score`: log-probabilities of a run's data under its model, and documents by
perplexity."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

from bigtrain.commands.arguments import Config, DeepSpeedConfig, Overrides
from bigtrain.errors import ConfigError, Problem
from bigtrain.system.arguments import Directory, Positive, command_words
from bigtrain.system.next_commands import next_lines, train_line
from bigtrain.system.world import read_world


@dataclass(frozen=True, kw_only=True)
class ScoreArguments:
    """Command line of `bigtrain score`."""

    config: Config
    deepspeed_config: DeepSpeedConfig = None
    output: Directory
    """directory for the scores of each dataset of the run; a pass that was killed continues
    there"""
    kind: Literal["documents", "tokens", "top-k"] = "documents"
    """what to write: the sum of each document; also the value of each token; also the --top-k most
    probable tokens at each (default: documents)"""
    top_k: Positive | None = None
    """with --kind top-k: tokens to write (default: 32)"""
    part_tokens: Positive = 4194304
    """tokens of a part, which is written at once (default: 4194304)"""
    filter: Directory | None = None
    """also write a dataset of the documents with a perplexity within the limits"""
    min_perplexity: Annotated[float | None, "P"] = None
    """with --filter: lowest perplexity (default: 0)"""
    max_perplexity: Annotated[float | None, "P"] = None
    """with --filter: highest perplexity (default: any)"""
    overrides: Overrides = ()


def run(args: ScoreArguments) -> int:
    """Score the data and print a summary. Collective under a launcher. Raises BigtrainError."""
    from bigtrain.python_api.scoring import PerplexityFilter, score, summary

    # Perplexity limits need a directory for the kept documents (--filter), and the reverse.
    keep = None
    lowest, highest = args.min_perplexity, args.max_perplexity
    if args.filter is not None:
        if lowest is None and highest is None:
            rule, remedy = "has no limits", "--max-perplexity P, --min-perplexity P"
            raise ConfigError(Problem("--filter", str(args.filter), rule, remedy))
        keep = PerplexityFilter(
            args.filter, lowest or 0.0, math.inf if highest is None else highest
        )
    elif lowest is not None or highest is not None:
        rule = "limits have no effect without a directory for the documents"
        key = "--max-perplexity" if lowest is None else "--min-perplexity"
        value = highest if lowest is None else lowest
        raise ConfigError(Problem(key, value, rule, "--filter DIR"))
    scores = score(
        args.config,
        *args.overrides,
        output=args.output,
        kind=args.kind,
        top_k=args.top_k,
        part_tokens=args.part_tokens,
        deepspeed_config=args.deepspeed_config,
        keep=keep,
    )
    # The summary, and the command that uses the scores.
    world = read_world(os.environ)
    if world.is_main:
        print(*summary(scores), sep="\n")
        if keep is not None:
            from bigtrain.data.shards.inspection import summary as shards_summary
            from bigtrain.data.shards.manifest import read_manifest

            print(shards_summary(keep.output, read_manifest(keep.output)))
            data = f"data.path={keep.output}"
            line = train_line(["--config", args.config, *args.overrides, data], world.size)
        elif args.kind == "top-k":
            teacher = f"objective.teacher={args.output}"
            line = train_line(["--config", "STUDENT.yaml", teacher], world.size)
        else:
            words = command_words(args, filter="kept/", max_perplexity=50.0)
            line = shlex.join(["bigtrain", "score", *words])
        print(next_lines(line))
    return 0
