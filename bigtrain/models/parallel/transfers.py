"""What a state that a recurrence starts from adds to its outputs and to its last state.

All recurrences are linear in their state: ``S_out = A S_in + S_zero`` and ``y = y_zero + R S_in``,
where the index zero means a start from nothing. So ranks compute from nothing at once, and correct
their outputs when the states of earlier ranks are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bigtrain.models.layers.recurrence.functions import CHANNELS, MATRIX, SCALAR, Call
from bigtrain.models.layers.recurrence.pieces import VectorScan

Correction = Callable[[torch.Tensor], torch.Tensor]
"""From the state at the start [n, ...] to what it adds to the output [n, width, ...]."""


@dataclass(frozen=True)
class Transfer:
    """Pieces of a recurrence from nothing. output: [n, width, ...]. state: the last one, [n, ...].
    factor: A, a matrix [n, H, K, K], a number for each head [n, H, 1, 1] or like `state`."""

    output: torch.Tensor
    state: torch.Tensor
    factor: torch.Tensor
    correction: Correction


def from_nothing(call: Call, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of pieces `tensors` [n, width, ...], and the state after them, float32."""
    if call.function.kind in (MATRIX, SCALAR, CHANNELS):
        output, state = call.output_and_state(tensors)
        return output, state.float()
    scan = VectorScan(call.output, tensors, call.rest)
    output, state = scan.run()
    return scan.gated(output), state


def transfer(call: Call, tensors: dict[str, torch.Tensor]) -> Transfer:
    """Return what pieces `tensors` [n, width, ...] that continue a document compute from
    nothing."""
    if call.function.kind == MATRIX:
        return _matrix_transfer(call, tensors)
    if call.function.kind == SCALAR:
        return _scalar_transfer(call, tensors)
    if call.function.kind == CHANNELS:
        return _channels_transfer(call, tensors)
    scan = VectorScan(call.output, tensors, call.rest)
    output, state = scan.run()
    return Transfer(scan.gated(output), state, scan.factor, scan.correction)


def factor_shape(factor_kind: str, state: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of `Transfer.factor` without n, for a state [n, ...]."""
    shape = tuple(state.shape[1:])
    if factor_kind == MATRIX:
        return (*shape[:2], shape[1])
    return (shape[0], 1, 1) if factor_kind == SCALAR else shape


def advance(factor_kind: str, factor: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return A S."""
    return factor @ state if factor_kind == MATRIX else factor * state


def _matrix_transfer(call: Call, tensors: dict[str, torch.Tensor]) -> Transfer:
    """Gated delta rule: ``S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T``, ``o_t = S_t^T
    q_t``. As many value columns as a key has, all zero, start from the identity: they end as A, and
    give ``r_t = A_t^T q_t`` on the way, with an unchanged function."""
    value, key_size = tensors["value"], tensors["key"].shape[-1]
    n, _, heads, value_size = value.shape
    wide = {**tensors, "value": F.pad(value, (0, key_size))}
    start = torch.eye(key_size, device=value.device, dtype=torch.float32)
    start = F.pad(start, (value_size, 0)).expand(n, heads, -1, -1).contiguous()
    output, state = call.output_and_state(wide, initial_state=start)
    output, read = output.split((value_size, key_size), -1)
    state, factor = state.float().split((value_size, key_size), -1)
    return Transfer(
        output,
        state,
        factor,
        lambda incoming: torch.einsum("nwhk,nhkv->nwhv", read.float(), incoming),
    )


def _scalar_transfer(call: Call, tensors: dict[str, torch.Tensor]) -> Transfer:
    """Mamba 2: ``S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T``, with a number A for each head, and
    ``y_t = S_t C_t + D x_t``. An incoming state S adds ``exp(sum of dt A up to t) S C_t``."""
    output, state = call.output_and_state(tensors)
    options = call.rest
    dt = tensors["dt"].float()
    if options.get("dt_bias") is not None:
        dt = dt + options["dt_bias"]
    if options.get("dt_softplus"):
        dt = F.softplus(dt)
    dt = dt.clamp(*options.get("dt_limit", (0.0, float("inf"))))
    total_decay = (dt * options["A"].float()).cumsum(1).exp()  # from the first token: [n, width, H]
    groups = tensors["C"].shape[2]
    read = tensors["C"].float()  # [n, width, G, N]

    def correction(incoming: torch.Tensor) -> torch.Tensor:
        # [n, G, H / G, P, N]: heads of a group share C.
        grouped = incoming.unflatten(1, (groups, -1))
        added = torch.einsum("nwgs,nghps->nwghp", read, grouped).flatten(2, 3)
        output: torch.Tensor = added * total_decay[..., None]
        return output

    return Transfer(output, state.float(), total_decay[:, -1, :, None, None], correction)


def _channels_transfer(call: Call, tensors: dict[str, torch.Tensor]) -> Transfer:
    """RG-LRU: ``S_t = a_t S_{t-1} + x_t``, ``y_t = S_t``. Without inputs, states that start from 1
    are the products of the factors."""
    output, state = call.output_and_state(tensors)
    inputs = torch.zeros_like(tensors["hidden_states"], dtype=torch.float32)
    ones = torch.ones_like(state, dtype=torch.float32)
    factors, factor = call.output_and_state(
        {**tensors, "hidden_states": inputs}, recurrent_states=ones
    )
    return Transfer(
        output, state.float(), factor.float(), lambda incoming: factors * incoming[:, None]
    )
