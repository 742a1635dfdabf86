"""Every kind of objective is complete: its settings, its loss and its rows."""

from __future__ import annotations

import pkgutil
from typing import Any, get_args

import pytest

from bigtrain.data.documents.row_keys import ROW_KEYS
from bigtrain.models.layers.token_loss import NO_TERMS
from bigtrain.objectives.losses.next_token import NextTokenLoss, loss_terms
from bigtrain.objectives.losses.passes import ObjectiveLoss, make_objective
from bigtrain.objectives.rows import Rows
from bigtrain.objectives.section import KINDS, ObjectiveSection
from tests.unit.objectives.test_losses import CASES

REQUIRED: dict[str, dict[str, Any]] = {"distillation": {"teacher": "scores"}}
"""Settings without which a kind is refused."""


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_complete(name: str) -> None:
    kind = ObjectiveSection(type=name, **REQUIRED.get(name, {})).kind
    assert type(kind) is KINDS[name]
    assert type(kind).__module__ == f"bigtrain.objectives.{name}"
    texts = ObjectiveSection.descriptions()
    missing = [field for field in kind.fields.model_fields if not texts.get(field)]
    assert missing == [], "a base of ObjectiveSection has these fields, each with a text below it"
    loss = make_objective(kind.section)
    assert isinstance(loss, ObjectiveLoss)
    if type(loss) is not NextTokenLoss:
        assert name in [section["type"] for section, *_ in CASES], "its equation in test_losses.py"


@pytest.mark.parametrize(
    "changes",
    [{}, {"type": "distillation", "teacher": "scores"}, {"z_loss": 1e-4}, {"label_smoothing": 0.1},
     {"type": "preference", "loss": "sigmoid", "label_smoothing": 0.1}],
)  # fmt: skip
def test_entropies_are_plain_where_no_terms_are_added(changes: dict[str, Any]) -> None:
    section = ObjectiveSection(**changes)
    assert section.has_plain_entropies is (loss_terms(section) == NO_TERMS)
    assert not ObjectiveSection(type="reward").has_plain_entropies


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_kind_are_complete(name: str) -> None:
    rows = KINDS[name].rows
    if rows is None:
        return
    for function in (rows.parse, rows.encode, rows.samples):
        assert callable(pkgutil.resolve_name(function))
    assert rows.name in get_args(Rows), "Rows in bigtrain/objectives/rows.py"
    used = {
        key
        for row_key in ROW_KEYS
        if row_key.action == "used" and rows.name in row_key.formats
        for key in row_key.names
    }
    assert set(rows.keys) <= used, "its keys in bigtrain/data/documents/row_keys.py"
    counts = {"rows": 1, "ones": 1, "zeros": 0, "num_labels": 2, "labels": "a, b"}
    assert rows.summary.format(**counts)
    assert rows.document.format(row=0, name=rows.documents[0], label="a")


@pytest.mark.parametrize("name", KINDS)
def test_settings_of_other_kinds_are_refused(name: str) -> None:
    for other in KINDS.values():
        for field in other.fields.model_fields.keys() - KINDS[name].fields.model_fields.keys():
            value = {"teacher_top_k": 2, "loss": "ipo"}.get(field, "x")
            if ObjectiveSection.model_fields[field].annotation is float:
                value = 0.25
            with pytest.raises(ValueError, match=rf"objective.{field} = .* has no effect|needs"):
                ObjectiveSection(type=name, **{field: value})
