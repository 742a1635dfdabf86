"""Self-checks come to every length at which the run's model begins to do something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.masking_utils import causal_mask_function

from bigtrain.models.equivalence import thresholds
from bigtrain.models.equivalence.document_isolation import find_isolation
from bigtrain.models.equivalence.parameter_plan import find_gradient_reach
from bigtrain.models.equivalence.proxy_model import build_proxy_model, document_positions
from bigtrain.models.equivalence.reductions import with_heads
from bigtrain.models.equivalence.thresholds import (
    _Experiments,
    _set,
    cross_thresholds,
    find_thresholds,
    numbers_of,
)
from bigtrain.models.parallel.sequence import SequenceParallel
from tests.support.longrope import longrope
from tests.unit.models.equivalence.test_sequence_parallel import problems
from tools.tiny_models import tiny_config


def test_lengths_that_samples_pass_are_made_small_in_their_order() -> None:
    config = CONFIG_MAPPING["phi3"](sliding_window=2047, pad_token_id=None, **longrope(48, 4096))
    cross_thresholds(config, 8192, 24)
    rotary = config.rope_parameters["original_max_position_embeddings"]
    assert (config.sliding_window, rotary) == (13, 14)
    assert config.original_max_position_embeddings == rotary

    config = CONFIG_MAPPING["phi3"](sliding_window=2047, pad_token_id=None, **longrope(48, 4096))
    cross_thresholds(config, 4096, 64)
    rotary = config.rope_parameters["original_max_position_embeddings"]
    assert (config.sliding_window, rotary) == (33, 4096)

    config = CONFIG_MAPPING["llama4_text"]()
    cross_thresholds(config, 8192, 24)  # the last position is scaled, and no chunk begins
    assert (config.attention_chunk_size, config.floor_scale) == (8192, 14)
    with pytest.raises(ValueError, match="2 tokens do not cross 2 different lengths"):
        cross_thresholds(CONFIG_MAPPING["llama4_text"](floor_scale=7), 10000, 2)


def test_layers_keep_their_windows() -> None:
    config = CONFIG_MAPPING["gemma3_text"](num_hidden_layers=8)
    model = build_proxy_model(config, "sdpa", [with_heads(2)], sequence_length=8192)
    assert model.config.sliding_window == 13
    assert model.config.layer_types == config.layer_types[:6]
    assert config.sliding_window == 4096


LARGE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "gemma3_text": {"sliding_window": 1024, "head_dim": 16, "num_hidden_layers": 6},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "attn_temperature_tuning": False,
        "no_rope_layers": [1, 1],
    },
}


@pytest.mark.parametrize(
    "model_type",
    ["mistral", pytest.param("gemma3_text", marks=pytest.mark.slow), "llama4_text"],
)
def test_ignored_windows_and_chunks_are_found(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `bigtrain parity` and the trial missed: their few tokens never came to the window."""
    own = SequenceParallel._mask

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs |= {"mask_function": causal_mask_function, "local_size": None}
        return own(self, *args, **kwargs)

    assert problems(model_type, sequence_length=16384, **LARGE[model_type]) == []
    monkeypatch.setattr(SequenceParallel, "_mask", without)
    (problem,) = problems(model_type, sequence_length=16384, **LARGE[model_type])
    assert "splitting the sequence changes the logits" in str(problem)
    assert problems(model_type, sequence_length=1024, **LARGE[model_type]) == []


def test_a_choice_by_parts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"pad_token_id": None, **longrope(8, 4096)}
    for size, isolate in ((2, True), (4, False)):
        assert problems("phi3", size, sequence_length=8192, isolate=isolate, **keys) == []

    def of_part(_self: Any, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.full_like(position_ids, int(position_ids.max()) + 1)

    monkeypatch.setattr(SequenceParallel, "_document_lengths", of_part)
    for size, isolate in ((2, True), (4, False)):
        (problem,) = problems("phi3", size, sequence_length=8192, isolate=isolate, **keys)
        assert "splitting the sequence changes the logits" in str(problem)
    assert problems("phi3", sequence_length=4096, **keys) == []


def test_a_run_is_refused_for_what_its_samples_reach_alone() -> None:
    """From 8192 tokens on llama4 scales by positions that it counts itself."""
    values = {key: LARGE["llama4_text"][key] for key in ("head_dim", "num_local_experts")}
    values |= {"intermediate_size_mlp": 64, "num_hidden_layers": 4}
    assert problems("llama4_text", sequence_length=8191, **values) == []
    (problem,) = problems("llama4_text", sequence_length=8192, **values)
    assert problem.remedy == "parallel.sequence=1"
    config = CONFIG_MAPPING["llama4_text"](**values, num_attention_heads=4, num_key_value_heads=2)
    assert find_isolation(config, "sdpa", 8191)[1] == ""
    assert (
        "their logits differ from those of the separate" in find_isolation(config, "sdpa", 8192)[1]
    )


V4: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "hc_mult": 2,
    "partial_rotary_factor": 0.5,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
}
"""A small DeepSeek-V4; its lengths are the tests'."""


def deepseek_v4(sparse_rate: int, heavy_rate: int, top_k: int, window: int) -> Any:
    rates = {"compressed_sparse_attention": sparse_rate, "heavily_compressed_attention": heavy_rate}
    lengths = {"index_topk": top_k, "sliding_window": window}
    return CONFIG_MAPPING["deepseek_v4"](**V4, compress_rates=rates, **lengths)


FOUND: list[tuple[str, Any, dict[str, int]]] = [
    # A budget of entries of 4 tokens, and entries of 4 and 128 tokens.
    ("rates", lambda: deepseek_v4(4, 128, 512, 90), {"128": 128, "512": 2052, "4": 4}),
    # The budget shows in samples as soon as entries are short.
    ("budget", lambda: deepseek_v4(64, 96, 32, 200), {"64": 64, "32": 2112, "200": 201}),
    (
        "dynamic",
        lambda: CONFIG_MAPPING["llama"](
            hidden_size=32,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_hidden_layers=2,
            max_position_embeddings=200,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        ),
        {"200": 201},
    ),
    # Classes of which no small model could be built before.
    ("per_layer", lambda: CONFIG_MAPPING["gemma4_text"](sliding_window=100), {"100": 101}),
    ("token_ids", lambda: CONFIG_MAPPING["cwm"](sliding_window=100), {"100": 101}),
]
"""Configurations, and the first lengths of their numbers."""


@pytest.mark.parametrize(
    ("make", "lengths"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in ("rates", "budget")))
        for name, *case in FOUND
    ],
)
def test_lengths_are_found_by_changing_numbers(make: Any, lengths: dict[str, int]) -> None:
    found = find_thresholds(make(), 4096)
    assert found is not None
    by_number = {str(t.number): t.first_length(t.number) for t in found}
    assert {number: by_number.get(number) for number in lengths} == lengths


def test_numbers_become_small_where_samples_cross_them() -> None:
    config = deepseek_v4(64, 96, 32, 200)
    cross_thresholds(config, 4096, 24)
    rates = config.compress_rates
    assert rates["compressed_sparse_attention"] == 4
    assert rates["heavily_compressed_attention"] in range(13, 17)
    assert 4 * (config.index_topk + 1) in range(13, 24)
    assert config.sliding_window in range(13, 17)
    config = deepseek_v4(64, 96, 32, 200)
    cross_thresholds(config, 80, 24)  # none but entries of 64 tokens
    assert config.compress_rates["heavily_compressed_attention"] == 96
    assert (config.index_topk, config.sliding_window) == (32, 200)
    assert config.compress_rates["compressed_sparse_attention"] < 24


@pytest.mark.slow
def test_documents_are_not_isolated_where_entries_are_longer_than_the_samples_of_trials() -> None:
    config = deepseek_v4(64, 128, 512, 128)
    assert find_isolation(config, "auto", 48)[1] == ""
    assert "packed documents are not isolated" in find_isolation(config, "auto", 512)[1]


def test_numbers_of_layers_and_single_layers() -> None:
    """A number of layers is no threshold, and values of single layers are numbers."""
    assert find_thresholds(tiny_config("xlnet"), 64) == ()
    config = tiny_config("gemma4_text")
    config.per_layer_config = {1: {"head_dim": 32, "sliding_window": 5}, 3: {"head_dim": 32}}
    (path,) = numbers_of(config)["sliding_window=5"]
    _set(config, path, 7)
    assert config.per_layer_config[1].sliding_window == 7


def test_the_probe_is_as_long_as_samples_where_thresholds_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Experiments, "_build_base", lambda _: False)
    monkeypatch.setattr(thresholds, "trial_key", lambda *_: None)
    config = deepseek_v4(4, 128, 512, 128)
    assert find_thresholds(config, 256) is None
    compressors = [n for n in find_gradient_reach(config, 256).absent or () if "indexer" not in n]
    assert [name for name in compressors if ".compressor." in name] == []


def test_documents_on_both_sides() -> None:
    positions = document_positions(4, 16)
    assert positions.shape == (4, 16)
    longest = [int(row.max()) + 1 for row in positions]
    assert longest == [11, 5, 11, 5]


def test_a_first_token_that_sees_later_tokens_may_differ_first() -> None:
    """No sample of no tokens is computed (prophetnet's logits depend on later tokens)."""

    class Acausal(torch.nn.Module):
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            assert input_ids.numel()
            logits = input_ids.float()[..., None] + self.factor * input_ids.sum()
            return SimpleNamespace(logits=logits)

    assert thresholds._first_difference(Acausal(1), Acausal(2)) == 1
