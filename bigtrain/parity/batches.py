"""Batches of a comparison: random tokens, equal samples at every topology.

They have what changes a loss in a run: rows with many targets and with few, weights of losses, both
signs of a divergence.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.proxy_model import document_positions
from bigtrain.models.equivalence.reductions import VOCABULARY
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import ModelSection, RunConfig

STEPS = 5
RATES = tuple(1e-2 * (0.5 + 0.25 * step) for step in range(STEPS))
"""The learning rate of every step, all different, so that a rate of the wrong step is detected."""

TEACHER_TOP_K = 5
WEIGHTED_STEPS = (1, 3)
"""Steps whose losses have weights, if the objective reads weights."""

_MOST_IGNORED = 0.6  # of the tokens of a row
_RATED_TOKENS = VOCABULARY // 4
_DESIRABLE = (0.8, 0.8, 0.2, 0.2, 0.5)  # share of desirable answers, by step
_REFERENCE_SCORES = "reference_scores.npy"


def save_reference_scores(model: Any, config: RunConfig) -> None:
    """Save the scores of a reference model next to the weights of the proxy `model`: the scores of
    the proxy. Noise is added, except with adapters: there the scores must equal those of passes
    without adapters."""
    if not config.objective.kind.needs_reference:
        return
    size, num_rows = config.batch.samples_per_step, config.objective.kind.rows_per_sample
    plan = BatchPlan(size, size, 1, 1, config.batch.sequence_length, rows_per_sample=num_rows)
    steps = []
    for step in range(STEPS):
        batch = _random_batch(config, plan, step)
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids, use_cache=False).logits.float()
        target_ids = batch.labels.clamp(min=0).unsqueeze(-1)
        log_probs = logits.log_softmax(-1).gather(-1, target_ids).squeeze(-1)
        noise = torch.rand(len(target_ids), generator=torch.Generator().manual_seed(step)) - 0.5
        scores = (log_probs * (batch.labels != IGNORED_LABEL)).sum(-1)
        steps.append(scores if config.adapters is not None else scores + noise)
    assert config.model.path is not None
    np.save(Path(config.model.path) / _REFERENCE_SCORES, torch.stack(steps).numpy())


def micro_batches(
    config: RunConfig, plan: BatchPlan, step: int, data_rank: int
) -> list[MicroBatch]:
    """Return the micro-batches of a step for `data_rank`."""
    batch = _random_batch(config, plan, step)
    if config.objective.kind.reads_scores(config):
        assert config.model.path is not None
        scores = np.load(Path(config.model.path) / _REFERENCE_SCORES)[step]
        batch = replace(batch, reference=torch.from_numpy(scores))
    num_rows = len(batch.labels)
    rows = torch.arange(num_rows).reshape(plan.accumulation, plan.data_size, -1)[:, data_rank]
    return [batch.moved(operator.itemgetter(row)) for row in rows]


def _random_batch(config: RunConfig, plan: BatchPlan, step: int) -> MicroBatch:
    """Return the global batch of a step, without scores of a reference. Rated answers use few
    different tokens, which the model learns; in the first steps most are desirable, later most are
    undesirable, so that the model moves towards them and away. In samples that are scored, every
    token up to the end has a target, and tokens without targets follow."""
    generator = torch.Generator().manual_seed(1000 + step)
    section, objective = config.objective, config.objective.kind
    num_rows, length = plan.global_batch_size * plan.rows_per_sample, plan.sequence_length
    has_mismatched = objective.rows is not None and objective.rows.has_mismatched
    num_tokens = _RATED_TOKENS if has_mismatched else VOCABULARY
    tokens = torch.randint(1, num_tokens, (num_rows, length + 1), generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    # Each row ignores another share of its tokens.
    draws = torch.rand(labels.shape, generator=generator)
    draws[:, 0] = 1.0  # a row without targets would be padding
    ignored_shares = _MOST_IGNORED * torch.rand(num_rows, 1, generator=generator)
    labels[draws < ignored_shares] = IGNORED_LABEL
    # Fields that only some objectives or data have.
    positions = desirable = classes = teacher_values = teacher_ids = weights = None
    if config.data.isolates:
        positions = document_positions(num_rows, length)
        labels[:, :-1][positions[:, 1:] == 0] = IGNORED_LABEL
    if has_mismatched:
        # Two rows belong together: an answer, and its prompt with another answer.
        draws = torch.rand(num_rows // 2, generator=generator)
        desirable = (draws < _DESIRABLE[step]).repeat_interleave(2)
    if objective.scores_samples:
        lengths = torch.randint(length // 2, length + 1, (num_rows, 1), generator=generator)
        labels = torch.where(torch.arange(length) < lengths, tokens[:, 1:], IGNORED_LABEL)
    if objective.rows is not None and objective.rows.has_classes:
        hf_config = load_hf_config(ModelSection(path=config.model.path))
        num_labels = int(hf_config.num_labels or 0)
        classes = torch.randint(num_labels, (num_rows,), generator=generator)
    if section.teacher is not None:
        logits = 2 * torch.randn(*labels.shape, VOCABULARY, generator=generator)
        teacher_values, teacher_ids = logits.log_softmax(-1).topk(TEACHER_TOP_K)
    if objective.is_next_token and step in WEIGHTED_STEPS:
        weights = 2 * torch.rand(labels.shape, generator=generator) * (labels != IGNORED_LABEL)
    return MicroBatch(
        inputs,
        labels,
        positions,
        desirable=desirable,
        classes=classes,
        teacher_values=teacher_values,
        teacher_ids=teacher_ids,
        weights=weights,
    )
