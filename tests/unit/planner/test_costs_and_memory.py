"""Memory by hand counts: states by ZeRO's table, what autograd keeps, stages and their batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bigtrain.planner.layout import Layout, OptimizerCosts
from bigtrain.planner.memory import MemoryUse, peak_memory
from bigtrain.planner.model_costs import DenseShape, ModelCosts, closed_form, dense_shape
from bigtrain.planner.stages import stage_layers
from bigtrain.planner.tables.engines import engine_named

ENGINE = engine_named("deepspeed")
GPT = DenseShape(24, 2048, 16, 16, 8192, 50257, gated=False, tied=True, dropout=True,
                 fused_attention=False)  # fmt: skip
LLAMA = DenseShape(32, 4096, 32, 8, 14336, 128256)


def use_of(model: ModelCosts, **changes: Any) -> MemoryUse:
    layout = replace(
        Layout(data_size=8, reduce_bucket_elements=1, gather_bucket_elements=1), **changes
    )
    return peak_memory(model, layout, ENGINE)


def test_a_configuration_gives_its_shape_and_experts_have_none() -> None:
    # fmt: off
    values = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
              "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    # fmt: on
    assert dense_shape(values) == LLAMA
    assert closed_form(LLAMA).num_parameters == 8_030_261_248
    gpt2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
    shape = dense_shape(gpt2)
    assert shape is not None
    assert (shape.intermediate_size, shape.gated) == (3072, False)
    assert dense_shape({**values, "num_local_experts": 8}) is None
    assert dense_shape({"hidden_size": 8}) is None


@pytest.mark.parametrize(
    ("zero", "expected"),
    # Bytes of a parameter on one of 8 ranks, gradients in float32: 2 + 4 + 12;
    # BF16_Optimizer of ZeRO 1 keeps 16-bit gradients beside them.
    [(0, 18.0), (1, 2 + 2 + 4 + 12 / 8), (2, 2 + 4 / 8 + 12 / 8), (3, 18 / 8)],
)
def test_states_are_those_of_the_paper(zero: int, expected: float) -> None:
    model = closed_form(LLAMA)
    use = use_of(model, zero_stage=zero)
    assert (use.states + use.gradients) / model.num_parameters == pytest.approx(expected)


def test_activations_of_a_layer_are_korthikantis() -> None:
    """``s b h (34 + 5 a s / h)``, of which a rank keeps ``10 + (24 + 5 a s / h) / t``."""
    model, s, b, h, a = closed_form(GPT), 1024, 3, 2048, 16
    one = replace(model, layers=(0,))

    def kept(tensor: int) -> float:
        use = use_of(one, micro_batch_size=b, sequence_length=s, tensor_size=tensor)
        return use.activations / (s * b * h) - 6  # without the final norm and the head

    assert kept(1) == pytest.approx(34 + 5 * a * s / h, rel=0.01)
    assert kept(4) == pytest.approx(10 + 24 / 4 + 5 * a * s / h / 4, rel=0.05)


def test_full_recomputation_keeps_the_inputs_and_one_layer() -> None:
    model = closed_form(LLAMA)
    s, h = 2048, 4096
    plain, full = (use_of(model, recompute=kind).activations for kind in ("none", "full"))
    layer = (plain - 6 * s * h) / 32
    # What is computed anew comes when the loss is gone, and is less than that.
    assert full == pytest.approx(32 * 2 * s * h + 6 * s * h)
    small = replace(model, vocabulary_size=16)
    assert use_of(small, recompute="full").activations == pytest.approx(32 * 2 * s * h + layer)
    every_fourth = use_of(model, recompute="full", recompute_every=4).activations
    assert full < every_fourth < plain


def test_stages_keep_as_many_micro_batches_as_are_in_flight() -> None:
    """Of each the inputs of a stage's layers and its output; the first stage of four keeps four."""
    model = replace(closed_form(LLAMA), embedding_parameters=10**10, head_parameters=1)
    hidden = 2 * 4096 * 2048
    kept = [
        use_of(model, pipeline_size=4, num_accumulation=m, recompute="full") for m in (1, 2, 4, 16)
    ]
    assert [use.stage for use in kept] == [0, 0, 0, 0]
    first, *others = (use.activations for use in kept)
    layers = len(stage_layers(model, 4, balanced=True)[0])
    assert others == pytest.approx([first + n * (layers + 1) * hidden for n in (1, 3, 3)])


def test_chunks_bound_what_logits_take() -> None:
    model = closed_form(LLAMA)
    whole = use_of(model, sequence_length=8192).loss
    chunked = use_of(model, sequence_length=8192, loss_chunk_tokens=512).loss
    logits = 8192 * 128256 * 14  # 16-bit logits, and three of their kind in float32
    head = 8 * 128256 * 4096  # its gradients, added up over the chunks
    assert whole == logits
    assert chunked == pytest.approx(logits / 16 + head + 2 * 8192 * 4096)  # of hidden states


def test_offload_moves_states_to_main_memory() -> None:
    model = closed_form(LLAMA)
    kept, moved = (use_of(model, zero_stage=3, offload_optimizer=off) for off in (False, True))
    # Masters, moments, gradients in float32, and those that come from the device in 16 bits.
    assert moved.host_offload == pytest.approx(18 / 8 * model.num_parameters)
    assert kept.allocated - moved.allocated == pytest.approx(16 / 8 * model.num_parameters)


def test_offload_moves_inputs_of_recomputed_layers_to_main_memory() -> None:
    """All but the one that a layer is recomputed from, and one that leaves or returns."""
    model = closed_form(LLAMA)
    full: dict[str, Any] = {"recompute": "full", "sequence_length": 65536, "num_accumulation": 4}
    full["loss_chunk_tokens"] = 512
    kept, moved = (use_of(model, **full, offload_activations=off) for off in (False, True))
    one = 2.0 * 4096 * 65536
    assert kept.host_activations == 0
    assert moved.host_activations == pytest.approx(32 * one)
    assert kept.allocated - moved.allocated == pytest.approx(30 * one)
    assert moved.host_terms()["activations"] == moved.host_activations


def test_tiles_keep_nothing_inside_mlps() -> None:
    """Of a gated layer four tensors of the inner width; in its backward pass one tile of those and
    two gradients of them, the gradient of its input, and parameters' of a tile and in float32; of
    small tiles less than the norm's four gradients in float32."""
    model = closed_form(LLAMA)
    tokens, inner, weights = 65536, 14336, 3 * 4096 * 14336
    changes: dict[str, Any] = {"sequence_length": tokens, "loss_chunk_tokens": 512}
    once, tiled = (use_of(model, **changes, tiled_mlp=tiles) for tiles in ("off", 16))
    assert use_of(model, **changes, tiled_mlp="auto") == tiled
    # The most is when the loss is computed.
    assert once.activations - tiled.activations == pytest.approx(32 * 8 * inner * tokens)
    assert once.loss == tiled.loss
    changes["recompute"] = "full"
    once, tiled = (use_of(model, **changes, tiled_mlp=tiles) for tiles in ("off", 16))
    norm = 4 * 4 * 4096 * tokens
    assert 1.5 * 8 * inner * tokens / 16 + 2 * 4096 * tokens + 6 * weights < norm
    assert once.allocated - tiled.allocated == pytest.approx(8 * inner * tokens - norm)
    own = 1.5 * 8 * inner * tokens / 2 + 2 * 4096 * tokens + 6 * weights
    two = use_of(model, **changes, tiled_mlp=2)
    assert once.allocated - two.allocated == pytest.approx(8 * inner * tokens - own)
    # A fourth of an MLP is less than the norm.
    cut = use_of(model, **changes, tiled_mlp=16, tensor_size=4)
    assert cut.activations < tiled.activations
    assert use_of(model, **changes, tensor_size=4).activations == cut.activations
    # One tile is enough for few tokens.
    changes["sequence_length"] = 4096
    assert use_of(model, **changes, tiled_mlp="auto") == use_of(model, **changes)


@pytest.mark.parametrize("ring_size", [2, 4])
def test_a_ring_holds_keys_of_two_ranks_and_gradients_in_float32(ring_size: int) -> None:
    """Without what follows attention in a layer, which is freed by then."""
    model, tiles = closed_form(DenseShape(32, 4096, 32, 32, 14336, 1024)), 64
    changes: dict[str, Any] = {"sequence_size": 4, "recompute": "full", "loss_chunk_tokens": 512}
    changes |= {"sequence_length": 4 * 65536, "tiled_mlp": tiles}
    heads, ring = (use_of(model, **changes, ring_size=size) for size in (1, ring_size))
    queries, keys = 32 * 128, 2 * 32 * 128
    kernel = 2 * queries + 1.5 * (2 * queries + 2 * keys)
    expected = 6 * queries + 2.5 * 2 * keys + 3.5 * 4 * keys + kernel
    if ring_size == 2:  # nothing arrives during the second of two steps
        expected = 6 * queries + 1.5 * 2 * keys + 2 * 4 * keys + max(kernel, 1.5 * 4 * keys)
    expected -= 8 * 4096 / 2  # half of norms and residuals
    assert ring.allocated - heads.allocated == pytest.approx(65536 * (expected - 4 * 4 * 4096))


@pytest.mark.parametrize(
    ("zero", "accumulation", "device", "host"),
    # Bytes of a parameter on one of 8 ranks, beside a buffer of the largest one on both sides.
    [(1, 1, 2 + 4 + 2, 16 / 8), (1, 4, 2 + 4 + 2, 18 / 8), (2, 4, 2 + 2 / 8, 18 / 8)],
)
def test_offload_of_whole_parameters_keeps_a_buffer_on_both_sides(
    zero: int, accumulation: int, device: float, host: float
) -> None:
    model = closed_form(LLAMA)
    use = use_of(model, zero_stage=zero, offload_optimizer=True, num_accumulation=accumulation)
    largest = 2.0 * model.embedding_parameters
    assert use.host_offload == pytest.approx(host * model.num_parameters + largest)
    held = use.states + use.gradients
    assert held == pytest.approx(device * model.num_parameters)
    assert use.buckets == pytest.approx(largest, abs=100)


def test_a_save_takes_a_copy_in_main_memory_and_nothing_of_the_device() -> None:
    model = closed_form(LLAMA)
    for zero in range(4):
        use = use_of(model, zero_stage=zero)
        assert use.host_checkpoint == pytest.approx(12 / 8 * model.num_parameters)
    small = closed_form(replace(LLAMA, num_layers=1))
    alone = use_of(small, data_size=1)
    assert alone.host == alone.host_checkpoint == 12 * small.num_parameters
    # Of many ranks each writes little, and one exports: a file of 5 GB in 16 bit, and a layer.
    many = use_of(model, data_size=512)
    assert many.host == many.host_export == 4 * (2.5e9 + 128256 * 4096)


@pytest.mark.parametrize(
    ("zero", "dense", "expert"),
    # Bytes of a parameter on one of 8 ranks, of which 4 divide the experts: those have a quarter of
    # them, and ZeRO divides that among the 2 that hold the same ones.
    [(0, 18.0, 18 / 4), (1, 8 + 12 / 8, (8 + 12 / 2) / 4), (2, 2 + 16 / 8, (2 + 16 / 2) / 4),
     (3, 18 / 8, 18 / 8)],
)  # fmt: skip
def test_experts_are_divided_and_their_states_among_fewer(
    zero: int, dense: float, expert: float
) -> None:
    plain = closed_form(LLAMA)
    kind = replace(plain.kinds[0], num_parameters_expert=10**8)
    model = replace(plain, kinds=(kind,))
    use = use_of(model, zero_stage=zero, expert_size=4)
    experts = 10**8 * len(plain.layers)
    expected = dense * plain.num_parameters + expert * experts
    assert use.states + use.gradients == pytest.approx(expected)


def test_terms_add_up() -> None:
    use = use_of(closed_form(LLAMA), zero_stage=3, tensor_size=2, pipeline_size=1)
    assert sum(use.terms().values()) == pytest.approx(use.total)
    assert use.total == pytest.approx(use.allocated + use.context)


@pytest.mark.parametrize(
    ("costs", "expected"),
    # Of one element of a hidden matrix and of one of everything else, beside 2 + 4 bytes.
    [
        (OptimizerCosts("adamw"), (8, 8)),
        (OptimizerCosts("adamw", state_bytes=2), (4, 4)),
        (OptimizerCosts("adamw_8bit"), (2 + 8 / 256, 2 + 8 / 256)),
        (OptimizerCosts("muon"), (4, 8)),
        (OptimizerCosts("muon", state_bytes=2), (2, 4)),
        (OptimizerCosts("lion"), (4, 4)),
        (OptimizerCosts("adafactor"), (0, 0)),
        (OptimizerCosts("muon", state_bytes=2, average_bytes=4), (6, 8)),
    ],
)
def test_moments_of_each_optimizer(costs: OptimizerCosts, expected: tuple[float, float]) -> None:
    model = closed_form(LLAMA)
    hidden, kv, inner = 4096, 1024, 14336
    matrices = 32 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    others = model.num_parameters - matrices
    use = use_of(model, zero_stage=0, optimizer=costs)
    moments = use.states - 6 * model.num_parameters
    assert moments == pytest.approx(expected[0] * matrices + expected[1] * others, rel=1e-6)
    assert use.host_checkpoint == pytest.approx(
        4 * model.num_parameters / 8 + moments / 8, rel=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "parts"),
    [({}, 1), ({"zero_stage": 3}, 8), ({"zero_stage": 1, "tensor_size": 2}, 16)],
)
def test_scales_of_8_bit_moments_are_on_every_rank(changes: dict[str, Any], parts: int) -> None:
    """A float32 per moment and 256 elements, of which neither ZeRO nor tensor parallelism divides
    any; each is written once."""
    model = closed_form(LLAMA)
    changes = {"zero_stage": 0, **changes}
    wide, small = (
        use_of(model, **changes, optimizer=OptimizerCosts(name)) for name in ("adamw", "adamw_8bit")
    )
    scales = 8 / 256 * model.num_parameters
    saved = 6 * model.num_parameters / parts - scales
    assert wide.states - small.states == pytest.approx(saved, rel=1e-3)
    written = (wide.host_checkpoint - small.host_checkpoint) * 8
    per_tensor_rank = 6 * model.num_parameters / changes.get("tensor_size", 1)
    assert written == pytest.approx(per_tensor_rank - scales, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "num_buckets"),
    [
        ({"zero_stage": 1}, 0),  # put together when activations are gone
        ({"zero_stage": 2}, 0),
        ({"zero_stage": 1, "offload_optimizer": True}, 1),  # DeepSpeed's own
        ({"zero_stage": 1, "pipeline_size": 2}, 2),  # a second one at the end
    ],
)
def test_buckets_larger_than_the_model(changes: dict[str, Any], num_buckets: int) -> None:
    """As `benchmarks/planner_memory.py --bucket 50000000` measures them."""
    bucket = 50_000_000
    changes |= {"reduce_bucket_elements": bucket, "parameter_bytes": 4}
    model = closed_form(DenseShape(4, 128, 4, 2, 384, 2048))
    use = use_of(model, overlap_communication=False, **changes)
    passing = use.activations + use.loss if num_buckets == 2 else 0.0
    assert use.buckets + passing == pytest.approx(num_buckets * bucket * 4, rel=0.01)


def test_what_is_left_of_a_layer_recomputed_by_operator() -> None:
    """Its input, half of its products' results and attention's, 16 bits each; a quarter on each of
    four tensor-parallel ranks that cut the sequence too."""
    model = replace(closed_form(LLAMA), saved_bytes_outside=0.0, vocabulary_size=0)
    width = 4096 + (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096) / 2 + 4096
    one = use_of(model, recompute="operators", sequence_length=512)
    working = use_of(model, sequence_length=512).activations / 32 / 2
    assert one.activations - working == pytest.approx(32 * 512 * 2 * width)
    cut = use_of(
        model, recompute="operators", sequence_length=512, tensor_size=4, tensor_sequence=True
    )
    assert cut.activations == pytest.approx(one.activations / 4)


def test_copies_of_checkpoints_take_main_memory_alone() -> None:
    model = closed_form(LLAMA)
    part = 12 * model.num_parameters / 8
    usual, none, kept = (
        use_of(model, zero_stage=3, copies_states=copies, memory_every_steps=every)
        for copies, every in ((True, None), (False, None), (True, 1))
    )
    assert usual.host_checkpoint == pytest.approx(part)
    assert none.host_checkpoint == 0
    assert usual.host_memory_checkpoints == 0
    assert kept.host_memory_checkpoints == pytest.approx(3 * part)
    assert kept.host - usual.host == pytest.approx(3 * part)
    assert usual.total == none.total == kept.total
