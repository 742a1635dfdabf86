"""Loss on the held-out documents, per source and for the mixture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bigtrain.data.loading.loader import HeldOutSource
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.run.reporting.metrics import HeldOutLoss


@dataclass(frozen=True)
class HeldOutResult:
    """Evaluation: the loss over all sets, and that of each by its name."""

    whole: HeldOutLoss
    sources: dict[str, HeldOutLoss]

    def figures(self) -> dict[str, float]:
        """Return metrics by the names of ``evaluation.best.metric``; those of single sets only if
        there are several."""
        metrics = _figures(self.whole, "")
        if len(self.sources) > 1:
            for name, one in self.sources.items():
                metrics |= _figures(one, f"/{name}")
        return metrics


def _figures(one: HeldOutLoss, suffix: str) -> dict[str, float]:
    metrics = {f"held_out_loss{suffix}": one.loss, f"held_out_perplexity{suffix}": one.perplexity}
    if one.bits_per_byte is not None:
        metrics[f"held_out_bits_per_byte{suffix}"] = one.bits_per_byte
    return metrics


def measure(engine: TrainEngine, held_out: Sequence[HeldOutSource]) -> HeldOutResult | None:
    """Return the loss on the same held-out samples every time, in nats per token. Collective.

    The loss of a mixture is the mean of its sources' losses, weighted by their training weights; a
    source without held-out documents does not count, nor does a set of weight 0. None if there are
    none, or if the loss is not finite.
    """
    if not held_out:
        return None
    sources = {}
    for source in held_out:
        loss, tokens = engine.evaluate(source.batches)
        sources[source.name] = HeldOutLoss(loss, tokens, bits_per_byte(loss, source))
    total = sum(source.weight for source in held_out)
    shares = {source.name: source.weight / total for source in held_out if source.weight}
    loss = sum(sources[name].loss * share for name, share in shares.items())
    if not math.isfinite(loss):
        return None
    bits = [(sources[name].bits_per_byte, share) for name, share in shares.items()]
    known = [bit * share for bit, share in bits if bit is not None]
    whole = HeldOutLoss(
        loss,
        sum(sources[name].tokens for name in shares),
        sum(known) if len(known) == len(shares) else None,
    )
    return HeldOutResult(whole, sources)


def bits_per_byte(loss: float, source: HeldOutSource) -> float | None:
    """Convert `loss` from nats per token to bits per byte of text."""
    if source.tokens_per_byte is None:
        return None
    return loss / math.log(2) * source.tokens_per_byte
