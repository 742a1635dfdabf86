"""Modules that DeepSpeed and torch import when the first engine is built, which takes seconds.

Only a process that ranks are forked from imports this (`bigtrain.forked_rank`)."""

from __future__ import annotations

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - with torch.compile's modules
