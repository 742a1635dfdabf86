"""Head that gives a sample one of several labels. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from bigtrain.objectives.kind import Better, ObjectiveFields, ObjectiveKind
from bigtrain.objectives.rows import AnswerRows, Refusal

CLASSIFIED = AnswerRows(
    name="classification",
    documents=("sample",),
    keys=("label", "text", "messages", "tools"),
    identifying=frozenset({"label"}),
    noun="a sample with a label",
    parse="bigtrain.data.documents.preferences:classified",
    encode="bigtrain.data.chat.preferences:encode_classified",
    samples="bigtrain.data.samples.documents:ClassifiedSamples",
    padded_unit="each sample",
    learned="samples of",
    summary="{rows:,} samples with {num_labels} labels: {labels}",
    document="label {label}",
    identity="classification",
    missing=Refusal(
        "has no samples with labels, which {} reads",
        "tokenize with --format classification",
    ),
    for_next_token=Refusal(
        "has samples with labels, which next_token would not read",
        "objective.type=classification",
    ),
    is_labeled=True,
    is_detected=False,
)


class Classification(ObjectiveKind[ObjectiveFields]):
    """Cross-entropy of the label of a sample."""

    name = "classification"
    summary = "a head that gives a sample one of several labels (rows: classification)"
    fields = ObjectiveFields
    loss = "bigtrain.objectives.losses.classification:ClassificationLoss"
    unit = "rows"
    unit_name = "sample"
    rows = CLASSIFIED
    scores_samples = True
    metrics: ClassVar[Mapping[str, Better]] = MappingProxyType({"accuracy": "max"})
