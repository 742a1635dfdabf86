"""Steps that were measured on an H100 (docs/benchmarks.md, "On one H100"), and their settings."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.support.points import Point
from bigtrain.system.shipped_files import recipes

_CHUNK_256_MIB = 2**28 // (4 * 128256)
_POINT = Point(
    size="1b", zero_stage=1, accumulation=1, micro_batch_size=4, dtype="bf16", rounds=3,
    steps_per_round=4, threads=1, contenders=("bigtrain",), loss="auto",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A step to price. measured: tokens per second on one H100, None where nobody measured it.
    num_ranks: that share the step's data."""

    name: str
    point: Point
    measured: float | None = None
    num_ranks: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a step of one rank."""
        length = self.point.sequence_length or 4096
        return self.point.micro_batch_size * self.point.accumulation * length


def _experts() -> dict[str, Any]:
    """Return Qwen3-30B-A3B's configuration with an eighth of its layers, which fits one GPU."""
    path = recipes() / "configs" / "Qwen--Qwen3-30B-A3B-Base.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config | {"num_hidden_layers": 6, "bos_token_id": None, "eos_token_id": None}


def _plain(contender: str) -> Point:
    return replace(_POINT, contenders=(contender,), loss="plain")


_SMALL_CHUNKS = replace(_POINT, loss_chunk_tokens=_CHUNK_256_MIB)

MEASURED = (
    Row("bare loop", _plain("bare"), 40_854),
    Row("HF Trainer", _plain("hf"), 40_091),
    Row("chunks of 256 MiB", _SMALL_CHUNKS, 38_580),
    Row("chunks of 1 GiB", _POINT, 41_344),
    Row("256 MiB, Liger's layers", replace(_SMALL_CHUNKS, kernels="liger"), 46_701),
    Row("256 MiB, compiled layers", replace(_SMALL_CHUNKS, compile="on"), 46_779),
)
FURTHER = (
    Row("today, 1 GiB", _POINT),
    Row("today, Liger's layers", replace(_POINT, kernels="liger")),
    Row("today, compiled layers", replace(_POINT, compile="on")),
    Row("today, compiled, Liger's loss", replace(_POINT, compile="on", loss="liger")),
    Row("today, compiled, 8 passes", replace(_POINT, compile="on", accumulation=8)),
    Row("today, compiled, float8", replace(_POINT, compile="on", float8="tensorwise")),
    Row("today, experts", replace(_POINT, model_config=_experts(), micro_batch_size=2)),
)
