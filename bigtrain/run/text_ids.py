"""Ids that begin and end the texts of a run: from the manifests of the data, for the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigtrain.data.samples.source import SourceDataset, StreamDataset
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.manifest import TokenizerRecord
from bigtrain.models.text_ids import ModelTextIds, ShardTextIds, model_text_ids
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.text_record import TextRecord


def text_record(tokenizers: Sequence[TokenizerRecord]) -> TextRecord:
    """Return how texts of a mixture's datasets begin and end. The first plain-text dataset decides
    how they begin; conversations begin according to their template."""
    plain_tokenizers = [tokenizer for tokenizer in tokenizers if tokenizer.chat_template is None]
    first = (plain_tokenizers or tokenizers)[0]
    document_end_ids = [tokenizer.end_of_document_id for tokenizer in (first, *tokenizers)]
    answer_end_ids = sorted(
        {token_id for tokenizer in tokenizers for token_id in tokenizer.answer_end_ids or ()}
    )
    stop_ids = tuple(dict.fromkeys((*document_end_ids, *answer_end_ids)))
    return TextRecord(first.beginning_ids, first.end_of_document_id, stop_ids)


def resolve_text_ids(
    config: RunConfig, hf_config: Any, datasets: Sequence[TokenDataset]
) -> ModelTextIds:
    """Return `hf_config` with the ids that begin and end the texts of `datasets`, and the record of
    the ids."""
    tokenizers = [dataset.table.tokenizer for dataset in datasets]

    def beginning_token() -> int | None:
        from bigtrain.data.tokenizers.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(str(datasets[0].tokenizer_path)).huggingface
        return None if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)

    def ids_are_in_data() -> bool:
        """Return whether bigtrain tokenized the data. Rows that a user or a class tokenized need
        not begin and end with the ids of the tokenizer."""
        for dataset in datasets:
            if isinstance(dataset, SourceDataset | StreamDataset):
                return False
            options = dataset.manifest.options
            if options.chat and options.chat_format == "tokens":
                return False
        return True

    shards = ShardTextIds(
        text_record(tokenizers),
        ", ".join(str(dataset.path) for dataset in datasets),
        max(tokenizer.vocab_size for tokenizer in tokenizers),
        ids_are_in_data,
        beginning_token,
    )
    return model_text_ids(
        config.model, hf_config, shards, same_tokenizer=not config.data.allow_other_tokenizer
    )
