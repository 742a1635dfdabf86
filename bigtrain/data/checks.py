"""What a dataset must be for a run, found out before any process starts. No torch.

Each function returns problems instead of raising, so that they can be reported with all others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigtrain.config import ModelSection, RunConfig
from bigtrain.data.manifest import Manifest
from bigtrain.data.packing import count_windows
from bigtrain.data.shards import open_dataset
from bigtrain.errors import DataError, Problem

MAX_PADDING_ROWS = 1024
"""Rows of an embedding beyond the tokenizer's vocabulary: it is padded to multiples of at most
this for speed and tensor parallelism; more is rather another tokenizer."""


def check_dataset(config: RunConfig, model_vocab_size: int | None = None) -> list[Problem]:
    """Everything wrong with ``config.data`` for this run; empty where it can be trained on.

    `model_vocab_size`: rows of the model's embedding where the caller knows them; otherwise they
    are looked up in `model.config`, `model.overrides` or the model directory's config.json, and
    not checked where they stand only on the hub. Reads headers and sizes of the shards, and loads
    a tokenizer only where data.tokenizer names one.
    """
    problems: list[Problem] = []
    manifests: list[Manifest] = []
    for number, source in enumerate(config.data.mixture):
        try:
            manifests.append(open_dataset(source.path, check="sizes").manifest)
        except DataError as error:
            problems.append(Problem(config.data.key_of(number), source.path, str(error)))
    if problems:
        return problems
    problems = check_length(config, manifests) + check_same_tokenizer(config, manifests)
    if model_vocab_size is None:
        model_vocab_size = known_vocab_size(config.model)
    if model_vocab_size is not None:
        problems += check_vocabulary(manifests[0], model_vocab_size)
    if config.data.tokenizer is not None:
        problems += _check_tokenizer(manifests[0], config.data.tokenizer)
    return problems


def check_same_tokenizer(config: RunConfig, manifests: Sequence[Manifest]) -> list[Problem]:
    """Whether one tokenizer made all sources: their token ids would mean different text."""

    def identity(manifest: Manifest) -> tuple[str, int, int]:
        tokenizer = manifest.tokenizer
        return tokenizer.hash, tokenizer.vocab_size, tokenizer.end_of_document_id

    def described(number: int) -> str:
        hash_, size, end = identity(manifests[number])
        name = manifests[number].tokenizer.name
        return f"{name}, hash {hash_}, {size} tokens, end of document {end}"

    return [
        Problem(
            config.data.key_of(number),
            config.data.mixture[number].path,
            f"was made with another tokenizer ({described(number)}) than "
            f"{config.data.mixture[0].path} ({described(0)})",
            "tokenize all sources of a mixture with the same tokenizer",
        )
        for number, manifest in enumerate(manifests)
        if identity(manifest) != identity(manifests[0])
    ]


def check_length(config: RunConfig, manifests: Sequence[Manifest]) -> list[Problem]:
    """Whether the splits hold enough tokens for one global batch and for one evaluation.

    Every source must hold one sample, and all of them together one global batch.
    """
    length = config.batch.sequence_length
    chunk_length = config.data.chunk_length or length
    tokens = [manifest.num_tokens("train") for manifest in manifests]
    chunks = [count_windows(number, chunk_length) for number in tokens]
    samples = [number * (chunk_length // length) for number in chunks]
    key, value = ("data.path", config.data.path) if config.data.path else ("data.sources", None)
    problems = []
    if sum(samples) < config.batch.samples_per_step:
        problems.append(
            Problem(
                key,
                value,
                f"too short for one global batch: {sum(tokens)} training tokens are {sum(samples)} "
                f"samples of {length} tokens, one step takes {config.batch.samples_per_step}",
                "tokenize more text, or set a smaller batch",
            )
        )
    for number, manifest in enumerate(manifests):
        key, path = config.data.key_of(number), config.data.mixture[number].path
        if not samples[number] and len(manifests) > 1:
            problems.append(
                Problem(
                    key,
                    path,
                    f"has {tokens[number]} training tokens, too few for one sample of "
                    f"{chunk_length} + 1",
                    "leave it out, tokenize more text, or set a smaller "
                    + ("batch.sequence_length" if chunk_length == length else "data.chunk_length"),
                )
            )
        held_out = manifest.num_tokens("held_out")
        if held_out and not count_windows(held_out, length):
            problems.append(
                Problem(
                    key,
                    path,
                    f"the held-out split has {held_out} tokens, too few for one sample of "
                    f"{length} + 1",
                    "tokenize again with a larger --held-out, or with none",
                )
            )
    return problems


def check_vocabulary(manifest: Manifest, model_vocab_size: int) -> list[Problem]:
    """Whether the shards' token ids fit a model with `model_vocab_size` rows of embedding."""
    tokenizer = manifest.tokenizer
    if tokenizer.vocab_size > model_vocab_size:
        rule = (
            f"too small: the shards were made with tokenizer {tokenizer.name}, whose vocabulary "
            f"has {tokenizer.vocab_size} tokens"
        )
    elif model_vocab_size - tokenizer.vocab_size > MAX_PADDING_ROWS:
        rule = (
            f"too large: the shards were made with tokenizer {tokenizer.name}, whose vocabulary "
            f"has {tokenizer.vocab_size} tokens, and more than {MAX_PADDING_ROWS} rows beyond it "
            "are another tokenizer's"
        )
    else:
        return []
    return [
        Problem(
            "model vocab_size",
            model_vocab_size,
            rule,
            f"set vocab_size to {tokenizer.vocab_size} (random weights), or tokenize with the "
            "model's own tokenizer",
        )
    ]


def known_vocab_size(model: ModelSection) -> int | None:
    """Rows of the model's embedding as far as files on this machine say; None where they do not."""
    tree: Any = model.config
    if not isinstance(tree, dict):
        path = Path(model.path if tree is None else tree) / "config.json"  # type: ignore[arg-type]
        try:
            tree = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None  # a hub name, or a directory that the model layer will refuse
    for source in (model.overrides, tree):
        if isinstance(source, dict):
            text = source.get("text_config")
            for level in (source, text if isinstance(text, dict) else {}):
                if isinstance(level.get("vocab_size"), int):
                    return int(level["vocab_size"])
    return None


def _check_tokenizer(manifest: Manifest, name: str) -> list[Problem]:
    from bigtrain.data.tokenization import load_tokenizer

    try:
        tokenizer = load_tokenizer(name)
    except DataError as error:
        return [Problem("data.tokenizer", name, str(error))]
    if tokenizer.hash == manifest.tokenizer.hash:
        return []
    return [
        Problem(
            "data.tokenizer",
            name,
            f"another tokenizer than the one the shards were made with ({manifest.tokenizer.name}, "
            f"{manifest.tokenizer.vocab_size} tokens; this one has {tokenizer.vocab_size})",
            "leave data.tokenizer out, or tokenize again with it",
        )
    ]
