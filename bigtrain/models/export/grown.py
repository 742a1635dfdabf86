"""A pretrained model with a grown vocabulary, written as a new Hugging Face directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bigtrain.errors import ModelError
from bigtrain.models.build import build_model, read_in_turn
from bigtrain.models.configuration import load_hf_config, vocabulary_size
from bigtrain.models.export.base_record import BaseRecord, record_base
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.models.weights.export_hf import DTYPES
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.models.weights.vocabulary import (
    VocabularyResize,
    base_configuration,
    grown_configuration,
    grown_weights,
)
from bigtrain.settings.run_config import ModelSection, VocabularySection

_PROBE_TOKENS = 32


def export_grown(
    source: str,
    tokenizer_directory: Path,
    tokens: int,
    output: Path,
    *,
    vocabulary: VocabularySection,
    seed: int,
) -> VocabularyResize:
    """Write the model `source` (directory or hub name) with rows for a tokenizer of `tokens`
    tokens; return its growth, with notes on all further differences from `source`.

    One process; holds the weights of a single file. Raises ModelError if the model need not grow,
    and as `export_model`.
    """
    section = ModelSection(path=source, vocabulary=vocabulary)
    base = load_hf_config(section)
    hf_config, growth = grown_configuration(section, base, tokens)
    if growth is None:
        raise ModelError(
            f"--model = {source!r}: its {vocabulary_size(base)} rows are enough for the "
            f"tokenizer's {tokens} tokens -> use it as it is, with that tokenizer"
        )
    # The base's weights with new rows.
    base_weights = find_weights(source, base_configuration(hf_config, growth))
    weights = grown_weights(
        base_weights, hf_config, growth, section, seed, on_main_rank=lambda work: work()
    )
    # Logits that the export must reproduce.
    name = str(hf_config.dtype).removeprefix("torch.")
    dtype = name if name in DTYPES else "float32"
    model = build_model(section, hf_config, seed=0, dtype=DTYPES[dtype], weights="left").eval()
    read_in_turn(model, weights)
    ids = Probe.make_input(growth.after, _PROBE_TOKENS)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.float()
    with TemporaryDirectory() as name:
        record_base(source, base_weights, Path(name))
        notes = export_model(
            weights.tensors,
            hf_config,
            Destination(output, tokenizer_directory, dtype=None),
            probe=Probe(ids, logits, dtype),
            base=BaseRecord(Path(name)),
        )
    return replace(growth, notes=tuple(notes))
