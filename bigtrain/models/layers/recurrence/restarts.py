"""Recurrent layers that start afresh at each document, and modules that are called for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from bigtrain.errors import ModelError
from bigtrain.models.layers.recurrence.functions import replace_functions, run_by_document
from bigtrain.models.layers.recurrence.pieces import (
    by_document,
    current_documents,
    documents_in_samples,
    keep_documents,
)
from bigtrain.models.torch_patches import shadow, unshadow
from bigtrain.models.transformers_patches import replace_checkpoint

_BY_DOCUMENT, _EQUALLY_OFTEN = "bigtrain_by_document", "bigtrain_equally_often"


def restart_at_documents(model: nn.Module, modules: Iterable[str] = ()) -> Callable[[], None]:
    """Make the states and convolutions of `model` start afresh at each of `current_documents`, also
    when layers are recomputed; returns an undo function. `modules`: classes of modules that are
    called for each document. Recomputation keeps the documents of the forward pass also after the
    undo function."""
    with ExitStack() as undo:
        undo.callback(replace_functions(model, run_by_document))
        undo.callback(_call_by_document(model, set(modules)))
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
                replace_checkpoint(layer, keep_documents)
        return undo.pop_all().close


def _call_by_document(model: nn.Module, classes: set[str]) -> Callable[[], None]:
    """Call modules of the named `classes` once for each document; return a function that undoes
    it."""
    changed = [module for module in model.modules() if type(module).__name__ in classes]
    for module in changed:
        forward = vars(module).get("forward") or partial(type(module).forward, module)
        forward_by_document = torch.compiler.disable(
            partial(_forward, module, forward), reason="modules are called for each document"
        )
        shadow(module, "forward", forward_by_document)
        shadow(module, _BY_DOCUMENT, True)

    def undo() -> None:
        for module in changed:
            unshadow(module, "forward")
            unshadow(module, _BY_DOCUMENT)

    return undo


def call_equally_often(model: nn.Module) -> None:
    """Let modules that are called for each document be called equally often on all ranks: under
    ZeRO 3 every call gathers parameters, which all ranks must take part in. Adds at most log2(T)
    calls with one token."""
    for module in model.modules():
        if _BY_DOCUMENT in vars(module):
            shadow(module, _EQUALLY_OFTEN, True)


Rebuild = Callable[[Sequence[torch.Tensor | None]], Any]
"""Makes values with other tensors of tokens, in the order in which these were found."""


def _forward(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward` for each document. Arguments and results with tokens are tensors [B, T, ...],
    or [1, T, ...] for all samples; other tensors of the results (states) become None."""
    documents = current_documents()
    if documents is None:
        return forward(*args, **kwargs)
    shape = documents.positions.shape
    token_tensors, rebuild_arguments = tensors_of_tokens((args, kwargs), shape)
    if not token_tensors:
        raise ModelError(f"{type(module).__name__} is given no values of tokens")
    output_rebuilders: list[Rebuild] = []

    def call(pieces: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
        piece_args, piece_kwargs = rebuild_arguments(list(pieces.values()))
        with documents_in_samples(None):
            output = forward(*piece_args, **piece_kwargs)
        piece_shape = next(iter(pieces.values())).shape[:2]
        tensors, rebuild_output = tensors_of_tokens(output, piece_shape, keep_rest=False)
        output_rebuilders.append(rebuild_output)
        return tensors

    flat = {str(n): x.flatten(0, 1) for n, x in enumerate(token_tensors) if x is not None}
    outputs = by_document(call, flat, documents)
    if _EQUALLY_OFTEN in vars(module):
        # Documents have one batch for each number of bits of a length.
        num_missing = shape[1].bit_length() - len(documents.numbers_on(flat["0"].device)[0])
        # Call as often as other ranks do, with the first token. A result counts as zero in all
        # outputs, so that the backward pass has the call, too.
        one_token = {name: x[:1, None] for name, x in flat.items()}
        for _ in range(num_missing):
            floats = [x for x in call(one_token) if x is not None and x.is_floating_point()]
            zero = 0 * torch.stack([x.float().sum() for x in floats]).sum()
            outputs = [
                x if x is None or not x.is_floating_point() else x + zero.to(x.dtype)
                for x in outputs
            ]
    # Outputs of all batches have one structure; widths of later calls may be other widths.
    rebuild_outputs = output_rebuilders[0]
    return rebuild_outputs([None if x is None else x.unflatten(0, shape) for x in outputs])


def tensors_of_tokens(
    values: Any, shape: torch.Size, *, keep_rest: bool = True
) -> tuple[list[torch.Tensor | None], Rebuild]:
    """Return the tensors of tokens in `values` [B, T, ...], and a function that makes `values` of
    others. `shape`: B and T. `keep_rest`: whether other tensors stay in `values`, or are found as
    None: the size of a state may be T, and is not for pieces of another width. Raises ModelError
    for a tensor with tokens in another dimension, such as a mask."""
    tensors_found: list[torch.Tensor | None] = []

    def visit(value: Any) -> Rebuild:
        if torch.is_tensor(value):
            number = len(tensors_found)
            if value.ndim >= 2 and value.shape[1] == shape[1] and value.shape[0] in (1, shape[0]):
                tensors_found.append(value.expand(shape[0], *value.shape[1:]))
                return lambda tensors: tensors[number]
            if keep_rest and shape[1] in value.shape:
                raise ModelError(f"a tensor {list(value.shape)} has tokens in another dimension")
            if keep_rest:
                return lambda _: value
            tensors_found.append(None)
            return lambda tensors: tensors[number]
        if isinstance(value, tuple | list):
            parts = [visit(part) for part in value]
            return lambda tensors: tuple(part(tensors) for part in parts)
        if isinstance(value, dict):
            items = {key: visit(part) for key, part in value.items()}
            return lambda tensors: {key: part(tensors) for key, part in items.items()}
        return lambda _: value

    rebuild = visit(values)
    return tensors_found, rebuild
