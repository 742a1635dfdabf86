"""Modules that mix tokens outside attention, found by experiment: what a module returns for later
tokens changes with its inputs of earlier ones, while every token attends to itself only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from bigtrain.errors import ModelError
from bigtrain.models.equivalence.proxy_model import MODEL_FAILURES, proxy_tokens
from bigtrain.models.layers.document_masks import attention_by, document_boundaries
from bigtrain.models.layers.recurrence.pieces import SampleDocuments, documents_in_samples
from bigtrain.models.layers.recurrence.restarts import restart_at_documents, tensors_of_tokens

_NAME = "bigtrain_self_only"
_TOKENS, _CUT = 13, 7
"""Of a sample, and of its first document. No size of a small model is 13, so that a dimension of 13
is one of tokens."""
_TOLERANCE = 1e-5


@torch.no_grad()
def mixing_classes(model: PreTrainedModel) -> tuple[str, ...]:
    """Return classes of modules of `model` that have to be called for each document, so that tokens
    of different documents are mixed nowhere outside attention: the smallest modules. Empty if
    there are none, or if no set of modules suffices."""
    classes: tuple[str, ...] = ()
    try:
        with attention_by(model, _NAME, _own_value):
            while True:
                undo = restart_at_documents(model, classes)
                try:
                    smallest_classes = _smallest_that_mix(model)
                finally:
                    undo()
                if not smallest_classes:
                    return classes
                if smallest_classes <= set(classes):
                    return ()
                classes = tuple(sorted({*classes, *smallest_classes}))
    except (ModelError, *MODEL_FAILURES):
        return ()


def _own_value(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: `query` [B, H, T, D], the result [B, T, H, D]."""
    copies = query.shape[1] // value.shape[1]
    return value.repeat_interleave(copies, 1).transpose(1, 2), None


def _smallest_that_mix(model: PreTrainedModel) -> set[str]:
    """Return the classes of the modules that mix documents and contain no module that does."""
    ids = proxy_tokens(model, _TOKENS)
    positions = torch.cat([torch.arange(_CUT), torch.arange(_TOKENS - _CUT)]).expand(2, _TOKENS)
    calls: dict[nn.Module, tuple[Any, Any]] = {}

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(module, (args, kwargs))

    hooks = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in model.modules()
        if module is not model
    ]
    with documents_in_samples(SampleDocuments(positions)), document_boundaries(packed=False):
        try:
            model(input_ids=ids, position_ids=positions, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        mixing = {module for module, call in calls.items() if _mixes(module, ids.shape, *call)}
    return {
        type(module).__name__
        for module in mixing
        if not mixing.intersection(set(module.modules()) - {module})
    }


def _mixes(module: nn.Module, shape: torch.Size, args: Any, kwargs: Any) -> bool:
    """Return whether results of `module` for the second document depend on the first one."""
    try:
        tensors, rebuild = tensors_of_tokens((args, kwargs), shape)
    except ModelError:
        return False  # a module that contains it may be called for each document
    token_tensors = [x for x in tensors if x is not None]
    if not any(x.is_floating_point() for x in token_tensors):
        return False
    results = []
    for factor in (1.0, -0.5):
        changed = [x.clone() for x in token_tensors]
        for x in changed:
            if x.is_floating_point():
                x[:, :_CUT] *= factor
        new_args, new_kwargs = rebuild(changed)
        output = module(*new_args, **new_kwargs)
        results.append(tensors_of_tokens(output, shape, keep_rest=False)[0])
    return any(
        float((a[:, _CUT:] - b[:, _CUT:]).abs().max()) > _TOLERANCE * float(a.abs().max())
        for a, b in zip(*results, strict=True)
        if a is not None and b is not None and a.is_floating_point()
    )
