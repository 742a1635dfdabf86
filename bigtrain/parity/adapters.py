"""Adapters of the run on plain transformers: peft's model, with the documented initial values."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from bigtrain.errors import ConfigError, Problem
from bigtrain.models.layers.adapter_checks import KEY, PARAMETERS_KEY, SAVED_KEY
from bigtrain.models.layers.adapter_targets import find_parameters, find_saved, find_targets
from bigtrain.models.layers.adapters import quiet_bitsandbytes
from bigtrain.models.layers.parameters import has_score_head
from bigtrain.models.transformers_patches import targets_as_named
from bigtrain.settings.run_config import AdaptersSection


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Disable the adapters of `model` inside the block, by peft's own switch."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def comparable_adapters(model: Any, section: AdaptersSection, notes: list[str]) -> AdaptersSection:
    """Return `section` for the proxy `model`, which has fewer layers: without dropout, on weights
    that are not quantized. Raises ConfigError if no module matches."""
    if section.is_quantized:
        notes.append(f"adapters.quantization = {section.quantization} is off here")
    if section.dropout:
        notes.append(f"adapters.dropout = {section.dropout} is off here, like all dropout")
    update: dict[str, Any] = {
        "quantization": "none",
        "double_quantization": True,
        "compute_dtype": None,
        "llm_int8_threshold": 6.0,
        "dropout": 0.0,
    }
    for key, name, missing in (
        (KEY, "targets", find_targets(model, section).missing),
        (PARAMETERS_KEY, "target_parameters", find_parameters(model, section).missing),
        (SAVED_KEY, "modules_to_save", find_saved(model, section).missing),
    ):
        if missing:
            matching = [pattern for pattern in getattr(section, name) if pattern not in missing]
            notes.append(f"{key}: {', '.join(missing)} match nothing in the proxy model")
            update[name] = tuple(matching)
    small = section.model_copy(update=update)
    if not find_targets(model, small).names and not find_parameters(model, small).names:
        rule = "matches no layer of the proxy model, which has fewer layers"
        raise ConfigError(Problem(KEY, section.targets, rule, "match layers of every depth"))
    return small


def with_adapters(model: Any, section: AdaptersSection, seed: int) -> Any:
    """Add peft's adapters to the layers of `model` and freeze everything else; return `model`. Each
    layer's initial values are peft's, from a separate random stream (docs/howto/adapters.md)."""
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), quiet_bitsandbytes():
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        warnings.simplefilter("ignore")  # Conv1D, and layers that peft supports in several ways
        names = find_targets(model, section).names
        config = LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            use_rslora=section.rslora,
            init_lora_weights="pissa" if section.init == "pissa" else True,
            use_dora=section.dora,
            target_modules=names,
            target_parameters=find_parameters(model, section).names or None,
            modules_to_save=find_saved(model, section).names or None,
            fan_in_fan_out=bool(names) and isinstance(model.get_submodule(names[0]), Conv1D),
            task_type="SEQ_CLS" if has_score_head(model) else "CAUSAL_LM",
        )
        with targets_as_named():
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        # Initial values by layer, so that they do not depend on the layers before it.
        inner: Any = adapted.base_model.model
        for name, module in inner.named_modules():
            if isinstance(module, LoraLayer) and section.init == "lora":
                digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
                torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                layer: Any = module
                layer.float().reset_lora_parameters("default", True)
    return inner.to(dtype)
