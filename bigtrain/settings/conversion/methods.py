"""Methods of other trainers, and the objective and row format of bigtrain for each. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigtrain.settings.conversion.draft import Draft


@dataclass(frozen=True)
class Method:
    """Method of training. objective: ``objective.type``; None: next_token. loss: of preference
    pairs. has_beta, has_weights, is_centered: which settings the objective has. rows: options of
    ``tokenize`` that name the rows' format."""

    objective: str | None = None
    loss: str | None = None
    has_beta: bool = False
    has_weights: bool = False
    is_centered: bool = False
    rows: Sequence[str] = ()


_PAIRS = ("--format", "preference")
METHODS: Mapping[str, Method] = dict(
    sft=Method(),
    pt=Method(rows=("--text-key", "text")),
    dpo=Method("preference", "sigmoid", has_beta=True, rows=_PAIRS),
    ipo=Method("preference", "ipo", has_beta=True, rows=_PAIRS),
    simpo=Method("preference", "simpo", has_beta=True, rows=_PAIRS),
    orpo=Method("preference", "orpo", has_beta=True, rows=_PAIRS),
    kto=Method("kto", has_beta=True, has_weights=True, rows=("--format", "kto")),
    reward=Method("reward", is_centered=True, rows=_PAIRS),
)
"""Methods by the names that TRL, Axolotl and LLaMA-Factory have for them."""
METHODS = {**METHODS, "rm": METHODS["reward"]}  # LLaMA-Factory's name

_TERMS_OF_PAIRS: Mapping[str, str] = {
    "label_smoothing": "label_smoothing",
    "dpo_label_smoothing": "label_smoothing",
    "pref_ftx": "sft_weight",
}
"""Keys of terms that only losses of pairs have, and the settings of the objective. LLaMA-Factory's
pref_ftx weighs the mean over the answer's tokens, as here (train/dpo/trainer.py, `sft_loss`)."""


def set_objective(draft: Draft, method: Method, beta: float, weight_keys: Sequence[str]) -> None:
    """Set the objective of a method. beta: of the file. weight_keys: keys of the weights of
    desirable and of undesirable answers."""
    if method.loss is None:
        for key in _TERMS_OF_PAIRS:
            if draft.value(key):
                draft.refuse(key, "is a term of losses of pairs, and this run has none")
    if method.objective is None:
        return
    draft.set("objective.type", method.objective)
    if method.loss is not None:
        draft.set("objective.loss", method.loss)
        for key, name in _TERMS_OF_PAIRS.items():
            if draft.value(key):
                draft.set(f"objective.{name}", draft.number(key))
    if method.has_beta:
        draft.set("objective.beta", beta)
    if method.has_weights:
        draft.set("objective.desirable_weight", draft.number(weight_keys[0], 1.0))
        draft.set("objective.undesirable_weight", draft.number(weight_keys[1], 1.0))
    if method.loss == "simpo":
        draft.set("objective.gamma", draft.number("simpo_gamma", 0.5))
    if method.is_centered:
        coefficient = draft.number("center_rewards_coefficient", 0.0)
        draft.set("objective.center_rewards_coefficient", coefficient)
