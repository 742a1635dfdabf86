"""`batch.phases`: what each phase has, and what is refused before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigtrain.commands.check import describe
from bigtrain.errors import ConfigError
from bigtrain.run.segments import inspect_segments
from bigtrain.settings.loading import parse_run_config
from bigtrain.settings.resolve import largest_phase, resolve_run
from bigtrain.settings.run_config import BatchSection
from tests.support.datasets import write_dataset
from tests.unit.settings.test_run_config import make_tree


def tree(*phases: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A run with `phases`."""
    settings = make_tree()
    settings["batch"]["phases"] = list(phases)
    return {**settings, **sections}


def refusal(run: dict[str, Any], ranks: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_run(parse_run_config(run), ranks, "zero1", "cpu")
    return str(caught.value)


def test_phases_take_keys_of_the_section() -> None:
    run = tree({"steps": 2, "sequence_length": 4}, {"steps": 3, "global_tokens": 32})
    resolved = resolve_run(parse_run_config(run), 2, "zero1", "cpu")
    plans = [phase.plan for phase in resolved.phases]
    assert [plan.sequence_length for plan in plans] == [4, 8, 8]
    assert [plan.global_batch_size for plan in plans] == [16, 4, 16]
    assert [plan.accumulation for plan in plans] == [4, 1, 4]
    batch = resolved.config.batch
    assert [batch.at(step).samples_per_step for step in range(7)] == [16, 16, 4, 4, 4, 16, 16]
    assert batch.tokens_until(7) == 2 * 64 + 3 * 32 + 2 * 128
    assert batch.tokens_until(3) == 2 * 64 + 32
    assert largest_phase(resolved).plan.micro_batch_tokens == 16
    shown = describe(resolved)
    for line in ("# steps 1 to 2: 16 samples", "# steps 3 to 5: 4 ", "# steps 6 to 10: 16 "):
        assert line in shown
    whole = BatchSection(sequence_length=8, global_batch_size=4)
    assert whole.at(3) is whole


BEST_FIT = {"path": "x", "document_boundaries": "isolate", "packing": "best_fit"}
CHUNKS = {"path": "x", "chunk_length": 8}
OWN = {"path": "x", "samples": {"type": "collections:Counter"}}


@pytest.mark.parametrize(
    ("phase", "sections", "texts"),
    [
        (
            {"global_batch_size": 6},
            {},
            ["batch.phases[1].global_batch_size = 6: must be a multiple of", "nearest: 4 or 8"],
        ),
        ({"global_tokens": 12}, {}, ["batch.phases[1].global_tokens = 12", "nearest: 8 or 16"]),
        ({"steps": 20}, {}, ["train.steps = 10: batch.phases have 22 steps -> train.steps=22"]),
        ({}, {"train": {"epochs": 1}}, ["train.epochs = 1", "-> train.steps=N"]),
        ({}, {"data": BEST_FIT}, ["data.packing = 'best_fit'", "-> data.packing=concatenate"]),
        (
            {"sequence_length": 3},
            {"data": CHUNKS},
            ["batch.phases[1].sequence_length = 3: is not a divisor of", "data.chunk_length=9"],
        ),
        ({"sequence_length": 3}, {"parallel": {"sequence": 2}}, ["phases[1].sequence_length = 3"]),
        ({}, {"data": OWN}, ["data.samples", "omit batch.phases"]),
    ],
)
def test_refusals_name_key_value_rule_and_fix(
    phase: dict[str, Any], sections: dict[str, Any], texts: list[str]
) -> None:
    shown = refusal(tree({"steps": 2}, {"steps": 3, **phase}, **sections))
    for text in texts:
        assert text in shown, shown


MODEL = {"config": {"model_type": "llama", "vocab_size": 50, "hidden_size": 16,
                    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                    "max_position_embeddings": 16}}  # fmt: skip


def test_positions_and_data_of_every_phase(tmp_path: Path) -> None:
    run = tree({"steps": 2, "sequence_length": 32}, model=MODEL)
    assert "batch.phases[0].sequence_length = 32: is more than the model's" in refusal(run)
    data = {"path": str(write_dataset(tmp_path / "shards", vocab_size=50))}
    run = tree({"steps": 2}, {"steps": 2, "global_batch_size": 1000}, model=MODEL, data=data)
    resolved = resolve_run(parse_run_config(run), 2, "zero1", "cpu")
    with pytest.raises(ConfigError, match=r"in batch.phases\[1\].*one step takes 1000"):
        inspect_segments(resolved)
