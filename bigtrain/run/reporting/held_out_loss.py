"""Loss on a held-out set, and derived metrics."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean `loss` in nats over `tokens` held-out target tokens; `bits_per_byte` of their text,
    if known."""

    loss: float
    tokens: int
    bits_per_byte: float | None = None

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite if too large for a float."""
        return math.exp(self.loss) if self.loss < math.log(sys.float_info.max) else math.inf

    def figures(self) -> dict[str, float]:
        """Return metrics by name, as in a line of metrics.jsonl."""
        metrics = {"loss": self.loss, "perplexity": self.perplexity, "tokens": self.tokens}
        if self.bits_per_byte is not None:
            metrics["bits_per_byte"] = self.bits_per_byte
        return metrics
