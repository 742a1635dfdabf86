"""`bigtrain tokenizer`: train a byte-level BPE tokenizer on text, or add tokens to one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from bigtrain.commands.arguments import NewDirectory, Overrides
from bigtrain.data.tokenize_job.options import Inputs, ReadingOptions
from bigtrain.errors import ConfigError, DataError, Problem
from bigtrain.system.arguments import Positive, command_words
from bigtrain.system.next_commands import next_lines


@dataclass(frozen=True, kw_only=True)
class TokenizerArguments(ReadingOptions):
    """Command line of `bigtrain tokenizer`."""

    inputs: Inputs = ()
    vocab_size: Positive | None = None
    """tokens of the vocabulary, including the end-of-document token; at least 257"""
    base: Annotated[str | None, "NAME"] = None
    """instead of --input and --vocab-size: use this tokenizer (directory or Hub name), and add
    tokens to it"""
    add_token: Annotated[tuple[str, ...], "TEXT"] = ()
    """text that becomes one token of --base; may be repeated"""
    add_special_token: Annotated[tuple[str, ...], "TEXT"] = ()
    """the same for a control token, such as <|im_start|>: document text never becomes it, and
    decoding can skip it; may be repeated"""
    config: Annotated[str | None, "NAME_OR_PATH"] = None
    """instead of --base and the tokens: the run YAML whose section tokenizer names them"""
    output: NewDirectory
    overrides: Overrides = ()


def run(args: TokenizerArguments) -> int:
    """Train a tokenizer, or add tokens to one; save it, and print a summary. Raise ConfigError,
    DataError; then no files remain."""
    if args.overrides and args.config is None:
        rule = "is a setting of a run, and --config is missing"
        raise ConfigError(Problem("arguments", args.overrides[0], rule, "--config RUN.yaml"))
    # Add tokens that a run names (--config) or the command line (--base), or train a tokenizer.
    trains = bool(args.inputs) or args.vocab_size is not None
    if args.config is not None:
        if trains or args.base is not None or args.add_token or args.add_special_token:
            rule = "defines the tokenizer and its added tokens"
            raise ConfigError(
                Problem("--config", args.config, rule, "remove all other options except --output")
            )
        from bigtrain.settings.loading import load_run_config

        config = load_run_config(args.config, args.overrides)
        base, section = config.base_tokenizer, config.tokenizer
        if base is None or section is None:
            rule = "its run does not add tokens to a tokenizer"
            remedy = "name them in its section: tokenizer.add_special_tokens, tokenizer.add_tokens"
            raise ConfigError(Problem("--config", args.config, rule, remedy))
        return _add_tokens(args.output, base, section.add_tokens, section.add_special_tokens)
    if args.base is not None:
        if trains:
            raise DataError("--base uses a trained tokenizer -> remove --input and --vocab-size")
        return _add_tokens(args.output, args.base, args.add_token, args.add_special_token)
    if not args.inputs or args.vocab_size is None:
        raise DataError(
            "training a tokenizer needs --input and --vocab-size -> give both, or --base"
        )
    if args.add_token or args.add_special_token:
        raise DataError("--add-token and --add-special-token are for an existing tokenizer: --base")

    from bigtrain.python_api.tokenizing import train_tokenizer

    names = [field.name for field in fields(ReadingOptions)]
    reading = ReadingOptions(**{name: getattr(args, name) for name in names})
    num_tokens = train_tokenizer(
        **vars(reading), vocab_size=args.vocab_size, output=args.output, say=print
    )
    if num_tokens < args.vocab_size:
        print(
            f"note: the text yields {num_tokens} tokens, fewer than --vocab-size {args.vocab_size}",
            file=sys.stderr,
        )
    tokenize = ["--tokenizer", str(args.output), "--output", "shards/"]
    print(next_lines(shlex.join(["bigtrain", "tokenize", *command_words(reading), *tokenize])))
    return 0


def _add_tokens(output: Path, base: str, plain: Sequence[str], special: Sequence[str]) -> int:
    """Save the tokenizer `base` with added tokens; print their ids, and what to do next."""
    from bigtrain.python_api.results import add_tokens

    ids = add_tokens(base, output, tokens=plain, special_tokens=special)
    added = ", ".join(f"{text} {number}" for text, number in ids.items())
    print(f"{output}: {base} with {len(ids)} token{'s' if len(ids) != 1 else ''} added ({added})")
    print(
        "trained weights get rows for them by the section tokenizer of a run, or by "
        "model.vocabulary.new_rows=mean_covariance"
    )
    tokenize = ["--input", "FILE", "--tokenizer", str(output), "--output", "shards/"]
    print(next_lines(shlex.join(["bigtrain", "tokenize", *tokenize])))
    return 0
