"""Models that are given positions number them as they number positions that they are not given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from bigtrain.errors import ConfigError
from bigtrain.models.equivalence.document_isolation import find_isolation
from bigtrain.models.equivalence.position_numbering import find_numbering, plan_numbering
from bigtrain.models.equivalence.sequence_parallel import check_sequence_parallel
from bigtrain.models.layers.document_masks import PLAIN_NUMBERING, PositionNumbering
from bigtrain.models.layers.position_embeddings import number_positions, replace_numbers
from bigtrain.run.preflight import _check_positions, inspect_inputs
from bigtrain.settings.resolve import resolve_run
from tests.support.datasets import write_dataset
from tests.support.run_trees import run_config
from tests.unit.models.layers.test_chunked_loss import gradients

PADDING = 5
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}


def roberta(model_type: str = "roberta", padding: int = PADDING) -> PreTrainedConfig:
    language = {"default_language": "en_XX"} if model_type == "xmod" else {}
    return CONFIG_MAPPING[model_type](**SIZES, **language, pad_token_id=padding, is_decoder=True)


@pytest.mark.parametrize(
    "model_type",
    [
        "roberta",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("camembert", "xmod", "data2vec-text", "xlm-roberta-xl")
        ),
    ],
)
def test_the_first_number_follows_the_padding(model_type: str) -> None:
    for padding in (1, PADDING):
        numbering, problems = plan_numbering(roberta(model_type, padding), "auto", 32)
        assert numbering == PositionNumbering(padding + 1, uncounted=padding)
        assert problems == []
    isolation, reason = find_isolation(roberta(model_type), "auto", 32)
    assert (isolation.numbering.first, reason) == (PADDING + 1, "")
    for isolate in (False, True):
        assert (
            check_sequence_parallel(
                roberta(model_type), "auto", 2, sequence_length=32, isolate=isolate
            )
            == []
        )


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "bart"])
def test_other_models_count_from_0(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type](vocab_size=64, is_decoder=True)
    assert plan_numbering(config, "auto", 64) == (PLAIN_NUMBERING, [])


def test_numbers_are_of_documents_alone() -> None:
    numbering = PositionNumbering(PADDING + 1, uncounted=PADDING)
    ids = torch.tensor([[5, 7, 5, 5, 9, 8, 5, 3], [4, 3, 5, 8, 8, 8, 5, 5]])
    lengths = ((3, 4, 1), (1, 7))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    expected = [
        torch.cat(
            [
                RobertaEmbeddings.create_position_ids_from_input_ids(document[None], PADDING)[0]
                for document in row.split(row_lengths)
            ]
        )
        for row, row_lengths in zip(ids, lengths, strict=True)
    ]
    assert torch.equal(numbering.numbers(ids, positions), torch.stack(expected))
    assert PositionNumbering(2).numbers(None, positions).tolist() == (positions + 2).tolist()


@pytest.mark.parametrize("fault", ["", "forgotten", "twice", "not restarted"])
def test_gradients_are_of_documents_alone(fault: str) -> None:
    """Also with tokens that do not count."""
    model: Any = AutoModelForCausalLM.from_config(roberta())
    lengths = ((7, 9, 8), (1, 20, 3))
    ids = torch.randint(0, 8, (2, 24), generator=torch.Generator().manual_seed(0))
    assert (ids == PADDING).sum() > 3
    separate = [
        model(input_ids=document[None], use_cache=False).logits[0].square().sum()
        for row, row_lengths in zip(ids, lengths, strict=True)
        for document in row.split(row_lengths)
    ]
    expected = gradients(model, torch.stack(separate).sum())
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    isolation, _ = find_isolation(model.config, "auto", 32)
    isolation.install(model)
    given_positions = positions
    if fault == "forgotten":
        replace_numbers(model, lambda _, positions: positions)
    elif fault == "twice":
        given_positions = isolation.numbering.numbers(ids, positions)
    elif fault == "not restarted":
        given_positions = torch.arange(24).expand(2, 24)
    with isolation.document_mask(positions):
        logits = model(input_ids=ids, position_ids=given_positions, use_cache=False).logits
    packed = gradients(model, logits.square().sum())
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    distances = [float((packed[name] - x).abs().max()) for name, x in expected.items()]
    assert (max(distances) <= 1e-5 * largest) == (not fault)


def test_the_numbers_of_parts_replace_and_restore_those_of_samples() -> None:
    model: Any = AutoModelForCausalLM.from_config(roberta()).eval()
    ids = torch.randint(10, 60, (1, 8), generator=torch.Generator().manual_seed(0))

    def logits(first: int) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(
                input_ids=ids, position_ids=torch.arange(first, first + 8)[None], use_cache=False
            ).logits
        return result

    plain = {first: logits(first) for first in (0, 6, 9)}
    undo = number_positions(model, PositionNumbering(6))
    assert torch.equal(logits(0), plain[6])
    undo_parts = replace_numbers(model, lambda _, positions: positions + 9)
    assert torch.equal(logits(0), plain[9])
    undo_parts()
    assert torch.equal(logits(0), plain[6])
    undo()
    assert torch.equal(logits(0), plain[0])


def test_positions_that_do_not_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    count = RobertaEmbeddings.create_position_ids_from_input_ids

    def every_second(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * count(*args, **kwargs) - PADDING

    monkeypatch.setattr(
        RobertaEmbeddings, "create_position_ids_from_input_ids", staticmethod(every_second)
    )
    assert find_numbering(AutoModelForCausalLM.from_config(roberta()).eval()) == PLAIN_NUMBERING
    assert find_isolation(roberta(), "auto", 32)[1].startswith("packed documents are not isolated")
    (problem,) = check_sequence_parallel(roberta(), "auto", 2, sequence_length=32, isolate=False)
    assert "its own positions do not count the tokens" in problem.rule


def test_a_length_beyond_the_table_gets_the_same_nearest_length() -> None:
    (problem,) = _check_positions(run_config(batch={"sequence_length": 65}), roberta())
    assert problem.remedy.startswith("at most 58, or raise model.overrides")
    gpt2 = CONFIG_MAPPING["gpt2"](vocab_size=64, n_positions=64)
    (problem,) = _check_positions(run_config(batch={"sequence_length": 65}), gpt2)
    assert problem.remedy.startswith("at most 64, or raise model.overrides")


@pytest.mark.parametrize("boundaries", ["ignore", "isolate"])
def test_samples_fit_into_the_table_after_its_unused_rows(tmp_path: Path, boundaries: str) -> None:
    data = {"path": str(write_dataset(tmp_path / "d", vocab_size=50))}
    config = {**roberta().to_diff_dict(), "vocab_size": 50, "eos_token_id": 0}
    for length, is_legal in ((58, True), (59, False), (64, False), (65, False)):
        run = run_config(
            model={"config": config},
            data={**data, "document_boundaries": boundaries},
            batch={"sequence_length": length, "global_batch_size": 2, "micro_batch_size": 2},
            output={"export": False},
        )
        if is_legal:
            inspect_inputs(resolve_run(run, 1))
            continue
        with pytest.raises(ConfigError) as caught:
            inspect_inputs(resolve_run(run, 1))
        (problem,) = caught.value.problems
        assert str(problem).startswith(
            f"batch.sequence_length = {length}: is more than the model's max_position_embeddings = "
            "64, of which its own positions leave 6 unused -> at most 58, or raise model.overrides"
        )
