"""The section on adapters: what is trained instead of the model's own weights."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bigtrain.settings.sections.base import PositiveInt, Section

Preset = Literal["attention", "mlp"]
PRESETS: tuple[Preset, ...] = ("attention", "mlp")
"""Kinds of layers that `targets` may name instead of patterns."""

_QUANTIZED = {"load_in_4bit", "quantization"}
"""Keys of other trainers that a user may try, to be refused with a reason."""


class AdaptersSection(Section):
    """LoRA (Hu et al. 2021, arXiv 2106.09685) as peft has it: beside each chosen linear layer a
    product of two low-rank matrices is trained, and the model's own weights (model.path) stay
    frozen."""

    type: Literal["lora"] = "lora"
    rank: PositiveInt = Field(default=16, description="inner size of the two matrices")
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=32.0, description="their product is scaled by alpha / rank; see rslora"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="probability of dropping an element of the adapters' input"
    )
    target_parameters: tuple[str, ...] = Field(
        default=(),
        description="stacked weights of experts that get an adapter for each expert: shell "
        "patterns of parameter names or of their last parts, such as [gate_up_proj, down_proj]",
    )
    targets: Literal["all-linear", "attention", "mlp"] | tuple[str, ...] = Field(
        default="all-linear",
        description="layers that get adapters: all-linear (every linear layer but the head); "
        "attention or mlp (those of that kind in every decoder layer, by its modules; mlp also "
        "every expert of a stack, and no router); or a list of such kinds and of shell patterns of "
        "module names or of their last parts, such as [attention], [q_proj, v_proj] or "
        "[model.layers.?.self_attn.*]",
    )
    rslora: bool = Field(
        default=False,
        description="scale the product by alpha / sqrt(rank) (Kalajdzievski 2023, "
        "arXiv 2312.03732)",
    )
    dora: bool = Field(
        default=False,
        description="train magnitude and direction of the weights separately (DoRA, Liu et al. "
        "2024, arXiv 2402.09353)",
    )
    modules_to_save: tuple[str, ...] = Field(
        default=(),
        description="modules of which a full copy is trained beside the adapters and saved with "
        "them (peft's modules_to_save): shell patterns as in targets, such as [lm_head] or [norm]",
    )

    @property
    def presets(self) -> tuple[Preset, ...]:
        """The kinds of layers among `targets`."""
        named = (self.targets,) if isinstance(self.targets, str) else self.targets
        return tuple(preset for preset in PRESETS if preset in named)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The shell patterns among `targets`."""
        named = () if isinstance(self.targets, str) else self.targets
        return tuple(name for name in named if name not in PRESETS)

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @model_validator(mode="before")
    @classmethod
    def _base_is_not_quantized(cls, values: object) -> object:
        asked = _QUANTIZED & values.keys() if isinstance(values, dict) else set()
        if asked:
            raise ValueError(
                f"adapters.{min(asked)}: adapters beside a base in 4 bits (QLoRA) are not "
                "implemented: bigtrain reads a base into 16 or 32 bits, and nothing compares "
                "packed weights under ZeRO with plain peft (docs/howto/adapters.md: "
                "what was tried) -> leave it out, and take ZeRO 3 or a GPU that holds "
                "the base in 16 bits"
            )
        return values

    @model_validator(mode="after")
    def _has_targets(self) -> Self:
        if not self.targets and not self.target_parameters:
            raise ValueError("adapters.targets names no layer -> all-linear, or leave adapters out")
        if self.target_parameters and (self.dora or self.dropout):
            name, off = ("dora", "false") if self.dora else ("dropout", "0")
            raise ValueError(
                f"adapters.target_parameters: peft has no {name} for stacked weights -> "
                f"adapters.{name}={off}"
            )
        return self
