"""Choice of a run's loss: from all logits at once, in chunks, or by Liger's fused kernel.

Chunks pay off if logits are large, and work for every model whose forward method calls its base
model and its head. A proxy model is tested for it: loss and every gradient.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem, one_line
from bigtrain.models.configuration import text_config, vocabulary_size
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    TOKENS,
    build_proxy_model,
    fewer_experts,
    with_heads,
)
from bigtrain.models.layers.chunked_loss import IGNORED_LABEL, ChunkedLoss, LossPlan
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig

CHUNK_BYTES = 256 * 2**20
"""Float32 logits of a chunk. Smaller chunks save little memory, and each costs an addition of the
head's full gradient."""

_TOLERANCE = 1e-5
"""Relative to the loss and the largest gradient; float32 sums in another order make 1e-6."""

LIGER_REMEDY = "pip install 'bigtrain[gpu]', or set {key}"


def choose_loss(
    config: RunConfig, hf_config: PreTrainedConfig, plan: BatchPlan
) -> tuple[LossPlan, list[Problem]]:
    """Choose the loss of a run with the micro-batches of `plan`; return problems with it, too.

    ``auto`` takes chunks if the logits exceed one and the proxy model computes the same with them.
    Takes a second at most, and no time if the logits are small.
    """
    section, vocabulary = config.model, vocabulary_size(hf_config)
    num_tokens = plan.micro_batch_size * plan.sequence_length // config.parallel.sequence
    chunk_tokens = section.loss_chunk_tokens or max(1, CHUNK_BYTES // (4 * vocabulary))
    gib = 4 * num_tokens * vocabulary / 2**30
    size = f"logits of {num_tokens} tokens x {vocabulary} words take {gib:.2g} GiB in float32"

    def plain(reason: str) -> tuple[LossPlan, list[Problem]]:
        return LossPlan("plain", chunk_tokens, f"loss: from all logits at once ({reason})"), []

    if section.loss == "plain":
        return plain("model.loss=plain")
    if section.loss == "auto" and num_tokens <= chunk_tokens:
        return plain(size)
    kind: Literal["liger", "chunked"] = "liger" if section.loss == "liger" else "chunked"
    softcap, reason = _try(hf_config, section.attention, kind, plan.sequence_length)
    if reason and section.loss == "auto":
        return plain(f"{size}; chunks are not supported for {hf_config.model_type}: {reason}")
    text = f"loss: in chunks of {chunk_tokens} tokens ({size})"
    if kind == "liger":
        text = "loss: Liger's fused linear cross-entropy"
    chosen = LossPlan(kind, chunk_tokens, text, softcap)
    problems = []
    if reason:
        rule = f"is not supported for model_type {hf_config.model_type}: {reason}"
        other = "chunked or plain" if kind == "liger" else "plain"
        problems.append(Problem("model.loss", section.loss, rule, f"model.loss={other}"))
    elif kind == "liger" and importlib.util.find_spec("liger_kernel") is None:
        remedy = LIGER_REMEDY.format(key="model.loss=chunked")
        problems.append(Problem("model.loss", "liger", "liger-kernel is not installed", remedy))
    return chosen, problems


def _try(
    hf_config: PreTrainedConfig,
    attention: str,
    kind: Literal["liger", "chunked"],
    sequence_length: int,
) -> tuple[float | None, str]:
    """Return the softcap of the logits, for Liger, and why `kind` does not work; empty if it
    does."""
    if attention not in ("auto", "sdpa", "eager"):
        attention = "auto"  # other kernels have no float32 on a CPU
    try:
        model = build_proxy_model(
            hf_config,
            attention,
            [_fewer_heads_and_experts, with_heads(2)],
            sequence_length=sequence_length,
        ).eval()
        softcap = getattr(text_config(model.config), "final_logit_softcapping", None)
        if kind == "liger":
            return softcap, _is_linear(model, softcap)
        return None, difference(model)
    except (ModelError, *MODEL_FAILURES) as error:
        return None, one_line(error)


def difference(model: PreTrainedModel, chunk_tokens: int = 7) -> str:
    """Describe how the chunked loss or a gradient differs from the plain one; empty if
    not. Some labels are masked. Leaves `model` as it was, without gradients."""
    ids, labels = _sample(model)
    plain = model(input_ids=ids, use_cache=False)
    cross_entropy = F.cross_entropy(
        plain.logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL
    )
    wanted = _gradients(model, cross_entropy, plain)
    chunked = ChunkedLoss(model, chunk_tokens)
    try:
        outputs = model(input_ids=ids, use_cache=False, targets=labels)
        mean = outputs.loss / (labels != IGNORED_LABEL).sum()
        gradients = _gradients(model, mean, outputs)
    finally:
        chunked.remove()
    off = abs(float(mean.detach()) - float(cross_entropy.detach())) / float(cross_entropy.detach())
    if not off <= _TOLERANCE:
        return f"the loss differs by {off:.1g} of it"
    largest = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    for name, gradient in wanted.items():
        zero = torch.zeros(())
        one, other = (zero if g is None else g for g in (gradient, gradients[name]))
        off = float((one - other).abs().max()) / largest
        if not off <= _TOLERANCE:
            return f"the gradient of {name} differs by {off:.1g} of the largest"
    return ""


def _gradients(
    model: PreTrainedModel, loss: torch.Tensor, outputs: Any
) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    if getattr(outputs, "aux_loss", None) is not None:
        loss = loss + outputs.aux_loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


@torch.no_grad()
def _is_linear(model: PreTrainedModel, softcap: float | None) -> str:
    """Return why Liger's kernel, which supports a matrix, a bias and a softcap, does not fit; empty
    if it does."""
    kept: list[torch.Tensor] = []
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return "its head is not a linear layer"
    handle = head.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    logits = model(input_ids=_sample(model)[0], use_cache=False).logits
    handle.remove()
    if len(kept) != 1:
        return "its forward method does not call its head once"
    expected = kept[0] if softcap is None else softcap * torch.tanh(kept[0] / softcap)
    if not torch.allclose(logits, expected, rtol=1e-5, atol=1e-6):
        return "its logits are not what its head gives (for example, they are scaled)"
    return ""


def _sample(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, some of them masked: int64 [2, TOKENS]."""
    vocabulary = vocabulary_size(model.config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (2, TOKENS), generator=generator)
    labels = torch.randint(3, vocabulary, (2, TOKENS), generator=generator)
    labels[0, 5:17] = IGNORED_LABEL
    return ids, labels


def _fewer_heads_and_experts(config: Any) -> None:
    with_heads(2)(config)
    fewer_experts(config)
