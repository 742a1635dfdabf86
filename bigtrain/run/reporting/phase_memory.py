"""Peak device memory of the run and by phase; a CPU has none by phase."""

from __future__ import annotations

import torch

from bigtrain.run.reporting.metrics import memory_gib
from bigtrain.system.units import GIB

PHASES = ("forward", "backward", "compute", "optimizer", "save", "evaluation")
"""`compute`: forward and backward passes of a pipeline, which alternate."""


class PhaseMemory:
    """Peak memory of this rank so far. On CUDA it resets torch's own peak; use `peak_gib` instead.
    Each `begin` takes some 50 microseconds of the host, and does not wait for the device."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._is_measuring = False
        self._phase: str | None = None
        self._peak = 0
        self._by_phase: dict[str, int] = {}

    def measure(self, is_measured: bool) -> None:
        """Set whether the next phases are measured; unmeasured phases cost nothing."""
        if self._device_type == "cuda" and self._is_measuring and not is_measured:
            self.begin(None)
        self._is_measuring = is_measured

    def begin(self, phase: str | None) -> None:
        """Begin a phase of `PHASES`, or None for time outside of phases."""
        if self._device_type != "cuda" or not self._is_measuring:
            return
        peak = torch.cuda.max_memory_allocated()
        self._peak = max(self._peak, peak)
        if self._phase is not None:
            self._by_phase[self._phase] = max(peak, self._by_phase.get(self._phase, 0))
        torch.cuda.reset_peak_memory_stats()
        self._phase = phase if phase in PHASES else None

    def peak_gib(self) -> float:
        """Return `memory_gib`, corrected for the resets."""
        return max(self._peak / GIB, memory_gib(self._device_type))

    def by_phase_gib(self) -> dict[str, float] | None:
        """Return the peak of each phase so far, in GiB; None on a CPU."""
        if self._device_type != "cuda":
            return None
        return {phase: peak / GIB for phase, peak in self._by_phase.items()}
