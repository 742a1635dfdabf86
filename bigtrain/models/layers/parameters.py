"""Parameters by name, their seeds and freezing (`model.frozen`); decoder layers and their experts;
heads."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from bigtrain.errors import Problem
from bigtrain.models.configuration import SCORER
from bigtrain.models.torch_patches import own_parameter
from bigtrain.models.transformers_patches import initialize_module, modules_of_experts

KEY = "model.frozen"


def check_frozen(model: nn.Module, patterns: Sequence[str]) -> list[Problem]:
    """Return problems with `patterns` for this model: a pattern matches nothing, or together they
    match all parameters. Freezes the matches; `model` may be on the meta device."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    problems = [
        Problem(
            KEY,
            pattern,
            "matches the name of no parameter",
            f"a shell pattern of full names, such as {names[0]} or {names[0].split('.')[0]}.*",
        )
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    freeze(model, patterns)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        problems.append(
            Problem(KEY, list(patterns), "leaves nothing to train", "match fewer parameters")
        )
    return problems


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze parameters of which a name (tied ones have several) matches one of `patterns`."""
    if not patterns:
        return
    for names in names_of(model.named_parameters(remove_duplicate=False)).values():
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            model.get_parameter(names[0]).requires_grad_(False)


def freeze_named(model: nn.Module, names: Iterable[str]) -> None:
    """Freeze the parameters `names`, whose modules may have been given adapters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if name in parameters:
            parameters[name].requires_grad_(False)


def parameter_of(model: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter `name` of `model`, also where the module's attribute is a property
    (`give_properties`), which `get_parameter` refuses."""
    prefix, _, leaf = name.rpartition(".")
    return own_parameter(model.get_submodule(prefix), leaf)


def names_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[int, list[str]]:
    """Return all names of every parameter, by its id. Tied parameters have several names, of which
    the first counts."""
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in parameters:
        names_by_id.setdefault(id(parameter), []).append(name)
    return names_by_id


def give_properties(module: nn.Module, properties: dict[str, property], **marks: object) -> None:
    """Let attributes of `module`, the names of parameters that it has or had, be `properties`. Its
    class becomes a subclass with an equal name, with `marks` as attributes: transformers uses the
    class's full name to find what to record."""
    module_class = type(module)
    names = {"__module__": module_class.__module__, "__qualname__": module_class.__qualname__}
    module.__class__ = type(
        module_class.__name__, (module_class,), {**marks, **names, **properties}
    )


def local_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of the shard that tensor or expert parallelism assigns to this rank, before
    ZeRO partitions it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def has_score_head(model: nn.Module) -> bool:
    """Return whether `model` is of a class that scores samples."""
    return type(model).__name__.endswith(SCORER)


def output_layer(model: Any) -> nn.Module | None:
    """Return the layer that computes logits of tokens or of samples; None if several modules do."""
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None or not has_score_head(model):
        return head
    heads = {name.rpartition(".")[0] for name in head_parameters(model)}
    return model.get_submodule(heads.pop()) if len(heads) == 1 else None


def head_parameters(model: Any) -> list[str]:
    """Return the names of the parameters that are not the base model's."""
    base_prefix = f"{model.base_model_prefix}."
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return [name for name in names if not name.startswith(base_prefix)]


@torch.no_grad()
def initial_head(model: Any, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and initial values (float32) of the head of `model`, which may be on the meta
    device: by the architecture's rules, from a random stream for each module, as
    `bigtrain.models.build.initialize_weights` draws them."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in head_parameters(model))
    for prefix in modules:
        module = copy.deepcopy(model.get_submodule(prefix)).to_empty(device="cpu").float()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, prefix))
            initialize_module(model, module)
        for leaf, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{leaf}", parameter.detach()


def seed_of(seed: int, name: str) -> int:
    """Return the seed of what is drawn for the module or parameter `name`, in a run seeded
    `seed`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def decoder_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield names and layers, in model order; layers of other pipeline stages are placeholders."""
    list_prefixes: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not name.startswith(tuple(list_prefixes)):
            list_prefixes.append(f"{name}.")
            yield from ((f"{name}.{index}", layer) for index, layer in module.named_children())


def listed_layers(model: nn.Module, count: int | None) -> list[tuple[str, nn.Module]]:
    """Return `decoder_layers` of the first list with `count` layers; all layers if no
    list has."""
    layers = list(decoder_layers(model))
    lists: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in layers:
        lists.setdefault(name.rpartition(".")[0], []).append((name, module))
    return next((listed for listed in lists.values() if len(listed) == count), layers)


def expert_stacks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that hold the weights of experts as stacks [experts, ...]: modules whose
    products transformers computes, and modules whose class it calls experts (Llama 4's and
    LongCat's)."""
    yield from modules_of_experts(model)
    for module in unmarked_experts(model):
        if any(len(local_shape(parameter)) == 3 for parameter in module.parameters(recurse=False)):
            yield module


def unmarked_experts(model: nn.Module) -> list[nn.Module]:
    """Return modules whose class is called experts, and whose products transformers does not
    compute."""
    marked = set(modules_of_experts(model))
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Experts") and module not in marked
    ]
