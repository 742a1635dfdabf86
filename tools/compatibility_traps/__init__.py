"""The traps of DeepSpeed 0.19.8 that are known, and what bigtrain does about each."""

from __future__ import annotations

from tools.compatibility_traps.engine import ENGINE
from tools.compatibility_traps.parallelism import PARALLELISM
from tools.compatibility_traps.trap import Trap

TRAPS = PARALLELISM + ENGINE

__all__ = ["TRAPS", "Trap"]
