"""Key of a trial's result in the cache: a checksum of everything that the result depends on."""

from __future__ import annotations

import json

import torch
from transformers import PreTrainedConfig

from bigtrain.system.user_cache import key_of, package_fingerprints, package_source, processor

_LIBRARIES = (
    *("torch", "transformers", "liger-kernel", "flash-attn", "kernels", "torchao"),
    *("peft", "bitsandbytes"),  # used by models with adapters
)


def trial_key(hf_config: PreTrainedConfig, *settings: object) -> str | None:
    """Return the cache key of a trial with these `settings` (JSON types); None if the result is not
    cached."""
    if not type(hf_config).__module__.startswith("transformers."):
        return None
    try:
        libraries = package_fingerprints(*_LIBRARIES)
    except LookupError:
        return None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    model = hf_config.to_json_string(use_diff=False)
    trial = json.dumps(settings, sort_keys=True)
    return key_of([package_source(), libraries, device, model, trial])
