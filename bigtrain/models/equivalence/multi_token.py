"""Whether a run's layers for multi-token prediction can be built, read and written: before they are
trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from bigtrain.errors import ModelError, Problem
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import num_trained_mtp_layers
from bigtrain.models.equivalence.parameter_plan import WithoutValues, probed_configuration
from bigtrain.models.equivalence.proxy_model import MODEL_FAILURES, failure_text
from bigtrain.models.layers.document_masks import document_boundaries
from bigtrain.models.layers.multi_token import NAME, mtp_layers
from bigtrain.models.weights.export_hf import stored_names
from bigtrain.models.weights.lazy_tensors import LazyTensor, Offsets
from bigtrain.models.weights.mtp_names import MtpNames, load_mtp_layers


def check_mtp_layers(
    hf_config: PreTrainedConfig, weight: float, sequence_length: int
) -> list[Problem]:
    """Return why the multi-token layers of `hf_config` cannot be trained on samples of
    `sequence_length` with this loss `weight`; empty if they can, or if none is trained. Builds the
    model without values."""
    if not num_trained_mtp_layers(hf_config):
        return []
    try:
        config, tokens = probed_configuration(hf_config, sequence_length)
        model: Any = empty_model(config)
        # A configuration may lack what only these layers use, such as the rotary embedding of
        # another attention: one forward pass shows it.
        layers = mtp_layers(model)
        assert layers is not None
        width = model.config.get_text_config().hidden_size
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        hidden = torch.zeros(1, tokens, width, dtype=model.dtype, device="meta")
        with WithoutValues(), document_boundaries(packed=False):  # type: ignore[no-untyped-call]
            for _ in layers.hidden_states(model, hidden, ids, None):
                pass
        # The names that an export writes must give every parameter of these layers back.
        model = empty_model(hf_config)
        layers = mtp_layers(model)
        assert layers is not None
        state = model.state_dict(keep_vars=True)
        names = MtpNames.find(model)
        stored = {
            name: LazyTensor(tensor.shape, tensor.dtype, _Nowhere())
            for name, tensor in stored_names(model, state).items()
            if names.is_one(name)
        }
        problems = load_mtp_layers(model, layers, stored)
        problems += [
            f"{NAME}.{name}: the names of an export do not give it back"
            for name, tensor in layers.state_dict(keep_vars=True).items()
            if not isinstance(tensor, LazyTensor)
        ]
        reason = "; ".join(problems[:3])
    except ModelError as error:
        reason = str(error)
    except MODEL_FAILURES as error:
        reason = f"{type(error).__name__}: {failure_text(error)}"
    if not reason:
        return []
    rule = (
        f"trains layers for multi-token prediction, which is not supported for model_type "
        f"{hf_config.model_type}: {reason}"
    )
    return [Problem("objective.mtp_weight", weight, rule, "objective.mtp_weight=0")]


class _Nowhere:
    """Source of values that are never read."""

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        raise AssertionError("read")

    def sources(self) -> Iterator[object]:
        return iter(())
