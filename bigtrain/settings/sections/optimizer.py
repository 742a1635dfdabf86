"""Section on the optimizer, and the table of optimizers. Pure.

A row of the table and the module with its update rule define an optimizer: settings, engine and
planner read from it the values of ``optimizer.type``, the settings that it does not read, and the
names and bytes of its states.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from bigtrain.errors import Problem
from bigtrain.settings.sections.base import PositiveInt, Section
from bigtrain.system.extras import install_line


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about an optimizer, without torch.

    module: defines `RULE`, the optimizer's `UpdateRule`. states: names, in checkpoints, of states
    that are shaped like the parameter. state_bytes: bytes per element of a state; None: those of
    ``optimizer.state_dtype``. block_bytes: bytes per element of the parameter of states that every
    rank of a stage has in full. beside: the optimizer of all other parameters, if this one updates
    only matrices of hidden layers. small: the optimizer of parameters with fewer than
    `min_elements` elements, if this one updates only larger ones. package: the library with its
    kernels, and the extra of bigtrain that installs it. settings: the field of the section that
    only this optimizer reads. defaults: of other fields of the section, if they differ. unread:
    fields that it does not read, with the reason.
    """

    module: str
    states: tuple[str, ...]
    state_bytes: int | None = None
    block_bytes: float = 0.0
    beside: str | None = None
    small: str | None = None
    min_elements: int = 0
    package: tuple[str, str] | None = None
    settings: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Further optimizers that a run with this optimizer uses."""
        return [name for name in (self.beside, self.small) if name is not None]

    def bytes_per_element(self, state_bytes: int) -> float:
        """Return the bytes of states per element of a parameter that this optimizer updates.
        `state_bytes`: of an element in ``optimizer.state_dtype``."""
        element_bytes = state_bytes if self.state_bytes is None else self.state_bytes
        return len(self.states) * element_bytes + self.block_bytes

    def divided_bytes(self, matrix_share: float, state_bytes: int) -> float:
        """Return the bytes per element, in the mean over a model, of states that ZeRO shards.
        `matrix_share`: the share of elements that are in matrices of hidden layers. The few
        elements of `small` parameters are ignored."""
        matrix_bytes = self.bytes_per_element(state_bytes) - self.block_bytes
        if self.beside is None:
            return matrix_bytes
        non_matrix_bytes = facts_of_optimizer(self.beside).divided_bytes(0.0, state_bytes)
        return matrix_share * matrix_bytes + (1 - matrix_share) * non_matrix_bytes


_RULES = "bigtrain.engine.optimizers"

BLOCK_ELEMENTS = 256
"""Elements of a parameter that share a scale in 8-bit AdamW."""

OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(f"{_RULES}.adamw", ("exp_avg", "exp_avg_sq")),
    "adamw_8bit": OptimizerFacts(
        f"{_RULES}.adamw_8bit",
        ("exp_avg_code", "exp_avg_sq_code"),
        state_bytes=1,
        block_bytes=2 * 4 / BLOCK_ELEMENTS,
        small="adamw",
        min_elements=4096,
        package=("bitsandbytes", "adamw8bit"),
        unread={"state_dtype": "its moments are codes of 8 bits"},
    ),
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
"""Optimizers by ``optimizer.type``, in the order in which they are listed to a user."""


def facts_of_optimizer(name: str) -> OptimizerFacts:
    """Return the row of ``optimizer.type`` = `name`, which the settings have accepted."""
    return OPTIMIZERS[name]


def check_optimizer_package(section: "OptimizerSection") -> list[Problem]:
    """Return a problem where the optimizer's package is not installed. Imports nothing."""
    package = section.facts.package
    if package is None or importlib.util.find_spec(package[0]):
        return []
    remedy = f"{install_line(package[1])}, or optimizer.type=adamw"
    return [Problem("optimizer.type", section.type, f"{package[0]} is not installed", remedy)]


def known_optimizer(name: str) -> str:
    """Return `name` if it is in the table, else raise ValueError with pydantic's text for a wrong
    choice."""
    if name not in OPTIMIZERS:
        quoted = [repr(optimizer_name) for optimizer_name in OPTIMIZERS]
        expected = f"{', '.join(quoted[:-1])} or {quoted[-1]}"
        raise ValueError(f"Input should be {expected}")
    return name


Beta = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0)]


class SplitSection(Section):
    """Split of a fused projection into its matrices for Muon."""

    parts: tuple[PositiveInt, ...] | PositiveInt
    """output features of each matrix, in their order; or the number of equally large ones"""
    interleaved: PositiveInt = 1
    """how many times the matrices alternate along the output, such as the number of heads where
    each head has its query, key and value together (GPT-NeoX)"""


class MuonSection(Section):
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/) as in `torch.optim.Muon`,
    for the matrices of hidden layers."""

    lr: Rate | None = None
    """peak learning rate of the matrices; default: optimizer.lr, which fits AdamW's where adjust_lr
    is match_rms_adamw"""
    weight_decay: Decay | None = None
    """decoupled decay of the matrices; default: optimizer.weight_decay"""
    momentum: Beta = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations"""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """in which matrices are sent and iterated on; bfloat16 as torch.optim.Muon, which turns
    differences in a gradient's last bits into some in a weight's fifth digit"""
    eps: Rate = 1e-7
    """least norm that a matrix is divided by"""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """scale of an update of a matrix [rows, columns]: 0.2 sqrt(max(rows, columns)) (Liu et al.
    2025, arXiv 2502.16982, equation 4), or Jordan's sqrt(max(1, rows / columns))"""
    split: dict[str, SplitSection] = Field(default_factory=dict)
    """fused projections by patterns of parameter names, such as "*.qkv_proj.weight": {parts: [4096,
    1024, 1024]}; others are one matrix each"""


class AdafactorSection(Section):
    """Adafactor's (Shazeer and Stern 2018, arXiv 1804.04235) parameters other than learning rate
    and decay, as in `torch.optim.Adafactor`."""

    beta2_decay: Annotated[float, Field(lt=0)] = -0.8
    """the second moment's decay at step t is 1 - t ** beta2_decay"""
    eps1: Annotated[float, Field(gt=0)] | None = None
    """least squared gradient; default: float32's epsilon"""
    eps2: Rate = 1e-3
    """least root mean square of a parameter"""
    clip_threshold: Annotated[float, Field(ge=1)] = 1.0
    """largest root mean square of an update"""


class AverageSection(Section):
    """Exponential moving average of the weights, as `torch.optim.swa_utils.AveragedModel` with
    `get_ema_multi_avg_fn`: a copy of the weights after the first update, then after each update
    decay * average + (1 - decay) * weights. Updates that are skipped do not change it."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """how much of the average an update keeps; the average is over about 1 / (1 - decay) updates"""


class OptimizerSection(Section):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with decay and no-decay groups, or
    another optimizer with the same groups. Lion: Chen et al. 2023, arXiv 2302.06675."""

    type: Annotated[str, AfterValidator(known_optimizer)] = Field(
        default="adamw", json_schema_extra={"enum": list(OPTIMIZERS)}
    )
    """muon is for matrices of hidden layers; embeddings, head, norms, biases, routers and all other
    parameters use adamw. adamw_8bit is bitsandbytes' (Dettmers et al. 2022, arXiv 2110.02861) for
    parameters with 4096 elements or more; smaller ones use adamw"""
    lr: Rate
    """peak learning rate"""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """of adamw, also together with muon; of lion, whose default is [0.9, 0.99]"""
    eps: Rate = 1e-8
    """of adamw, also together with muon"""
    weight_decay: Decay = 0.1
    """decoupled decay of the decay group"""
    decay_embeddings: bool = True
    """whether tables of tokens and positions are in the decay group; biases, norms, states of
    recurrent layers and other parameters that multiply no activations never are"""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """global gradient norm to clip to; 0 turns clipping off"""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """of moments and momentum; bfloat16 halves their size, with stochastic rounding; adafactor,
    which has none, supports only float32"""
    muon: MuonSection = MuonSection.model_construct()
    adafactor: AdafactorSection = AdafactorSection.model_construct()
    ema: AverageSection | None = None
    """average of the trained weights, in float32 and divided among ranks like the optimizer's
    states; in checkpoints, and exported by bigtrain export --average"""

    @property
    def facts(self) -> OptimizerFacts:
        """Facts about the optimizer, without torch."""
        return facts_of_optimizer(self.type)

    @property
    def own_settings(self) -> Any:
        """The section that only this optimizer reads; None if it has none."""
        return None if self.facts.settings is None else getattr(self, self.facts.settings)

    @property
    def is_own(self) -> bool:
        """True if bigtrain provides the optimizer; else DeepSpeed does, as its JSON sets."""
        return self.type != "adamw" or self.state_dtype != "float32" or self.ema is not None

    @model_validator(mode="before")
    @classmethod
    def _set_defaults_of_type(cls, values: Any) -> Any:
        facts = OPTIMIZERS.get(str(values.get("type"))) if isinstance(values, dict) else None
        return values if facts is None else {**facts.defaults, **values}

    @model_validator(mode="after")
    def _only_its_own_settings(self) -> Self:
        for optimizer_type, facts in OPTIMIZERS.items():
            name = facts.settings
            if name is None or name == self.facts.settings:
                continue
            settings = getattr(self, name)
            if settings != type(settings)():  # other than the defaults
                raise ValueError(
                    f"optimizer.{name} is set, and optimizer.type = {self.type} does not read it "
                    f"-> type: {optimizer_type}, or remove it"
                )
        for name, reason in self.facts.unread.items():
            # Compare values, since in the configuration of a checkpoint every field is set.
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default:
                text = list(value) if isinstance(value, tuple) else value
                raise ValueError(
                    f"optimizer.{name} = {text}: optimizer.type = {self.type} does not read it: "
                    f"{reason} -> remove it, or type: adamw"
                )
        return self
