"""Choice of a run's loss: from all logits at once, in chunks, or by Liger's fused kernel. Whether
chunks compute the same is tested on a proxy model."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.configuration import (
    num_trained_mtp_layers,
    scores_samples,
    text_config,
    vocabulary_size,
)
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    build_proxy_model,
    failure_text,
    proxy_tokens,
)
from bigtrain.models.equivalence.trial import (
    GRADIENT,
    LOSS,
    Results,
    Tolerance,
    Trial,
    pop_gradients,
)
from bigtrain.models.experts import auxiliary_loss
from bigtrain.models.layers.chunked_loss import ChunkedLoss
from bigtrain.models.layers.kernels import may_compile_loss
from bigtrain.models.layers.plans import LossPlan
from bigtrain.models.layers.token_loss import IGNORED_LABEL
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.model import chunk_tokens
from bigtrain.system.extras import install_line


def choose_loss(
    config: RunConfig, hf_config: PreTrainedConfig, plan: BatchPlan
) -> tuple[LossPlan, list[Problem]]:
    """Choose the loss of a run with the micro-batches of `plan`; also return problems with the
    chosen loss. ``auto`` uses chunks if the logits exceed one chunk, or if layers may be compiled
    and with them the loss of a chunk, and a proxy model computes the same in chunks. Takes a second
    at most, and no time with small logits on a CPU."""
    section, vocabulary = config.model, vocabulary_size(hf_config)
    num_rows = plan.micro_batch_size * config.objective.kind.trained_rows_per_sample
    num_tokens = num_rows * plan.sequence_length // config.parallel.degrees.sequence_size
    num_chunk_tokens = chunk_tokens(vocabulary, section.loss_chunk_tokens)
    gib = 4 * num_tokens * vocabulary / 2**30
    size = f"logits of {num_tokens} tokens x {vocabulary} words take {gib:.2g} GiB in float32"

    def plain(reason: str) -> tuple[LossPlan, list[Problem]]:
        return LossPlan("plain", num_chunk_tokens, f"loss: from all logits at once ({reason})"), []

    # All logits at once where chunks save nothing. Multi-token prediction computes more logits, and
    # only in chunks.
    if scores_samples(hf_config):
        return LossPlan("plain", num_chunk_tokens, ""), []
    if section.loss == "plain":
        return plain("model.loss=plain")
    needs_chunks = num_trained_mtp_layers(hf_config) > 0
    saves = num_tokens > num_chunk_tokens or may_compile_loss(config, hf_config)
    if section.loss == "auto" and not saves and not needs_chunks:
        return plain(size)
    loss_type: Literal["liger", "chunked"] = "liger" if section.loss == "liger" else "chunked"
    # Chunks may change the result of a model: a proxy model shows it.
    softcap, reason = None, ""
    try:
        model = build_proxy_model(
            hf_config, section.attention, sequence_length=plan.sequence_length
        ).eval()
        if loss_type == "liger":
            softcap = getattr(text_config(model.config), "final_logit_softcapping", None)
            reason = _is_linear(model, softcap)
        elif (difference := CHUNKED.difference(model)) is not None:
            reason = f"the {difference.where} differs {difference.size}"
    except (ModelError, *MODEL_FAILURES) as error:
        softcap, reason = None, failure_text(error)
    if reason and section.loss == "auto" and not needs_chunks:
        return plain(f"{size}; chunks are not supported for {hf_config.model_type}: {reason}")
    text = f"loss: in chunks of {num_chunk_tokens} tokens ({size})"
    if section.loss == "auto" and config.precision.dtype != "float32":
        # Four times the error (docs/benchmarks.md), so a user has to ask for it.
        text += f" (not Liger's: it adds up the head's gradient in {config.precision.dtype})"
    if loss_type == "liger":
        text = "loss: Liger's fused linear cross-entropy"
    loss_plan = LossPlan(loss_type, num_chunk_tokens, text, softcap)
    problems = []
    if reason:
        rule = f"is not supported for model_type {hf_config.model_type}: {reason}"
        alternative = "chunked or plain" if loss_type == "liger" else "plain"
        if needs_chunks:
            alternative += " with objective.mtp_weight=0"
        problems.append(Problem("model.loss", section.loss, rule, f"model.loss={alternative}"))
    elif loss_type == "liger" and importlib.util.find_spec("liger_kernel") is None:
        remedy = f"{install_line('gpu')}, or set model.loss=chunked"
        problems.append(Problem("model.loss", "liger", "liger-kernel is not installed", remedy))
    return loss_plan, problems


def loss_and_gradients(model: PreTrainedModel) -> Results:
    """Return the loss of a proxy model from its logits, with its gradients."""
    ids, labels = _sample(model)
    outputs = model(input_ids=ids, use_cache=False)
    loss = F.cross_entropy(
        outputs.logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL
    )
    return _results(model, loss, outputs)


def _in_chunks(model: PreTrainedModel, chunk_tokens: int = 7) -> Results:
    ids, labels = _sample(model)
    chunked = ChunkedLoss(model, chunk_tokens)
    try:
        outputs = model(input_ids=ids, use_cache=False, targets=labels)
        return _results(model, outputs.loss / (labels != IGNORED_LABEL).sum(), outputs)
    finally:
        chunked.remove()


def _results(model: PreTrainedModel, loss: torch.Tensor, outputs: Any) -> Results:
    auxiliary = auxiliary_loss(outputs)
    model.zero_grad(set_to_none=True)
    (loss if auxiliary is None else loss + auxiliary).backward()
    return {LOSS: {"loss": loss.detach()}, GRADIENT: pop_gradients(model)}


CHUNKED = Trial(
    loss_and_gradients,
    _in_chunks,
    # Float32 sums in another order make 1e-6.
    {LOSS: Tolerance(relative=1e-5), GRADIENT: Tolerance(common=1e-5)},
)


@torch.no_grad()
def _is_linear(model: PreTrainedModel, softcap: float | None) -> str:
    """Return why the logits are not what Liger's kernel computes from a matrix, a bias and a
    softcap; empty if they are."""
    head_outputs: list[torch.Tensor] = []
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return "its head is not a linear layer"
    with head.register_forward_hook(lambda _module, _inputs, output: head_outputs.append(output)):
        logits = model(input_ids=_sample(model)[0], use_cache=False).logits
    if len(head_outputs) != 1:
        return "its forward method does not call its head once"
    expected = (
        head_outputs[0] if softcap is None else softcap * torch.tanh(head_outputs[0] / softcap)
    )
    if not torch.allclose(logits, expected, rtol=1e-5, atol=1e-6):
        return "its logits are not what its head gives (for example, they are scaled)"
    return ""


def _sample(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids, and labels of which some are masked: int64 [2, TOKENS]."""
    labels = proxy_tokens(model, seed=1)
    labels[0, 5:17] = IGNORED_LABEL
    return proxy_tokens(model), labels
