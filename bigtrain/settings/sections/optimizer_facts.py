"""The table of optimizers: what settings, planner and engine know of each. Pure.

A row, and the module with the update rule that it names, are an optimizer: values of
``optimizer.type``, refusals of settings that it does not read, names and bytes of its states and
the planner's memory are all read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OptimizerFacts:
    """What there is to know of an optimizer without torch.

    module: has its `RULE`, an `UpdateRule`. states: those shaped like the parameter, by the names
    that checkpoints give them; each is in ``optimizer.state_dtype``. beside: the optimizer of all
    parameters that are not matrices of hidden layers, where this one is for those alone. settings:
    the field of the section that only this one reads. defaults: of the section's other fields,
    where it has other ones. unread: fields that it does not read, with the reason.
    """

    module: str
    states: tuple[str, ...]
    beside: str | None = None
    settings: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)

    def states_per_element(self, matrix_share: float) -> float:
        """Elements of states per parameter; `matrix_share`: the share of parameters that are in
        matrices of hidden layers."""
        if self.beside is None:
            return len(self.states)
        rest = facts_of_optimizer(self.beside).states_per_element(0.0)
        return matrix_share * len(self.states) + (1 - matrix_share) * rest


_RULES = "bigtrain.engine.optimizers"

OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(f"{_RULES}.adamw", ("exp_avg", "exp_avg_sq")),
    "muon": OptimizerFacts(f"{_RULES}.muon", ("momentum_buffer",), beside="adamw", settings="muon"),
    "lion": OptimizerFacts(
        f"{_RULES}.lion",
        ("exp_avg",),
        defaults={"betas": (0.9, 0.99)},
        unread={"eps": "Lion's update is a sign, which is divided by nothing"},
    ),
    "adafactor": OptimizerFacts(
        f"{_RULES}.adafactor",
        (),
        settings="adafactor",
        unread={
            "betas": "Adafactor's decay is adafactor.beta2_decay, and it has no momentum",
            "eps": "Adafactor's are adafactor.eps1 and adafactor.eps2",
            "state_dtype": "Adafactor's states are a number for each row and column, in float32",
        },
    ),
}
"""By ``optimizer.type``, in the order in which they are listed to a user."""


def facts_of_optimizer(name: str) -> OptimizerFacts:
    """The row of ``optimizer.type`` = `name`, which the settings have accepted."""
    return OPTIMIZERS[name]


def known_optimizer(name: str) -> str:
    """`name` if it is in the table. Raises ValueError in pydantic's words for a value that is none
    of several."""
    if name not in OPTIMIZERS:
        quoted = [repr(known) for known in OPTIMIZERS]
        expected = f"{', '.join(quoted[:-1])} or {quoted[-1]}"
        raise ValueError(f"Input should be {expected}")
    return name
