"""`bigtrain tokenize`: turn text into token shards."""

from __future__ import annotations

import argparse
import time

from bigtrain.commands.arguments import reading_of
from bigtrain.commands.conversations import conversations_of


def run(args: argparse.Namespace) -> int:
    """Tokenize and print a summary. Raises DataError; then only finished work is kept."""
    from bigtrain.data.shards.inspection import summary
    from bigtrain.python_api.tokenizing import build_tokens

    started_at = time.monotonic()
    result = build_tokens(
        args.input,
        args.tokenizer,
        args.output,
        **reading_of(args),
        **conversations_of(args),
        held_out=args.held_out,
        shard_bytes=args.shard_size,
        max_bad_fraction=args.max_bad_fraction,
        max_unrendered=args.max_unrendered,
        max_prompt_tokens=args.max_prompt_tokens,
        workers=args.workers,
        rank=args.rank,
        world_size=args.world_size,
        encoder=args.encoder,
        parse_special_tokens=args.parse_special_tokens,
        beginning_of_text=args.beginning_of_text,
        end_of_document=args.end_of_document,
        text_filter=args.filter,
        labels=args.labels,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_seed=args.fim_seed,
        fim_tokens=args.fim_tokens,
    )
    if result.already_finished:
        print(f"{args.output} is already the finished dataset of this input; nothing to do")
    print(summary(args.output, result.manifest, with_unread=result.already_finished))
    if not result.already_finished:
        elapsed_s = time.monotonic() - started_at
        tokens = result.built_tokens
        print(f"  {elapsed_s:.1f} s, {tokens:,} tokens here, {tokens / elapsed_s:,.0f} tokens/s")
    return 0
