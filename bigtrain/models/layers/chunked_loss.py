"""Cross-entropy in chunks of tokens, so that the full logits never exist.

Loss and gradients of a chunk are computed at once and its logits dropped (like Liger's fused linear
cross-entropy, arXiv 2410.10989). The architecture's own code around the head (multipliers,
soft-capping, biases) runs: the forward method is called again for every chunk, with the base model
replaced by the chunk's hidden states; all chunks inside one call of the head module, so that the
head's hooks (ZeRO-3 gathers and reduces there) run once.

Shapes: B = samples, T = tokens of a sample, H = hidden size, V = vocabulary, N = tokens in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from bigtrain.errors import ModelError
from bigtrain.models.layers.adapter_names import trained_copy
from bigtrain.models.layers.gradient_parts import ChunkGradients, EagerGradients, LateGradients
from bigtrain.models.layers.token_loss import (
    IGNORED_LABEL,
    NO_TERMS,
    LossTerms,
    Teacher,
    TopTokens,
    cross_entropies,
    summed_token_loss,
    token_scores,
)
from bigtrain.models.torch_patches import allow_any_length, shadow, shadowed

Fused = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Summed cross-entropy of a weight [V, H], hidden states [N, H], labels [N] and a bias [V]."""


@dataclass(frozen=True)
class FurtherLosses:
    """Losses of further hidden states by the model's head. states: yields hidden states [B, T, H]
    computed from the model's, with their labels, int64 [B, T] on the host. share:
    factor of the losses, in addition to the model's `factor`."""

    states: Callable[[torch.Tensor], Iterator[tuple[torch.Tensor, torch.Tensor]]]
    share: float


@dataclass
class SummedLoss(ModelOutput):  # type: ignore[misc]
    """Output of a forward pass with `targets`: `loss` in nats, summed over the targets; `further`:
    the summed losses of the `FurtherLosses`."""

    loss: torch.Tensor | None = None
    further: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


class ChunkedLoss:
    """Gives `model` a forward method that takes `targets` and then returns a `SummedLoss`, or, with
    `per_token`, the log-probability of every target as its `loss`, whose gradient is computed from
    the logits of a chunk at a time, too.

    chunk_tokens: tokens whose logits exist at a time.
    fused: computes head and loss in one kernel, instead of chunks; only for models whose logits are
        the head's output (`bigtrain.models.equivalence.loss` checks).
    terms: added to the cross-entropy in training; not with `fused`, nor to `per_token`.

    Install it when the model is complete: split, sharded, its head's forward final. Without
    `targets` the forward method is unchanged. Raises ModelError for a model whose parts are not
    found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_tokens: int,
        fused: Fused | None = None,
        terms: LossTerms = NO_TERMS,
    ) -> None:
        assert chunk_tokens >= 1
        assert fused is None or terms == NO_TERMS
        self._terms = terms
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._fused = fused
        self._cross_entropies = cross_entropies
        self._is_compiled = False
        self._head_name, self._base_name = _head_and_base(model)
        self._head: Any = trained_copy(model.get_submodule(self._head_name))
        self._base: Any = model.get_submodule(self._base_name)
        self._plain_forward: Callable[..., Any] = model.forward
        self._plain_head: Callable[..., Any] = self._head.forward
        # State of a forward pass.
        self._inputs: dict[str, Any] = {}
        self._labels: torch.Tensor | None = None
        self._factor: torch.Tensor | None = None
        self._per_token = False
        self._top: TopTokens | None = None
        self._teacher: Teacher | None = None
        self._token_weights: torch.Tensor | None = None
        self._base_outputs: Any = None
        self._loss: torch.Tensor | None = None
        shadow(model, "forward", self.forward)
        shadow(self._head, "forward", self._head_forward)

    def compile(self) -> None:
        """Compute the cross-entropy of a chunk's logits, without further terms, in two kernels that
        Inductor generates, of the logits in their dtype: forward and backward. Operators take about
        ten kernels, of float32. One graph in training, of any number of tokens."""
        compiled = torch.compile(cross_entropies)

        def of_any_number(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            allow_any_length(logits)
            allow_any_length(labels)
            losses: torch.Tensor = compiled(logits, labels)
            return losses

        self._cross_entropies = of_any_number
        self._is_compiled = True

    def remove(self) -> None:
        """Restore the model's forward method."""
        shadow(self._model, "forward", self._plain_forward)
        shadow(self._head, "forward", self._plain_head)

    def forward(
        self,
        *args: Any,
        targets: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        per_token: bool = False,
        top: TopTokens | None = None,
        teacher: Teacher | None = None,
        further: FurtherLosses | None = None,
        weights: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Run the model's forward method; with `targets` int64 [B, T] return a `SummedLoss`, whose
        loss is float32 [B, T] with `per_token`, and float32 [B, T, 1 + 2 k] with k `top` tokens, as
        `bigtrain.models.layers.token_loss.token_scores` returns it, then without a graph.

        `targets` are the labels of the tokens (already shifted), -100 for none. They may be on the
        host: then tokens without a label take no time. `factor` float32 [], above zero: the loss
        will be multiplied by it. With `factor`, 16-bit gradients are rounded as the plain loss's:
        the factor's mantissa is multiplied in before rounding, and only a power of two (which might
        leave float16's range) after. `teacher` [B, T, k], on the device: of the targets. `weights`
        float32 [B, T], on the device: factors of the targets' losses; not with `fused`, nor with
        `further`. `further` losses are computed after the model's loss, with the same terms.
        """
        if targets is None:
            return self._plain_forward(*args, **inputs)
        self._inputs, self._labels, self._factor = inputs, targets, factor
        self._per_token, self._top = per_token, top
        self._teacher, self._token_weights = teacher, weights
        try:
            # Instead of logits, the head computes the loss of all hidden states.
            with self._standing_in(self._run_base, self._run_head):
                outputs = self._plain_forward(*args, **inputs)
            if self._loss is None:
                raise ModelError(f"the forward method does not call {self._head_name}")
            # Losses of further hidden states, such as multi-token prediction's, by the same head.
            further_losses: list[torch.Tensor] = []
            if further is not None:
                self._teacher = None
                self._factor = None if factor is None else factor * further.share
                for hidden, labels in further.states(self._base_outputs.last_hidden_state):
                    self._labels = labels
                    further_losses.append(self._head(hidden))
            return SummedLoss(
                loss=self._loss,
                further=None if further is None else tuple(further_losses),
                aux_loss=getattr(outputs, "aux_loss", None),
                router_logits=getattr(outputs, "router_logits", None),
            )
        finally:
            self._inputs, self._labels, self._factor = {}, None, None
            self._teacher = self._token_weights = None
            self._base_outputs = self._loss = None

    def _run_base(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._base_outputs = module(*args, **kwargs)
        return self._base_outputs

    def _run_head(self, *_: Any, **__: Any) -> torch.Tensor:
        """Replaces the head: stores the loss, and returns placeholder logits that nobody reads."""
        if self._base_outputs is None:
            raise ModelError(f"the forward method does not call {self._base_name}")
        hidden = self._base_outputs.last_hidden_state
        self._loss = self._head(hidden)
        size = self._model.config.get_text_config().vocab_size
        unused: torch.Tensor = hidden.new_zeros(1, 1, size)
        return unused

    def _head_forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the head's forward: in a pass with targets the loss, inside the module's hooks."""
        if self._labels is None:
            output: torch.Tensor = self._plain_head(hidden, *args, **kwargs)
            return output
        weights = list(self._head.parameters())
        if self._top is not None:
            return self._top_scores(hidden, self._top)
        if self._per_token:
            return self._log_probabilities(hidden, weights)
        if not torch.is_grad_enabled():
            return self._compute(hidden, weights, None)
        mantissa = None if self._factor is None else torch.frexp(self._factor).mantissa
        loss: torch.Tensor = EagerGradients.apply(self._compute, mantissa, hidden, *weights)  # type: ignore[no-untyped-call]
        return loss

    def _compute(
        self,
        hidden: torch.Tensor,
        head_weights: Sequence[torch.Tensor],
        gradients: list[torch.Tensor | None] | None,
        mantissa: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the summed loss of `hidden` [B, T, H]; appends the gradients of `hidden` and of
        `head_weights`, times `mantissa`, to `gradients`."""
        assert self._labels is not None
        # Only tokens with a label.
        rows = hidden.detach().flatten(0, -2)
        labels, index = _targets(self._labels, rows.device)
        teacher = self._teacher
        if teacher is not None:
            values, ids = (tensor.flatten(0, -2) for tensor in teacher)
            teacher = (values, ids) if index is None else (values[index], ids[index])
        token_weights = None if self._token_weights is None else self._token_weights.flatten()
        if index is not None:
            rows = rows[index]
            token_weights = None if token_weights is None else token_weights[index]

        def loss_of(part: slice, chunk: torch.Tensor) -> torch.Tensor:
            chunk_weights = None if token_weights is None else token_weights[part]
            if self._fused is not None:
                assert chunk_weights is None
                bias = getattr(self._head, "bias", None)
                return self._fused(self._head.weight, chunk, labels[part], bias).float()
            if self._is_compiled and (self._terms == NO_TERMS or not torch.is_grad_enabled()):
                entropies = self._entropies(chunk, labels[part])
                return (entropies if chunk_weights is None else entropies * chunk_weights).sum()
            chunk_teacher = teacher and (teacher[0][part], teacher[1][part])
            logits = self._logits(chunk).float()
            return summed_token_loss(
                logits, labels[part], self._terms, chunk_teacher, chunk_weights
            )

        # Loss and gradients of a chunk at a time.
        loss = torch.zeros((), device=rows.device, dtype=torch.float32)
        sums = None if gradients is None else ChunkGradients(self._head, rows, head_weights)
        parts = list(self._parts(len(labels)))
        if self._fused is not None:
            parts = [slice(0, len(labels))] if len(labels) else []
        for part in parts:
            if sums is None:
                loss += loss_of(part, rows[part])
            else:
                loss += sums.add(part, partial(loss_of, part), mantissa)
        if gradients is not None and sums is not None:
            gradients += sums.values(hidden, index)
        return loss

    def _log_probabilities(
        self, hidden: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return log-probabilities float32 [B, T] of the targets of `hidden` [B, T, H]."""
        assert self._labels is not None
        shape, inputs = self._labels.shape, self._inputs
        labels, index = _targets(self._labels, hidden.device)
        # The backward pass comes after the state of this forward pass was reset.
        outputs = type(self._base_outputs)(**{**self._base_outputs, "last_hidden_state": None})

        def compute(hidden: torch.Tensor) -> torch.Tensor:
            rows = hidden.detach().flatten(0, -2)
            rows = rows if index is None else rows[index]
            values = rows.new_zeros(len(labels), dtype=torch.float32)
            with torch.no_grad():
                for part in self._parts(len(labels)):
                    values[part] = -self._entropies(rows[part], labels[part])
            if index is None:
                return values.view(shape)
            return values.new_zeros(shape.numel()).index_copy_(0, index, values).view(shape)

        def differentiate(
            hidden: torch.Tensor, upstream: torch.Tensor
        ) -> tuple[torch.Tensor | None, ...]:
            weights = list(self._head.parameters())  # gathered again, with ZeRO 3
            current_pass = self._inputs, self._base_outputs
            self._inputs, self._base_outputs = inputs, outputs
            try:
                rows, upstream = hidden.detach().flatten(0, -2), -upstream.flatten()
                if index is not None:
                    rows, upstream = rows[index], upstream[index]
                sums = ChunkGradients(self._head, rows, weights)
                for part in self._parts(len(labels)):
                    entropies = partial(self._entropies, labels=labels[part])
                    sums.add(part, entropies, upstream[part])
                return tuple(sums.values(hidden, index))
            finally:
                self._inputs, self._base_outputs = current_pass

        if not torch.is_grad_enabled():
            return compute(hidden)
        values: torch.Tensor = LateGradients.apply(compute, differentiate, hidden, *weights)  # type: ignore[no-untyped-call]
        return values

    @torch.no_grad()
    def _top_scores(self, hidden: torch.Tensor, top: TopTokens) -> torch.Tensor:
        """Return scores float32 [B, T, 1 + 2 k] of the targets of `hidden` [B, T, H], as
        `token_scores`: the log-probability of the target, the k greatest, and the ids of these; 0
        without a target."""
        assert self._labels is not None
        labels, index = _targets(self._labels, hidden.device)
        rows = hidden.flatten(0, -2)
        rows = rows if index is None else rows[index]
        scores = rows.new_zeros((len(labels), 1 + 2 * top.count), dtype=torch.float32)
        for part in self._parts(len(labels)):
            logits = self._logits(rows[part]).float()
            scores[part] = token_scores(logits, labels[part], top)
        if index is not None:
            all_rows = scores.new_zeros((self._labels.numel(), scores.shape[1]))
            scores = all_rows.index_copy_(0, index, scores)
        return scores.view(*self._labels.shape, -1)

    def _parts(self, count: int) -> Iterator[slice]:
        """Yield the chunks of `count` tokens. With compiled kernels no chunk has a single token,
        which would have a graph of its own, unless `count` is 1."""
        for start in range(0, count, self._chunk_tokens):
            end = start + self._chunk_tokens
            if self._is_compiled and end == count - 1:
                yield slice(start, count)
                return
            yield slice(start, end)

    def _entropies(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropies of the hidden states `rows` [N, H]: float32 [N]."""
        return self._cross_entropies(self._logits(rows), labels)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of hidden states `rows` [N, H], in the model's dtype."""
        outputs = type(self._base_outputs)(
            **{**self._base_outputs, "last_hidden_state": rows.unsqueeze(0)}
        )

        def head(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._plain_head(*args, **kwargs)

        with self._standing_in(lambda *_, **__: outputs, head):
            logits: torch.Tensor = self._plain_forward(**self._inputs).logits
        return logits.flatten(0, 1)

    @contextmanager
    def _standing_in(self, base: Callable[..., Any], head: Callable[..., Any]) -> Iterator[None]:
        """Inside, the forward method calls these instead; the modules stay registered."""
        calls = {self._base_name: _Call(self._base, base), self._head_name: _Call(self._head, head)}
        with shadowed(self._model, calls):
            yield


class _Call:
    """Replaces a module in its model's forward method: calls go to `call`, attributes are the
    module's."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = module, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        # Some models call a part of the base model (OPT the decoder).
        return _Call(value, self._call) if isinstance(value, nn.Module) else value


def _targets(
    labels: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the labels [N] of tokens that have a label, and the tokens' indices (None: all) on
    `device`. Selects only on the host, since reading labels on a device would wait for it."""
    flat = labels.flatten()
    index = None
    if flat.device.type == "cpu":
        present = flat != IGNORED_LABEL
        if not bool(present.all()):
            index = present.nonzero().flatten()
            flat = flat[index]
            index = index.to(device, non_blocking=True)
    return flat.to(device, non_blocking=True), index


def _head_and_base(model: PreTrainedModel) -> tuple[str, str]:
    """Return names of the head and of the base model, both children of `model`."""
    head = model.get_output_embeddings()
    children = dict(model.named_children())
    heads = [name for name, child in children.items() if child is head]
    if not heads:
        raise ModelError("its head is not a part of its own")
    child_names = [
        name
        for name, child in children.items()
        if child is not head and any(True for _ in child.parameters())
    ]
    prefix = str(model.base_model_prefix)
    if prefix in child_names:
        return heads[0], prefix
    if len(child_names) != 1:
        raise ModelError("what computes its hidden states is not one part of it")
    return heads[0], child_names[0]
