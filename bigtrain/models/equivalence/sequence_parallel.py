"""Equivalence of sequence parallelism and the full sample, tested on a proxy model.

Convolutions and recurrent layers see beyond the tokens of one rank, and no configuration lists it;
attention outside transformers' registry, or with a parameter for each head, cannot be divided. So
it is tested before there is a process group: threads replace ranks.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import BigtrainError, Problem, one_line
from bigtrain.models.configuration import text_config
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    VOCABULARY,
    build_proxy_model,
    rescale_weights,
    with_heads,
)
from bigtrain.models.equivalence.rank_threads import RankThreads
from bigtrain.models.experts import auxiliary_loss
from bigtrain.models.layers.rotary import choose_by_document
from bigtrain.models.parallel.sequence import SequenceParallel
from bigtrain.settings.compatibility.check import Facts, check_model

TOLERANCE = 1e-4
"""Relative to the largest logit: far above float32 rounding, far below what one wrong token
does."""

_TOKENS_OF_PART = 8


def check_sequence_parallel(
    hf_config: PreTrainedConfig,
    attention: str,
    size: int,
    *,
    sequence_length: int,
    isolate: bool,
    tensor_size: int = 1,
) -> list[Problem]:
    """Return problems with splitting samples of a model of `hf_config` over `size` ranks; empty if
    none.

    `sequence_length`: tokens of these samples. `isolate`: documents in a sample are isolated.
    `tensor_size`: tensor-parallel ranks, which divide the attention heads already. Builds a proxy
    model with random weights on the CPU and compares logits. Takes a second or so.
    """
    text = text_config(hf_config)
    heads = getattr(text, "num_attention_heads", None)
    problems = check_model(
        Facts(
            sequence_size=size,
            tensor_size=tensor_size,
            attention_heads=heads if isinstance(heads, int) else None,
        )
    )
    if problems:
        return problems
    try:
        model = build_proxy_model(
            hf_config,
            attention,
            [with_heads(2 * size)],
            sequence_length=sequence_length,
            tokens=size * _TOKENS_OF_PART,
        )
        rescale_weights(model).eval()
        (whole, loss), parts, lonely = _outputs(model, size, isolate=isolate)
    except BigtrainError as error:
        return [_refusal(size, str(error))]
    except MODEL_FAILURES as error:
        reason = one_line(error)
        return [_refusal(size, f"a proxy model of {hf_config.model_type} failed: {reason}")]
    limit = TOLERANCE * float(whole.abs().max())
    if not float((_joined(lonely) - whole).abs().max()) > 10 * limit:
        return [_refusal(size, "random weights do not show whether parts see each other")]
    difference = float((_joined(parts) - whole).abs().max())
    if not difference <= limit:
        return [
            _refusal(
                size,
                f"{hf_config.model_type} produces different logits when the sequence is split "
                f"(by {difference:.2g}, rounding is below {limit:.2g}): it mixes tokens outside "
                "attention",
            )
        ]
    if not all(abs(other - loss) <= TOLERANCE * abs(loss) for _, other in parts):
        return [
            _refusal(
                size,
                f"the auxiliary loss of {hf_config.model_type} changes when the sequence is split "
                f"({parts[0][1]:.4g} instead of {loss:.4g})",
            )
        ]
    return []


def _refusal(size: int, reason: str) -> Problem:
    return Problem("parallel.sequence", size, reason, "parallel.sequence=1")


_Outputs = tuple[torch.Tensor, float]
"""Logits [B, T, V], or of T tokens' part, and the router's auxiliary loss (0 without one)."""


@torch.no_grad()
def _outputs(
    model: PreTrainedModel, size: int, *, isolate: bool
) -> tuple[_Outputs, list[_Outputs], list[_Outputs]]:
    """Return outputs for full samples, for `size` parts with exchange, and without it."""
    length = size * _TOKENS_OF_PART
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (2, length), generator=generator)
    positions = torch.arange(length).expand(2, length)
    if isolate:
        # Boundaries inside parts, and none at their edges.
        positions = positions.clone()
        positions[:, 4:] -= 4
        positions[1, length - 3 :] = torch.arange(3)
    if isolate:  # tested by `find_isolation`
        undo = choose_by_document(model)
        whole = _run(model, {"input_ids": ids, "position_ids": positions})
        undo()
    else:  # with the model's own positions: some do not count from 0
        whole = _run(model, {"input_ids": ids})
    lonely = [
        _run(model, {"input_ids": part, "position_ids": place})
        for part, place in zip(
            ids.split(_TOKENS_OF_PART, 1), positions.split(_TOKENS_OF_PART, 1), strict=True
        )
    ]
    return whole, _in_parts(model, ids, positions if isolate else None, size), lonely


def _in_parts(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor | None, size: int
) -> list[_Outputs]:
    exchange = RankThreads(size)
    sequence = SequenceParallel(model, exchange)

    def compute(rank: int) -> _Outputs:
        with exchange.as_rank(rank), torch.no_grad():
            return _run(model, sequence.inputs(ids, positions))

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(compute, range(size)))
    finally:
        sequence.close()


def _run(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> _Outputs:
    outputs = model(**inputs, use_cache=False)
    loss = auxiliary_loss(outputs)
    return outputs.logits, 0.0 if loss is None else float(loss)


def _joined(parts: list[_Outputs]) -> torch.Tensor:
    return torch.cat([logits for logits, _ in parts], 1)
