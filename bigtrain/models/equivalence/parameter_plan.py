"""Parameters of a run's model that are trained, decay, and are updated by Muon. Checkpoints record
it, so that no upgrade changes an optimizer's groups silently
(`bigtrain.run.checkpointing.changed_settings`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from bigtrain.models.build import empty_model
from bigtrain.models.equivalence.gradient_reach import GradientReach, find_gradient_reach
from bigtrain.models.experts import selection_biases
from bigtrain.models.layers.parameter_roles import collapsed, parameter_roles
from bigtrain.models.layers.parameters import freeze, freeze_named
from bigtrain.models.parallel.hidden_matrices import hidden_matrices
from bigtrain.models.transformers_patches import computed_in_float32
from bigtrain.settings.run_config import RunConfig

_SHOWN = 5


@dataclass(frozen=True)
class ParameterPlan:
    """Names of parameters by what a run does with them.

    untrained: get no gradient from text, and are frozen. frozen: these, and those that
    ``model.frozen`` names, but for selection biases that are updated. kept: are float32 where the
    model computes in 16 bit. The others are of
    trained parameters, with ``*`` for indices. decaying: with
    ``optimizer.decay_embeddings``. decayed_before: do not decay, but did in releases that went by
    the number of dimensions. matrices: are updated by an optimizer of hidden matrices. reason: a
    line for the log; empty if all are trained in the run's dtype.
    """

    untrained: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    decaying: tuple[str, ...] = ()
    decayed_before: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """Return the part that a checkpoint contains (JSON types)."""
        kept = asdict(self)
        return {name: list(kept[name]) for name in ("decaying", "matrices", "frozen")}


def plan_parameters(
    config: RunConfig, hf_config: PreTrainedConfig, reach: GradientReach | None = None
) -> ParameterPlan:
    """Return the plan for a run's model; of a run with adapters no groups of its optimizer.
    `reach`: of the model; found out if it is None."""
    kept = _kept(config, hf_config)
    reasons = []
    if kept:
        reasons.append(_listed("kept in float32 by its architecture", kept, kept))
    reach = reach or find_gradient_reach(hf_config, config.model.attention)
    absent = reach.absent
    if absent is None:
        reasons.append(
            "parameters without a gradient: not known, since no model of this kind could be run "
            "before the training; all are trained"
        )
    model = empty_model(hf_config)
    names = [name for name, _ in model.named_parameters()]
    untrained = tuple(name for name in absent or () if name in names)
    biases: list[str] = []
    if config.moe.bias_update_rate:
        biases = [b.name for b in selection_biases(model, untrained) if b.is_parameter]
        kept = tuple(dict.fromkeys([*kept, *biases]))
    if config.adapters is not None:
        return ParameterPlan(untrained, kept=kept, reason="; ".join(reasons))
    freeze(model, config.model.frozen)
    also = [name for name in untrained if model.get_parameter(name).requires_grad]
    freeze_named(model, untrained)
    if also:
        title = "not trained, since they get no gradient from text"
        reasons.append(_listed(title, also, names))
    decaying, before = _decays(model, also)
    own = config.optimizer.facts.beside is not None
    return ParameterPlan(
        untrained,
        tuple(n for n, p in model.named_parameters() if not p.requires_grad and n not in biases),
        kept,
        tuple(decaying),
        tuple(before),
        tuple(collapsed(hidden_matrices(model))) if own else (),
        "; ".join(reasons),
    )


def _kept(config: RunConfig, hf_config: PreTrainedConfig) -> tuple[str, ...]:
    dtype = getattr(torch, config.precision.dtype)
    if dtype == torch.float32:
        return ()
    return tuple(computed_in_float32(empty_model(hf_config, dtype), dtype))


def _listed(title: str, names: Collection[str], every: Collection[str]) -> str:
    shown = summarized(names, every) if names is not every else collapsed(names)
    rest = "" if len(shown) <= _SHOWN else f" and {len(shown) - _SHOWN} more"
    return f"{title}: {len(names)} parameters ({', '.join(shown[:_SHOWN])}{rest})"


def _decays(model: nn.Module, also: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return trained parameters that decay; and those that decayed in earlier releases, `also`
    included."""
    decaying, before = [], []
    parameters, no_longer = dict(model.named_parameters()), set(also)
    for name, entry in parameter_roles(model).items():
        parameter = parameters[name]
        if parameter.requires_grad and entry.role.decays():
            decaying.append(name)
        elif parameter.ndim >= 2 and (parameter.requires_grad or name in no_longer):
            before.append(name)
    return collapsed(decaying), collapsed(before)


def summarized(names: Collection[str], every: Collection[str]) -> list[str]:
    """`names`, those of modules of which `every` parameter is among them as ``MODULE.*``; with
    ``*`` for indices."""
    chosen = set(names)
    others = {prefix for name in every if name not in chosen for prefix in _prefixes(name)}
    shown = []
    for name in names:
        module = next((prefix for prefix in _prefixes(name) if prefix not in others), None)
        shown.append(name if module is None else f"{module}.*")
    return list(dict.fromkeys(collapsed(shown)))


def _prefixes(name: str) -> list[str]:
    """Return names of the modules that hold `name`, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
