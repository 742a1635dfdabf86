"""Section on adapters, which are trained instead of the model's own weights."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bigtrain.settings.sections.base import PositiveInt, Section

Preset = Literal["attention", "mlp"]
PRESETS: tuple[Preset, ...] = ("attention", "mlp")
"""Kinds of layers that `targets` may name instead of patterns."""

_NAMES_OF_FOREIGN_KEYS = {
    "load_in_8bit": "quantization: int8",
    "init_lora_weights": "init",
    "pissa_init": "init: pissa",
    "load_in_4bit": "quantization: nf4",
    "quantization_bit": "quantization: nf4",
    "quantize_base": "quantization: nf4",
    "bnb_4bit_quant_type": "quantization: nf4",
    "quantization_type": "quantization: nf4",
    "bnb_4bit_use_double_quant": "double_quantization",
    "use_bnb_nested_quant": "double_quantization",
    "double_quant": "double_quantization",
    "bnb_4bit_compute_dtype": "compute_dtype",
}
"""Keys of other trainers that a user may write, and their names here."""


class AdaptersSection(Section):
    """LoRA (Hu et al. 2021, arXiv 2106.09685) as in peft: a product of two low-rank matrices is
    added to each chosen linear layer and trained; the model's own weights (model.path) stay
    frozen."""

    type: Literal["lora"] = "lora"
    rank: PositiveInt = 16
    """inner size of the two matrices"""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """their product is scaled by alpha / rank; see rslora"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """probability of dropping an element of the adapters' input"""
    target_parameters: tuple[str, ...] = ()
    """stacked weights of experts that get an adapter for each expert: shell patterns of parameter
    names or of their last parts, such as [gate_up_proj, down_proj]"""
    targets: Literal["all-linear", "attention", "mlp"] | tuple[str, ...] = "all-linear"
    """layers that get adapters: all-linear (every linear layer but the head); attention or mlp
    (those of that kind in every decoder layer, by its modules; mlp also every expert of a stack,
    and no router); or a list of such kinds and of shell patterns of module names or of their last
    parts, such as [attention], [q_proj, v_proj] or [model.layers.?.self_attn.*]"""
    init: Literal["lora", "pissa"] = "lora"
    """initial values; lora: A random, B zero; pissa: the principal components of the weights, which
    are taken out of the frozen weights (Meng et al. 2024, arXiv 2404.02948; peft's
    init_lora_weights="pissa")"""
    rslora: bool = False
    """scale the product by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)"""
    dora: bool = False
    """train magnitude and direction of the weights separately (DoRA, Liu et al. 2024, arXiv
    2402.09353)"""
    loraplus_lr_ratio: Annotated[float, Field(gt=0)] | None = None
    """LoRA+ (Hayou et al. 2024, arXiv 2402.12354): the learning rate of the matrices B (and of
    trained vectors) is optimizer.lr times this, often 16; null: 1"""
    modules_to_save: tuple[str, ...] = ()
    """modules of which a full copy is trained with the adapters and saved with them (peft's
    modules_to_save): shell patterns as in targets, such as [lm_head] or [norm]"""

    quantization: Literal["none", "nf4", "fp4", "int8"] = "none"
    """keep the weights of the model's linear layers, but for the head, in 4 bits (QLoRA, Dettmers
    et al. 2023, arXiv 2305.14314), by bitsandbytes: nf4 (NormalFloat) or fp4; every 64 weights have
    a scale; or in 8 bits: int8 (LLM.int8, Dettmers et al. 2022, arXiv 2208.07339), with a scale for
    each output"""
    double_quantization: bool = True
    """of nf4 and fp4: keep the scales in 8 bits, not in 32"""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """of nf4 and fp4: the dtype to which weights are dequantized and in which products are
    computed; absent: precision.dtype"""
    llm_int8_threshold: Annotated[float, Field(ge=0)] = 6.0
    """of int8: inputs of a layer that are larger than this are multiplied without quantization
    (where bitsandbytes quantizes inputs: on CUDA, and in evaluation)"""

    @property
    def is_quantized(self) -> bool:
        """True if the base is kept in 4 or 8 bits."""
        return self.quantization != "none"

    @property
    def packing(self) -> Literal["float32_scales", "8bit_scales", "int8"] | None:
        """How bitsandbytes stores a quantized weight; None for a base that is not quantized."""
        if self.quantization == "int8":
            return "int8"
        if self.quantization == "none":
            return None
        return "8bit_scales" if self.double_quantization else "float32_scales"

    @property
    def changes_base(self) -> bool:
        """True if the model with its adapters off differs from the base: by DoRA's magnitudes,
        trained copies of modules, or weights without their principal components (PiSSA)."""
        return self.dora or bool(self.modules_to_save) or self.init == "pissa"

    @property
    def presets(self) -> tuple[Preset, ...]:
        """The kinds of layers among `targets`."""
        entries = (self.targets,) if isinstance(self.targets, str) else self.targets
        return tuple(preset for preset in PRESETS if preset in entries)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The shell patterns among `targets`."""
        entries = () if isinstance(self.targets, str) else self.targets
        return tuple(entry for entry in entries if entry not in PRESETS)

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @model_validator(mode="before")
    @classmethod
    def _foreign_keys_are_refused(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        if foreign_keys := _NAMES_OF_FOREIGN_KEYS.keys() & values.keys():
            key = min(foreign_keys)
            raise ValueError(
                f"adapters.{key} has another name here -> {_NAMES_OF_FOREIGN_KEYS[key]}"
            )
        return values

    @model_validator(mode="after")
    def _has_targets(self) -> Self:
        if not self.targets and not self.target_parameters:
            raise ValueError("adapters.targets names no layer -> all-linear, or omit adapters")
        if self.target_parameters and (self.dora or self.dropout):
            name, off = ("dora", "false") if self.dora else ("dropout", "0")
            raise ValueError(
                f"adapters.target_parameters: peft has no {name} for stacked weights -> "
                f"adapters.{name}={off}"
            )
        return self

    @model_validator(mode="after")
    def _initial_values_are_of_weights(self) -> Self:
        # Settings that exclude PiSSA: name, whether it is set, the reason, and its off value.
        excluded = (
            ("dora", self.dora, "has not been compared with plain peft", "false"),
            ("quantization", self.is_quantized, "peft decomposes no quantized weight", "none"),
            ("target_parameters", self.target_parameters, "peft decomposes no stack", "[]"),
        )
        for name, is_set, rule, off in excluded:
            if self.init == "pissa" and is_set:
                raise ValueError(
                    f"adapters.init = 'pissa' with adapters.{name}: {rule} -> adapters.init=lora, "
                    f"or adapters.{name}={off}"
                )
        return self

    @model_validator(mode="after")
    def _quantization_is_of_layers(self) -> Self:
        if self.is_quantized and self.target_parameters:
            raise ValueError(
                "adapters.target_parameters: stacked weights cannot be quantized -> "
                "adapters.quantization=none"
            )
        if self.quantization == "int8" and self.dora:
            raise ValueError(
                "adapters.dora has not been compared with plain peft on a base in 8 bits -> "
                "adapters.dora=false, or adapters.quantization=nf4"
            )
        if self.quantization != "int8" and self.llm_int8_threshold != 6.0:
            raise ValueError(
                "adapters.llm_int8_threshold has no meaning without adapters.quantization=int8 -> "
                "omit it"
            )
        has_4_bits = self.quantization in ("nf4", "fp4")
        if not has_4_bits and (self.compute_dtype or not self.double_quantization):
            name = "compute_dtype" if self.compute_dtype else "double_quantization"
            raise ValueError(
                f"adapters.{name} has no meaning without adapters.quantization=nf4 (or fp4) -> "
                "omit it"
            )
        return self
