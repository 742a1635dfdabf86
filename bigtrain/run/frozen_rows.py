"""Tokens that a run learns while their rows of the embedding, or of the head, are not trained."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bigtrain.data.samples.source import SourceDataset, StreamDataset
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.errors import DataError, Problem
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import scores_samples, text_config
from bigtrain.models.layers.parameters import freeze, names_of
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.models.weights.lazy_tensors import LazyTensor
from bigtrain.models.weights.weight_files import weight_files
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.user_cache import cached, key_of, source_of

_SCANNED_TOKENS = 1 << 26
"""Tokens of a dataset that are looked at: control tokens are in every document."""
_BLOCK_TOKENS = 1 << 22  # a multiple of 8
_CACHE = "frozen_rows"


def check_frozen_rows(
    config: RunConfig, hf_config: Any, datasets: Sequence[TokenDataset], *, grows: bool
) -> tuple[list[Problem], list[str]]:
    """Check an embedding and a head that the run does not train, as with adapters: a token that
    `datasets` teach must not have an untrained row there. Returns problems, and notes on the
    padding token, whose row is zeros by design, or is not trained. Checks only a base in a local
    directory, whose embedding and head are read. grows: the run adds rows to its vocabulary.
    Raises ModelError where `find_weights` does."""
    path = config.model.path
    if not (config.adapters or config.model.frozen):
        return [], _padding_notes(hf_config, datasets)
    if grows or path is None or not Path(path).is_dir():
        return [], []
    from bigtrain.models.weights.untrained_rows import untrained_rows

    model = empty_model(hf_config)
    frozen_tables = _frozen_tables(config, model)
    if not frozen_tables:
        return [], []

    # Untrained rows of each table, cached for these files and this code of the search.
    weights = find_weights(path, hf_config, seed=config.seed)
    files = [file.resolve() for file in weight_files(path, hf_config)]
    file_stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    search_code = source_of(inspect.getfile(untrained_rows))
    rows_by_table = {}
    for table_name in frozen_tables:

        def find(table: LazyTensor = weights.tensors[table_name]) -> dict[str, Any]:
            # Pairs of token id and content, since JSON makes texts of the keys of an object.
            return {"rows": list(untrained_rows(table).items())}

        key = key_of([search_code, json.dumps([file_stamps, table_name, config.seed])])
        rows_by_table[table_name] = dict(cached(_CACHE, key, find)["rows"])
    untrained_ids = sorted({token_id for rows in rows_by_table.values() for token_id in rows})
    if not untrained_ids:
        return [], []

    # Compare with the tokens that each dataset teaches.
    padding_id = getattr(text_config(hf_config), "pad_token_id", None)
    problems, notes = [], []
    for dataset in datasets:
        if isinstance(dataset, SourceDataset | StreamDataset):
            continue  # samples of user code, whose tokens are not in shards
        texts_by_id = {
            token_id: [
                f"its row of {table_name} is {rows[token_id]}"
                for table_name, rows in rows_by_table.items()
                if token_id in rows
            ]
            for token_id in _taught_ids(dataset, untrained_ids)
        }
        # An untrained row of the padding token is usual: it does not stop the run.
        if padding_id in texts_by_id:
            padding_texts = {padding_id: texts_by_id.pop(padding_id)}
            notes.append(str(_problem(config, model, dataset, padding_texts)))
        if texts_by_id:
            problems.append(_problem(config, model, dataset, texts_by_id))
    return problems, notes


def _padding_notes(hf_config: Any, datasets: Sequence[TokenDataset]) -> list[str]:
    """Return a note if texts of `datasets` begin or end with the padding token of a model whose
    embedding gives the row of that token no gradient (``padding_idx`` of torch)."""
    padding_id = getattr(text_config(hf_config), "pad_token_id", None)
    text_ids: set[int] = set()
    for dataset in datasets:
        record = dataset.table.tokenizer
        if record.chat_template is None:
            text_ids |= {*record.beginning_ids, record.end_of_document_id}
        text_ids |= {*(record.answer_end_ids or ())}
    if padding_id not in text_ids or scores_samples(hf_config):
        return []
    embedding = empty_model(hf_config).get_input_embeddings()
    if getattr(embedding, "padding_idx", None) != padding_id:
        return []
    return [
        f"model: pad_token_id = {padding_id} is also a token that begins or ends texts: as in "
        "transformers, the row of the padding token in the embedding gets no gradient where the "
        "token is read -> to train the row: model.overrides={pad_token_id: null}"
    ]


def _taught_ids(dataset: TokenDataset, ids: list[int]) -> list[int]:
    """Return the tokens among `ids` that the training split of `dataset` teaches: the targets among
    its first tokens, and the tokens that end texts. The result is cached by the shards' checksums,
    which a check of the dataset compares with the files."""
    record, columns = dataset.table.tokenizer, dataset.table.splits["train"]
    num_shards = int(np.searchsorted(np.cumsum(columns.rows["tokens"]), _SCANNED_TOKENS)) + 1

    def scan() -> dict[str, Any]:
        counts = np.zeros(record.vocab_size, np.int64)
        tokens_to_scan = _SCANNED_TOKENS
        for shard in dataset.shards("train")[:num_shards]:
            for low in range(0, min(shard.num_tokens, tokens_to_scan), _BLOCK_TOKENS):
                high = min(low + _BLOCK_TOKENS, shard.num_tokens)
                tokens = shard.tokens[low:high]
                if shard.mask_path is not None:  # a bit for each token: whether it is a target
                    packed = shard.mask_bytes[low // 8 : -(-high // 8)]
                    bits = np.unpackbits(packed, bitorder="little")[: high - low]
                    tokens = tokens[bits.view(np.bool_)]
                counts += np.bincount(tokens, minlength=record.vocab_size)
            tokens_to_scan -= shard.num_tokens
        taught = {*np.flatnonzero(counts).tolist(), *(record.answer_end_ids or ())}
        return {"ids": [token_id for token_id in ids if token_id in taught]}

    settings = json.dumps([record.vocab_size, record.answer_end_ids, columns.is_masked, ids])
    shard_rows = columns.rows[:num_shards].tobytes()
    key = key_of([source_of(__file__), shard_rows, settings])
    taught_ids: list[int] = cached(_CACHE, key, scan)["ids"]
    return taught_ids


def _token_tables(model: Any) -> list[Any]:
    """Return the embedding and, if there is one, the head."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [module for module in modules if module is not None]


def _frozen_tables(config: RunConfig, model: Any) -> list[str]:
    """Return the names of the weights of the embedding and the head that the run does not train; a
    single name if they are tied."""
    if config.adapters is None:
        freeze(model, config.model.frozen)
        trained = [module for module in _token_tables(model) if module.weight.requires_grad]
    else:
        from bigtrain.models.layers.adapter_targets import find_saved

        saved_names, _ = find_saved(model, config.adapters)
        trained = [model.get_submodule(name) for name in saved_names]
    names_by_id = names_of(model.named_parameters(remove_duplicate=False))
    frozen = [module.weight for module in _token_tables(model) if module not in trained]
    return list(dict.fromkeys(names_by_id[id(weight)][0] for weight in frozen))


def _problem(
    config: RunConfig, model: Any, dataset: TokenDataset, texts_by_id: dict[int, list[str]]
) -> Problem:
    """Return the problem of tokens with untrained rows. texts_by_id: content of a token's rows."""
    first = min(texts_by_id)
    try:
        from bigtrain.data.tokenizers.tokenizer import load_tokenizer

        huggingface = load_tokenizer(str(dataset.tokenizer_path)).huggingface
        name = f"{huggingface.convert_ids_to_tokens(first)} ({first})"
    except DataError:
        name = str(first)
    num_others = len(texts_by_id) - 1
    other_tokens = f"; so are {num_others} other tokens" if num_others else ""
    rule = (
        f"{dataset.path} teaches token {name}, which {config.model.path} never learned: "
        f"{' and '.join(texts_by_id[first])}, and the run does not train these rows, so that the "
        f"model cannot generate it{other_tokens}"
    )
    alternative = (
        "a base that has learned the token, or a chat template with tokens that it has learned"
    )
    if config.adapters is None:
        return Problem(
            "model.frozen", list(config.model.frozen), rule, f"train them, or {alternative}"
        )
    from bigtrain.models.layers.adapter_checks import SAVED_KEY

    saved = list(config.adapters.modules_to_save)
    is_tied = len({id(module.weight) for module in _token_tables(model)}) == 1
    if is_tied:  # training a copy would untie them
        first_train = "train the full model on it first (model.frozen freezes the rest)"
        return Problem(SAVED_KEY, saved, rule, f"{first_train}, or {alternative}")
    table_names = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if module in _token_tables(model)
    ]
    modules_to_save = list(dict.fromkeys([*saved, *table_names]))
    return Problem(
        SAVED_KEY, saved, rule, f"{SAVED_KEY}=[{', '.join(modules_to_save)}], or {alternative}"
    )
