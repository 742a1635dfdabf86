"""How parameters are cut: shards tile them, degrees that cannot be are refused by name."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bigtrain.engine.checkpoint.fragments import MASTER, Fragment
from bigtrain.errors import ModelError
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.tensor_parallel import check_tensor_size
from bigtrain.models.parallel.collectives import sum_gradient
from bigtrain.models.parallel.grouped_experts import PADDED
from bigtrain.models.parallel.sharding import Shard, even_ranges, padded_range
from bigtrain.models.parallel.tensor import _shard_of_style, check_shards, tensor_plan
from bigtrain.settings.run_config import AdaptersSection, ModelSection
from tests.support.tiers import examples

LLAMA: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 63,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def shards_of(shape: tuple[int, ...], dim: int, packed: int, parts: int) -> list[Shard]:
    """All processes' shards of a parameter cut evenly, or with padding where it is not packed."""
    shards = []
    for rank in range(parts):
        if packed:
            width = shape[dim] // packed
            start, stop = even_ranges(width, parts, rank)
            ranges = tuple((n * width + start, n * width + stop) for n in range(packed))
            shards.append(Shard(shape, dim, ranges, packed * (stop - start), primary=True))
        else:
            span, rows = padded_range(shape[dim], parts, rank)
            shards.append(Shard(shape, dim, (span,), rows, primary=True))
    return shards


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[Shard], int]:
    """Shards of a parameter, and the number of parts that ZeRO makes of each."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    packed, parts = draw(st.integers(0, 2)), draw(st.integers(1, 4))
    if packed:
        width = draw(st.integers(parts, 2 * parts + 1))
        shape = (*shape[:dim], packed * width, *shape[dim + 1 :])
    return shards_of(shape, dim, packed, parts), draw(st.integers(1, 3))


@settings(max_examples=examples(100))
@given(cuts())
def test_fragments_of_shards_tile_the_parameter(case: tuple[list[Shard], int]) -> None:
    shards, num_partitions = case
    shape = shards[0].shape
    full = torch.arange(1, math.prod(shape) + 1).reshape(shape)
    rebuilt = torch.zeros_like(full)
    for shard in shards:
        local = shard.take(full)
        assert local.shape == shard.local_shape
        capacity = -(-local.numel() // num_partitions)
        for rank in range(num_partitions):
            start = min(rank * capacity, local.numel())
            flat = local.view(-1)[start : start + capacity]
            for box, view in Fragment("x", shard, start, {MASTER: flat}).parts(MASTER):
                assert not rebuilt[box.slices].any()  # nothing twice
                rebuilt[box.slices] = view
    assert torch.equal(rebuilt, full)


def test_padding_is_zero() -> None:
    full = torch.ones(5, 2)
    last = shards_of((5, 2), 0, 0, 2)[1]
    assert last.take(full).tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


def config(model_type: str = "llama", **changes: Any) -> Any:
    return CONFIG_MAPPING[model_type](**{**LLAMA, **changes})


@pytest.mark.parametrize("size", [1, 2, 8])
def test_legal_degrees(size: int) -> None:
    assert check_tensor_size(config(), size) == []


def test_heads_that_do_not_divide_name_the_nearest_degrees() -> None:
    (problem,) = check_tensor_size(config(), 3)
    assert problem.key == "parallel.tensor"
    assert problem.value == 3
    assert "num_attention_heads = 8 and num_key_value_heads = 2" in problem.rule
    assert problem.remedy == "nearest: 2 or 4"


def test_gathered_attention_needs_no_whole_heads() -> None:
    assert check_tensor_size(config("phi3", pad_token_id=0), 3) == []


def test_adapters_beside_every_kind_of_cut() -> None:
    for model_type in ("llama", "phi3", "minicpm3"):
        assert check_tensor_size(config(model_type, pad_token_id=0), 2, AdaptersSection()) == []


def test_adapters_beside_what_is_cut_in_another_way_are_refused() -> None:
    changed = config()
    changed.base_model_tp_plan = {
        **changed.base_model_tp_plan,
        "layers.*.mlp.up_proj": "all_reduce",
    }
    assert check_tensor_size(changed, 2) == []
    one, two = check_tensor_size(changed, 2, AdaptersSection(targets=("up_proj", "q_proj")))
    assert (one.key, one.value) == ("adapters.targets", "model.layers.0.mlp.up_proj")
    assert "'all_reduce'" in one.rule
    assert two.value == "model.layers.1.mlp.up_proj"


def test_architecture_without_a_plan_is_refused() -> None:
    gpt2 = CONFIG_MAPPING["gpt2"](n_embd=32, n_head=4, n_layer=2, vocab_size=64)
    with pytest.raises(
        ModelError, match=r"no tensor-parallel plan for model_type gpt2 -> parallel"
    ):
        check_tensor_size(gpt2, 2)


def test_width_smaller_than_the_degree_is_refused_by_name() -> None:
    narrow = config(intermediate_size=3, num_key_value_heads=8)
    with pytest.raises(
        ModelError, match=r"mlp\.gate_proj\.weight .* -> parallel\.tensor=3 or less"
    ):
        check_tensor_size(narrow, 4)


def test_uneven_parts_with_dropout_are_refused() -> None:
    """Processes would draw different amounts of randomness, and then different masks."""
    uneven = config("starcoder2", residual_dropout=0.1)
    refusal = (
        r"mlp\.c_fc\.weight .* with dropout between its layers \(.*mlp\.residual_dropout = 0\.1"
    )
    with pytest.raises(ModelError, match=refusal):
        check_tensor_size(uneven, 2)
    assert check_tensor_size(config("starcoder2", residual_dropout=0.0), 2) == []


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        # Of the class for classification: no causal model of this architecture reads it.
        ("gpt_neox", {"classifier_dropout": 0.1}),
        # On hidden states, of which every process has the same.
        ("gpt_neox", {"hidden_dropout": 0.1}),
        ("phi", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "num_key_value_heads": 8}),
    ],
)
def test_dropout_elsewhere_does_not_matter(model_type: str, changes: dict[str, Any]) -> None:
    """Only what is drawn for the uneven part itself counts."""
    assert check_tensor_size(config(model_type, **changes), 2) == []


@pytest.mark.parametrize(("width", "parts"), [(24, [16, 8]), (20, [10, 10]), (8, [4, 4])])
def test_experts_are_cut_in_whole_units_where_there_are_enough(
    width: int, parts: list[int]
) -> None:
    """Of others, no grouped matrix product takes the parts."""
    uneven = config("qwen3_moe", num_experts=2, moe_intermediate_size=width)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(uneven)
    plan, group = tensor_plan(model), "model.layers.0.mlp.experts"
    for rank, part in enumerate(parts):
        name, shape = f"{group}.gate_up_proj", (2, 2 * width, 32)
        up = _shard_of_style(model, name, "packed_colwise", shape, rank=rank, size=2)
        bias = _shard_of_style(
            model, f"{name}_bias", "packed_colwise", shape[:2], rank=rank, size=2
        )
        assert plan[f"{group}.gate_up_proj"] == "packed_colwise"
        assert up.local_shape == (2, 2 * part, 32)
        assert bias.local_shape == (2, 2 * part)


@pytest.mark.parametrize(("width", "kind"), [(24, "grouped_mm"), (20, PADDED), (7, PADDED)])
def test_experts_that_no_grouped_product_takes_are_padded(width: int, kind: str) -> None:
    section = ModelSection(
        config={
            "model_type": "qwen3_moe",
            **LLAMA,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": width,
        }
    )
    model: Any = build_model(section, load_hf_config(section), seed=0)
    assert model.config._experts_implementation == kind
    assert model.bfloat16()(input_ids=torch.arange(6)[None]).logits.isfinite().all()


def test_unknown_style_is_refused_by_name() -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config())
    plan = tensor_plan(model) | {"model.norm.weight": "diagonal"}
    with pytest.raises(ModelError, match=r"model\.norm\.weight: unknown style 'diagonal'"):
        check_shards(model, plan, 2)


def test_tied_embeddings_get_the_rule_of_their_head() -> None:
    tied = CONFIG_MAPPING["gpt_neox"](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(tied)
    plan = tensor_plan(model)
    assert plan["gpt_neox.embed_in.weight"] == "embedding_rowwise"
    assert plan["lm_head.weight"] == "colwise_gather_output"


def test_what_asks_for_a_summed_gradient_is_freed_with_it(tmp_path: Path) -> None:
    """A view would hold its base, and the base the view, in a circle that no collector sees."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    group = dist.ProcessGroupGloo(store, 0, 1)
    layer = torch.nn.Linear(4, 4)
    asked = layer(torch.ones(2, 4))
    first, second = sum_gradient(asked, group), sum_gradient(asked, group)
    assert first is second
    assert first.data_ptr() == asked.data_ptr()
    assert torch.equal(first, asked)
    freed = weakref.ref(asked)
    del asked, first, second
    gc.collect()
    assert freed() is None
