"""Exports a checkpoint in a process of its own, and writes how far its memory rose.

Arguments: a directory with `checkpoint`, `hf` (for its configuration), `tokenizer` and
`probe.safetensors`; the largest size of a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bigtrain.engine.checkpoint.lazy import open_weights
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.settings.run_config import ModelSection
from tests.parity.import_worker import Memory


def main() -> None:
    place = Path(sys.argv[1])
    hf_config = load_hf_config(ModelSection(path=str(place / "hf")))
    probe = Probe.load(place / "probe.safetensors", "float32")
    # Not the libraries' own memory, which the first use of each takes.
    empty_model(hf_config)
    AutoTokenizer.from_pretrained(place / "tokenizer")
    memory = Memory()
    export_model(
        open_weights(place / "checkpoint"),
        hf_config,
        Destination(place / "again", place / "tokenizer", "float32", max_shard_size=sys.argv[2]),
        probe=probe,
    )
    (place / "risen").write_text(json.dumps(memory.risen_bytes()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
