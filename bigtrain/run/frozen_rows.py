"""Tokens that a run learns while their rows of the embedding and the head stay as in the base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bigtrain.data.samples.source import SourceDataset, StreamDataset
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.errors import DataError, Problem
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import text_config
from bigtrain.models.layers.adapter_checks import SAVED_KEY
from bigtrain.models.layers.adapter_targets import find_saved
from bigtrain.models.layers.parameters import freeze, names_of
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.models.weights.untrained_rows import untrained_rows
from bigtrain.settings.run_config import RunConfig

_SCANNED_TOKENS = 1 << 26
"""Tokens of a dataset that are looked at: control tokens are in every document."""
_BLOCK_TOKENS = 1 << 22  # a multiple of 8


def check_frozen_rows(
    config: RunConfig, hf_config: Any, datasets: Sequence[TokenDataset]
) -> tuple[list[Problem], list[str]]:
    """Check that no token that `datasets` teach has an untrained row in a table that the run does
    not train, as with adapters. Returns problems, and notes on the padding token: its row is zeros
    by design. Only for a base in a directory here, whose embedding and head are read. Raises
    ModelError as `find_weights`."""
    path = config.model.path
    if path is None or not Path(path).is_dir() or (not config.adapters and not config.model.frozen):
        return [], []
    model = empty_model(hf_config)
    if not (frozen := _frozen_tables(config, model)):
        return [], []
    weights = find_weights(path, hf_config, seed=config.seed)
    padding = getattr(text_config(hf_config), "pad_token_id", None)
    problems, notes = [], []
    for dataset in datasets:
        if isinstance(dataset, SourceDataset | StreamDataset):
            continue  # samples of the user's own
        # Count the tokens that the training split teaches: the targets among its first tokens, and
        # the tokens that end texts.
        record = dataset.table.tokenizer
        counts = np.zeros(record.vocab_size, np.int64)
        tokens_to_scan = _SCANNED_TOKENS
        for shard in dataset.shards("train"):
            for low in range(0, min(shard.num_tokens, tokens_to_scan), _BLOCK_TOKENS):
                high = min(low + _BLOCK_TOKENS, shard.num_tokens)
                tokens = shard.tokens[low:high]
                if shard.mask_path is not None:
                    packed = shard.mask_bytes[low // 8 : -(-high // 8)]
                    bits = np.unpackbits(packed, bitorder="little")[: high - low]
                    tokens = tokens[bits.view(np.bool_)]
                counts += np.bincount(tokens, minlength=record.vocab_size)
            tokens_to_scan -= shard.num_tokens
            if tokens_to_scan <= 0:
                break
        learned = {*np.flatnonzero(counts).tolist(), *(record.answer_end_ids or ())}

        # Find learned tokens whose rows the base never trained and this run does not train.
        untrained: dict[int, list[str]] = {}
        for name in frozen:
            for number, content in untrained_rows(weights.tensors[name], learned).items():
                untrained.setdefault(number, []).append(f"its row of {name} is {content}")
        padding_rows = {n: untrained.pop(n) for n in [padding] if n in untrained}
        problems += [_problem(config, model, dataset, untrained)] if untrained else []
        notes += [str(_problem(config, model, dataset, padding_rows))] if padding_rows else []
    return problems, notes


def _tables(model: Any) -> list[Any]:
    """Return the embedding and, if there is one, the head."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [module for module in modules if module is not None]


def _frozen_tables(config: RunConfig, model: Any) -> list[str]:
    """Return the names of the embedding's and the head's weights, one if tied, where the run does
    not train them."""
    if config.adapters is None:
        freeze(model, config.model.frozen)
        trained = [module for module in _tables(model) if module.weight.requires_grad]
    else:
        trained = [model.get_submodule(name) for name in find_saved(model, config.adapters)[0]]
    names = names_of(model.named_parameters(remove_duplicate=False))
    frozen = [module.weight for module in _tables(model) if module not in trained]
    return list(dict.fromkeys(names[id(weight)][0] for weight in frozen))


def _problem(
    config: RunConfig, model: Any, dataset: TokenDataset, untrained: dict[int, list[str]]
) -> Problem:
    """Return the problem of `untrained` tokens, by id with the content of the rows."""
    first = min(untrained)
    try:
        from bigtrain.data.tokenizers.tokenizer import load_tokenizer

        huggingface = load_tokenizer(str(dataset.tokenizer_path)).huggingface
        name = f"{huggingface.convert_ids_to_tokens(first)} ({first})"
    except DataError:
        name = str(first)
    other_tokens = f"; so are {len(untrained) - 1} other tokens" if len(untrained) > 1 else ""
    rule = (
        f"{dataset.path} teaches token {name}, which {config.model.path} never learned: "
        f"{' and '.join(untrained[first])}, and the run does not train these rows, so that the "
        f"model cannot generate it{other_tokens}"
    )
    alternative = (
        "a base that has learned the token, or a chat template with tokens that it has learned"
    )
    if config.adapters is None:
        return Problem(
            "model.frozen", list(config.model.frozen), rule, f"train them, or {alternative}"
        )
    saved = list(config.adapters.modules_to_save)
    if len({id(module.weight) for module in _tables(model)}) == 1:  # a copy would part them
        first_train = "train the full model on it first (model.frozen freezes the rest)"
        return Problem(SAVED_KEY, saved, rule, f"{first_train}, or {alternative}")
    tables = [name for name, module in model.named_modules() if module in _tables(model)]
    modules_to_save = list(dict.fromkeys([*saved, *(name.rpartition(".")[2] for name in tables)]))
    return Problem(
        SAVED_KEY, saved, rule, f"{SAVED_KEY}=[{', '.join(modules_to_save)}], or {alternative}"
    )
