"""Parameters of a run's model that are trained, decay, and are updated by Muon. Checkpoints record
it, so that no upgrade changes an optimizer's groups silently
(`bigtrain.run.checkpointing.changed_settings`)."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from bigtrain.models.build import empty_model
from bigtrain.models.configuration import auto_class, num_counted_mtp_layers, num_trained_mtp_layers
from bigtrain.models.experts import auxiliary_loss, selection_biases
from bigtrain.models.layers.document_masks import document_boundaries
from bigtrain.models.layers.parameter_roles import collapsed, parameter_roles
from bigtrain.models.layers.parameters import freeze, freeze_named
from bigtrain.models.torch_patches import OperatorMode
from bigtrain.models.transformers_patches import computed_in_float32
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.adapters import AdaptersSection

_SHOWN = 5


@dataclass(frozen=True)
class ParameterPlan:
    """Names of parameters by what a run does with them.

    untrained: get no gradient from text, and are frozen. frozen: `untrained` and the parameters
    that ``model.frozen`` names, without selection biases that are updated. float32_names: are
    float32 where the model computes in 16 bit. unreached: parameters in `untrained` that nothing
    else freezes, or whose adapters or copies a run with adapters trains; the first step compares
    them with its gradients. reason: a line for the log; empty if all are trained in the run's
    dtype.

    Trained parameters, with ``*`` for indices: decaying: with ``optimizer.decay_embeddings``.
    matrices: are updated by an optimizer of hidden matrices.
    """

    untrained: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    float32_names: tuple[str, ...] = ()
    decaying: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """Return the part that a checkpoint contains (JSON types)."""
        return {name: list(getattr(self, name)) for name in ("decaying", "matrices", "frozen")}


def plan_parameters(
    config: RunConfig, hf_config: PreTrainedConfig, reach: GradientReach | None = None
) -> ParameterPlan:
    """Return the plan for a run's model; without optimizer groups for a run with adapters.
    `reach`: gradient reach of the model; None: a forward pass finds it."""
    reasons = []
    # An architecture may compute some parameters in float32 while the run is in 16 bit.
    dtype = getattr(torch, config.precision.dtype)
    float32_names: tuple[str, ...] = ()
    if dtype != torch.float32:
        float32_names = tuple(computed_in_float32(empty_model(hf_config, dtype), dtype))
    if float32_names:
        title = "kept in float32 by its architecture"
        reasons.append(_listed(title, float32_names, collapsed(float32_names)))
    num_mtp_layers = num_counted_mtp_layers(hf_config)
    if num_mtp_layers and not num_trained_mtp_layers(hf_config):
        reasons.append(
            "layers for multi-token prediction that the configuration counts: "
            f"{num_mtp_layers}, not built and not trained (objective.mtp_weight = 0)"
        )
    # Without a gradient, weight decay would shrink a parameter: it is not trained.
    length = config.batch.sequence_length
    reach = reach or find_gradient_reach(hf_config, length, config.model.attention)
    if reach.absent is None:
        reasons.append(
            "parameters without a gradient: not known, since no model of this kind could be run "
            "before the training; all are trained"
        )
    model = empty_model(hf_config)
    names = [name for name, _ in model.named_parameters()]
    untrained = tuple(name for name in reach.absent or () if name in names)
    # Selection biases have no gradient either, but the run updates them, in float32.
    biases: list[str] = []
    if config.moe.bias_update_rate:
        biases = [b.name for b in selection_biases(model, untrained) if b.is_parameter]
        float32_names = tuple(dict.fromkeys([*float32_names, *biases]))
    if config.adapters is not None:
        weights = _adapted_weights(model, config.adapters)
        unreached = [name for name in untrained if name in weights]
        if unreached:
            title = "adapters without effect, since text gives these weights no gradient"
            reasons.append(_listed(title, unreached, summarized(unreached, names)))
        return ParameterPlan(
            untrained,
            float32_names=float32_names,
            unreached=tuple(unreached),
            reason="; ".join(reasons),
        )
    freeze(model, config.model.frozen)
    unreached = [name for name in untrained if model.get_parameter(name).requires_grad]
    freeze_named(model, untrained)
    if unreached:
        title = "not trained, since they get no gradient from text"
        reasons.append(_listed(title, unreached, summarized(unreached, names)))
    decaying = [
        name
        for name, entry in parameter_roles(model).items()
        if entry.role.decays() and model.get_parameter(name).requires_grad
    ]
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad and n not in biases]
    has_matrix_optimizer = config.optimizer.facts.beside is not None
    matrices: tuple[str, ...] = ()
    if has_matrix_optimizer:
        from bigtrain.models.parallel.hidden_matrices import hidden_matrices

        matrices = tuple(collapsed(hidden_matrices(model)))
    return ParameterPlan(
        untrained=untrained,
        frozen=tuple(frozen),
        float32_names=float32_names,
        decaying=tuple(collapsed(decaying)),
        matrices=matrices,
        unreached=tuple(unreached),
        reason="; ".join(reasons),
    )


def _listed(title: str, names: Collection[str], patterns: Sequence[str]) -> str:
    suffix = "" if len(patterns) <= _SHOWN else f" and {len(patterns) - _SHOWN} more"
    return f"{title}: {len(names)} parameters ({', '.join(patterns[:_SHOWN])}{suffix})"


def _adapted_weights(model: PreTrainedModel, section: AdaptersSection) -> set[str]:
    """Return the names of the weights that get adapters, or that are trained as copies."""
    from bigtrain.models.layers.adapter_targets import find_parameters, find_saved, find_targets

    copies = {
        f"{module}.{name}"
        for module in find_saved(model, section).names
        for name, _ in model.get_submodule(module).named_parameters()
    }
    layers = {f"{name}.weight" for name in find_targets(model, section).names}
    return copies | layers | {*find_parameters(model, section).names}


def summarized(names: Collection[str], all_names: Collection[str]) -> list[str]:
    """Return `names` with ``*`` for indices, and ``MODULE.*`` for a module of which `names` has all
    parameters; `all_names`: parameters of the model."""

    def modules_of(name: str) -> list[str]:
        parts = name.split(".")
        return [".".join(parts[:length]) for length in range(1, len(parts))]

    selected = set(names)
    partial_modules = {m for n in all_names if n not in selected for m in modules_of(n)}
    patterns = []
    for name in names:
        module = next((m for m in modules_of(name) if m not in partial_modules), None)
        patterns.append(name if module is None else f"{module}.*")
    return list(dict.fromkeys(collapsed(patterns)))


PROBE_TOKENS = 96
"""Length of the sample on which gradients are observed: more than the chunks of 64 tokens in the
code of linear attention, and room for every threshold of a configuration."""


@dataclass(frozen=True)
class GradientReach:
    """Parameters that the logits depend on, observed in one forward pass.

    absent: first names of the parameters that the logits do not depend on, in the model's order;
    None if no model of this configuration can be run. failure: why the model's code cannot run a
    forward pass, neither on the meta device nor of a proxy model on the CPU; empty if a forward
    pass runs or its failure is unknown.
    """

    absent: tuple[str, ...] | None
    failure: str = ""


def find_gradient_reach(
    hf_config: PreTrainedConfig, sequence_length: int, attention: str = "auto"
) -> GradientReach:
    """Run a forward pass of the model, without values where that is possible, and read autograd's
    graph. The sample crosses every threshold that samples of `sequence_length` cross.

    Parameters without a gradient (a vision tower, an indexer whose choice has none) must not be
    trained: torch leaves them unchanged, while DeepSpeed gives them a gradient of zeros, and weight
    decay shrinks them. Takes a tenth of a second, a few seconds where the meta device is not
    enough.
    """
    config, tokens = probed_configuration(hf_config, sequence_length)
    with torch.random.fork_rng(devices=[]):  # constructors may draw numbers
        try:
            return GradientReach(_on_meta(config, tokens))
        except Exception:  # whatever model code does with tensors without values
            pass
        from bigtrain.models.equivalence.proxy_model import MODEL_FAILURES, failure_text

        try:
            return GradientReach(_on_cpu(config, attention, min(tokens, PROBE_TOKENS)))
        except NotImplementedError:
            return GradientReach(None)
        except (*MODEL_FAILURES, ArithmeticError) as error:
            return GradientReach(None, f"{type(error).__name__}: {failure_text(error)}")


def probed_configuration(
    hf_config: PreTrainedConfig, sequence_length: int
) -> tuple[PreTrainedConfig, int]:
    """Return a configuration, and a length of samples that cross every threshold which samples of
    `sequence_length` cross in `hf_config`: `sequence_length` itself if thresholds are unknown."""
    config, tokens = copy.deepcopy(hf_config), min(sequence_length, PROBE_TOKENS)
    if sequence_length > tokens:
        from bigtrain.models.equivalence.thresholds import cross_thresholds

        if not cross_thresholds(config, sequence_length, tokens):
            return config, sequence_length
    return config, tokens


def _on_meta(hf_config: PreTrainedConfig, tokens: int) -> tuple[str, ...]:
    with torch.device("meta"), no_init_weights():
        model = auto_class(hf_config).from_config(copy.deepcopy(hf_config))
        ids = torch.zeros(1, tokens, dtype=torch.int64)
    model.tie_weights()  # which no_init_weights also skips
    model.train()
    with WithoutValues():  # type: ignore[no-untyped-call]
        return _unreached(model, ids)


def _on_cpu(hf_config: PreTrainedConfig, attention: str, tokens: int) -> tuple[str, ...]:
    from bigtrain.models.equivalence.proxy_model import build_proxy_model, proxy_tokens

    # Thresholds are crossed in `hf_config` already.
    model = build_proxy_model(
        hf_config, attention, sequence_length=tokens, all_layers=True, tokens=tokens
    )
    model.train()
    return _unreached(model, proxy_tokens(model, tokens))


def _unreached(model: Any, ids: torch.Tensor) -> tuple[str, ...]:
    with torch.enable_grad(), document_boundaries(packed=False):
        outputs = model(input_ids=ids, use_cache=False)
        auxiliary = auxiliary_loss(outputs)
        roots = [outputs.logits] if auxiliary is None else [outputs.logits, auxiliary]
        # Parameters are the leaves of the graph.
        leaf_ids: set[int] = set()
        visited, pending, is_complete = set(), [root.grad_fn for root in roots], True
        while pending:
            node = pending.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            is_complete = is_complete and not isinstance(node, BackwardCFunction)
            variable: nn.Parameter | None = getattr(node, "variable", None)
            if variable is not None:
                leaf_ids.add(id(variable))
            pending += [next_node for next_node, _ in node.next_functions]
        absent = [(name, p) for name, p in model.named_parameters() if id(p) not in leaf_ids]
        # A custom backward pass (Reformer's) may reach parameters that the graph does not show.
        if absent and not is_complete:
            torch.stack([root.float().sum() for root in roots]).sum().backward()
    return tuple(name for name, parameter in absent if parameter.grad is None)


class WithoutValues(OperatorMode):
    """Answers what the meta device cannot: grouped products, and values that decide control
    flow."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "aten::_grouped_mm":
            rows, stack = args[0], args[1]
            return rows.new_empty((*rows.shape[:-1], stack.shape[-1]))
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            if args[0].dtype == torch.bool:
                return True
            return 1.0 if args[0].is_floating_point() else 1
        if name == "aten::nonzero" and args[0].is_meta:
            return args[0].new_empty((1, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))
