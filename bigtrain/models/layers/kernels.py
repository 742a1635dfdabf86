"""Liger's Triton kernels (arXiv 2410.10989; 0.6 and 0.7, CUDA only) in place of a model's RMSNorm,
RoPE and SwiGLU. Its loss is in `bigtrain.models.layers.chunked_loss`."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.cuda import is_available as is_cuda_available
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import Problem
from bigtrain.models.layers.plans import CompilationPlan
from bigtrain.settings.compatibility.facts import Facts, read_facts
from bigtrain.settings.deepspeed.engine_config import EngineConfig
from bigtrain.settings.fast_path import CPU, FastPath, LayerMachine, choose_fast_path
from bigtrain.settings.hf_config_keys import EXPERTS, number_of
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.model import ModelSection
from bigtrain.system.extras import install_line
from bigtrain.system.machine import triton_problem

_OPTIONS = {
    "rope": True,
    "rms_norm": True,
    "swiglu": True,
    "geglu": True,
    "layer_norm": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": False,
}


def check_kernels(hf_config: PreTrainedConfig, kernels: str) -> list[Problem]:
    """Return problems with ``model.kernels`` other than none for models of `hf_config`. Builds
    nothing."""
    if importlib.util.find_spec("liger_kernel") is None:
        remedy = f"{install_line('gpu')}, or set model.kernels=none"
        return [Problem("model.kernels", kernels, "liger-kernel is not installed", remedy)]
    patches = _patches()
    if hf_config.model_type in patches:
        return []
    rule = f"liger-kernel has none for model_type {hf_config.model_type}, only for " + ", ".join(
        sorted(patches)
    )
    return [Problem("model.kernels", kernels, rule, "model.kernels=none")]


def machine_of(device_type: str) -> LayerMachine:
    """Return what the layers of a run on this machine's devices may use."""
    if device_type != "cuda":
        return CPU
    problem = triton_problem()
    if not problem and is_cuda_available() and torch.cuda.get_device_capability() < (7, 0):
        problem = f"Triton has no kernels for a {torch.cuda.get_device_name()}"
    has_liger = importlib.util.find_spec("liger_kernel") is not None
    return LayerMachine(
        is_cuda=True,
        triton_problem=problem,
        has_liger=has_liger,
        liger_models=frozenset(_patches()) if has_liger else frozenset(),
    )


def may_compile(section: ModelSection) -> bool:
    """Return whether layers may be compiled on this machine: for ``on``, and for ``auto`` with CUDA
    and a Triton that works, unless Liger's kernels are asked for."""
    if section.compile != "auto":
        return section.compile == "on"
    is_free = section.kernels != "liger" and is_cuda_available()
    return is_free and not machine_of("cuda").triton_problem


def may_compile_loss(config: RunConfig, hf_config: PreTrainedConfig) -> bool:
    """Return whether the loss of chunks may be compiled on this machine: with the layers, by the
    rules that the run's own settings tell."""
    if not (may_compile(config.model) and config.objective.has_plain_entropies):
        return False
    device_type = "cuda" if config.model.compile == "auto" else "cpu"
    return _fast_path(config, {}, hf_config, device_type).compiles


def fast_path_of(
    config: RunConfig,
    engine: EngineConfig,
    hf_config: PreTrainedConfig,
    device_type: str,
    compilation: CompilationPlan,
) -> FastPath:
    """Return how the layers of a run compute on this machine's devices. `compilation`: of the run's
    model plan."""
    return _fast_path(config, engine.deepspeed, hf_config, device_type, compilation.refusal)


def _fast_path(
    config: RunConfig,
    deepspeed: Mapping[str, Any],
    hf_config: PreTrainedConfig,
    device_type: str,
    compilation_refusal: str = "",
) -> FastPath:
    """Return `choose_fast_path` of the facts of a run. deepspeed: rendered, empty if unknown."""
    num_experts = number_of(hf_config.get_text_config().to_dict(), EXPERTS)
    facts = read_facts(config, deepspeed, None) | Facts(num_experts=num_experts)
    machine, model_type = machine_of(device_type), str(hf_config.model_type)
    return choose_fast_path(config.model, facts, machine, model_type, compilation_refusal)


def apply_kernels(model: PreTrainedModel) -> None:
    """Make `model` compute with Liger's kernels; parameters stay as they are. Rotary embeddings are
    a function in transformers' module of the architecture, which is patched for the entire process.
    Call `check_kernels` first."""
    patch = _patches()[model.config.model_type]
    parameters = inspect.signature(patch).parameters
    patch(model=model, **{name: value for name, value in _OPTIONS.items() if name in parameters})


def _patches() -> dict[str, Callable[..., Any]]:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    patches: dict[str, Callable[..., Any]] = MODEL_TYPE_TO_APPLY_LIGER_FN
    return patches
