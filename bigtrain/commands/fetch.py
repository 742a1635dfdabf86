"""`bigtrain fetch`: copy a run, a model or a dataset from an address to a directory."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bigtrain.system.arguments import Argument
from bigtrain.system.next_commands import model_line, next_lines


@dataclass(frozen=True, kw_only=True)
class FetchArguments:
    """Command line of `bigtrain fetch`."""

    address: Annotated[str, Argument("address")]
    """address, such as s3://bucket/runs/mine"""
    output: Annotated[Path, Argument("output")]
    """directory to copy it to"""
    step: Annotated[int | None, "N"] = None
    """for a run: the checkpoint to fetch (default: the newest complete one)"""


def run(args: FetchArguments) -> int:
    """Fetch missing files. Raise DataError; fetched files are kept for the next start."""
    from bigtrain.errors import without_secrets
    from bigtrain.python_api.results import fetch

    fetched = fetch(args.address, args.output, step=args.step, say=print)
    address = without_secrets(args.address.rstrip("/"))
    print(f"{args.output}: {fetched.num_bytes:,} bytes from {address}")
    if fetched.step is not None:
        print(f"  the run resumes from step {fetched.step} with output.directory={args.output}")
        print(next_lines(f"bigtrain checkpoints --run {shlex.quote(str(args.output))}"))
    elif (args.output / "config.json").is_file():
        print(next_lines(model_line(args.output)))
    else:
        print(next_lines(f"bigtrain inspect {shlex.quote(str(args.output))}"))
    return 0
