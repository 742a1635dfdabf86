"""Recurrent layers with documents in a sample, against documents in samples of their own."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from bigtrain.models.build import _set_gradient_checkpointing, build_model
from bigtrain.models.equivalence.document_isolation import find_isolation
from bigtrain.models.equivalence.proxy_model import rescale_weights
from bigtrain.models.layers.document_masks import edges_of_documents
from bigtrain.models.layers.parameter_roles import split_by_decay
from bigtrain.models.layers.recurrence import functions, pieces
from bigtrain.models.layers.recurrence.functions import layers_with_functions
from bigtrain.models.layers.recurrence.pieces import SampleDocuments, batches_of
from bigtrain.models.layers.recurrence.restarts import restart_at_documents
from bigtrain.models.parallel.hidden_matrices import hidden_matrices
from bigtrain.settings.run_config import AdaptersSection, ModelSection
from tests.support.hybrids import HYBRIDS, hybrid_config
from tests.unit.models.layers.test_chunked_loss import gradients

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    **ATTENTION,
    **HYBRID,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA_2 = {
    **ATTENTION,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_n_groups": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
NO_EXPERTS = {"num_experts": 1, "num_experts_per_tok": 1}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": DELTA,
    "kimi_linear": {
        **ATTENTION,
        **HYBRID,
        "num_key_value_heads": 2,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "bamba": {**MAMBA_2, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MAMBA_2, "layer_types": ["mamba", "attention"], "num_local_experts": 0},
    "nemotron_h": {
        **ATTENTION,
        "layers_block_type": ["linear_attention", "full_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "falcon_h1": {**MAMBA_2, "mamba_d_ssm": 64},
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 4, "time_step_rank": 4},
    "jamba": {
        **ATTENTION,
        **NO_EXPERTS,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
    },
    "lfm2": {**ATTENTION, "layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {
        **ATTENTION,
        "lru_width": 32,
        "head_dim": 16,
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 16,
    },
    "minimax": {
        **ATTENTION,
        **HYBRID,
        "head_dim": 16,
        "block_size": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "rwkv": {"attention_hidden_size": 32, "intermediate_size": 64},
    "xlstm": {"num_heads": 2, "chunk_size": 16, "embedding_dim": 32},
    "zaya": {
        **ATTENTION,
        **EXPERTS,
        "num_experts_per_tok": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
FAST = ("qwen3_5_text", "kimi_linear", "bamba", "jamba", "lfm2", "recurrent_gemma", "minimax")
LENGTHS = ((70, 1, 2, 69), (3, 64, 74, 1))
"""Longer than the 64 tokens that the delta rule computes together, and shorter than convolutions.
Documents begin inside of 64 tokens, and 64 before others do."""


def hybrid(model_type: str) -> PreTrainedModel:
    """A model whose states remember tens of tokens."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**SIZES, **MODELS[model_type]})
    model = rescale_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "dt" in name and parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) - 3)
            elif name.endswith("A_log"):
                parameter.copy_((torch.rand_like(parameter) * 2 + 0.2).log())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def separate_and_packed(
    model: PreTrainedModel, isolation: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Logits and gradients of documents in samples of their own, and packed."""
    shape = len(LENGTHS), sum(LENGTHS[0])
    ids = torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(*shape, 64, generator=torch.Generator().manual_seed(1))
    rows = zip(ids, LENGTHS, strict=True)
    separate = torch.stack(
        [
            torch.cat([model(input_ids=x[None], use_cache=False).logits[0] for x in row.split(n)])
            for row, n in rows
        ]
    )
    wanted = {"logits": separate.detach(), **gradients(model, (separate * weights).sum())}
    positions = torch.stack(
        [torch.cat([torch.arange(length) for length in row]) for row in LENGTHS]
    )
    undo = isolation.install(model)
    with isolation.document_mask(positions):
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    # Another micro-batch is passed before the layers of this one are computed again.
    with isolation.document_mask(positions.flip(0)), torch.no_grad():
        model(input_ids=ids, position_ids=positions.flip(0), use_cache=False)
    found = {"logits": packed.detach(), **gradients(model, (packed * weights).sum())}
    undo()
    return wanted, found


def errors(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, float]:
    return {
        name: float((found[name] - x).abs().max() / x.abs().max().clamp_min(1e-20))
        for name, x in wanted.items()
        if float(x.abs().max()) > 0
    }


def limit(model_type: str, name: str) -> float:
    """Rounding: decays are sums over all tokens of numbers of both signs, and the states of OLMo's
    layers may change their sign at each token."""
    is_rough = name.endswith(("A_log", "dt_bias")) or model_type == "olmo_hybrid"
    return 2e-5 if is_rough else 1e-5


@pytest.mark.parametrize(
    "model_type",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_packed_documents_are_separate_documents(model_type: str) -> None:
    """Logits and every gradient, of recomputed layers where the class can recompute."""
    model = hybrid(model_type)
    isolation, reason = find_isolation(model.config, "auto", sum(LENGTHS[0]))
    assert reason == ""
    if model.supports_gradient_checkpointing:
        section = ModelSection(config=model_type, gradient_checkpointing="full")
        _set_gradient_checkpointing(model, section)
    worst = errors(*separate_and_packed(model, isolation))
    assert {name: error for name, error in worst.items() if error > limit(model_type, name)} == {}


def test_batches_of_pieces_are_padded_by_less_than_their_length() -> None:
    lengths = [1, 3, 2, 8, 9, 15, 16]
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    batches = batches_of(starts, lengths)
    assert sorted(start for batch in batches for start in batch.starts) == starts
    for batch in batches:
        assert batch.width < 2 * min(batch.lengths)
        assert batch.tokens().shape == (len(batch.starts), batch.width)


def test_a_state_as_wide_as_a_piece_is_no_result_of_tokens() -> None:
    """MiniMax's lightning attention returns a state [B, heads, ...], and documents may have as many
    tokens as it has heads."""
    num_heads = 4

    class Mixer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.cumsum(1), x.new_ones(len(x), num_heads, 3, 3)

    model = torch.nn.ModuleList([Mixer()])
    positions = torch.cat([torch.arange(length) for length in (4, 9, 5, 2, 4)])[None]
    restart_at_documents(model, ["Mixer"])
    x = torch.arange(24.0)[None, :, None]
    with pieces.documents_in_samples(pieces.SampleDocuments(positions)):
        output, state = model[0](x)
    sums = [document.cumsum(1) for document in x.split((4, 9, 5, 2, 4), 1)]
    assert torch.equal(output, torch.cat(sums, 1))
    assert state is None


@pytest.mark.parametrize("has_adapters", [True, False])
def test_no_kernel_leaves_an_adapter_out(
    has_adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of convolution, scan and output projection takes the projection's weight."""
    name, calls = "mamba2_split_conv1d_scan_combined", []
    module = importlib.import_module("transformers.models.bamba.modeling_bamba")

    def kernel(*args: Any, **kwargs: Any) -> None:  # that says that it is not installed
        calls.append(name)

    monkeypatch.setattr(module, name, functools.wraps(getattr(module, name))(kernel))
    section = ModelSection(config=HYBRIDS["bamba"])
    adapters = AdaptersSection(targets=["out_proj"], rank=2) if has_adapters else None
    model = build_model(section, hybrid_config("bamba"), seed=0, adapters=adapters).train()
    ids = torch.arange(3, 19)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert (calls == []) == has_adapters


def test_a_sample_without_documents_is_left_to_the_layer() -> None:
    model = hybrid("qwen3_5_text").eval()
    ids = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    isolation, _ = find_isolation(model.config, "auto", 32)
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        isolation.install(model)
        with isolation.document_mask(None):
            installed = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(plain, installed)


@pytest.mark.parametrize("kind", [functions.CONVOLUTION, functions.MATRIX])
def test_the_probe_sees_what_does_not_start_afresh(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state, or the convolution, of a layer that runs through: the layer is then called for
    each document."""

    def leaky(call: functions.Call) -> torch.Tensor | None:
        return None if call.function.kind == kind else functions.run_by_document(call)

    monkeypatch.setattr("bigtrain.models.layers.recurrence.restarts.run_by_document", leaky)
    isolation, _ = find_isolation(hybrid("qwen3_5_text").config, "auto", 32)
    assert isolation.modules == ("Qwen3_5GatedDeltaNet",)


@pytest.mark.parametrize(("model_type", "chunk"), [("qwen3_5_text", 64), ("bamba", 8)])
def test_the_probe_crosses_what_the_scan_computes_together(
    model_type: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = []

    def noted(call: functions.Call) -> torch.Tensor | None:
        documents = pieces.current_documents()
        if documents is not None and call.chunk:
            edges = edges_of_documents(documents.positions)
            longest.append((call.chunk, int(edges.diff().max())))
        return functions.run_by_document(call)

    monkeypatch.setattr("bigtrain.models.layers.recurrence.restarts.run_by_document", noted)
    assert find_isolation(hybrid(model_type).config, "auto", 32)[1] == ""
    assert {size for size, _ in longest} == {chunk}
    assert all(length > size for size, length in longest)


def test_layers_are_found_by_what_they_call() -> None:
    found = {name: called for name, _, called in layers_with_functions(hybrid("bamba"))}
    fused = "mamba2_split_conv1d_scan_combined"
    assert found == {"model.layers.0.mamba": {"causal_conv1d_fn", "mamba2_chunk_scan", fused}}
    assert not list(layers_with_functions(nn.Linear(2, 2)))


def test_documents_are_copied_to_a_device_once() -> None:
    documents = SampleDocuments(torch.tensor([[0, 1, 0, 1, 2], [0, 0, 1, 2, 3]]))
    device = torch.device("cpu")
    assert documents.numbers_on(device) is documents.numbers_on(device)
    batches, places = documents.numbers_on(device)
    tokens = torch.cat([batch.flatten() for batch in batches])
    assert tokens[places].tolist() == list(range(10))


NOT_DECAYED = {
    "qwen3_5_text": {"A_log", "dt_bias"},
    "kimi_linear": {"A_log", "dt_bias"},
    "mamba2": {"A_log", "dt_bias", "D"},
    "bamba": {"A_log", "dt_bias", "D"},
    "nemotron_h": {"A_log", "dt_bias", "D"},
    "falcon_mamba": {"A_log", "D", "dt_proj.bias"},
    "jamba": {"A_log", "D", "dt_proj.bias"},
    "recurrent_gemma": {"recurrent_param", "recurrent_gate_bias"},
    "rwkv": {"time_decay", "time_first"},
}
"""Decays, time steps and skips. Mamba's published code marks A_log, D and the bias of time steps by
``_no_weight_decay`` (state-spaces/mamba, mamba_simple.py and mamba2.py), also in Nemotron-H's
training by Megatron-LM (megatron/core/ssm/mamba_mixer.py)."""


@pytest.mark.parametrize("model_type", NOT_DECAYED)
def test_decays_have_no_weight_decay_and_are_not_matrices(model_type: str) -> None:
    model = hybrid(model_type)
    kept = {id(p) for p in split_by_decay(model, decay_embeddings=True).no_decay}
    names = {name: id(parameter) for name, parameter in model.named_parameters()}
    states = {n for n in names if n.endswith(tuple(f".{e}" for e in NOT_DECAYED[model_type]))}
    assert len(states) >= len(NOT_DECAYED[model_type])
    assert {name for name in states if names[name] not in kept} == set()
    convolutions = {name for name in names if "conv" in name}
    assert hidden_matrices(model).keys().isdisjoint(states | convolutions)
