"""Cross-entropy of tokens, terms that are added to it in training, and scores of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

IGNORED_LABEL = -100


@dataclass(frozen=True)
class LossTerms:
    """Terms of the training loss in addition to the cross-entropy. label_smoothing: share of the
    target that is divided equally over the vocabulary (Szegedy et al. 2016, arXiv 1512.00567; as
    transformers' LabelSmoother). z_loss: weight of the squared logarithm of the softmax's
    denominator (PaLM, arXiv 2204.02311). distillation: weight w of the divergence from a teacher;
    the cross-entropy has the weight 1 - w. temperature: T of the teacher's and the model's
    probabilities in the divergence, which is multiplied by T^2, so that its gradient does not
    shrink with T (Hinton et al. 2015, arXiv 1503.02531, section 2)."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    distillation: float = 0.0
    temperature: float = 1.0


NO_TERMS = LossTerms()

Teacher = tuple[torch.Tensor, torch.Tensor]
"""Log-probabilities of a teacher's k most probable tokens, float32 [N, k], and their ids, int64."""


@dataclass(frozen=True)
class TopTokens:
    """Most probable tokens that a model is asked for. count: how many. num_ids: ids that are
    compared, the first of the vocabulary: a model may have more rows than its tokenizer has tokens;
    None for all. temperature: of the probabilities."""

    count: int
    num_ids: int | None = None
    temperature: float = 1.0


def cross_entropies(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy in nats of each target, float32 [N], 0 without a target: `logits`
    [N, V], `labels` int64 [N], -100 for none."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="none")


def summed_token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    terms: LossTerms = NO_TERMS,
    teacher: Teacher | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the loss in nats summed over targets: logits float32 [N, V], labels int64 [N], -100
    for none, `weights` float32 [N], factors of the tokens' losses. Without a graph (in an
    evaluation) the loss is the cross-entropy only."""
    if weights is not None:
        is_training = torch.is_grad_enabled()
        losses = F.cross_entropy(
            logits,
            labels,
            ignore_index=IGNORED_LABEL,
            reduction="none",
            label_smoothing=terms.label_smoothing if is_training else 0.0,
        )
        if terms.z_loss and is_training:
            squares = logits.logsumexp(-1).square()
            losses = losses + terms.z_loss * squares * (labels != IGNORED_LABEL)
        return (losses * weights).sum()
    if terms == NO_TERMS or not torch.is_grad_enabled():
        return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    loss = F.cross_entropy(
        logits,
        labels,
        ignore_index=IGNORED_LABEL,
        reduction="sum",
        label_smoothing=terms.label_smoothing,
    )
    # z-loss: sum of log(Z)^2 with Z = sum(exp(logits)) (PaLM, arXiv 2204.02311, section 5).
    if terms.z_loss:
        squares = logits.logsumexp(-1).square()
        loss = loss + terms.z_loss * (squares * (labels != IGNORED_LABEL)).sum()
    # (1 - w) * loss + w * T^2 * KL(teacher || model) at temperature T (Hinton et al. 2015, arXiv
    # 1503.02531).
    if teacher is not None:
        temperature = terms.temperature
        softened = logits if temperature == 1 else logits / temperature
        divergences = divergence(softened, *teacher) * (labels != IGNORED_LABEL)
        weight = terms.distillation * temperature**2
        loss = (1 - terms.distillation) * loss + weight * divergences.sum()
    return loss


def divergence(logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of the model from a teacher whose k most probable
    tokens are known, with all further tokens counted as one: float32 [N]. It is at most the
    divergence over all tokens, and equal for k = V. logits float32 [N, V]; values, ids: `Teacher`.

    ``sum_i p_i (log p_i - log q_i)`` over the teacher's tokens i, and the term of the remainder
    ``1 - sum_i p_i``; p: the teacher's probabilities, q: the model's.
    """
    log_normalizers, teacher_probs = logits.logsumexp(-1), values.exp()
    model_logps = logits.gather(-1, ids) - log_normalizers.unsqueeze(-1)
    token_terms = torch.special.xlogy(teacher_probs, teacher_probs) - teacher_probs * model_logps
    divergences: torch.Tensor = token_terms.sum(-1)
    if ids.shape[-1] == logits.shape[-1]:
        return divergences
    remainder = (-torch.expm1(values.logsumexp(-1))).clamp(min=0)
    remainder_logps = logits.scatter(-1, ids, -torch.inf).logsumexp(-1) - log_normalizers
    divergences += torch.special.xlogy(remainder, remainder) - remainder * remainder_logps
    return divergences


def token_log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of every label, float32 [B, T]; 0 without a label. logits [B, T,
    V], labels int64 [B, T]."""
    entropies = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED_LABEL,
        reduction="none",
    )
    return -entropies.view(labels.shape)


def token_scores(
    logits: torch.Tensor, labels: torch.Tensor, top: TopTokens | None = None
) -> torch.Tensor:
    """Return the log-probability of every label, then the log-probabilities of the k most probable
    tokens (`top`) in falling order, then their ids: float32 [N, 1 + 2 k]; 0 without a label. logits
    float32 [N, V], labels int64 [N]. Ids below 2^24 are exact in float32."""
    assert logits.shape[-1] <= 1 << 24
    entropies = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="none")
    columns = [-entropies.unsqueeze(-1)]
    if top is not None:
        logits = logits[..., : top.num_ids]
        if top.temperature != 1:
            logits = logits / top.temperature
        values, ids = logits.topk(top.count, dim=-1)
        values = values - logits.logsumexp(-1, keepdim=True)
        present = (labels != IGNORED_LABEL).unsqueeze(-1)
        columns += [values * present, (ids * present).float()]
    return torch.cat(columns, -1)
