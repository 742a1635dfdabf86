"""`bigtrain tokenize`: turn text into token shards."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from bigtrain.data.tokenize_job.options import TokenizeOptions
from bigtrain.system.next_commands import next_lines, shards_line


def run(args: TokenizeOptions) -> int:
    """Tokenize and print a summary. Raises DataError; then only finished work is kept."""
    from bigtrain.data.shards.inspection import summary
    from bigtrain.python_api.tokenizing import build_tokens

    started_at = time.monotonic()
    result = build_tokens(args)
    output = Path(args.output)
    if result.already_finished:
        print(f"{output} is already the finished dataset of this input; nothing to do")
    print(summary(output, result.manifest, with_unread=result.already_finished))
    if not result.already_finished:
        elapsed_s = time.monotonic() - started_at
        tokens = result.built_tokens
        print(f"  {elapsed_s:.1f} s, {tokens:,} tokens here, {tokens / elapsed_s:,.0f} tokens/s")
    check = f"bigtrain check --config RUN.yaml data.path={shlex.quote(str(output))} --inputs"
    print(next_lines(shards_line(output, str(args.tokenizer)), f"{check}   # with a run YAML"))
    return 0
