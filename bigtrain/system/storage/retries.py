"""Number of retries after transient errors, and the delays between them."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bigtrain.system.storage.addresses import without_secrets
from bigtrain.system.storage.stores import Broken, StorageError

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """Retry policy: `tries` attempts in a row without a byte of progress are an error. `seconds`
    gives the delay before each: doubling from half a second to at most half a minute, with
    jitter."""

    tries: int = 8
    first_s: float = 0.5
    longest_s: float = 30.0
    sleep: Callable[[float], None] = time.sleep

    def wait(self, failed: int) -> None:
        """Sleep after `failed` attempts in a row."""
        seconds = min(self.longest_s, self.first_s * 2 ** (failed - 1))
        self.sleep(seconds * random.uniform(0.5, 1.0))


PATIENCE = Patience()


def persistently(
    address: str, what: str, act: Callable[[], T], patience: Patience | None = None
) -> T:
    """Return `act()`, retried while it raises `Broken`. Raise StorageError after the last
    attempt."""
    patience = patience or PATIENCE
    for failed in range(1, patience.tries + 1):
        try:
            return act()
        except Broken as error:
            why = without_secrets(str(error))
            if failed == patience.tries:
                raise StorageError(
                    f"{without_secrets(address)} {what} after {failed} attempts: {why}"
                ) from None
            logger.warning("%s: %s; retrying", without_secrets(address), why)
            patience.wait(failed)
    raise AssertionError("there is at least one attempt")
