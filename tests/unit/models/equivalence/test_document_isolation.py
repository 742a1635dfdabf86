"""Architectures that cannot keep documents apart are found before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
    masking_utils,
)

from bigtrain.errors import ConfigError, ModelError
from bigtrain.models.build import _set_gradient_checkpointing
from bigtrain.models.equivalence import document_isolation
from bigtrain.models.equivalence.document_isolation import find_isolation
from bigtrain.models.equivalence.proxy_model import build_proxy_model
from bigtrain.models.equivalence.reductions import deterministic, with_heads
from bigtrain.models.layers.compilation import compile_layers
from bigtrain.models.layers.document_attention import (
    DocumentBoundaries,
    Isolation,
    attend_by_document,
    per_document_attention,
)
from bigtrain.models.layers.document_masks import (
    document_attention,
    document_boundaries,
    document_numbers,
    lengths_of_documents,
)
from bigtrain.run.preflight import inspect_inputs
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import ModelSection
from tests.support.datasets import write_dataset
from tests.support.run_trees import run_config
from tests.unit.models.layers.test_chunked_loss import gradients


def find(model_type: str, attention: str, **values: Any) -> tuple[str, str]:
    isolation, reason = find_isolation(CONFIG_MAPPING[model_type](**values), attention, 32)
    return isolation.method, reason


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("llama", "documents"),
        # windows in some layers
        pytest.param("gemma3_text", "documents", marks=pytest.mark.slow),
        ("gemma2", "documents"),  # eager: caps scores, which sdpa does not
        # eager with sinks; its own masks forget documents
        pytest.param("gpt_oss", "documents", marks=pytest.mark.slow),
        ("opt", "documents"),  # its own masks forget documents
        ("biogpt", "documents"),  # makes a mask of padding, of which there is none
        ("gpt_neo", "masks"),  # does not take its attention from the registry
        pytest.param("mvp", "masks", marks=pytest.mark.slow),  # and makes masks without positions
        pytest.param("bloom", "masks", marks=pytest.mark.slow),  # ALiBi
    ],
)
def test_architectures_that_isolate(model_type: str, kind: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    before = config.to_dict()
    for attention in ("auto", "eager"):
        isolation, reason = find_isolation(config, attention, 32)
        assert (isolation.method, reason) == (kind, "")
    assert config.to_dict() == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_layers_attend_by_document_outside_of_their_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits as uncompiled, and no graph is compiled again for other documents."""
    torch._dynamo.reset()
    counters.clear()
    models = [
        build_proxy_model(
            CONFIG_MAPPING["llama"](), "sdpa", [with_heads(2)], sequence_length=16
        ).eval()
        for _ in range(2)
    ]
    isolation = Isolation("documents")
    for model in models:
        isolation.install(model)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compile_layers(models[1], divided=True)
    num_graphs = []
    for lengths in ((7, 9, 8), (1, 20, 3), (24,), (5, 5, 5, 5, 4)):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        ids = torch.randint(1, 64, (1, 24), generator=torch.Generator().manual_seed(0))
        with torch.no_grad(), isolation.document_mask(positions):
            logits, compiled_logits = (
                model(input_ids=ids, position_ids=positions, use_cache=False).logits
                for model in models
            )
        assert torch.allclose(compiled_logits, logits, atol=1e-5)
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs == [2, 2, 2, 2]


def test_architectures_that_do_not() -> None:
    for attention in ("auto", "eager"):
        _, reason = find("openai-gpt", attention)
        assert reason.startswith("packed documents are not isolated: their logits differ")
        assert reason.endswith(": tokens attend to the documents before theirs")


def test_positions_that_cannot_be_restarted_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_isolation, "position_embeddings", lambda _: iter(()))
    assert find("bart", "auto", **BART)[1].endswith(
        ": positions in a document depend on the tokens before it"
    )


def test_masks_that_long_samples_do_not_use_are_not_relied_on() -> None:
    """BigBird's sparse attention, which begins at 5 + 2 * 3 blocks."""
    values = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    config = CONFIG_MAPPING["big_bird"](
        **values, block_size=16, intermediate_size=32, is_decoder=True
    )
    assert find_isolation(config, "auto", 176)[1] == ""
    assert find_isolation(config, "auto", 192)[1] == (
        "packed documents are not isolated in samples of 192 tokens: tokens attend to the "
        "documents before theirs"
    )


def test_states_start_afresh() -> None:
    assert find("mamba", "eager", num_hidden_layers=2, hidden_size=64) == ("documents", "")


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "d", vocab_size=50)
    data = {"path": str(path), "document_boundaries": "isolate"}
    llama, gpt = (
        run_config(
            model={"config": {"model_type": name, "vocab_size": 50}},
            data=data,
            output={"export": False},
        )
        for name in ("llama", "openai-gpt")
    )
    inspect_inputs(resolve_run(llama, 1))
    with pytest.raises(ConfigError) as caught:
        inspect_inputs(resolve_run(gpt, 1))
    (problem,) = caught.value.problems
    assert str(problem).startswith(
        "data.document_boundaries = 'isolate': is not supported for model_type openai-gpt: packed "
        "documents are not isolated: their logits differ from those of the separate"
    )
    assert problem.remedy == "set data.document_boundaries=ignore, or choose another architecture"


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_kernels_that_a_cpu_lacks_are_tried_by_what_they_are_told(attention: str) -> None:
    for model_type in ("llama", "gemma2"):
        kind = "lengths" if attention.startswith("flash") else "masks"
        assert find(model_type, attention) == (kind, "")
    assert find("openai-gpt", attention)[1]


def test_lengths_of_documents() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    lengths = lengths_of_documents(positions)
    assert lengths["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 10, 15]
    assert lengths["cu_seq_lens_q"].dtype == torch.int32
    assert lengths["cu_seq_lens_k"] is lengths["cu_seq_lens_q"]
    assert lengths["max_length_q"] == lengths["max_length_k"] == 5


def test_models_are_told_whether_documents_share_samples() -> None:
    look = masking_utils.find_packed_sequence_indices
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    assert torch.equal(document_numbers(positions), look(positions))
    model = build_proxy_model(
        CONFIG_MAPPING["gemma2"](), "eager", [with_heads(2)], sequence_length=16
    ).eval()
    ids = torch.randint(1, 64, positions.shape, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        looked = model(**inputs).logits
        with document_boundaries(packed=True):
            told = model(**inputs).logits
        with document_boundaries(packed=False):
            mixed = model(**inputs).logits
    assert torch.equal(told, looked)
    assert not torch.allclose(mixed, looked, atol=1e-3)
    with pytest.raises(ZeroDivisionError), document_boundaries(packed=True):
        _ = 1 / 0
    assert masking_utils.find_packed_sequence_indices is look


BART = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "vocab_size": 64,
    "dropout": 0.0,
    "is_decoder": True,
}
REMBERT = {
    "hidden_size": 32,
    "input_embedding_size": 16,
    "output_embedding_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
SIZES = ((7, 9, 8), (1, 20, 3))
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in SIZES])


def alone_and(
    model: PreTrainedModel, packed: Callable[[dict[str, Any]], torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients of documents alone, and of what `packed` makes of their two samples."""
    ids = torch.randint(1, 64, POSITIONS.shape, generator=torch.Generator().manual_seed(0))
    separate = [
        model(input_ids=document[None], use_cache=False).logits[0].square().sum()
        for row, lengths in zip(ids, SIZES, strict=True)
        for document in row.split(lengths)
    ]
    wanted = gradients(model, torch.stack(separate).sum())
    inputs = {"input_ids": ids, "position_ids": POSITIONS, "use_cache": False}
    return wanted, gradients(model, packed(inputs).square().sum())


def assert_equal(
    wanted: dict[str, torch.Tensor], gradients_by_name: dict[str, torch.Tensor]
) -> None:
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert torch.allclose(gradients_by_name[name], gradient, rtol=0, atol=1e-5 * largest), name


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_documents_by_lengths_are_documents_alone(model_type: str) -> None:
    """Every gradient; what flash attention is told is held against masks and samples."""
    model = build_proxy_model(
        CONFIG_MAPPING[model_type](), "eager", [with_heads(2)], sequence_length=16
    ).eval()
    assert_equal(*alone_and(model, lambda inputs: model(**inputs).logits))
    with document_attention(model):
        told = lengths_of_documents(POSITIONS)
        assert_equal(*alone_and(model, lambda inputs: model(**inputs, **told).logits))


@pytest.mark.parametrize(
    ("model_type", "attention"),
    [
        ("llama", "sdpa"),
        pytest.param("gemma3_text", "sdpa", marks=pytest.mark.slow),
        pytest.param("gemma2", "eager", marks=pytest.mark.slow),
        ("gpt_oss", "eager"),
    ],
)
def test_documents_that_attend_for_themselves_are_documents_alone(
    model_type: str, attention: str
) -> None:
    """Every gradient of recomputed layers, with grouped heads, and windows shorter than some
    documents and longer than others."""
    config = CONFIG_MAPPING[model_type]()
    if getattr(config, "sliding_window", None):
        config.sliding_window = 6
    model = build_proxy_model(config, attention, [with_heads(2)], sequence_length=16).train()
    section = ModelSection(config=model_type, gradient_checkpointing="full")
    _set_gradient_checkpointing(model, section)
    isolation = Isolation("documents")
    isolation.install(model)

    def packed(inputs: dict[str, Any]) -> torch.Tensor:
        with isolation.document_mask(inputs["position_ids"]):
            logits: torch.Tensor = model(**inputs).logits
        return logits

    assert_equal(*alone_and(model, packed))


MODELS: dict[str, dict[str, Any]] = {
    "bart": BART,
    "mvp": BART,
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "rembert": REMBERT,
}


@pytest.mark.parametrize(
    ("model_type", "fault"),
    [
        *product(MODELS, ("", "attention")),
        ("bart", "positions"),
        ("mvp", "positions"),
    ],
)
def test_documents_of_models_without_positions_are_documents_alone(
    model_type: str, fault: str
) -> None:
    """Every gradient; not if positions are not restarted, or masks are not of documents."""
    values = {"is_decoder": True, **MODELS[model_type]}
    config = deterministic(CONFIG_MAPPING[model_type](**values))
    model = AutoModelForCausalLM.from_config(config)
    isolation, reason = find_isolation(config, "auto", 24)
    assert reason == ""
    if fault == "positions":
        isolation = replace(isolation, positions=False)
    elif fault == "attention":
        isolation = replace(isolation, method="masks", overlays=False)
    isolation.install(model)

    def packed(inputs: dict[str, Any]) -> torch.Tensor:
        with isolation.document_mask(inputs["position_ids"]):
            logits: torch.Tensor = model(**inputs).logits
        return logits

    wanted, gradients_by_name = alone_and(model, packed)
    if not fault:
        assert_equal(wanted, gradients_by_name)
        return
    with pytest.raises(AssertionError):
        assert_equal(wanted, gradients_by_name)


def test_a_mask_for_an_encoder_is_made_and_refused_where_it_is_used() -> None:
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["bart"](**BART))
    attend_by_document(model)
    ids = torch.randint(1, 64, POSITIONS.shape)
    with per_document_attention(POSITIONS):
        model(input_ids=ids, use_cache=False)
        with pytest.raises(ModelError, match="the model attends to all tokens"):
            model(input_ids=ids, encoder_hidden_states=torch.ones(2, 24, 32), use_cache=False)


def test_no_mask_of_sequence_squared_is_made() -> None:
    class Largest(TorchDispatchMode):
        squares = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            self.squares += torch.is_tensor(out) and tuple(out.shape[-2:]) == (512, 512)
            return out

    model = build_proxy_model(
        CONFIG_MAPPING["mistral"](sliding_window=32), "sdpa", [with_heads(2)], sequence_length=16
    )
    positions = torch.arange(512)[None] % 128
    inputs = {"input_ids": positions % 60, "position_ids": positions, "use_cache": False}
    with Largest() as by_masks:
        model(**inputs)
    isolation = Isolation("documents")
    isolation.install(model)
    with isolation.document_mask(positions), Largest() as by_documents:
        model(**inputs).logits.sum().backward()
    assert by_masks.squares > 0
    assert by_documents.squares == 0


def test_other_masks_than_causal_ones_are_not_made_up() -> None:
    model = build_proxy_model(
        CONFIG_MAPPING["llama"](), "sdpa", [with_heads(2)], sequence_length=16
    )
    attend_by_document(model)
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    common = {"batch_size": 1, "q_length": 24, "kv_length": 24, "config": model.config}
    sliding = masking_utils.sliding_window_causal_mask_function(5)
    chunks = masking_utils.chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.int64))
    with per_document_attention(POSITIONS[:1]):
        causal = masks(mask_function=masking_utils.causal_mask_function, **common)
        assert causal == DocumentBoundaries((7, 9, 8), None)
        assert masks(mask_function=sliding, local_size=5, **common) == DocumentBoundaries(
            (7, 9, 8), 5
        )
        for other in (
            {"mask_function": chunks, "local_size": 5},
            {"mask_function": sliding},
            {"mask_function": sliding, "local_size": 6},
            {"mask_function": masking_utils.bidirectional_mask_function},
            {"mask_function": masking_utils.causal_mask_function, "allow_is_causal_skip": False},
        ):
            with pytest.raises(ModelError, match="asks for other masks than causal ones"):
                masks(**other, **common)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_documents_by_block_masks_have_the_gradients_of_documents_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """flex attention, not compiled: what torch refuses on a CPU is only its kernels' backward."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    model = build_proxy_model(
        CONFIG_MAPPING["llama"](), "eager", [with_heads(2)], sequence_length=16
    ).eval()
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
        assert_equal(wanted, gradients(model, packed.square().sum()))
