"""Rotary embeddings by document, against plain transformers with every document alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from bigtrain.models.equivalence.document_isolation import find_isolation
from bigtrain.models.equivalence.proxy_model import rescale_weights
from bigtrain.models.equivalence.sequence_parallel import run_in_parts
from bigtrain.models.equivalence.trial import OUTPUT
from bigtrain.models.layers.document_attention import Isolation
from bigtrain.models.layers.rotary import choose_by_document
from tests.support.longrope import longrope
from tests.unit.models.equivalence.test_sequence_parallel import COMMON

ORIGINAL = 10
DOCUMENTS = ((4, 6, 8, 6), (3, 18, 3), (24,))
TYPES = {"phi3": {"pad_token_id": None}, "phimoe": {}, "gemma3_text": {"head_dim": 16}}


def model_of(model_type: str) -> PreTrainedModel:
    more = {"short_mscale": 1.1, "long_mscale": 1.4} if model_type == "phimoe" else {}
    keys = longrope(8, ORIGINAL, **more)
    if model_type == "gemma3_text":  # one for each type of layer
        keys["layer_types"] = ["sliding_attention", "full_attention"]
        keys["rope_parameters"] = {
            "full_attention": keys["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    values: dict[str, Any] = {**COMMON, **keys, **TYPES[model_type]}
    if model_type != "phi3":
        del values["original_max_position_embeddings"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[model_type](**values), attn_implementation="sdpa"
    )
    return rescale_weights(model).eval()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 100, (3, 24), generator=torch.Generator().manual_seed(0))
    rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in DOCUMENTS]
    return ids, torch.stack(rows)


@torch.no_grad()
def alone(model: PreTrainedModel) -> torch.Tensor:
    ids, _ = tokens()
    return torch.stack(
        [
            torch.cat(
                [
                    model(input_ids=part[None], use_cache=False).logits[0]
                    for part in row.split(sizes)
                ]
            )
            for row, sizes in zip(ids, map(list, DOCUMENTS), strict=True)
        ]
    )


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("kind", ["masks", "documents"])
def test_a_document_does_not_depend_on_those_beside_it(kind: Any, model_type: str) -> None:
    model = model_of(model_type)
    expected = alone(model)
    ids, positions = tokens()
    Isolation(kind).install(model)

    def packed(rows: slice) -> torch.Tensor:
        with Isolation(kind).document_mask(positions[rows]):
            logits: torch.Tensor = model(
                input_ids=ids[rows], position_ids=positions[rows], use_cache=False
            ).logits
        return logits

    assert distance(packed(slice(None)), expected) < 1e-5
    for row in range(3):  # however the micro-batches are cut
        assert distance(packed(slice(row, row + 1)), expected[row : row + 1]) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "size"), [("phi3", 4), ("phimoe", 2), ("gemma3_text", 2)])
def test_parts_of_samples_choose_as_the_whole(model_type: str, size: int) -> None:
    model = model_of(model_type)
    ids, positions = tokens()
    whole, separate = model(input_ids=ids, use_cache=False).logits, alone(model)
    for given, expected in ((None, whole), (positions, separate)):
        results = run_in_parts(model, ids, given, size)
        assert distance(results[OUTPUT]["logits"], expected) < 1e-5
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, whole)  # given back


def test_it_is_undone_and_copied() -> None:
    model = model_of("phi3")
    ids, positions = tokens()
    undo = choose_by_document(model)
    other = copy.deepcopy(model)
    assert other.model.rotary_emb.forward.args[0] is other.model.rotary_emb
    undo()
    assert "forward" not in vars(model.model.rotary_emb)
    with torch.no_grad():
        patched, plain = (
            m(input_ids=ids, position_ids=positions, use_cache=False).logits for m in (other, model)
        )
    assert distance(patched, plain) > 1e-2


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_the_trial_sees_it(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_of("phi3").config
    config.max_position_embeddings, config.original_max_position_embeddings = 8192, 4096
    config.rope_parameters["original_max_position_embeddings"] = 4096
    assert find_isolation(config, attention, 8192)[1] == ""
    monkeypatch.setattr("bigtrain.models.layers.rotary.choose_by_document", lambda _: lambda: None)
    assert (
        "their logits differ from those of the separate"
        in find_isolation(config, attention, 8192)[1]
    )
    assert find_isolation(config, attention, 4096)[1] == ""  # nothing of it is ever long
