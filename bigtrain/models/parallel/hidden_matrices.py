"""The matrices of hidden layers, which Muon updates, found by their roles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from bigtrain.errors import ConfigError, Problem
from bigtrain.models.layers.parameter_roles import Role, parameter_roles
from bigtrain.models.layers.parameters import decoder_layers, expert_stacks
from bigtrain.models.parallel.sharding import full_shape
from bigtrain.settings.sections.optimizer import OptimizerSection, SplitSection
from bigtrain.system.boxes import Box

KEY = "optimizer.muon.split"
_UPDATED_ROLES = {Role.MATRIX, Role.EXPERTS, Role.ADAPTER}


@dataclass(frozen=True)
class HiddenMatrix:
    """A trained parameter that is a matrix of a hidden layer, or a stack of matrices.

    name: in the model. shape: of the full parameter, [experts, ...] for a stack. output_dim: the
    dimension of the outputs. num_groups: equally large matrices along that dimension.
    """

    name: str
    shape: tuple[int, ...]
    output_dim: int
    num_groups: int = 1


def hidden_matrices(model: nn.Module) -> dict[str, HiddenMatrix]:
    """Return by name, in model order: weights of linear layers inside decoder layers, and experts.

    By role (`bigtrain.models.layers.parameter_roles`), so neither embeddings, heads, norms and
    biases nor routers. Excluded as well: weights that no linear layer and no stack holds; matrices
    with one row or column. Parameters may be partitioned or sharded. Not collective.
    """
    roles = {(entry.module, entry.leaf): entry for entry in parameter_roles(model).values()}
    matrices: dict[str, HiddenMatrix] = {}
    for layer_name, layer in decoder_layers(model):
        stacks = {id(module) for module in expert_stacks(layer)}
        for module_name, module in layer.named_modules(prefix=layer_name):
            for leaf, parameter, output_dim in _weights(module, id(module) in stacks):
                entry, shape = roles.get((module_name, leaf)), full_shape(parameter)
                if entry is None or entry.role not in _UPDATED_ROLES or min(shape[-2:]) == 1:
                    continue
                if parameter.requires_grad:
                    groups = entry.num_groups
                    matrices[entry.name] = HiddenMatrix(entry.name, shape, output_dim, groups)
    return matrices


def _weights(module: Any, is_stack: bool) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield the weights of a module, or of a stack of experts: name, parameter, and output
    dimension."""
    if is_stack:
        parameters = module.named_parameters(recurse=False)
        stacks = [(name, p) for name, p in parameters if len(full_shape(p)) == 3]
        # Stacks are [experts, out, in], or transposed: [experts, in, out]. Where transformers has
        # not marked them, the widths are named as if they were transposed, and are if the second
        # stack fits the first: it takes half of the first's outputs, whose other half is the gate.
        is_transposed = bool(getattr(module, "is_transposed", None))
        if getattr(module, "is_transposed", None) is None and len(stacks) == 2:
            (_, first_in, first_out), (_, second_in, second_out) = (
                full_shape(parameter) for _, parameter in stacks
            )
            is_transposed = first_in == second_out and first_out == 2 * second_in
        output_dim = 2 if is_transposed else 1
        yield from ((name, parameter, output_dim) for name, parameter in stacks)
    elif isinstance(module, (nn.Linear, Conv1D)):
        weight: Any = module.weight
        yield "weight", weight, 0 if isinstance(module, nn.Linear) else 1


@dataclass(frozen=True)
class Matrix:
    """A matrix that is to be orthogonalized as one: rows and columns of a parameter.

    boxes: parts of the full parameter that the matrix consists of, in order along dimension
    `output_dim` (-2 or -1).
    """

    parameter: str
    boxes: tuple[Box, ...]
    output_dim: int

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.boxes[0].sizes[-2:]
        length = sum(box.sizes[self.output_dim] for box in self.boxes)
        return (length, columns) if self.output_dim == -2 else (rows, length)

    def parts(self) -> Iterator[tuple[Box, tuple[int, int]]]:
        """Yield each box, and the row and column of the matrix at which it begins."""
        begin = 0
        for box in self.boxes:
            yield box, (begin, 0) if self.output_dim == -2 else (0, begin)
            begin += box.sizes[self.output_dim]


def matrices_of(
    hidden_matrices: Iterable[HiddenMatrix], splits: Mapping[str, SplitSection]
) -> list[Matrix]:
    """Return all matrices of `hidden_matrices`: one per layer, per expert of a stack and per group
    of a grouped layer, and the parts of parameters that match a pattern of `splits`. Raises
    ConfigError for widths that do not add up."""
    matrices = []
    for hidden in hidden_matrices:
        pattern = next((p for p in splits if fnmatchcase(hidden.name, p)), None)
        output_dim = hidden.output_dim - len(hidden.shape)
        width = hidden.shape[output_dim]
        if pattern is None:
            group = width // hidden.num_groups
            spans = [[(n * group, (n + 1) * group)] for n in range(hidden.num_groups)]
        else:
            # Parts of the parameter along the output dimension, perhaps interleaved.
            num_groups, parts = splits[pattern].interleaved, splits[pattern].parts
            group = width // num_groups
            widths = [group // parts] * parts if isinstance(parts, int) else list(parts)
            if sum(widths) * num_groups != width:
                parts_text = f"{parts} parts" if isinstance(parts, int) else f"parts {list(parts)}"
                parts_text += f", interleaved {num_groups} times" if num_groups > 1 else ""
                fits = width % num_groups == 0
                raise ConfigError(
                    Problem(
                        f"{KEY}.{pattern}",
                        parts_text,
                        f"do not add up to the {width} output features of {hidden.name}",
                        f"widths whose sum is {group}" if fits else "another number",
                    )
                )
            starts = [sum(widths[:number]) for number in range(len(widths))]
            spans = [
                [(g * group + start, g * group + start + size) for g in range(num_groups)]
                for start, size in zip(starts, widths, strict=True)
            ]
        # The matrices of every expert.
        full = Box.full(hidden.shape)
        is_stack = len(hidden.shape) == 3
        experts = [full.replace(0, n, 1) for n in range(hidden.shape[0])] if is_stack else [full]
        for box in experts:
            for ranges in spans:
                boxes = [box.replace(output_dim, start, stop - start) for start, stop in ranges]
                matrices.append(Matrix(hidden.name, tuple(boxes), output_dim))
    return matrices


def check_matrices(model: nn.Module, optimizer: OptimizerSection) -> list[Problem]:
    """Return reasons why an optimizer of hidden matrices cannot update `model`, which may be on the
    meta device: it has no hidden matrix, or `split` does not fit."""
    matrices, section = hidden_matrices(model), optimizer.muon
    problems = [
        Problem(
            f"{KEY}.{pattern}",
            split.parts,
            "matches the name of no matrix of a hidden layer",
            f"a shell pattern of full names, such as {next(iter(matrices), 'none')}",
        )
        for pattern, split in section.split.items()
        if not any(fnmatchcase(name, pattern) for name in matrices)
    ]
    if not matrices:
        rule = "is for matrices of hidden layers, and nothing of this model that is trained is one"
        return [Problem("optimizer.type", optimizer.type, rule, "adamw")]
    try:
        matrices_of(matrices.values(), section.split)
    except ConfigError as error:
        problems += error.problems
    return problems
