"""Parameters of a run's model that are trained, decay, and are updated by Muon. Checkpoints record
the names, so that no upgrade changes an optimizer's groups silently
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

    untrained: parameters without a gradient from text, which are frozen. frozen: `untrained` and
    the parameters that ``model.frozen`` names, without selection biases that the run updates.
    float32_names: parameters in float32 of a model that computes in 16 bit. unreached: parameters
    in `untrained` that nothing else freezes, or whose adapters or copies a run with adapters
    trains; the first step compares these names with its gradients. reason: a line for the log;
    empty if all parameters are trained in the run's dtype.

    Trained parameters, with ``*`` for indices: decaying: parameters that weight decay shrinks under
    ``optimizer.decay_embeddings``. matrices: parameters of an optimizer of hidden matrices.
    """

    untrained: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    float32_names: tuple[str, ...] = ()
    decaying: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """Return the names that a checkpoint contains (JSON types)."""
        return {name: list(getattr(self, name)) for name in ("decaying", "matrices", "frozen")}


def plan_parameters(
    config: RunConfig, hf_config: PreTrainedConfig, reach: GradientReach | None = None
) -> ParameterPlan:
    """Return the plan for a run's model; without optimizer groups for a run with adapters.
    `reach`: gradient reach of the model; None: observed here in a forward pass."""
    reasons = []
    # An architecture may compute some parameters in float32 while the run is in 16 bit.
    dtype = getattr(torch, config.precision.dtype)
    float32_names: tuple[str, ...] = ()
    if dtype != torch.float32:
        float32_names = tuple(computed_in_float32(empty_model(hf_config, dtype), dtype))
    if float32_names:
        title = "kept in float32 by its architecture"
        reasons.append(_parameter_list_text(title, float32_names, collapsed(float32_names)))
    num_mtp_layers = num_counted_mtp_layers(hf_config)
    if num_mtp_layers and not num_trained_mtp_layers(hf_config):
        reasons.append(
            "layers for multi-token prediction that the configuration counts: "
            f"{num_mtp_layers}, not built and not trained (objective.mtp_weight = 0)"
        )
    # Weight decay would shrink a parameter without a gradient, so the parameter is not trained.
    sequence_length = config.batch.sequence_length
    reach = reach or find_gradient_reach(hf_config, sequence_length, config.model.attention)
    if reach.absent is None:
        reasons.append(
            "parameters without a gradient: not known, since no model of this kind could be run "
            "before the training; all are trained"
        )
    model = empty_model(hf_config)
    names = [name for name, _ in model.named_parameters()]
    untrained = tuple(name for name in reach.absent or () if name in names)
    # Selection biases have no gradient either, but the run updates them, in float32.
    bias_names: list[str] = []
    if config.moe.bias_update_rate:
        bias_names = [b.name for b in selection_biases(model, untrained) if b.is_parameter]
        float32_names = tuple(dict.fromkeys([*float32_names, *bias_names]))
    if config.adapters is not None:
        adapted_names = _adapted_or_copied_names(model, config.adapters)
        unreached = [name for name in untrained if name in adapted_names]
        if unreached:
            title = "adapters without effect, since text gives these weights no gradient"
            reasons.append(_parameter_list_text(title, unreached, summarized(unreached, names)))
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
        reasons.append(_parameter_list_text(title, unreached, summarized(unreached, names)))
    decaying = [
        name
        for name, entry in parameter_roles(model).items()
        if entry.role.decays() and model.get_parameter(name).requires_grad
    ]
    frozen = [
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and name not in bias_names
    ]
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


def _parameter_list_text(title: str, names: Collection[str], patterns: Sequence[str]) -> str:
    """Return a text with the number of parameters `names`, and the first `patterns` of them."""
    suffix = "" if len(patterns) <= _SHOWN else f" and {len(patterns) - _SHOWN} more"
    return f"{title}: {len(names)} parameters ({', '.join(patterns[:_SHOWN])}{suffix})"


def _adapted_or_copied_names(model: PreTrainedModel, section: AdaptersSection) -> set[str]:
    """Return the names of the weights that get adapters, or that are trained as copies."""
    from bigtrain.models.layers.adapter_targets import find_parameters, find_saved, find_targets

    copied_names = {
        f"{module_name}.{name}"
        for module_name in find_saved(model, section).names
        for name, _ in model.get_submodule(module_name).named_parameters()
    }
    layer_weights = {f"{name}.weight" for name in find_targets(model, section).names}
    return copied_names | layer_weights | {*find_parameters(model, section).names}


def summarized(names: Collection[str], all_names: Collection[str]) -> list[str]:
    """Return `names` of parameters as patterns: ``*`` for indices, and ``MODULE.*`` for a module
    all of whose parameters are in `names`. `all_names`: parameters of the model."""

    def modules_of(name: str) -> list[str]:
        """Return the names of the modules that contain parameter `name`, the largest first."""
        parts = name.split(".")
        return [".".join(parts[:length]) for length in range(1, len(parts))]

    further_names = set(all_names) - set(names)
    partial_modules = {module for name in further_names for module in modules_of(name)}
    patterns = []
    for name in names:
        complete_modules = [m for m in modules_of(name) if m not in partial_modules]
        patterns.append(f"{complete_modules[0]}.*" if complete_modules else name)
    return list(dict.fromkeys(collapsed(patterns)))


PROBE_TOKENS = 96
"""Length of the sample on which gradients are observed: longer than a chunk of 64 tokens in the
code of linear attention, with room for every threshold of a configuration."""


@dataclass(frozen=True)
class GradientReach:
    """Dependence of the logits on parameters, observed in one forward pass.

    absent: first names of the parameters that do not influence the logits, in the model's order;
    None if no forward pass of this configuration runs. failure: why a forward pass runs neither on
    the meta device nor of a proxy model on the CPU; empty if it runs or the reason is unknown.
    """

    absent: tuple[str, ...] | None
    failure: str = ""


def find_gradient_reach(
    hf_config: PreTrainedConfig, sequence_length: int, attention: str = "auto"
) -> GradientReach:
    """Run a forward pass of the model, on the meta device if possible, and read autograd's graph.
    The sample crosses every threshold that samples of `sequence_length` cross.

    A run must not train parameters without a gradient, such as a vision tower, or an indexer whose
    choice has no gradient: torch would leave these unchanged, while DeepSpeed gives them a gradient
    of zeros, and weight decay shrinks them. Takes a tenth of a second on the meta device, otherwise
    a few seconds.
    """
    config, tokens = probed_configuration(hf_config, sequence_length)
    with torch.random.fork_rng(devices=[]):  # constructors may draw numbers
        try:
            return GradientReach(_on_meta(config, tokens))
        except Exception:  # model code may raise any error for tensors without values
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
    """Return a configuration with reduced thresholds, and the number of tokens of a sample which
    crosses every threshold that samples of `sequence_length` cross in `hf_config`. The number is
    `sequence_length` itself if thresholds are unknown."""
    config, num_tokens = copy.deepcopy(hf_config), min(sequence_length, PROBE_TOKENS)
    if sequence_length > num_tokens:
        from bigtrain.models.equivalence.thresholds import cross_thresholds

        if not cross_thresholds(config, sequence_length, num_tokens):
            return config, sequence_length
    return config, num_tokens


def _on_meta(hf_config: PreTrainedConfig, tokens: int) -> tuple[str, ...]:
    """Return `_unreached` of the model on the meta device for a sample of `tokens` tokens."""
    with torch.device("meta"), no_init_weights():
        model = auto_class(hf_config).from_config(copy.deepcopy(hf_config))
        ids = torch.zeros(1, tokens, dtype=torch.int64)
    model.tie_weights()  # no_init_weights skips tying too
    model.train()
    with WithoutValues():  # type: ignore[no-untyped-call]
        return _unreached(model, ids)


def _on_cpu(hf_config: PreTrainedConfig, attention: str, tokens: int) -> tuple[str, ...]:
    """Return `_unreached` of a proxy model for a sample of `tokens` tokens."""
    from bigtrain.models.equivalence.proxy_model import build_proxy_model, proxy_tokens

    # The thresholds of `hf_config` are reduced already, so the sample is a complete one.
    model = build_proxy_model(
        hf_config, attention, sequence_length=tokens, all_layers=True, tokens=tokens
    )
    model.train()
    return _unreached(model, proxy_tokens(model, tokens))


def _unreached(model: Any, ids: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the parameters on which the logits and the auxiliary loss for token ids
    `ids` [1, T] do not depend."""
    with torch.enable_grad(), document_boundaries(packed=False):
        outputs = model(input_ids=ids, use_cache=False)
        auxiliary = auxiliary_loss(outputs)
        roots = [outputs.logits] if auxiliary is None else [outputs.logits, auxiliary]
        # Walk the graph from the roots. Parameters are its leaves.
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
        candidates = [(name, p) for name, p in model.named_parameters() if id(p) not in leaf_ids]
        # A custom backward pass (Reformer's) may reach parameters that the graph does not show.
        if candidates and not is_complete:
            torch.stack([root.float().sum() for root in roots]).sum().backward()
    return tuple(name for name, parameter in candidates if parameter.grad is None)


class WithoutValues(OperatorMode):
    """Lets a model run on the meta device: returns the shape of grouped products, and a value for a
    tensor's value that decides control flow (True, 1, or one nonzero element)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "aten::_grouped_mm":
            rows, stacked_matrices = args[:2]
            return rows.new_empty((*rows.shape[:-1], stacked_matrices.shape[-1]))
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            if args[0].dtype == torch.bool:
                return True
            return 1.0 if args[0].is_floating_point() else 1
        if name == "aten::nonzero" and args[0].is_meta:
            return args[0].new_empty((1, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))
