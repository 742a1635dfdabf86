"""The bytes of `bigtrain tokenize` are those of Megatron-LM's own script, on real text."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from bigtrain.cli import main
from bigtrain.data.tokenizers.encoders import FAST_ENCODERS

DATA = Path(__file__).parents[2] / "data" / "megatron"
"""24 paragraphs of the Apache license, and documents that are empty or hard to tokenize."""
LARGE_VOCABULARY = 70_000

# Made by Megatron-LM at d98e8a64ddf34856e74b24714e3bedb2f5a39553, tokenizers 0.23.3, transformers
# 5.23.0; for int32 with the tokenizer that `tokenizer_of` writes:
#   python tools/preprocess_data.py --input documents.jsonl --output-prefix x --append-eod \
#     --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --workers 1
# then sha256sum x_text_document.bin x_text_document.idx. The script was not changed; it imports
# triton, and Python 3.12's typing.override, which a sitecustomize gave to Python 3.11.
MEGATRON = {
    "uint16": (
        "df209ac5aeb96c3d4763f9d2c27cefa605f9568c9c5e3cea2d0afc072211f33c",
        "7e04aef83ef80ab98d7e61d0c4d3a027053610c27222c1447f7bc86e046f78ca",
    ),
    "int32": (
        "b15fba8cd14bb82179a1319c9802f06019edac55e699ef6032ee55d32d472e16",
        "2bac31b52e1511d61b0b9752ab22764ec58fe443fc4e370261568f378f97b100",
    ),
}


def tokenizer_of(dtype: str, directory: Path) -> Path:
    """The checked-in tokenizer; for int32 with tokens that no text has, up to 70,000 of them."""
    output = Path(shutil.copytree(DATA / "tokenizer", directory / dtype))
    if dtype == "int32":
        tree = json.loads((output / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = tree["model"]["vocab"]
        for number in range(len(vocabulary), LARGE_VOCABULARY):
            vocabulary[f"unused {number}"] = number
        (output / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    return output


@pytest.mark.parametrize(
    ("dtype", "encoder"),
    [
        *(("uint16", encoder) for encoder in (*FAST_ENCODERS, "reference")),
        pytest.param("int32", "reference", marks=pytest.mark.slow),
    ],
)
def test_equal_to_megatrons_own_script(dtype: str, encoder: str, tmp_path: Path) -> None:
    command = ["tokenize", "--input", str(DATA / "documents.jsonl"), "--encoder", encoder]
    command += ["--tokenizer", str(tokenizer_of(dtype, tmp_path)), "--parse-special-tokens"]
    assert main([*command, "--output", str(tmp_path / "d")]) == 0
    checksums = [
        hashlib.sha256((tmp_path / "d" / f"train-00000.{suffix}").read_bytes()).hexdigest()
        for suffix in ("bin", "idx")
    ]
    assert tuple(checksums) == MEGATRON[dtype]
