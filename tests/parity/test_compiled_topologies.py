"""Compiled layers train as a plain loop under every topology, from graphs that are compiled in the
first step only.

Fast cases are compiled for aot_eager, which traces and divides the passes as Inductor does; the
most slow cases by Inductor, in C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.engine.checkpoint.lazy import open_weights
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.settings.run_config import ModelSection
from tests.parity.cases import CHUNKS, EPS, ISOLATED, Case, PlainRuns
from tests.parity.conftest import (
    ARCHITECTURES,
    SHARED_MOE,
    STEPS,
    VOCAB_SIZE,
    each_case,
    llama,
    run_config,
    train_cases,
)
from tests.support.hybrids import HYBRIDS
from tests.support.resumes import Layout, Pair, Resumes, each_pair, layout

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

TENSOR, SEQUENCE, EXPERT = ({axis: 2} for axis in ("tensor", "sequence", "expert"))
RING = {"sequence": {"ring": 2}}
FULL = {"gradient_checkpointing": "full"}
TILES = {"tiled_mlp": 5}
MLP = ("an MLP is computed in tiles",)
ATTENTION, EXPERTS = ("ranks exchange tokens or heads",), ("ranks exchange tokens of experts",)
COUNTS = ("tokens of experts are counted",)
DOCUMENTS = ("documents have other lengths",)
RECURRENCE = ("recurrent layers have documents or ranks of their own",)
_SMALL = {"num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    "llama": llama(**_SMALL),
    # Other widths on each rank, and biases.
    "odd": llama(
        intermediate_size=63,
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
        **_SMALL,
    ),
    "qwen3": llama(model_type="qwen3", head_dim=8, **_SMALL),
    "phi3": llama(model_type="phi3", pad_token_id=0, **_SMALL),
    "phi": llama(
        model_type="phi", num_key_value_heads=4, tie_word_embeddings=False, pad_token_id=0, **_SMALL
    ),
    "shared_moe": SHARED_MOE,
    # Two layers of each kind, which share graphs.
    "bamba": HYBRIDS["bamba"]
    | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "qwen3_5": HYBRIDS["qwen3_5_text"]
    | {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 4,
        "layer_types": HYBRIDS["qwen3_5_text"]["layer_types"] * 2,
    },
}

FAST_BACKEND = "aot_eager_decomp_partition"
FROZEN = ["model.embed_tokens.weight", "*.1.*"]


@dataclass(frozen=True)
class Compiled(Case):
    """A case with compiled layers, which all share `graphs` graphs; the loss has one more. breaks:
    reasons for which a layer is not one graph, by a part of their text. by_inductor: in C++, else
    the graphs' operators run one by one, which takes a fifth of the time."""

    graphs: int = 1
    breaks: tuple[str, ...] = ()
    by_inductor: bool = True

    @property
    def graphs_after_each_step(self) -> list[int]:
        """Graphs of the first rank: all are of the first step, and of pipeline stages the last one
        computes the loss."""
        return [self.graphs + ("pipeline" not in self.degrees)] * STEPS


def compiled(**model: Any) -> Mapping[str, Mapping[str, Any]]:
    return {**EPS, "model": {"compile": "on", **model}}


IN_STEPS: dict[str, Any] = {"by_inductor": False}
QUICK = {"slow": False, **IN_STEPS}
CASES = [
    # ZeRO 3 gathers a layer's parameters before the layer is called.
    Compiled(2, "zero3", sections=compiled(), **QUICK),
    # Several chunks share the graph of the loss.
    Compiled(2, "zero3", sections=compiled(**FULL, **CHUNKS["model"])),
    Compiled(2, "zero3", "gpt2", sections=compiled()),
    # Each document attends separately between two graphs, with other lengths in every sample.
    Compiled(
        2, "zero3", sections={**compiled(), **ISOLATED}, slow=False, graphs=2, breaks=DOCUMENTS
    ),
    Compiled(2, "zero1", sections={**compiled(**FULL), **ISOLATED}, graphs=2, breaks=DOCUMENTS),
    Compiled(2, "zero2", "gpt2", sections={**compiled(), **ISOLATED}, graphs=2, breaks=DOCUMENTS),
    # Convolutions and recurrences are between graphs where documents or ranks divide them.
    Compiled(
        *(2, "zero1", "bamba"),
        sections={**compiled(), **ISOLATED},
        graphs=5,
        breaks=RECURRENCE + DOCUMENTS,
    ),
    Compiled(
        *(2, "zero3", "qwen3_5"),
        sections={**compiled(**FULL), **ISOLATED},
        graphs=5,
        breaks=RECURRENCE + DOCUMENTS,
    ),
    Compiled(
        *(2, "zero1", "bamba", 1, SEQUENCE, compiled()), graphs=5, breaks=RECURRENCE + ATTENTION
    ),
    Compiled(
        *(2, "zero1", "qwen3_5", 1, RING, compiled()), graphs=5, breaks=RECURRENCE + ATTENTION
    ),
    Compiled(
        *(2, "zero1", "bamba", 2, TENSOR, compiled()),
        graphs=5,
        breaks=(*RECURRENCE, "the means of a norm"),
    ),
    Compiled(2, "zero3", "qwen3_5", 1, TENSOR, compiled(**FULL), graphs=4, breaks=RECURRENCE),
    # Tokens of experts are counted between two graphs.
    Compiled(2, "zero1", "qwen3_moe", sections=compiled(), graphs=2, breaks=COUNTS, **IN_STEPS),
    Compiled(2, "zero3", "qwen3_moe", sections=compiled(**FULL), graphs=2, breaks=COUNTS),
    # Of frozen layers the backward pass is another one.
    Compiled(2, "zero3_offload", sections=compiled(frozen=FROZEN), graphs=2),
    # Exchanges of tensor parallelism are operators in the graph.
    Compiled(2, "zero1", degrees=TENSOR, sections=compiled(), **IN_STEPS),
    Compiled(2, "zero3", "qwen3", 1, TENSOR, compiled(gradient_checkpointing="full")),
    Compiled(2, "zero2", "odd", degrees=TENSOR, sections=compiled(**CHUNKS["model"])),
    Compiled(2, "zero0", "phi3", degrees=TENSOR, sections=compiled()),
    Compiled(2, "zero1", "qwen3_moe", 2, TENSOR, compiled(), graphs=2, breaks=COUNTS),
    Compiled(4, "zero1", "odd", 1, {"tensor": 4}, compiled()),
    Compiled(4, "zero3", "qwen3", 1, TENSOR, compiled()),
    # Attention of ranks that share samples is between two graphs.
    Compiled(2, "zero3", "llama", 1, SEQUENCE, compiled(**FULL), graphs=2, breaks=ATTENTION),
    Compiled(2, "zero1", "llama", 1, SEQUENCE, compiled(), graphs=2, breaks=ATTENTION),
    Compiled(2, "zero3", "llama", 1, RING, compiled(**FULL), graphs=2, breaks=ATTENTION),
    Compiled(2, "zero3", "qwen3", 1, SEQUENCE, compiled(**FULL), graphs=2, breaks=ATTENTION),
    Compiled(4, "zero2", "odd", 1, SEQUENCE | TENSOR, compiled(), graphs=2, breaks=ATTENTION),
    # Experts of ranks that divide them are between two graphs, which have one for any
    # number of rows and one for the sums by token.
    Compiled(*(2, "zero2", "qwen3_moe", 1, EXPERT, compiled()), graphs=4, breaks=EXPERTS, **QUICK),
    Compiled(2, "zero1", "qwen3_moe", 1, EXPERT, compiled(), graphs=4, breaks=EXPERTS),
    Compiled(2, "zero3", "qwen3_moe", 1, EXPERT, compiled(**FULL), graphs=4, breaks=EXPERTS),
    Compiled(4, "zero1", "qwen3_moe", 1, EXPERT | TENSOR, compiled(), graphs=4, breaks=EXPERTS),
    Compiled(
        *(2, "zero2", "qwen3_moe", 1, EXPERT | SEQUENCE, compiled()),
        graphs=5,
        breaks=EXPERTS + ATTENTION,
    ),
    # Projections of one input are on both sides of attention.
    Compiled(4, "zero1", "phi", 1, SEQUENCE | TENSOR, compiled(), graphs=2, breaks=ATTENTION),
    # One graph of the dense layer, four of the layer with experts.
    Compiled(
        *(4, "zero1", "shared_moe", 1, EXPERT | TENSOR, compiled(**FULL)),
        graphs=5,
        breaks=EXPERTS,
    ),
    # A stage compiles one graph more than a model without stages, in its first step too.
    Compiled(2, "pipeline_zero1", degrees={"pipeline": 2}, sections=compiled(**FULL), graphs=2),
    # An MLP in tiles is between two graphs. A tile has four: of two lengths, with and without a
    # backward pass.
    Compiled(2, "zero1", sections=compiled(**TILES), graphs=6, breaks=MLP, **IN_STEPS),
    Compiled(2, "zero3", sections=compiled(**TILES, **FULL), graphs=6, breaks=MLP),
    Compiled(2, "zero1", degrees=TENSOR, sections=compiled(**TILES), graphs=6, breaks=MLP),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def job_of(case: Case) -> dict[str, Any]:
        assert isinstance(case, Compiled)
        return {"compile_backend": "inductor" if case.by_inductor else FAST_BACKEND}

    def plain_of(case: Case) -> dict[str, Any]:
        is_frozen = "frozen" in case.sections["model"]
        return {"frozen": r"model\.embed_tokens|.*\.1\."} if is_frozen else {}

    directory = tmp_path_factory.mktemp("compiled")
    return PlainRuns(directory, dataset, MODELS, CASES, plain_of=plain_of, job_of=job_of)


@each_case(CASES)
def test_equals_plain_training(case: Compiled, runs: PlainRuns) -> None:
    result, _ = runs.check(case)
    assert result["graphs"] == case.graphs_after_each_step
    found = {text for text in case.breaks for reason in result["graph_breaks"] if text in reason}
    assert found == set(case.breaks)
    for reason in result["graph_breaks"]:
        assert any(text in reason for text in case.breaks), reason


ON, OFF = "compiled", "uncompiled"
PAIRS = [
    Pair(layout(2, "zero3", ON), layout(2, "zero1", OFF)),
    Pair(layout(2, "zero1", OFF, tensor=2), layout(2, "zero3", ON)),
    Pair(layout(2, "zero1", ON, sequence=2), layout(2, "zero1", ON, tensor=2)),
]


@pytest.fixture(scope="module")
def resumes(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumes:
    def job_of(place: Layout) -> dict[str, Any]:
        config = run_config(
            dataset,
            {"config": MODELS["llama"], "compile": "on" if place.variant == ON else "off"},
            micro_batch_size=8 // place.num_replicas // 2,
            parallel=dict(place.degrees),
        )
        return {
            "config": config | {"optimizer": config["optimizer"] | EPS["optimizer"]},
            "deepspeed_config": place.engine,
        } | {"compile_backend": FAST_BACKEND}

    directory = tmp_path_factory.mktemp("resumes")
    return Resumes(directory, PAIRS, job_of, stop=STEPS // 2, end=STEPS)


@each_pair(PAIRS)
def test_checkpoints_are_those_of_uncompiled_layers(pair: Pair, resumes: Resumes) -> None:
    """Names and values are the same, and a run continues with or without compiled layers."""
    saved = resumes.check(pair)
    assert "master/model.layers.0.mlp.up_proj.weight" in saved


@pytest.mark.slow
def test_exports_are_those_of_uncompiled_layers(dataset: Path, tmp_path: Path) -> None:
    """Names and values; the export compares the logits of the reloaded files with those of the
    compiled model after its last step."""
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(tmp_path / "tokenizer")
    ids = Probe.make_input(97, 16)
    jobs = {}
    for variant, compile_ in ((ON, "on"), (OFF, "off")):
        model = {"config": MODELS["llama"], "compile": compile_}
        config = run_config(dataset, model, micro_batch_size=4)
        jobs[variant] = {
            "config": config | {"optimizer": config["optimizer"] | EPS["optimizer"]},
            "deepspeed_config": "zero3",
            "compile_backend": FAST_BACKEND,
            "save_at": STEPS,
            "save_to": str(tmp_path / variant),
            "probe": ids.tolist(),
        }
    results = train_cases(2, jobs, tmp_path)
    assert results[ON]["graphs"] == [2] * STEPS  # of the layers, and of the loss
    hf_config = load_hf_config(ModelSection(config=MODELS["llama"]))
    exported = {}
    for variant, result in results.items():
        output = tmp_path / f"{variant}-hf"
        probe = Probe(ids, torch.tensor(result["logits"]), "float32")
        destination = Destination(output, tmp_path / "tokenizer", "float32")
        export_model(
            open_weights(tmp_path / variant / "tensors"), hf_config, destination, probe=probe
        )
        exported[variant] = load_file(output / "model.safetensors")
    assert exported[ON].keys() == exported[OFF].keys()
    for name, value in exported[ON].items():
        assert torch.allclose(value, exported[OFF][name], rtol=0, atol=1e-5), name
