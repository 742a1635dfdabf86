"""A checkpoint written with divided tensors or experts is read at every other degree, bit for
bit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import ARCHITECTURES, VOCAB_SIZE, llama, run_config
from tests.support.hybrids import HYBRIDS
from tests.support.resumes import Layout, Pair, Resumes, each_pair, layout

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

STOP, END = 2, 4
MODELS: dict[str, dict[str, Any]] = {
    # Nothing divides: padded vocabulary, uneven widths, shared key-value heads, packed experts.
    "odd": llama(intermediate_size=63, attention_bias=True, attention_dropout=0.1),
    "odd_experts": ARCHITECTURES["qwen3_moe"] | {"moe_intermediate_size": 24},
    "experts": ARCHITECTURES["qwen3_moe"],
    # Projections of several parts, by key heads and by z, x, B, C and dt.
    **{name: HYBRIDS[name] | {"vocab_size": VOCAB_SIZE} for name in ("qwen3_next", "bamba")},
}
BFLOAT16 = "bfloat16"


def alike(variant: str, dtype: str, *layouts: tuple[int, str, dict[str, int]]) -> list[Layout]:
    return [layout(size, engine, variant, dtype, **degrees) for size, engine, degrees in layouts]


def chain(layouts: list[Layout]) -> list[Pair]:
    """Each layout reads what the one before wrote, the first what the last wrote."""
    return [Pair(wrote, read) for wrote, read in pairwise([layouts[-1], *layouts])]


EXPERTS = "experts"
PLAIN, DIVIDED = layout(1, "zero1", EXPERTS), layout(2, "zero3", EXPERTS, expert=2)
DIVIDED_16 = layout(2, "zero1", EXPERTS, BFLOAT16, expert=2)
EXPORTED = Pair(DIVIDED, layout(1, "zero0", EXPERTS), slow=False)
FAST = [
    EXPORTED,
    Pair(DIVIDED, DIVIDED),
    Pair(PLAIN, layout(2, "zero2", EXPERTS, expert=2), slow=False),
    Pair(DIVIDED_16, layout(2, "zero3", EXPERTS, BFLOAT16, expert=2)),
    Pair(layout(2, "zero1", "odd", tensor=2), layout(2, "zero3", "odd", tensor=2)),
]
TENSOR, STAGES = {"tensor": 2}, {"pipeline": 2}
# Every degree of experts with every one of tensor parallelism and pipeline stages, with the fewest
# processes that have it; 4 x 2 x 2 needs sixteen.
OF_EXPERTS = alike(
    EXPERTS,
    "float32",
    (1, "zero0", {}),
    (2, "zero3", TENSOR),
    (2, "pipeline_zero1", STAGES),
    (4, "zero0", TENSOR | STAGES),
    (2, "zero2", {"expert": 2}),
    (4, "zero1", TENSOR | {"expert": 2}),
    (4, "pipeline_zero1", STAGES | {"expert": 2}),
    (8, "pipeline_zero1", TENSOR | STAGES | {"expert": 2}),
    (4, "zero3", {"expert": 4}),
    (8, "zero2", TENSOR | {"expert": 4}),
    (8, "zero0", STAGES | {"expert": 4}),
    # Where a rank has a replica that holds the same experts.
    (4, "zero3", {"expert": 2}),
)
EXPERTS_16 = alike(
    EXPERTS,
    BFLOAT16,
    (4, "zero2", {"expert": 2}),
    (4, "zero3", {"expert": 4}),
    (4, "pipeline_zero1", STAGES | {"expert": 2}),
    (4, "zero3", TENSOR | {"expert": 2}),
    (4, "zero1", {}),
)
ODD = alike(
    "odd",
    "float32",
    (1, "zero0", {}),
    (2, "zero3", TENSOR),
    (4, "zero2", {"tensor": 4}),
    (2, "zero1", TENSOR),
    (2, "zero3", {}),
    (4, "zero3", TENSOR),
)
ODD_16 = alike("odd", BFLOAT16, (2, "zero0", TENSOR), (1, "zero3", {}))
ODD_EXPERTS = alike(
    "odd_experts", "float32", (2, "zero3", TENSOR), (1, "zero2", {}), (4, "zero1", TENSOR)
)
RECURRENT = [
    alike(name, "float32", (2, "zero1", TENSOR), (1, "zero0", {}), (2, "zero3", TENSOR))
    for name in ("qwen3_next", "bamba")
]
PAIRS = [
    *FAST,
    *(
        pair
        for of in (OF_EXPERTS, EXPERTS_16, ODD, ODD_16, ODD_EXPERTS, *RECURRENT)
        for pair in chain(of)
    ),
    *(
        Pair(place, place)
        for place in (OF_EXPERTS[5], OF_EXPERTS[7], OF_EXPERTS[9], EXPERTS_16[0], EXPERTS_16[2])
    ),
    *(Pair(place, place) for place in (ODD[2], ODD[3], ODD_16[0], ODD_EXPERTS[0])),
]


@pytest.fixture(scope="module")
def resumes(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumes:
    def job_of(place: Layout) -> dict[str, Any]:
        config = run_config(
            dataset,
            {"config": MODELS[place.variant]},
            micro_batch_size=4 // place.num_replicas or 1,
            precision={"dtype": place.dtype},
            parallel=dict(place.degrees),
        )
        return {"config": config, "deepspeed_config": place.engine}

    return Resumes(tmp_path_factory.mktemp("tensors"), PAIRS, job_of, stop=STOP, end=END)


@each_pair(PAIRS)
def test_goes_on(pair: Pair, resumes: Resumes) -> None:
    wrote = pair.wrote
    # "odd" has dropout of attention, whose masks differ with the ranks that divide the heads.
    is_close = wrote.dtype == "float32" and wrote.variant != "odd"
    saved = resumes.check(pair, exact=1e-5 if is_close else None)
    assert any(key.startswith("exp_avg_sq/") for key in saved)
    if "experts" in wrote.variant:
        assert "exp_avg_sq/model.layers.0.mlp.experts.down_proj" in saved


def test_initial_weights_do_not_depend_on_the_degree(resumes: Resumes) -> None:
    """All begin with random weights and train the same samples."""
    results = resumes.results_of(EXPORTED)
    expected = results[PLAIN.name]["losses"]
    assert results[DIVIDED.name]["losses"] == pytest.approx(expected, abs=1e-5)


def test_export_does_not_know_the_degree(resumes: Resumes, tmp_path: Path) -> None:
    resumes.results_of(EXPORTED)
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(tokenizer)
    outputs = []
    for is_resumed in (False, True):
        weights = read_full_masters(resumes.directory_of(EXPORTED, resumed=is_resumed) / "tensors")
        hf_config = load_hf_config(ModelSection(config=MODELS["experts"]))
        model = AutoModelForCausalLM.from_config(hf_config)
        model.load_state_dict(weights, strict=False)
        ids = Probe.make_input(97, 16)
        with torch.no_grad():
            probe = Probe(ids, model.eval()(input_ids=ids).logits, "float32")
        outputs.append(tmp_path / str(is_resumed))
        destination = Destination(outputs[-1], tokenizer, "float32")
        export_model(weights, hf_config, destination, probe=probe)
    files = sorted(path.name for path in outputs[0].iterdir())
    assert "model.safetensors" in files
    for file in files:
        assert (outputs[0] / file).read_bytes() == (outputs[1] / file).read_bytes(), file
