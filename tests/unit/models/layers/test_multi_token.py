"""Labels of layers for multi-token prediction, and which architectures have such layers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig

from bigtrain.errors import ConfigError
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import MTP_MARK, unmarked, with_mtp_layers
from bigtrain.models.equivalence.multi_token import check_mtp_layers
from bigtrain.models.layers.multi_token import MultiTokenLayers, labels_at_depth
from tests.parity.multi_token_models import deepseek, mellum
from tools.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("depth", "positions", "expected"),
    [
        (1, None, [12, -100, 14, 15, 16, 17, -100]),
        (2, None, [-100, 14, 15, 16, 17, -100, -100]),
        # Documents of 4 and 3 tokens; the label across the boundary, 14, is already -100.
        (1, [0, 1, 2, 3, 0, 1, 2], [12, -100, -100, -100, 16, 17, -100]),
        (2, [0, 1, 2, 3, 0, 1, 2], [-100, -100, -100, -100, 17, -100, -100]),
    ],
)
def test_labels_stay_in_sample_and_document(
    depth: int, positions: list[int] | None, expected: list[int]
) -> None:
    labels = [11, 12, -100, 14, 15, 16, 17]
    if positions is not None:
        labels[3] = -100
    known = None if positions is None else torch.tensor([positions])
    assert labels_at_depth(torch.tensor([labels]), depth, known).tolist() == [expected]


@pytest.mark.parametrize("config", [deepseek(1), deepseek(2), mellum(), tiny_config("glm4_moe")])
def test_layers_are_written_as_they_are_read(config: PreTrainedConfig) -> None:
    marked = with_mtp_layers(config, trains=True)
    assert check_mtp_layers(marked, 0.1, 32) == []
    assert with_mtp_layers(config, trains=False) is config
    names = {name for name, _ in empty_model(marked).named_parameters()}
    plain = {name for name, _ in empty_model(config).named_parameters()}
    assert all(name.startswith("mtp.layers.") for name in names - plain)
    assert plain < names
    with unmarked(marked):
        assert MTP_MARK not in marked.to_json_string(use_diff=False)
    assert MTP_MARK in marked.to_json_string(use_diff=False)


def test_layers_are_tried_beyond_the_lengths_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that fails where its window ends."""
    marked = with_mtp_layers(mellum(), trains=True)
    marked.sliding_window = 100
    windows: list[tuple[int, int]] = []
    hidden_states = MultiTokenLayers.hidden_states

    def record(self: Any, model: Any, hidden: torch.Tensor, *args: Any) -> Any:
        windows.append((model.config.sliding_window, hidden.shape[1]))
        return hidden_states(self, model, hidden, *args)

    monkeypatch.setattr(MultiTokenLayers, "hidden_states", record)
    assert check_mtp_layers(marked, 0.1, 1024) == []
    ((window, num_tokens),) = windows
    assert window < num_tokens


def without_sliding_layers() -> PreTrainedConfig:
    config = mellum()
    config.layer_types = ["full_attention"] * 2
    return type(config)(**{**config.to_dict(), "rope_parameters": None})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tiny_config("inkling_text"), "gives them an embedding of their own"),
        (tiny_config("bailing_hybrid"), "transformers does not build them: .* is ambiguous"),
        (without_sliding_layers(), "KeyError: 'sliding_attention'"),
    ],
)
def test_what_transformers_cannot_train_is_refused(config: Any, reason: str) -> None:
    config.num_mtp_layers = 1
    (problem,) = check_mtp_layers(with_mtp_layers(config, trains=True), 0.1, 32)
    assert re.search(reason, problem.rule)
    assert problem.remedy == "objective.mtp_weight=0"


def test_a_configuration_without_such_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="of this llama counts no layers for multi-token"):
        with_mtp_layers(LlamaConfig(), trains=True)
