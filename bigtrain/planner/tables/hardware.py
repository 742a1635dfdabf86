"""Devices and the links between them, from data files that name the source of every number. Pure.

A number in `tables/hardware.json` is the vendor's specification; `Reach` is the share that programs
attain, fitted once over all published rows (`docs/planner.md`), or measured on this machine by
``bigtrain plan --calibrate``.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, Problem

TABLES = Path(__file__).parent


@dataclass(frozen=True)
class Reach:
    """Attained share of the specifications, and fixed costs of operations.

    Shares: `matmul`: of peak FLOPs, for large products; `attention`: of fused kernels; `memory`: of
    the memory bandwidth; `link`, `network`: of the bandwidths. `matmul_depth`: cost of a tile's
    prologue and epilogue, in elements of the inner dimension. `kernel_seconds`: minimum of a
    kernel; latency of a collective: `start_seconds`, plus `link_seconds` for each further rank of
    a node and `network_seconds` for each further node. `has_one_tile`: products are in the largest
    tile only. `attention_by_head`: where it was measured,
    shares of the peak by head size, forward and backward, instead of `attention`;
    `best_attention_by_head`: of the best published kernels.
    """

    matmul: float
    matmul_depth: float
    attention: float
    memory: float
    link: float
    network: float
    kernel_seconds: float
    start_seconds: float
    link_seconds: float
    network_seconds: float
    has_one_tile: bool = False
    attention_by_head: tuple[tuple[int, float, float], ...] = ()
    best_attention_by_head: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True)
class Device:
    """Accelerator (or rank on a CPU) with its links. Rates in units per second.

    `num_units`: multiprocessors. Bandwidths in bytes: `link_bandwidth`: in one direction to the
    devices of the node; `network_bandwidth`: a device's share of the node's network;
    `host_bandwidth`: to main memory (offload); `host_memory_bandwidth`: of main memory, for all
    devices of a node together (an offloaded optimizer step). `float8_gain`: speed of its best
    product in 8 bits over that in 16, `float4_gain` in 4 bits over that in 8; `matmul_factor`:
    share of the peak that its best product reaches, over the share of the device whose `reach` is
    used. `num_cores`: of a CPU, cores that the ranks of a node share; 0 if every rank has a core,
    or more. `measured_reach`: what bigtrain's own kernels were measured to reach, None where nobody
    measured; `reach` is fitted to older programs."""

    name: str
    peak_flops: float
    num_units: int
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    host_memory_bandwidth: float
    devices_per_node: int
    reach: Reach
    float32_flops: float = 0.0
    float8_gain: float = 1.0
    float4_gain: float = 1.0
    matmul_factor: float = 1.0
    is_cpu: bool = False
    num_cores: int = 0
    measured_reach: Reach | None = None

    def __hash__(self) -> int:
        """Return a hash that is computed once: a search looks kernels up hundreds of thousands of
        times."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, entry.name) for entry in fields(self)))


@functools.cache
def _table() -> Mapping[str, Any]:
    tree: Mapping[str, Any] = json.loads((TABLES / "hardware.json").read_text(encoding="utf-8"))
    return tree


def find_device(name: str, option: str = "--gpus") -> Device:
    """Return the device called `name`, in upper or lower case, with or without separators; for a
    family ("A100") its most common member. Raises ConfigError that lists the nearest names."""
    entry = _find(name)
    if entry is None:
        device_list = list(_table()["devices"])
        # Compare names without the memory: MI300X is nearer to H100 than to H100-80GB.
        short = {entry.rsplit("-", 1)[0]: entry for entry in reversed(device_list)}
        close = difflib.get_close_matches(name.upper(), list(short), n=3, cutoff=0.0)
        remedy = f"nearest names: {', '.join(short[match] for match in close)}; "
        remedy += f"known: {', '.join(device_list)}; or measure one with bigtrain plan --calibrate"
        raise ConfigError(Problem(option, name, "no such device in the hardware tables", remedy))
    columns = _table()["devices"][entry]
    value = {key: item["value"] for key, item in columns["figures"].items()}
    reach = Reach(**_table()["reach"][columns["reach"]])
    measured = None
    if "measured" in columns:
        rates = {k: v for k, v in _table()["measured"][columns["measured"]].items() if k != "about"}
        for key in ("attention_by_head", "best_attention_by_head"):
            rates[key] = tuple(tuple(shares) for shares in rates[key])
        measured = replace(reach, **rates)
    return Device(name=entry, reach=reach, measured_reach=measured, **value)


_WORDS_BESIDE = (
    r"(?i)\b(nvidia|amd|instinct|tesla|geforce|quadro|dgx|hgx|gpus?)\b|^\s*\d+\s*x\s*(?=[a-z])"
)
"""Words next to a device's name in tables: vendor, machine, number."""


def _find(name: str) -> str | None:
    name = re.sub(_WORDS_BESIDE, " ", name)
    # "H100SXM5" becomes "H100 SXM5".
    name = re.sub(r"(?i)(?<=\d)(?=(sxm|pcie?|nvl|hbm)\d*\b)", " ", name).strip()
    plain_name = _plain(name)
    devices = _table()["devices"]
    for entry, figures in devices.items():
        if plain_name in {_plain(entry), *(_plain(alias) for alias in figures.get("aliases", ()))}:
            return str(entry)
    # Names as in torch or a table: "NVIDIA H100 80GB HBM3", "A100-SXM4-80GB", "H100-80GB-SXM".
    for entry, figures in devices.items():
        # A pattern begins with the device's name, which must be a complete word of `name` ("RTX"
        # may precede it without a blank): H1000 and H100X are not H100.
        first = re.match("[A-Z0-9]*", figures["pattern"])
        assert first is not None
        word = rf"(?<![A-Z0-9])(RTX)?{first[0]}(?![A-Z0-9])"
        if re.search(word, name, re.IGNORECASE) and re.search(
            figures["pattern"], name, re.IGNORECASE
        ):
            return str(entry)
    return None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def with_network(device: Device, bits_per_second: float) -> Device:
    """Return `device` with its share of the network's bandwidth changed."""
    return replace(device, network_bandwidth=bits_per_second / 8)
