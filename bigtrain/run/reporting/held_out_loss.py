"""The loss on a held-out set, and what follows from it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean `loss` in nats over `tokens` held-out target tokens; `bits_per_byte` of their text,
    where it is known."""

    loss: float
    tokens: int
    bits_per_byte: float | None = None

    @property
    def perplexity(self) -> float:
        """Its exponential; infinite where that is too large for a float."""
        return math.exp(self.loss) if self.loss < math.log(sys.float_info.max) else math.inf

    def figures(self) -> dict[str, float]:
        """By name, as a line of metrics.jsonl has them."""
        found = {"loss": self.loss, "perplexity": self.perplexity, "tokens": self.tokens}
        if self.bits_per_byte is not None:
            found["bits_per_byte"] = self.bits_per_byte
        return found
