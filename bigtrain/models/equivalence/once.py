"""Trials of proxy models, made by one rank and cached for later launches.

A trial takes seconds of a CPU and up to 2 GB, and has the same result on every rank. The result is
stored in the user's cache (`bigtrain.system.user_cache`); the key covers everything that it depends
on: the settings that it reads, the model's configuration, the kind of device, libraries by their
checksums and this package by its source. Refusals are not cached, nor results for a model whose
code is not transformers' own.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from pydantic import TypeAdapter
from transformers import PreTrainedConfig

from bigtrain.errors import Problem
from bigtrain.models.equivalence.model_plan import ModelPlan, choose
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.user_cache import builds, cached, key_of, package_source, processor

KIND = "trials"
_LIBRARIES = (
    *("torch", "transformers", "liger-kernel", "flash-attn", "kernels"),
    *("peft", "bitsandbytes"),  # of models with adapters
)
_PLAN = TypeAdapter(ModelPlan)


class _RefusedError(Exception):
    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems


def choose_once(
    config: RunConfig, hf_config: PreTrainedConfig, plan: BatchPlan
) -> tuple[ModelPlan | None, list[Problem]]:
    """As `choose`; of the ranks that share a cache one calls it, while the others wait."""
    key = trial_key(
        hf_config,
        config.model.model_dump(mode="json", exclude={"path", "config", "overrides"}),
        config.parallel.model_dump(mode="json"),
        config.precision.model_dump(mode="json"),
        config.optimizer.model_dump(mode="json", include={"type", "muon"}),
        config.moe.model_dump(mode="json"),
        config.adapters and config.adapters.model_dump(mode="json"),
        [config.data.isolates, config.data.packing, config.batch.sequence_length],
        vars(plan),
    )
    if key is None:
        return choose(config, hf_config, plan)

    def find() -> dict[str, Any]:
        chosen, problems = choose(config, hf_config, plan)
        if chosen is None or problems:
            raise _RefusedError(problems)
        found: dict[str, Any] = _PLAN.dump_python(chosen, mode="json")
        return found

    try:
        return _PLAN.validate_python(cached(KIND, key, find)), []
    except _RefusedError as refused:
        return None, refused.problems


def trial_key(hf_config: PreTrainedConfig, *settings: object) -> str | None:
    """The cache key of a trial with these `settings` (JSON types); None: it is not cached."""
    if not type(hf_config).__module__.startswith("transformers."):
        return None
    try:
        libraries = builds(*_LIBRARIES)
    except LookupError:
        return None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    model = hf_config.to_json_string(use_diff=False)
    own = package_source()
    return key_of([own, libraries, device, model, json.dumps(settings, sort_keys=True)])
