"""Model FLOPs of the recurrences of hybrid models, per token and layer.

Chunked forms, in which a chunk of ``C`` tokens is computed by matrix products and a state is handed
from chunk to chunk; products of a token with the chunk count in full, as scores of attention do
(`bigtrain.planner.flops`). They do not grow with the length of the samples. 2 FLOPs for each
multiplication and addition:

- gated delta rule, value heads with keys ``K`` and values ``V`` wide: ``k k^T`` and ``q k^T``
  (``4 C K``), the triangular system for values and keys (``C (K + V)``), its product with scores
  (``2 C V``), and what reads and writes the state (``6 K V``). Yang et al. 2024, "Gated Delta
  Networks" (arXiv 2412.06464), section 3.3.
- Mamba 2, heads ``P`` wide with ``N`` states: scores ``C B^T`` (``2 C N``), their product with the
  inputs (``2 C P``), and what writes and reads the state (``4 N P``). Dao and Gu 2024 (arXiv
  2405.21060), section 6.
- Mamba 1, channels with ``N`` states: a decay, an input and an output of every state (``6 N``). Gu
  and Dao 2023 (arXiv 2312.00752), algorithm 2.

Pure: imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigtrain.settings.hf_config_keys import number_of

DELTA_CHUNK = 64
"""Tokens that the functions of the gated delta rule compute together (transformers 5.23, fla)."""
_RECURRENT_TYPES = ("linear_attention", "mamba", "hybrid")
_TYPES_WITHOUT_ATTENTION = ("linear_attention", "mamba", "conv", "mlp", "moe")
"""Values of ``layer_types``."""


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule of a layer: value heads, and widths of keys and values."""

    heads: int
    key_size: int
    value_size: int
    chunk: int = DELTA_CHUNK

    def flops(self) -> int:
        """Return the FLOPs of a token's forward pass."""
        chunk, keys, values = self.chunk, self.key_size, self.value_size
        with_chunk = 4 * chunk * keys + chunk * (keys + values) + 2 * chunk * values
        return self.heads * (with_chunk + 6 * keys * values)


@dataclass(frozen=True)
class StateSpace:
    """Mamba 2 of a layer: heads, their width and states."""

    heads: int
    head_size: int
    states: int
    chunk: int

    def flops(self) -> int:
        """Return the FLOPs of a token's forward pass."""
        with_chunk = 2 * self.chunk * (self.states + self.head_size)
        return self.heads * (with_chunk + 4 * self.states * self.head_size)


@dataclass(frozen=True)
class SelectiveScan:
    """Mamba 1 of a layer: channels and states."""

    channels: int
    states: int

    def flops(self) -> int:
        """Return the FLOPs of a token's forward pass."""
        return 6 * self.channels * self.states


def scan_of(config: object) -> DeltaRule | StateSpace | SelectiveScan | None:
    """Return the recurrence of a model's recurrent layers, by the keys of its configuration; None
    if it has no recurrent layers."""
    heads = number_of(config, ["linear_num_value_heads", "linear_num_heads"])
    if heads is not None:
        keys = number_of(config, ["linear_key_head_dim", "linear_head_dim"])
        values = number_of(config, ["linear_value_head_dim", "linear_head_dim"])
        return None if keys is None or values is None else DeltaRule(heads, keys, values)
    states = number_of(config, ["mamba_d_state", "ssm_state_size", "state_size"])
    if states is None:
        return None
    heads = number_of(config, ["mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"])
    size = number_of(config, ["mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"])
    chunk = number_of(config, ["mamba_chunk_size", "chunk_size"])
    if heads is not None and size is not None and chunk is not None:
        return StateSpace(heads, size, states, chunk)
    expansion, hidden = (
        number_of(config, names) for names in (["mamba_expand", "expand"], ["hidden_size"])
    )
    if expansion is None or hidden is None:
        return None
    return SelectiveScan(expansion * hidden, states)


def has_attention(layer_type: str | None) -> bool:
    """Return whether a layer of this type of a configuration's ``layer_types`` has attention."""
    return layer_type not in _TYPES_WITHOUT_ATTENTION


def has_scan(layer_type: str | None) -> bool:
    """Return whether a layer of this type has a recurrence with a state."""
    return layer_type in _RECURRENT_TYPES
