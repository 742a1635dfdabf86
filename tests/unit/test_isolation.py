"""Architectures that cannot keep documents apart are found before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from bigtrain.config import RunConfig
from bigtrain.engine.resolve import resolve_run
from bigtrain.errors import ConfigError
from bigtrain.models.documents import document_attention, lengths_of_documents
from bigtrain.models.isolation import check_isolation
from bigtrain.models.small_copy import small_copy, with_heads
from bigtrain.run.preflight import inspect_inputs
from tests.support.datasets import write_dataset
from tests.unit.test_chunked_loss import gradients


def texts(model_type: str, attention: str, **values: Any) -> list[str]:
    config = CONFIG_MAPPING[model_type](**values)
    return [str(problem) for problem in check_isolation(config, attention)]


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "gemma2", "qwen3_moe"])
def test_architectures_that_isolate(model_type: str, attention: str) -> None:
    assert texts(model_type, attention) == []


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "opt"])
def test_architectures_that_do_not(model_type: str) -> None:
    (problem,) = texts(model_type, "eager")
    assert problem.startswith(
        f"data.document_boundaries = 'isolate': cannot be had of model_type {model_type}: it does "
        "not: documents that share a sample have other logits than alone"
    )
    assert problem.endswith("set data.document_boundaries=ignore, or take another architecture")


def test_state_that_runs_through_is_found() -> None:
    (problem,) = texts("mamba", "eager", num_hidden_layers=2, hidden_size=64)
    assert "cannot be had of model_type mamba" in problem


def test_the_configuration_stays_as_it_was() -> None:
    config = CONFIG_MAPPING["qwen3"]()
    before = config.to_dict()
    check_isolation(config, "sdpa")
    assert config.to_dict() == before


def run_of(data: Path, model_type: str) -> dict[str, Any]:
    return {
        "model": {"config": {"model_type": model_type, "vocab_size": 50}},
        "data": {"path": str(data), "document_boundaries": "isolate"},
        "batch": {"sequence_length": 8, "global_samples": 4},
        "train": {"steps": 2},
        "optimizer": {"lr": 1e-3},
        "output": {"directory": "unused"},
    }


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "d", vocab_size=50)
    inspect_inputs(resolve_run(RunConfig.model_validate(run_of(data, "llama")), 1))
    with pytest.raises(ConfigError, match=r"data\.document_boundaries = 'isolate': cannot be had"):
        inspect_inputs(resolve_run(RunConfig.model_validate(run_of(data, "bloom")), 1))


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_kernels_that_a_cpu_lacks_are_tried_by_what_they_are_told(attention: str) -> None:
    for model_type in ("llama", "gemma2", "qwen3_moe"):
        assert texts(model_type, attention) == []
    (problem,) = texts("falcon", attention, alibi=True)
    assert problem.startswith("data.document_boundaries = 'isolate': cannot be had")


def test_lengths_of_documents() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    lengths = lengths_of_documents(positions)
    assert lengths["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 10, 15]
    assert lengths["cu_seq_lens_q"].dtype == torch.int32
    assert lengths["cu_seq_lens_k"] is lengths["cu_seq_lens_q"]
    assert lengths["max_length_q"] == lengths["max_length_k"] == 5


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_documents_by_lengths_are_documents_alone(model_type: str) -> None:
    """Loss and every gradient; what flash attention is told is held against masks and samples."""
    model = small_copy(CONFIG_MAPPING[model_type](), "eager", [with_heads(2)]).eval()
    ids = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    sizes = ((7, 9, 8), (1, 20, 3))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in sizes])
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    separate = [
        model(input_ids=document[None], use_cache=False).logits[0].square().sum()
        for row, lengths in zip(ids, sizes, strict=True)
        for document in row.split(lengths)
    ]
    wanted = gradients(model, torch.stack(separate).sum())
    masked = gradients(model, model(**inputs).logits.square().sum())
    with document_attention(model):
        told = lengths_of_documents(positions)
        found = gradients(model, model(**inputs, **told).logits.square().sum())
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        for other in (masked, found):
            assert torch.allclose(other[name], gradient, rtol=0, atol=1e-5 * largest), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_documents_by_block_masks_have_the_gradients_of_documents_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """flex attention, not compiled: what torch refuses on a CPU is only its kernels' backward."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    model = small_copy(CONFIG_MAPPING["llama"](), "eager", [with_heads(2)]).eval()
    ids = torch.randint(1, 64, (1, 256), generator=torch.Generator().manual_seed(0))
    sizes = (40, 88, 128)
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    alone = [
        model(input_ids=part, use_cache=False).logits.square().sum() for part in ids.split(sizes, 1)
    ]
    wanted = gradients(model, torch.stack(alone).sum())
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        found = gradients(model, packed.square().sum())
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=0, atol=1e-5 * largest), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_documents_by_block_masks_are_documents_alone() -> None:
    """flex attention, compiled; its forward pass alone, since a CPU has no other."""
    model = small_copy(CONFIG_MAPPING["llama"](), "eager", [with_heads(2)]).eval()
    sizes = (40, 88, 128)
    ids = torch.randint(1, 64, (1, 256), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    with torch.no_grad():
        alone = torch.cat(
            [model(input_ids=part, use_cache=False).logits for part in ids.split(sizes, 1)], 1
        )
        model.set_attn_implementation("flex_attention")
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        mixed = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(packed, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))
    assert not torch.allclose(mixed, alone, rtol=0, atol=1e-3 * float(alone.abs().max()))
