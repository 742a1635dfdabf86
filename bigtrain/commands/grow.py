"""`bigtrain grow`: a Hugging Face model with embedding rows for the tokens added to its
tokenizer."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from bigtrain.commands.arguments import NewDirectory
from bigtrain.system.arguments import Positive
from bigtrain.system.next_commands import next_lines


@dataclass(frozen=True, kw_only=True)
class GrowArguments:
    """Command line of `bigtrain grow`."""

    model: str
    """directory or Hub name of the base"""
    tokenizer: str
    """directory or Hub name: the base's with added tokens (bigtrain tokenizer --base)"""
    output: NewDirectory
    new_rows: Literal["mean_covariance", "mean", "normal"] = "mean_covariance"
    """like model.vocabulary.new_rows of a run (default: mean_covariance)"""
    pad_to_multiple_of: Positive | None = None
    """add rows up to a multiple of N"""
    seed: Annotated[int, "N"] = 0
    """seed of random rows (default: 0)"""


def run(args: GrowArguments) -> int:
    """Write and verify the directory. Raises ModelError or DataError; then nothing is written."""
    from bigtrain.python_api.results import grow_model

    growth = grow_model(
        args.model,
        args.tokenizer,
        args.output,
        new_rows=args.new_rows,
        pad_to_multiple_of=args.pad_to_multiple_of,
        seed=args.seed,
    )
    for note in growth.notes:
        print(f"bigtrain grow: {args.output}: {note}", file=sys.stderr)
    print(
        f"{args.output}: {args.model} with {growth.after} rows instead of {growth.before} "
        f"({', '.join(growth.names)}), reloaded and compared: same logits"
    )
    print(next_lines(f"bigtrain init --model {shlex.quote(str(args.output))} --data FILE"))
    return 0
