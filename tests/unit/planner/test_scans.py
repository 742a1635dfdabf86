"""FLOPs of recurrences against those that torch counts in the functions of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from bigtrain.models.tracing.meta_trace import trace_model
from bigtrain.planner.flops import ModelShape, flops_per_token, model_shape
from bigtrain.planner.layout import Layout
from bigtrain.planner.memory import peak_memory
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.scans import DELTA_CHUNK, DeltaRule, SelectiveScan, StateSpace, scan_of
from bigtrain.planner.tables.engines import engine_named
from tests.support.hybrids import hybrid_config
from tools.tiny_models import tiny_config

TOKENS = 4 * DELTA_CHUNK


def counted(run: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(("heads", "key_size", "value_size"), [(2, 16, 16), (3, 8, 24)])
def test_the_delta_rule_has_the_counted_products(
    heads: int, key_size: int, value_size: int
) -> None:
    keys, values = (torch.rand(1, TOKENS, heads, size) for size in (key_size, value_size))
    gates = torch.rand(1, TOKENS, heads)
    total = counted(lambda: torch_chunk_gated_delta_rule(keys, keys, values, -gates, gates))
    # torch does not count the solution of a triangular system.
    system = heads * DELTA_CHUNK * (key_size + value_size)
    assert total / TOKENS == DeltaRule(heads, key_size, value_size).flops() - system


@pytest.mark.parametrize(
    ("heads", "head_size", "states", "chunk"), [(2, 16, 8, 64), (4, 8, 32, 32)]
)
def test_mamba_2_has_the_counted_products(
    heads: int, head_size: int, states: int, chunk: int
) -> None:
    inputs, steps = torch.rand(1, TOKENS, heads, head_size), torch.rand(1, TOKENS, heads)
    read = torch.rand(1, TOKENS, 1, states)
    total = counted(lambda: mamba2_chunk_scan(inputs, steps, -torch.rand(heads), read, read, chunk))
    # The states of all chunks are multiplied with decays, which does not matter for a long chunk.
    chunks = TOKENS // chunk
    handed_on = 2 * (chunks + 1) ** 2 * heads * head_size * states
    assert total - handed_on == TOKENS * StateSpace(heads, head_size, states, chunk).flops()


@pytest.mark.parametrize(
    ("model_type", "scan"),
    [
        ("qwen3_5_text", DeltaRule(4, 8, 8)),
        ("kimi_linear", DeltaRule(2, 8, 8)),
        ("bamba", StateSpace(4, 16, 8, 8)),
        ("jamba", SelectiveScan(64, 4)),
        ("lfm2", None),
        ("recurrent_gemma", None),
    ],
)
def test_scans_are_read_of_configurations(model_type: str, scan: Any) -> None:
    assert scan_of(hybrid_config(model_type)) == scan


def test_recurrent_layers_have_a_scan_instead_of_attention() -> None:
    """One layer of two; in Falcon-H1 and the hybrid layers of Zamba 2, both."""
    shape = model_shape(hybrid_config("bamba"), [("weight", 100)], "embed", tied=False)
    assert shape == ModelShape(100, 32, StateSpace(4, 16, 8, 8).flops())
    longer = flops_per_token(shape, 64) - flops_per_token(shape, 32)
    assert longer == 12 * 32 * 32
    convolutions = model_shape(hybrid_config("lfm2"), [("weight", 100)], "embed", tied=False)
    assert convolutions == ModelShape(100, 32)
    both = model_shape(hybrid_config("falcon_h1"), [], "embed", tied=False)
    assert both is not None
    assert both.attention_width == 2 * 32
    assert both.scan_flops == 2 * StateSpace(4, 16, 8, 8).flops()
    only = model_shape(tiny_config("mamba2"), [], "embed", tied=False)
    assert only is not None
    assert only.attention_width == 0
    assert only.scan_flops


def test_ranks_that_share_a_sample_save_the_columns_of_the_transition() -> None:
    model = trace_model(hybrid_config("qwen3_5_text"), torch.float32)
    recurrent, attention = (model.kinds[index] for index in model.layers)
    assert (recurrent.state_columns, attention.state_columns) == (4 * 8, 0)
    without = replace(model, kinds=tuple(replace(kind, state_columns=0) for kind in model.kinds))
    engine = engine_named("deepspeed")

    def activations(costs: ModelCosts, **degrees: int) -> float:
        layout = Layout(sequence_length=128, micro_batch_size=1, zero_stage=0, **degrees)
        return peak_memory(costs, layout, engine).activations

    assert activations(model, data_size=2) == activations(without, data_size=2)
    added = activations(model, sequence_size=2) - activations(without, sequence_size=2)
    assert added == pytest.approx(engine.saved * 4 * 5 * 32 * 64)


@pytest.mark.parametrize("chunk", [64, 256])
def test_a_trace_is_of_complete_chunks(chunk: int) -> None:
    """A sample shorter than a chunk would be padded, and cost as much as the chunk."""
    config = hybrid_config("bamba", mamba_chunk_size=chunk)
    short, long = (
        trace_model(config, torch.float32, sequence_length=tokens).kinds[0]
        for tokens in (32, 4 * chunk)
    )
    assert short.saved_bytes_cut == pytest.approx(long.saved_bytes_cut, rel=0.1)
    assert short.moved_bytes_cut == pytest.approx(long.moved_bytes_cut, rel=0.1)
