"""Costs of a token in every layer of a model: parameters, matrix products, bytes saved and moved.

`bigtrain.models.tracing.meta_trace` measures them on the real transformers module; `closed_form`
computes them from the model's dimensions. All are for one token and tensor-parallel size 1; values
that tensor parallelism divides among its ranks (``cut``) are separate from values that each rank
has in full (``whole``).

Pure: imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

BLOCK_SIZE = 64
"""Weights in 4 bits that share a scale; bitsandbytes' default, the only size in transformers."""
_SCALE_BLOCK_SIZE = 256
_CODE_BYTES, _SCALE_CODE_BYTES, _OFFSET_BYTES = 4 * 16, 4 * 256, 4


@dataclass(frozen=True)
class Matmul:
    """Matrix product of the tokens with a weight of ``in_size x out_size``.

    `cut`: the dimension that tensor parallelism divides, None for neither. `num_groups`: number of
    experts of a grouped product; each token is multiplied with `share` experts (1 without experts),
    so that ``tokens * share`` rows are multiplied in all. `count`: number of equal products.
    `is_frozen`: the weight is not trained (`model.frozen`).
    """

    in_size: int
    out_size: int
    cut: Literal["in", "out"] | None = None
    num_groups: int = 1
    share: float = 1.0
    count: int = 1
    is_frozen: bool = False


@dataclass(frozen=True)
class Attention:
    """Softmax attention. `head_size` is the size of queries and keys, `value_size` of values; a
    token attends to at most `window` previous tokens, or to all if None."""

    num_heads: int
    num_key_value_heads: int
    head_size: int
    value_size: int
    window: int | None = None


Packing = Literal["float32_scales", "8bit_scales", "int8"]
"""How bitsandbytes stores a weight: in 4 bits with scales of either kind, or LLM.int8's."""


def packed_bytes(num_outputs: int, num_inputs: int, packing: Packing) -> int:
    """Return the bytes of a matrix as bitsandbytes 0.50 stores it: weights, scales and code tables.

    Dettmers et al. 2023 (arXiv 2305.14314), section 3: every block of 4-bit weights has a scale in
    float32. With double quantization that scale has 8 bits, every block of such scales has a
    float32 scale of its own, and the matrix has one offset. LLM.int8 (arXiv 2208.07339): a float32
    scale per output.
    """
    num_weights = num_outputs * num_inputs
    if packing == "int8":
        return num_weights + 4 * num_outputs
    weight_bytes = -(-num_weights // 2) + _CODE_BYTES
    num_scales = -(-num_weights // BLOCK_SIZE)
    if packing == "float32_scales":
        return weight_bytes + 4 * num_scales
    num_scale_blocks = -(-num_scales // _SCALE_BLOCK_SIZE)
    scale_bytes = num_scales + 4 * num_scale_blocks + _SCALE_CODE_BYTES + _OFFSET_BYTES
    return weight_bytes + scale_bytes


@dataclass(frozen=True)
class QuantizedWeights:
    """Quantized weights of a layer: their number, their bytes including scales, and the size of the
    largest matrix, which is dequantized for its products."""

    num_weights: int = 0
    num_bytes: int = 0
    largest: int = 0

    @staticmethod
    def of(shapes: Sequence[tuple[int, int]], packing: Packing) -> QuantizedWeights:
        """Build the costs of matrices with these numbers of outputs and inputs."""
        num_bytes = sum(packed_bytes(*shape, packing) for shape in shapes)
        sizes = [num_outputs * num_inputs for num_outputs, num_inputs in shapes]
        return QuantizedWeights(sum(sizes), num_bytes, max(sizes, default=0))


@dataclass(frozen=True)
class ExtraAdapterParameters:
    """Costs of adapters in addition to their products: trained elements (copies of modules, DoRA's
    magnitudes) that every tensor-parallel rank has, and elements that ranks divide; and elements of
    the sums of stacked weights and adapters, which ranks divide and autograd saves in every
    pass."""

    whole: int = 0
    cut: int = 0
    summed: int = 0

    def trained(self, tensor_size: int) -> float:
        """Return the trained elements on each of `tensor_size` ranks."""
        return self.whole + self.cut / tensor_size


@dataclass(frozen=True)
class MlpCosts:
    """Costs of the MLPs of a layer that can be computed in tiles; they are parts of the layer's.

    saved_bytes: per token, without the MLPs' inputs. num_parameters: elements of the largest MLP
    without experts, num_parameters_expert: of the largest with; 0 if there is none. products,
    moved: shares of the layer's products with weights, and of the layer's moved bytes.
    """

    saved_bytes_whole: float = 0.0
    saved_bytes_cut: float = 0.0
    num_parameters: int = 0
    num_parameters_expert: int = 0
    products: float = 0.0
    moved: float = 0.0
    num_kernels: int = 0


@dataclass(frozen=True)
class FusedCosts:
    """What a layer saves and moves, per token, and how many kernels it launches, if its elementwise
    operations are fused (`bigtrain.models.tracing.fusion`). `mlp_moved`: share of the MLPs."""

    saved_bytes_whole: float
    saved_bytes_cut: float
    moved_bytes_whole: float
    moved_bytes_cut: float
    mlp_saved_whole: float
    mlp_saved_cut: float
    mlp_moved: float
    num_kernels: int


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a decoder layer; bytes are per token.

    `saved`: by autograd for the backward pass; `moved`: read and written in the forward pass by
    operations other than products and attention. `score_bytes`: saved per head and attended token
    if attention is not fused. `num_kernels`: launched in the forward pass.
    `num_parameters_expert` are not counted in the two before. `num_frozen_whole`,
    `num_frozen_cut`, `num_frozen_expert`: those of the three that `model.frozen` names; a layer
    that saves nothing has no backward pass. `adapters`: products with trained weights in addition
    to the layer's own, which are then frozen; `others`: other elements of
    adapters that are trained or kept. `packed`: the 4-bit part of the parameters. `mlp`: the part
    that can be computed in tiles. `passes_states`: whether ranks that share a sample pass its
    recurrent states on. `state_columns`: columns of float32 that these ranks compute in addition to
    the values of the gated delta rule. `num_equal_parts`: number that the tensor-parallel ranks
    have to divide, and `num_groups`: groups of heads that share what they read, which the ranks
    divide or share; 0 without recurrence. `fused`: its costs with fused operations; None if they
    are not known.
    """

    num_parameters_whole: int
    num_parameters_cut: int
    num_parameters_expert: int
    num_tensors: int
    matmuls: tuple[Matmul, ...]
    attention: Attention | None
    saved_bytes_whole: float
    saved_bytes_cut: float
    moved_bytes_whole: float
    moved_bytes_cut: float
    score_bytes: float = 0.0
    num_kernels: int = 40
    adapters: tuple[Matmul, ...] = ()
    others: ExtraAdapterParameters = ExtraAdapterParameters()
    packed: QuantizedWeights = QuantizedWeights()
    mlp: MlpCosts = MlpCosts()
    passes_states: bool = False
    fused: FusedCosts | None = None
    state_columns: int = 0
    num_equal_parts: int = 0
    num_groups: int = 0
    num_frozen_whole: int = 0
    num_frozen_cut: int = 0
    num_frozen_expert: int = 0

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, entry.name) for entry in fields(self)))

    def divides_among(self, tensor_size: int) -> bool:
        """Return whether so many ranks can divide the layer's recurrence, if it has one."""
        sizes = (self.num_groups, tensor_size)
        shares = not self.num_groups or not max(sizes) % min(sizes)
        return self.num_equal_parts % tensor_size == 0 and shares

    def num_adapter_parameters(self, tensor_size: int) -> float:
        """Return the trained elements of the adapters on each of `tensor_size` ranks."""
        sizes = (
            a.in_size * a.out_size * a.count * a.num_groups / (tensor_size if a.cut else 1)
            for a in self.adapters
        )
        return self.others.trained(tensor_size) + sum(sizes)

    def with_fused_operations(self) -> LayerCosts:
        """Return the costs of the layer with fused elementwise operations; the same if they are not
        known."""
        fused = self.fused
        if fused is None:
            return self
        return replace(
            self,
            saved_bytes_whole=fused.saved_bytes_whole,
            saved_bytes_cut=fused.saved_bytes_cut,
            moved_bytes_whole=fused.moved_bytes_whole,
            moved_bytes_cut=fused.moved_bytes_cut,
            num_kernels=fused.num_kernels,
            mlp=replace(
                self.mlp,
                saved_bytes_whole=fused.mlp_saved_whole,
                saved_bytes_cut=fused.mlp_saved_cut,
                moved=fused.mlp_moved,
            ),
        )

    @property
    def has_backward(self) -> bool:
        """Whether autograd computes a gradient in the layer: not before the first trained
        parameter."""
        return self.saved_bytes_whole + self.saved_bytes_cut > 0

    @functools.cached_property
    def num_parameters(self) -> int:
        """Elements of the layer's parameters."""
        return self.num_parameters_whole + self.num_parameters_cut + self.num_parameters_expert

    @property
    def num_frozen(self) -> int:
        """Elements of the layer's parameters that `model.frozen` names."""
        return self.num_frozen_whole + self.num_frozen_cut + self.num_frozen_expert

    @functools.cached_property
    def num_active_parameters(self) -> float:
        """Elements that a token is multiplied with."""
        share = next((m.share / m.num_groups for m in self.matmuls if m.num_groups > 1), 1.0)
        dense = self.num_parameters_whole + self.num_parameters_cut
        return dense + self.num_parameters_expert * share


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a causal language model: its kinds of layers, and the kind of each layer.

    `head_parameters`: 0 if the head shares the embedding's weight (`tied`). `num_other_parameters`:
    final norm, position embeddings. `source`: traced or closed form. `saved_bytes_outside`: saved
    per token outside of the layers (final norm, head). `is_frozen`: only adapters are trained;
    `others_outside`: trained copies of modules outside of the layers (modules_to_save).
    `is_embedding_frozen`, `is_head_frozen`, `num_frozen_others`: what `model.frozen` names there.
    `num_further_losses`: losses by the same head in addition to the loss of the next token; the
    layers for multi-token prediction that they are of are the last of `layers`."""

    hidden_size: int
    vocabulary_size: int
    kinds: tuple[LayerCosts, ...]
    layers: tuple[int, ...]
    tied: bool
    embedding_parameters: int
    head_parameters: int
    num_other_parameters: int = 0
    source: str = "closed form"
    element_bytes: int = 2
    saved_bytes_outside: float = 0.0
    is_frozen: bool = False
    others_outside: ExtraAdapterParameters = ExtraAdapterParameters()
    num_further_losses: int = 0
    is_embedding_frozen: bool = False
    is_head_frozen: bool = False
    num_frozen_others: int = 0

    def __hash__(self) -> int:
        """Return a hash that is computed once: searches look models up in caches tens of thousands
        of times."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, entry.name) for entry in fields(self)))

    @functools.cached_property
    def num_experts(self) -> int:
        """Number of experts in an expert layer; 1 if there is none."""
        return max((m.num_groups for layer in self.kinds for m in layer.matmuls), default=1)

    @functools.cached_property
    def num_parameters(self) -> int:
        """Elements of the parameters, a tied parameter once."""
        inner = sum(self.kinds[layer_type].num_parameters for layer_type in self.layers)
        return inner + self.embedding_parameters + self.head_parameters + self.num_other_parameters

    @property
    def trains_head(self) -> bool:
        """Whether the loss computes a gradient of the head."""
        if self.is_frozen:
            return self.others_outside.trained(1) > 0
        return not self.is_head_frozen

    @functools.cached_property
    def packed(self) -> QuantizedWeights:
        """Quantized weights of the layers."""
        packed_layers = [self.kinds[layer_type].packed for layer_type in self.layers]
        return QuantizedWeights(
            sum(packed.num_weights for packed in packed_layers),
            sum(packed.num_bytes for packed in packed_layers),
            max((packed.largest for packed in packed_layers), default=0),
        )

    @functools.cached_property
    def with_fused_operations(self) -> ModelCosts:
        """Costs of the model whose layers have fused elementwise operations."""
        kinds = tuple(layer.with_fused_operations() for layer in self.kinds)
        return replace(self, kinds=kinds)

    def with_layers(self, layers: Sequence[LayerCosts]) -> ModelCosts:
        """Return the costs with `layers` instead of its own, of which equal ones are one kind."""
        kinds = tuple(dict.fromkeys(layers))
        numbers = {layer: number for number, layer in enumerate(kinds)}
        return replace(self, kinds=kinds, layers=tuple(numbers[layer] for layer in layers))

    def with_eager_attention(self) -> ModelCosts:
        """Return the costs with attention that keeps its scores: the softmax in float32, and a copy
        in the dtype of the values that it multiplies, if that is not float32."""
        score_bytes = 4.0 + (self.element_bytes if self.element_bytes < 4 else 0)
        kinds = tuple(
            layer if layer.attention is None else replace(layer, score_bytes=score_bytes)
            for layer in self.kinds
        )
        return replace(self, kinds=kinds)

    def with_score_head(self) -> ModelCosts:
        """Return the costs with a head of a single output instead of the vocabulary's head."""
        head = self.hidden_size
        return replace(
            self, vocabulary_size=1, head_parameters=head, tied=False, is_head_frozen=False
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for a cache."""
        return asdict(self)

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> ModelCosts:
        """Read the output of `to_json`. Raise ValueError if it is invalid."""
        costs: ModelCosts = _reader(ModelCosts).validate_python(tree)
        return costs


@dataclass(frozen=True)
class AdapterCosts:
    """Costs of adapters. products: per layer. others: per layer; outside: outside of the layers.
    packed: 4-bit weights per layer; empty if there are none."""

    products: tuple[tuple[Matmul, ...], ...]
    others: tuple[ExtraAdapterParameters, ...]
    outside: ExtraAdapterParameters = ExtraAdapterParameters()
    packed: tuple[QuantizedWeights, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for a cache."""
        return asdict(self)

    @staticmethod
    def from_json(tree: dict[str, Any]) -> AdapterCosts:
        """Read the output of `to_json`. Raise ValueError if it is invalid."""
        costs: AdapterCosts = _reader(AdapterCosts).validate_python(tree)
        return costs


_Costs = TypeVar("_Costs", ModelCosts, AdapterCosts)


@functools.cache
def _reader(costs_class: type[_Costs]) -> TypeAdapter[_Costs]:
    return TypeAdapter(costs_class)


def adapter_of(product: Matmul, rank: int) -> tuple[Matmul, Matmul]:
    """Return the two products of an adapter of `rank` for `product`, sharded by peft's rule."""
    cut = product.cut
    down = replace(product, out_size=rank, cut="in" if cut == "in" else None)
    up = replace(product, in_size=rank, cut="out" if cut == "out" else None)
    return down, up


def of_all_linear(model: ModelCosts, rank: int, packing: Packing | None = None) -> AdapterCosts:
    """Return the costs of adapters on every dense product of every layer. `packing`: None for
    unquantized weights."""
    adapters_by_type = [
        tuple(part for m in layer.matmuls if m.num_groups == 1 for part in adapter_of(m, rank))
        for layer in model.kinds
    ]
    products = tuple(adapters_by_type[layer_type] for layer_type in model.layers)
    packed: tuple[QuantizedWeights, ...] = ()
    if packing is not None:
        packed_by_type = []
        for layer in model.kinds:
            dense = [matmul for matmul in layer.matmuls if matmul.num_groups == 1]
            shapes = [(m.out_size, m.in_size) for m in dense for _ in range(m.count)]
            packed_by_type.append(QuantizedWeights.of(shapes, packing))
        packed = tuple(packed_by_type[layer_type] for layer_type in model.layers)
    return AdapterCosts(products, (ExtraAdapterParameters(),) * len(products), packed=packed)


def with_adapters(model: ModelCosts, costs: AdapterCosts) -> ModelCosts:
    """Return `model`, frozen, with `costs` added."""
    packed = costs.packed or (QuantizedWeights(),) * len(model.layers)
    layers = [
        replace(model.kinds[index], adapters=products, others=others, packed=packed_weights)
        for index, products, others, packed_weights in zip(
            model.layers, costs.products, costs.others, packed, strict=True
        )
    ]
    return replace(model.with_layers(layers), is_frozen=True, others_outside=costs.outside)


@dataclass(frozen=True)
class DenseShape:
    """Model dimensions that the closed form needs. `gated`: SwiGLU-like MLP. `dropout`: its masks
    are saved. `fused_attention`: scores are never written to memory."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocabulary_size: int
    gated: bool = True
    tied: bool = False
    dropout: bool = False
    fused_attention: bool = True
    head_size: int | None = None
    num_positions: int = 0


def closed_form(shape: DenseShape, element_bytes: int = 2) -> ModelCosts:
    """Return the costs of a dense decoder, derived analytically.

    Saved bytes: Korthikanti et al. 2022 (arXiv 2205.04198), table 2, for GPT with dropout:
    ``s b h (34 + 5 a s / h)``, of which ``10`` are not divided by tensor parallelism; for gated
    layers our own formula, ``(14 + 6 g) h + 8 f`` (norms in 16 bits), where ``4 h`` are the norms'
    inputs and ``4 h`` the inputs of the products. Moved bytes: as traced of transformers' Llama and
    GPT-NeoX, including rotary embeddings and norms in float32.
    """
    hidden, inner = shape.hidden_size, shape.intermediate_size
    head = shape.head_size or hidden // shape.num_heads
    queries, keys = shape.num_heads * head, shape.num_key_value_heads * head
    ups = 2 if shape.gated else 1
    matmuls = (
        Matmul(hidden, queries + 2 * keys, "out"),
        Matmul(queries, hidden, "in"),
        Matmul(hidden, ups * inner, "out"),
        Matmul(inner, hidden, "in"),
    )
    cut = sum(m.in_size * m.out_size for m in matmuls)
    mlp_parameters = sum(m.in_size * m.out_size for m in matmuls[2:])
    scale = element_bytes / 2
    if shape.gated:
        saved_whole, saved_cut = 8.0 * hidden, 4.0 * queries + 6.0 * keys + 8.0 * inner
    else:
        # Dropout's masks take one byte per element, two bytes undivided.
        saved_whole = (10.0 if shape.dropout else 8.0) * hidden
        saved_cut = 4.0 * queries + 4.0 * keys + 4.0 * inner
    bytes_per_score = 5.0 if shape.dropout else 4.0  # dropout's mask takes one
    layer = LayerCosts(
        num_parameters_whole=2 * hidden * (1 if shape.gated else 2),
        num_parameters_cut=cut,
        num_parameters_expert=0,
        num_tensors=9 if shape.gated else 12,
        matmuls=matmuls,
        attention=Attention(shape.num_heads, shape.num_key_value_heads, head, head),
        saved_bytes_whole=saved_whole * scale,
        saved_bytes_cut=saved_cut * scale,
        moved_bytes_whole=(84.0 if shape.gated else 24.0) * hidden * scale,
        moved_bytes_cut=(
            10.0 * inner + 28.0 * (queries + keys)
            if shape.gated
            else 4.0 * inner + 4.0 * (queries + keys)
        )
        * scale,
        score_bytes=0.0 if shape.fused_attention else bytes_per_score * scale,
        num_kernels=45 if shape.gated else 35,
        mlp=MlpCosts(
            saved_bytes_cut=(8.0 if shape.gated else 4.0) * inner * scale,
            num_parameters=mlp_parameters,
            products=mlp_parameters / cut,
            moved=0.2,
            num_kernels=5 if shape.gated else 3,
        ),
    )
    layer = replace(layer, fused=_fused_form(shape, layer, scale))
    table = shape.vocabulary_size * hidden
    return ModelCosts(
        hidden_size=hidden,
        vocabulary_size=shape.vocabulary_size,
        kinds=(layer,),
        layers=(0,) * shape.num_layers,
        tied=shape.tied,
        embedding_parameters=table,
        head_parameters=0 if shape.tied else table,
        num_other_parameters=hidden + shape.num_positions * hidden,
        element_bytes=element_bytes,
        saved_bytes_outside=6.0 * hidden * scale,
    )


def _fused_form(shape: DenseShape, layer: LayerCosts, scale: float) -> FusedCosts:
    """Return the costs of `layer` of `shape` with fused operations. A norm reads and writes the
    hidden states, the second one with the residual, which is read and written once more; rotary
    embeddings their queries and keys, activations their inputs and outputs. What is kept are the
    bytes of the closed form, which are those of fused kernels."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    head = shape.head_size or hidden // shape.num_heads
    rotary = 4.0 * head * (shape.num_heads + shape.num_key_value_heads) if shape.gated else 0.0
    return FusedCosts(
        saved_bytes_whole=layer.saved_bytes_whole,
        saved_bytes_cut=layer.saved_bytes_cut,
        moved_bytes_whole=18.0 * hidden * scale,
        moved_bytes_cut=(rotary + (6.0 if shape.gated else 4.0) * inner) * scale,
        mlp_saved_whole=layer.mlp.saved_bytes_whole,
        mlp_saved_cut=layer.mlp.saved_bytes_cut,
        mlp_moved=0.5,
        num_kernels=16 if shape.gated else 12,
    )


def dense_shape(values: Mapping[str, Any]) -> DenseShape | None:
    """Return the dimensions in a Hugging Face configuration; None if one is missing or experts
    exist.

    `values`: as in config.json; names of older architectures are supported too.
    """

    def number(*names: str) -> int | None:
        candidates = (values.get(name) for name in names)
        return next((n for n in candidates if isinstance(n, int) and n > 0), None)

    if any("expert" in name for name in values):
        return None
    layers = number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    hidden = number("hidden_size", "n_embd", "d_model", "dim")
    heads = number("num_attention_heads", "n_head", "n_heads")
    vocabulary = number("vocab_size")
    if layers is None or hidden is None or heads is None or vocabulary is None:
        return None
    # Configurations without it are GPT-like: the MLP is four times as wide.
    inner = number("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    return DenseShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_key_value_heads=number("num_key_value_heads") or heads,
        intermediate_size=inner or 4 * hidden,
        vocabulary_size=vocabulary,
        gated=number("intermediate_size") is not None and values.get("hidden_act") != "gelu",
        tied=values.get("tie_word_embeddings") is True,
        head_size=number("head_dim"),
    )
