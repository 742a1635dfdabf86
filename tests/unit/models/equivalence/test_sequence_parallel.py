"""Which architectures compute the same on parts of samples, found by trying."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bigtrain.models.equivalence import sequence_parallel as checked
from bigtrain.models.equivalence.proxy_model import proxy_tokens, rescale_weights
from bigtrain.models.equivalence.sequence_parallel import check_sequence_parallel, run_in_parts
from bigtrain.models.parallel import sequence as sequence_parallel
from bigtrain.models.parallel.sequence import IMPLEMENTATION, SequenceParallel
from bigtrain.models.parallel.sequence_exchange import SequenceExchange

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def problems(
    model_type: str,
    size: int = 2,
    *,
    sequence_length: int = 32,
    isolate: bool = False,
    tensor_size: int = 1,
    ring_size: int = 1,
    **changes: Any,
) -> list[Any]:
    hf_config = CONFIG_MAPPING[model_type](**{**COMMON, **changes})
    return check_sequence_parallel(
        hf_config,
        "auto",
        size,
        sequence_length=sequence_length,
        isolate=isolate,
        tensor_size=tensor_size,
        ring_size=ring_size,
    )


def test_a_part_is_prepared_while_another_makes_its_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of the check share the model: documents known to one are never gone again."""
    known = []
    find = sequence_parallel.document_numbers

    def watched(positions: torch.Tensor) -> torch.Tensor:
        known.append((sequence._documents, sequence._positions))
        return find(positions)

    ranks, no_ring = SimpleNamespace(size=2, rank=0), SimpleNamespace(size=1, rank=0)

    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**COMMON))
    sequence: Any = SequenceParallel(
        model,
        SequenceExchange(ranks, ranks, no_ring),  # type: ignore[arg-type]
    )
    monkeypatch.setattr(sequence_parallel, "document_numbers", watched)
    ids = torch.arange(8).reshape(1, 8)
    for _ in range(2):
        sequence.inputs(ids, ids % 4)
    sequence.close()
    assert known[0] == (None, None)
    assert all(value is not None for value in known[1])


@pytest.mark.parametrize(
    ("model_type", "isolate"),
    [
        *((name, True) for name in ("llama", "gemma3_text", "gpt_neox", "gpt_oss")),
        ("llama", False),
        *(
            pytest.param(name, False, marks=pytest.mark.slow)
            for name in ("gemma3_text", "gpt_neox", "gpt_oss")
        ),
    ],
)
def test_attention_in_the_registry_divides(model_type: str, *, isolate: bool) -> None:
    assert problems(model_type, isolate=isolate) == []


@pytest.mark.parametrize("model_type", ["bart", pytest.param("marian", marks=pytest.mark.slow)])
def test_positions_that_a_model_counts_itself_are_of_full_samples(model_type: str) -> None:
    sizes = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "is_decoder": True}
    assert problems(model_type, **sizes, decoder_ffn_dim=64, max_position_embeddings=64) == []


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("model_type", ["lfm2_moe", "falcon_h1"])
def test_states_pass_between_ranks(model_type: str, *, isolate: bool) -> None:
    changes: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
    if model_type == "falcon_h1":
        changes = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    else:
        changes |= {"num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1}
    assert problems(model_type, isolate=isolate, **changes) == []


@pytest.mark.parametrize(
    ("model_type", "size", "ring_size"),
    [
        ("llama", 3, 3),  # heads do not limit it
        pytest.param("gemma3_text", 4, 2, marks=pytest.mark.slow),  # a window
    ],
)
def test_a_ring_divides_any_attention(model_type: str, size: int, ring_size: int) -> None:
    for isolate in (False, True):
        assert problems(model_type, size, ring_size=ring_size, isolate=isolate) == []


@pytest.mark.parametrize(
    ("model_type", "reason", "changes"),
    [
        ("minimax", "MiniMaxLightningAttention", {"num_local_experts": 4, "head_dim": 16}),
        ("llama", "dropout", {"attention_dropout": 0.1}),
    ],
)
def test_a_ring_refuses(model_type: str, reason: str, changes: dict[str, Any]) -> None:
    (problem,) = problems(model_type, ring_size=2, **changes)
    assert "{'ulysses': 1, 'ring': 2}" in str(problem)
    assert reason in str(problem)


def test_heads_are_divided_among_tensor_parallel_processes_first() -> None:
    assert problems("llama", 4, num_key_value_heads=1) == []
    (problem,) = problems("llama", 3)
    assert "does not divide its 4 attention heads" in str(problem)
    assert "parallel.sequence=2" in str(problem)
    assert problems("llama", 2, tensor_size=2) == []
    (problem,) = problems("llama", 2, tensor_size=4)
    assert "4 attention heads among parallel.tensor = 4" in str(problem)
    assert "parallel.sequence=1" in str(problem)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bloom", "cannot be replaced"),
        pytest.param("xlstm", "xLSTMLayer", marks=pytest.mark.slow),
    ],
)
def test_what_does_not_divide_is_refused(model_type: str, reason: str) -> None:
    (problem,) = problems(model_type)
    assert reason in str(problem)


def test_the_router_loss_is_that_of_whole_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems("qwen3_moe", output_router_logits=True) == []
    monkeypatch.setattr(SequenceParallel, "_all_router_logits", lambda *_: None)
    (problem,) = problems("qwen3_moe", output_router_logits=True)
    assert "auxiliary loss" in str(problem)


def test_the_registry_is_left_unused() -> None:
    problems("llama")
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**COMMON))
    assert not model.config._attn_implementation.startswith(IMPLEMENTATION.format(""))


@pytest.mark.parametrize("ring_size", [1, 2])
def test_two_models_each_have_masks_of_their_own_samples(
    ring_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student, and its teacher, which is opened later and has read another micro-batch."""
    student, teacher = (
        AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**COMMON)) for _ in range(2)
    )
    rescale_weights(student)
    ids = proxy_tokens(student, 16)
    positions = torch.cat([torch.arange(5), torch.arange(11)]).expand(2, 16)
    expected = run_in_parts(student, ids, positions, 2, ring_size)

    class WithTeacher(SequenceParallel):
        def __init__(self, model: Any, exchange: SequenceExchange) -> None:
            super().__init__(model, exchange)
            self.teacher = SequenceParallel(teacher, exchange)

        def inputs(self, *args: Any) -> dict[str, torch.Tensor]:
            self.teacher.inputs(ids[:1], None)
            return super().inputs(*args)

        def close(self) -> None:
            self.teacher.close()
            super().close()

    monkeypatch.setattr(checked, "SequenceParallel", WithTeacher)
    actual = run_in_parts(student, ids, positions, 2, ring_size)
    assert torch.equal(actual["output"]["logits"], expected["output"]["logits"])
    assert sequence_parallel._numbers_in_use == set()
