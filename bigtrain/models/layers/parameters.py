"""Parameters by their names: which are frozen (`model.frozen`), from which seeds they are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from bigtrain.errors import Problem
from bigtrain.models.torch_patches import own_parameter

KEY = "model.frozen"


def check_frozen(model: nn.Module, patterns: Sequence[str]) -> list[Problem]:
    """Problems with `patterns` for this model: one matches nothing, or together they match all.

    Freezes what they match; `model` may be on the meta device.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    problems = [
        Problem(
            KEY,
            pattern,
            "matches the name of no parameter",
            f"a shell pattern of whole names, such as {names[0]} or {names[0].split('.')[0]}.*",
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
    """The parameter `name` of `model`, also where the module's attribute is a property
    (`give_properties`), which `get_parameter` refuses."""
    prefix, _, leaf = name.rpartition(".")
    return own_parameter(model.get_submodule(prefix), leaf)


def names_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[int, list[str]]:
    """All names of every parameter, by its id; tied ones have several, the first counts."""
    found: dict[int, list[str]] = {}
    for name, parameter in parameters:
        found.setdefault(id(parameter), []).append(name)
    return found


def give_properties(module: nn.Module, properties: dict[str, property], **marks: object) -> None:
    """Let attributes of `module`, the names of parameters that it has or had, be `properties`.

    Its class becomes a subclass of the same name, with `marks` as attributes: transformers uses the
    class's full name to find what to record.
    """
    kind = type(module)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), {**marks, **names, **properties})


def local_shape(parameter: Any) -> tuple[int, ...]:
    """Shape of what tensor or expert parallelism left to this rank, before ZeRO partitions it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def seed_of(seed: int, name: str) -> int:
    """The seed of what is drawn for the module or parameter `name`, in a run seeded `seed`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
