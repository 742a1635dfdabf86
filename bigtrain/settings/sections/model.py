"""Sections on the model: its source, how its layers run, and its dtypes."""

import importlib.util
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from bigtrain.errors import Problem
from bigtrain.settings.sections.base import NonNegativeFloat, PositiveInt, Section
from bigtrain.settings.sections.extensions import ImportedName
from bigtrain.system.units import SHORT_DTYPES

Float8 = Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]

_CHUNK_BYTES = 2**30
"""Float32 logits of a chunk. Each chunk costs an addition of the head's full gradient: on an H100,
Llama 3.2 1B trains 9% faster than with chunks of 256 MiB, and takes 2.3 GiB more."""
_TILE_TOKENS = 256
"""Rows of the largest tile of a product on GPUs: 2,093 tokens of a vocabulary of 128,256 are 144
tiles of the hidden states' gradient, 12 more than an H100 computes at a time; 2,048 are 128, which
take half the time, 3% of a step of Llama 3.2 1B (`make gpu-roofline`)."""


_ATTENTION_PACKAGES = {
    "flash_attention_2": ("flash_attn", "pip install flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "build it: hopper/ of Dao-AILab/flash-attention"),
}
"""Module that an attention implementation imports, and how it is installed."""


def check_attention_package(section: "ModelSection") -> list[Problem]:
    """Return a problem if neither the package of the attention implementation is installed, nor
    `kernels`, with which transformers may fetch it. Imports nothing."""
    if section.attention not in _ATTENTION_PACKAGES:
        return []
    module, install = _ATTENTION_PACKAGES[section.attention]
    if importlib.util.find_spec(module) or importlib.util.find_spec("kernels"):
        return []
    rule, remedy = f"{module} is not installed", f"{install}; or model.attention=sdpa"
    return [Problem("model.attention", section.attention, rule, remedy)]


def chunk_tokens(vocabulary_size: int, loss_chunk_tokens: int | None) -> int:
    """Return the tokens of a chunk of the loss: `ModelSection.loss_chunk_tokens`, or its default,
    a multiple of `_TILE_TOKENS` where a chunk is larger."""
    if loss_chunk_tokens is not None:
        return loss_chunk_tokens
    num_tokens = max(1, _CHUNK_BYTES // (4 * vocabulary_size))
    return num_tokens - num_tokens % _TILE_TOKENS if num_tokens > _TILE_TOKENS else num_tokens


def auto_tiles(num_tokens: int, hidden_size: int) -> int:
    """Return the tiles of ``tiled_mlp: auto``, as Arctic Long Sequence Training chooses them."""
    return -(-num_tokens // hidden_size)


class VocabularySection(Section):
    """Growth of the vocabulary of trained weights to that of the data's tokenizer. It never
    shrinks."""

    new_rows: Literal["mean_covariance", "mean", "normal"] = "mean_covariance"
    """values of the new rows of the embedding and of the head; mean_covariance: drawn around the
    mean of the old rows, with 1e-9 times their covariance (transformers' resize_token_embeddings);
    mean: that mean; normal: as the architecture initializes them"""
    pad_to_multiple_of: PositiveInt | None = None
    """add rows until their number is a multiple of this, such as 128 for tensor cores"""

    def size(self, before: int, tokens: int) -> int:
        """Return the rows of a vocabulary that has `before` rows and must have one per token."""
        num_rows = max(before, tokens)
        multiple = self.pad_to_multiple_of or 1
        return -(-num_rows // multiple) * multiple


LossKind = Literal["auto", "plain", "chunked", "liger"]


class ModelSection(Section):
    """Hugging Face causal LM, and how its layers run."""

    path: str | None = None
    """directory, hub name or address (s3://, ...) whose weights and configuration the run starts
    from"""
    config: str | dict[str, Any] | None = None
    """start from random weights: a directory or hub name whose configuration is used, or the
    configuration itself with its model_type"""
    type: ImportedName | None = None
    """model of yours, as package.module:Class: a PreTrainedModel of transformers whose config_class
    has a model_type of its own; absent: transformers' model of the configuration's model_type"""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """keys of the Hugging Face configuration to change (not the vocabulary when weights are loaded:
    see vocabulary)"""
    vocabulary: VocabularySection | None = None
    """give path's weights rows for the tokens that the data's tokenizer has beyond theirs; absent:
    a larger tokenizer is refused"""
    attention: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"
    """attention implementation of transformers; auto: sdpa where the model has it, or else eager"""
    gradient_checkpointing: Literal["none", "full"] | PositiveInt = "none"
    """recompute activations in the backward pass: none, full (every layer), or n (every n-th layer,
    starting with the first)"""
    frozen: tuple[str, ...] = ()
    """parameters that are not trained: shell patterns of their names, such as model.embed_tokens.*;
    exported as stored in the files of path"""

    neftune_noise_alpha: Annotated[float, Field(gt=0)] | None = None
    """add noise to the embeddings in training (NEFTune, Jain et al. 2023, arXiv 2310.05914):
    uniform in +-alpha / sqrt(tokens of a sample * embedding size), as transformers' trainers; often
    5; null: no noise"""

    loss: LossKind = "auto"
    """how the cross-entropy is computed, with the same result; plain: from all logits of a
    micro-batch; chunked: some tokens at a time, so that the full logits never exist; liger: by its
    fused kernel (CUDA); auto: chunked where the logits are larger than one chunk, or where layers
    may be compiled, since the loss of a chunk is compiled with them"""
    loss_chunk_tokens: PositiveInt | None = None
    """tokens whose logits exist at a time; default: as many as take 1 GiB in float32,
    in 256s"""

    tiled_mlp: Literal["auto", "off"] | PositiveInt = "off"
    """compute the MLP of each layer, experts too, in tiles of tokens, and again in the backward
    pass, so that the activations inside an MLP exist for one tile only; a number: of tiles; auto:
    tokens of a rank's micro-batch / hidden size, rounded up (arXiv 2506.13996), so that a tile has
    at most as many tokens as the hidden size, and off where that is one tile or tiles compute
    something else; off: at once. Dropout inside an MLP draws other masks than at once"""

    kernels: Literal["auto", "none", "liger"] = "auto"
    """fused RMSNorm, RoPE and SwiGLU; liger: those of liger-kernel, for the architectures it knows
    (CUDA); auto: liger with CUDA where layers are not compiled and it is installed, known to have
    the architecture and allowed; none on CPU"""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile of the decoder layers, one compilation for all of them; auto: on with CUDA
    where it is allowed and a trial of the model shows no other results, off on CPU"""
    activation_offload: bool = False
    """keep what recomputation starts from, the inputs of checkpointed layers, in host memory
    (CUDA); for long sequences"""

    @model_validator(mode="after")
    def _offload_has_inputs(self) -> Self:
        if self.activation_offload and self.gradient_checkpointing == "none":
            raise ValueError(
                "model.activation_offload = true moves the inputs of checkpointed layers, and "
                "model.gradient_checkpointing = 'none' has none; set it to full"
            )
        return self

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            fix = "model.config=null, or model.path=null"
            if self.path is None:
                fix = "model.path=MODEL, or add model.config"
            raise ValueError(
                "exactly one of model.path (trained weights) and model.config (random weights) "
                f"must be set -> {fix}"
            )
        if self.vocabulary is not None and self.path is None:
            raise ValueError(
                "model.vocabulary gives trained weights (model.path) more rows, and model.config "
                "has none -> omit it, and set vocab_size in model.config (or overrides)"
            )
        if isinstance(self.config, dict) and "model_type" not in self.config and not self.type:
            raise ValueError("model.config must name a model_type, for example model_type: llama")
        return self


class MoeSection(Section):
    """Load balancing of mixture-of-experts models; no effect on others."""

    auxiliary_loss: Literal["micro_batch", "global_batch"] = "micro_batch"
    """over which tokens the model's own load-balancing loss (output_router_logits and
    router_aux_loss_coef of its configuration) is computed; micro_batch: a micro-batch of one rank,
    as transformers does; global_batch: the fractions of tokens per expert are those of all ranks,
    in this micro-batch and those before it in the step"""
    z_loss_coefficient: NonNegativeFloat = 0.0
    """weight of the router z-loss, the mean square of the router logits' log-sum-exp (ST-MoE, arXiv
    2202.08906); 0: none"""
    bias_update_rate: NonNegativeFloat = 0.0
    """by how much each step raises (lowers) the selection bias of an expert to which fewer (more)
    tokens of the global batch than the mean were routed (DeepSeek-V3: 0.001); 0: biases stay as
    they are"""


class PrecisionSection(Section):
    """Number formats."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """of parameters in forward and backward, but for those that an architecture keeps in float32;
    masters and optimizer are float32"""
    gradient_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """in which gradients are accumulated and reduced; default: float32, but the dtype of the
    parameters with ZeRO 0 or float16"""
    tf32: bool = False
    """let float32 matrix products round their inputs to TF32's 10 bits of mantissa (CUDA): several
    times faster, with results that differ from a CPU's; false: full float32"""
    float8: Float8 = "none"
    """cast the operands of products in decoder layers to 8 bits (torchao; not those of head,
    embeddings, routers, experts, adapters; emulated on a CPU); tensorwise, rowwise: one scale per
    tensor, or per row; rowwise_with_gw_hp: rowwise, but gradients of weights as without float8;
    mxfp8: one per 32 elements (a prototype of torchao's)"""
    initial_loss_scale_power: Annotated[int, Field(ge=0, le=32)] = 16
    """float16 only: dynamic loss scaling starts at 2 to this power"""

    @field_validator("dtype", "gradient_dtype", mode="before")
    @classmethod
    def _short_names_are_read(cls, name: object) -> object:
        """Read bf16, fp16 and fp32 as the dtypes that they are short for."""
        return SHORT_DTYPES.get(name, name) if isinstance(name, str) else name
