"""Whether ZeRO 3 can gather the weights of a model's experts: tried on a proxy model.

Ranks gather a module's weights together when they come to it, forward and backward. Where the data
decide which experts are computed, in a loop over those that tokens have chosen (DBRX), ranks with
other tokens come to other modules, or to none, and wait for each other for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from bigtrain.errors import Problem
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import text_config
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    VOCABULARY,
    build_proxy_model,
    fewer_experts,
)
from bigtrain.models.equivalence.thresholds import TOKENS
from bigtrain.models.layers.decoder_layers import unmarked_experts
from bigtrain.models.torch_patches import OperatorMode


def check_expert_gathering(
    hf_config: PreTrainedConfig, zero_stage: int, num_replicas: int
) -> list[Problem]:
    """The problem with ZeRO 3 for a model of `hf_config`; empty if there is none.

    num_replicas: ranks that partition the model. Takes a second for a model with experts whose
    products transformers does not compute together.
    """
    if zero_stage < 3 or num_replicas == 1 or "expert" not in hf_config.to_json_string():
        return []
    if not unmarked_experts(empty_model(hf_config)):
        return []
    try:
        model = build_proxy_model(hf_config, "eager", [fewer_experts])
        vocabulary = min(VOCABULARY, int(text_config(model.config).vocab_size))
        ids = torch.randint(3, vocabulary, (2, TOKENS), generator=torch.Generator().manual_seed(0))
        with _Reads(unmarked_experts(model)) as reads, torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except MODEL_FAILURES:
        return []  # what cannot be tried is left to the run
    if not reads.found:
        return []
    rule = (
        f"the tokens decide which experts of a {hf_config.model_type} are computed, in a loop; "
        "with ZeRO 3 ranks would wait for each other's"
    )
    return [Problem("zero_optimization.stage", 3, rule, "ds_configs/zero2.json")]


class _Reads(OperatorMode):
    """Notes whether `modules` ask which elements of a tensor are set."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self._depth = False, 0
        for module in modules:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.found |= self._depth > 0 and func is torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))
