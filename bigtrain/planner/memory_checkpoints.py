"""Costs of checkpoints in memory of the hosts: bytes of the file system, of the network, seconds.
Pure.

A rank copies its part to host memory while training is blocked; a thread then writes it to the file
system, and sends it to the partner host while it writes the part of another rank
(`bigtrain.run.checkpointing.memory_saver`). A checkpoint is skipped while the previous one is
written, so both have to end within ``checkpoint.memory.every_steps`` steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bigtrain.planner.layout import Layout
from bigtrain.planner.memory import largest_checkpoint_part
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.seconds.communication import DIRECT
from bigtrain.planner.tables.engines import Engine
from bigtrain.planner.tables.hardware import Device
from bigtrain.settings.sections.running import copies_stored
from bigtrain.system.units import GIB

WRITE_BANDWIDTH = 1.9e9
"""Bytes per second at which a rank writes its file with checksums to /dev/shm: measured by
``python benchmarks/scale.py --parts write --ranks 1`` on two cores of an Intel Xeon, 2026-11-27."""

EXCHANGE_BANDWIDTH = 0.55e9
"""Bytes per second that a rank sends, and receives and writes at the same time, where no network is
the limit: `bigtrain.run.checkpointing.host_files.exchange_files` of 512 MiB between two processes
there, on one core each (0.47 to 0.56). Gloo sends by TCP, which takes the processor."""


@dataclass(frozen=True)
class MemoryCheckpointCosts:
    """Costs of ``checkpoint.memory`` for each rank. part_bytes: of the largest rank's part of a
    checkpoint. device: None if unknown (seconds are 0 then)."""

    part_bytes: float
    every_steps: int
    partner_copies: int
    device: Device | None

    @property
    def directory_bytes(self) -> float:
        """Bytes of a rank in ``checkpoint.memory.directory`` of the host, with the copies that the
        host keeps for a partner."""
        return self.part_bytes * copies_stored(self.partner_copies)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends to its partner for each checkpoint."""
        return self.part_bytes * self.partner_copies

    @property
    def blocked_seconds(self) -> float:
        """Seconds for which training is blocked by each checkpoint: by the copy to host memory."""
        return 0.0 if self.device is None else self.part_bytes / self.device.host_bandwidth

    @property
    def writing_seconds(self) -> float:
        """Seconds until a checkpoint is written, and sent to the partner, while training continues:
        at the rate of a rank, or of a rank's share of the host's link."""
        if self.device is None:
            return 0.0
        rate = min(EXCHANGE_BANDWIDTH, self.device.network_bandwidth * DIRECT)
        return self.part_bytes / WRITE_BANDWIDTH + self.sent_bytes / rate

    def lines(self, step_seconds: float) -> list[str]:
        """Return a line on the seconds, and one if checkpoints would be skipped. step_seconds: of a
        step, with its share of `blocked_seconds`."""
        steps = "every step" if self.every_steps == 1 else f"every {self.every_steps} steps"
        text = f"a checkpoint in memory {steps} blocks training for {self.blocked_seconds:.2g} s, "
        text += "and is written"
        if self.partner_copies:
            text += f" and sent to the partner ({self.sent_bytes / GIB:.3g} GiB a rank)"
        lines = [f"{text} in {self.writing_seconds:.3g} s during training"]
        # A checkpoint is written from the end of the copy until the next one is due.
        undisturbed = step_seconds - self.blocked_seconds / self.every_steps
        if self.writing_seconds > self.every_steps * undisturbed:
            lines.append(
                f"checkpoints in memory will be skipped: the next one is due after "
                f"{self.every_steps * undisturbed:.3g} s -> "
                f"checkpoint.memory.every_steps={math.ceil(self.writing_seconds / undisturbed)}"
            )
        return lines

    def as_json(self, ranks_of_host: int) -> dict[str, Any]:
        """Return the costs with their units."""
        return {
            "host_directory_bytes": ranks_of_host * self.directory_bytes,
            "sent_bytes": self.sent_bytes,
            "blocked_seconds": self.blocked_seconds,
            "writing_seconds": self.writing_seconds,
        }


def memory_checkpoint_costs(
    model: ModelCosts, layout: Layout, device: Device | None, engine: Engine
) -> MemoryCheckpointCosts | None:
    """Return the costs of the largest rank's checkpoints in memory; None if `layout` has none."""
    if layout.memory_every_steps is None:
        return None
    part = largest_checkpoint_part(model, layout, engine)
    return MemoryCheckpointCosts(part, layout.memory_every_steps, layout.partner_copies, device)
