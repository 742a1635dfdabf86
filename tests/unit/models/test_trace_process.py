"""A trace in a process of its own is the trace, with less imported."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from bigtrain.models.configuration import load_hf_config, with_mtp_layers
from bigtrain.models.tracing import trace_process
from bigtrain.models.tracing.meta_trace import trace_model
from bigtrain.models.tracing.trace_process import ABSENT, EMPTY, NoTraceProcessError, trace_apart
from bigtrain.settings.run_config import ModelSection
from tests.support.worlds import ROOT

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **SMALL, "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "first_k_dense_replace": 1,
}  # fmt: skip
MOE = {**SMALL, "model_type": "qwen2_moe", "num_experts": 4}  # asks the real sympy


@pytest.mark.slow
@pytest.mark.parametrize(("config", "trains_mtp"), [(LATENT, True), (MOE, False)])
def test_it_is_the_trace_of_this_process(config: dict[str, Any], trains_mtp: bool) -> None:

    section = ModelSection(config=config, frozen=("*layers.0.*",))
    hf_config = with_mtp_layers(load_hf_config(section), trains=trains_mtp)
    own = trace_model(hf_config, torch.bfloat16, frozen=section.frozen)
    assert own.kinds[own.layers[0]].num_frozen > 0
    assert trace_apart(section, "bfloat16", trains_mtp=trains_mtp) == own
    assert own.num_further_losses == trains_mtp


def test_where_it_cannot_be_the_caller_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    section = ModelSection(config={**SMALL, "model_type": "llama"})
    monkeypatch.setattr(trace_process.sys, "executable", "/nowhere/python")
    with pytest.raises(NoTraceProcessError):
        trace_apart(section, "bfloat16")


@pytest.mark.slow
def test_what_is_left_out_is_not_imported_and_is_in_nobody_s_way() -> None:
    """Also with torch's shape functions that ask symbols for truth values."""
    code = (
        "import json, sys\n"
        "from bigtrain.models.tracing.trace_process import leave_out\n"
        "leave_out()\n"
        "import torch, transformers.modeling_utils\n"
        "x = torch.arange(6, device='meta').view(2, 3) + torch.ones(3, device='meta')\n"
        "files = [getattr(m, '__file__', None) for m in sys.modules.values() if m]\n"
        "print(json.dumps([list(x.shape), [f for f in files if f]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    shape, files = json.loads(done.stdout.splitlines()[-1])
    assert shape == [2, 3]
    folders = [f"/site-packages/{name.replace('.', '/')}/" for name in (*ABSENT, *EMPTY)]
    assert [file for file in files if any(folder in file for folder in folders)] == []
