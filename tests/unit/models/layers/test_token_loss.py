"""Label smoothing and z-loss, against transformers' label smoother and the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

from bigtrain.models.layers.chunked_loss import ChunkedLoss, FurtherLosses
from bigtrain.models.layers.token_loss import LossTerms, summed_token_loss

LOGITS = 5 * torch.randn(12, 30, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 30, (12,), generator=torch.Generator().manual_seed(1))
LABELS[3:6] = -100
COUNT = int((LABELS != -100).sum())


def test_label_smoothing_is_that_of_transformers() -> None:
    logits = LOGITS.requires_grad_()
    expected = LabelSmoother(0.1)({"logits": logits}, LABELS.clone())
    loss = summed_token_loss(logits, LABELS, LossTerms(label_smoothing=0.1)) / COUNT
    torch.testing.assert_close(loss, expected)


def test_z_loss_is_the_square_of_the_logarithm_of_the_denominator() -> None:
    logits = LOGITS.requires_grad_()
    plain = summed_token_loss(logits, LABELS)
    loss = summed_token_loss(logits, LABELS, LossTerms(z_loss=1e-2))
    squares = logits.double().exp().sum(-1).log().square()[LABELS != -100]
    torch.testing.assert_close((loss - plain).double(), 1e-2 * squares.sum(), rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(summed_token_loss(logits, LABELS, LossTerms(0.1, 1e-2)), plain)


@pytest.mark.parametrize("terms", [LossTerms(label_smoothing=0.2), LossTerms(z_loss=0.05)])
def test_chunks_have_the_same_loss_and_gradients(terms: LossTerms) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gpt2"](vocab_size=40, n_embd=16, n_layer=1, n_head=2)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    ids, labels = torch.randint(1, 40, (2, 9)), torch.randint(1, 40, (2, 9))
    labels[0, 2:5] = -100
    results = []
    for in_chunks in (False, True):
        if in_chunks:
            chunked = ChunkedLoss(model, 5, terms=terms)
            loss = model(input_ids=ids, use_cache=False, targets=labels).loss
            chunked.remove()
        else:
            logits = model(input_ids=ids, use_cache=False).logits
            loss = summed_token_loss(logits.flatten(0, 1).float(), labels.flatten(), terms)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        results.append({"loss": loss.detach(), **gradients})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-4, atol=1e-5)


def test_further_losses_have_the_same_head_and_terms() -> None:
    """With gradients through the hidden states, and of the shared head, of both."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gpt2"](vocab_size=40, n_embd=16, n_layer=1, n_head=2)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    ids, labels = torch.randint(1, 40, (2, 9)), torch.randint(1, 40, (2, 9))
    later = torch.where(labels > 20, labels, -100)
    terms, share = LossTerms(label_smoothing=0.2, z_loss=0.05), 0.3
    hidden = model.transformer(ids, use_cache=False).last_hidden_state
    expected = [
        summed_token_loss(model.lm_head(states).flatten(0, 1), targets.flatten(), terms)
        for states, targets in ((hidden, labels), (hidden.tanh(), later))
    ]
    (expected[0] + share * expected[1]).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    chunked = ChunkedLoss(model, 5, terms=terms)
    further = FurtherLosses(lambda states: iter([(states.tanh(), later)]), share)
    factor = torch.tensor(0.7)
    outputs = model(input_ids=ids, use_cache=False, targets=labels, factor=factor, further=further)
    chunked.remove()
    ((outputs.loss + share * outputs.further[0]) * factor).backward()
    torch.testing.assert_close(torch.stack([outputs.loss, *outputs.further]), torch.stack(expected))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, factor * gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(label_smoothing=0.1, z_loss=1e-2)])
def test_weights_are_factors_of_the_losses_of_tokens(terms: LossTerms) -> None:
    logits, weights = LOGITS.requires_grad_(), torch.rand(12) * (LABELS != -100)
    single = [summed_token_loss(logits[[n]], LABELS[[n]], terms) for n in range(12)]
    expected = sum(loss * weight for loss, weight in zip(single, weights, strict=True))
    torch.testing.assert_close(summed_token_loss(logits, LABELS, terms, None, weights), expected)
