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
    first = next(
        (tokenizer for tokenizer in tokenizers if tokenizer.chat_template is None), tokenizers[0]
    )
    documents = [
        first.end_of_document_id,
        *(tokenizer.end_of_document_id for tokenizer in tokenizers),
    ]
    answers = sorted(
        {number for tokenizer in tokenizers for number in tokenizer.answer_end_ids or ()}
    )
    stops = tuple(dict.fromkeys((*documents, *answers)))
    return TextRecord(first.beginning_ids, first.end_of_document_id, stops)


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

    def are_written() -> bool:
        # Rows that a user or a class tokenized begin and end as they like.
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
        are_written,
        beginning_token,
    )
    return model_text_ids(
        config.model, hf_config, shards, same_tokenizer=not config.data.allow_other_tokenizer
    )
