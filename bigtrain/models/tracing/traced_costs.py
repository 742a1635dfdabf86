"""The costs of a run's model, traced once and cached; a closed form if it cannot be traced. Imports
torch and transformers only if the costs are not cached yet."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, ModelError, Problem, one_line
from bigtrain.planner.model_costs import (
    AdapterCosts,
    ModelCosts,
    closed_form,
    dense_shape,
    of_all_linear,
    with_adapters,
)
from bigtrain.settings.hf_config_keys import missing_model, written_configuration
from bigtrain.settings.run_config import AdaptersSection, ModelSection, RunConfig
from bigtrain.settings.sections.base import Section
from bigtrain.system.user_cache import (
    cache_get,
    cache_has,
    cache_put,
    cached,
    key_of,
    package_fingerprints,
    package_source,
)

KIND = "model_costs"


def model_costs(
    config: RunConfig, hf_config: Any = None, *, traces: bool = True
) -> tuple[ModelCosts, str]:
    """Return costs of the run's model, and a remark about the costs, or "". `hf_config`: the
    model's configuration, if already loaded. Without `traces`, no torch is imported.

    Raises ConfigError or ModelError if the model is not known, or is neither traceable nor dense,
    and if its adapters are not known without torch.
    """
    costs, remark = _base_costs(config, hf_config, traces)
    if config.model.attention == "eager":
        costs = costs.with_eager_attention()
    if config.objective.kind.scores_samples:
        costs = costs.with_score_head()
    if config.adapters is not None:
        costs = with_adapters(costs, _adapter_costs(config, config.adapters, costs, traces))
    return costs, remark


def _base_costs(config: RunConfig, hf_config: Any, traces: bool) -> tuple[ModelCosts, str]:
    """Return the costs of the model without adapters and score head, and a remark if they are not
    traced. `traces`: trace the model without an earlier trace. Raises ModelError, ConfigError."""
    if missing := missing_model(config.model):
        raise ConfigError(missing)
    # Costs of an earlier trace of an equal model, else of a new trace.
    values = written_configuration(config.model)
    key = _key(config, values, hf_config, makes=traces) if values else None
    if key is not None:
        stored = cache_get(KIND, key)
        if stored is not None:
            with suppress(ValueError):
                return ModelCosts.from_json(stored), ""
    try:
        if not traces:
            raise ModelError("it has no earlier trace, and only --gpu NAME makes one")
        if key is None:
            return _trace(config, hf_config), ""
        stored_costs = cached(KIND, key, lambda: _trace(config, hf_config).to_json())
        return ModelCosts.from_json(stored_costs), ""
    except (ModelError, ImportError) as error:
        reason = one_line(error, None)
    # Without a trace, a closed form for models of dense layers.
    shape = dense_shape(values)
    if shape is None and not traces:
        raise ModelError("the model's layers have no earlier trace")
    if shape is None:
        remedy = "write hidden_size, num_hidden_layers, num_attention_heads, intermediate_size and "
        raise ConfigError(
            Problem("model", None, f"its layers cannot be traced ({reason})", remedy + "vocab_size")
        )
    size = 4 if config.precision.dtype == "float32" else 2
    trained = ", as if everything were trained" if config.model.frozen else ""
    remark = f"by a closed form of dense layers{trained}, not traced: {reason}"
    return closed_form(shape, size), remark


def _adapter_costs(
    config: RunConfig, section: AdaptersSection, costs: ModelCosts, traces: bool
) -> AdapterCosts:
    is_simple = not (section.target_parameters or section.modules_to_save or section.dora)
    if not traces and is_simple and section.targets == "all-linear":
        return of_all_linear(costs, section.rank, section.packing)
    values = written_configuration(config.model)
    key = _key(config, values, None, section, makes=traces) if values else None
    stored = cache_get(KIND, key) if key is not None else None
    if stored is not None:
        with suppress(ValueError):
            return AdapterCosts.from_json(stored)
    if not traces:
        raise ModelError("which layers get adapters was not looked up yet")
    from bigtrain.models.build import empty_model
    from bigtrain.models.configuration import load_hf_config
    from bigtrain.models.parallel.adapter_costs import adapter_costs

    counted = adapter_costs(empty_model(load_hf_config(_section(config))), section)
    if key is not None:
        cache_put(KIND, key, counted.to_json())
    return counted


def _key(
    config: RunConfig, values: Mapping[str, Any], hf_config: Any, *sections: Section, makes: bool
) -> str | None:
    """Return the key of cached costs, if the inputs are known: ``MODEL/PROGRAM``. `hf_config`: the
    traced configuration, whose vocabulary may be larger than in the written configuration.
    `makes`: costs are stored; otherwise the key is None if there are none of this model, without a
    look at the program, which takes a tenth of `bigtrain check`."""
    if config.model.type is not None:
        return None  # its code may change
    grown = ""
    if hf_config is not None and config.model.vocabulary is not None:
        grown = str(hf_config.get_text_config().vocab_size)
    model_key = key_of(
        [
            json.dumps(values, sort_keys=True),
            grown,
            str(config.objective.mtp_weight > 0),
            config.precision.dtype,
            json.dumps(config.model.frozen),
            *(section.model_dump_json() for section in sections),
        ]
    )
    if not makes and not cache_has(f"{KIND}/{model_key}"):
        return None
    with suppress(LookupError):
        libraries = package_fingerprints("torch", "transformers", *(("peft",) if sections else ()))
        return f"{model_key}/{key_of([libraries, package_source()])}"
    return None


def _trace(config: RunConfig, hf_config: Any) -> ModelCosts:
    if hf_config is None and "torch" not in sys.modules:
        from bigtrain.models.tracing.trace_process import NoTraceProcessError, trace_apart

        with suppress(NoTraceProcessError):
            trains_mtp = config.objective.mtp_weight > 0
            return trace_apart(_section(config), config.precision.dtype, trains_mtp=trains_mtp)
    import torch

    from bigtrain.models.configuration import load_hf_config, with_mtp_layers
    from bigtrain.models.tracing.meta_trace import trace_model

    dtype, frozen = getattr(torch, config.precision.dtype), config.model.frozen
    if hf_config is None:
        loaded_config = load_hf_config(_section(config))
        hf_config = with_mtp_layers(loaded_config, trains=config.objective.mtp_weight > 0)
    return trace_model(hf_config, dtype, frozen=frozen)


def _section(config: RunConfig) -> ModelSection:
    """Return the run's model section, with a shipped configuration for a hub name: needs no
    network."""
    section = config.model
    values = written_configuration(section)
    source = section.path or section.config
    if values and isinstance(source, str) and not Path(source).exists():
        return ModelSection(config=values, frozen=section.frozen)
    return section
