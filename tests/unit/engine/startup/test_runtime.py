"""Process-wide settings: what is set, that a user's own stays, and that all is undone."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import pinned_bytes
from bigtrain.engine.startup import runtime
from bigtrain.system.world import World

ALONE = World(0, 1, 0)


def run(directory: Path, **more: Any) -> Any:
    """As much of a resolved run as the settings depend on."""
    values = {"tf32": False, "cpu_threads": None, "bind_cores": None, "offload": None} | more
    return SimpleNamespace(
        config=SimpleNamespace(
            output=SimpleNamespace(directory=str(directory)),
            precision=SimpleNamespace(tf32=values["tf32"]),
            model=SimpleNamespace(attention="auto"),
            engine=SimpleNamespace(
                cpu_threads=values["cpu_threads"], bind_cores=values["bind_cores"]
            ),
        ),
        engine=SimpleNamespace(offload_optimizer=values["offload"]),
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As on a machine with a GPU; returns what its allocator is given."""
    given: list[str] = []
    monkeypatch.setattr(runtime, "device_kind", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(runtime, "set_allocator", given.append)
    return given


def test_a_gpu_gets_its_settings_and_they_are_undone(gpu: list[str], tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    before = torch.get_float32_matmul_precision()
    with runtime.runtime_settings(run(tmp_path), ALONE, environment) as lines:
        assert environment["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
        assert torch.get_float32_matmul_precision() == "highest"
        assert "float32 matrix products in full (no TF32)" in lines
        assert any("CUDA allocator: expandable_segments:True" in line for line in lines)
        assert any(line.startswith("set for NCCL: TORCH_NCCL_ASYNC") for line in lines)
    assert gpu == ["expandable_segments:True,pinned_max_round_threshold_mb:64"]
    sizes = (38 << 30, 16 << 20, 0)
    assert [pinned_bytes(size) for size in sizes] == [64 << 30, 16 << 20, 0]
    assert environment == {}
    assert torch.get_float32_matmul_precision() == before
    with runtime.runtime_settings(run(tmp_path, tf32=True), ALONE, {}) as lines:
        assert torch.get_float32_matmul_precision() == "high"
        assert "float32 matrix products in TF32 (precision.tf32)" in lines


def test_an_older_allocator_is_given_the_keys_it_knows(
    gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(settings: str) -> None:
        if "pinned" in settings:  # torch 2.11
            raise ValueError("Unrecognized key 'pinned_max_round_threshold_mb'")
        gpu.append(settings)

    monkeypatch.setattr(runtime, "set_allocator", refuse)
    with runtime.runtime_settings(run(tmp_path), ALONE, {}):
        pass
    assert gpu == ["expandable_segments:True"]


def test_an_optimizer_in_host_memory_gets_threads_and_cores(
    gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(set(cores)))
    monkeypatch.setattr(runtime, "this_machine", lambda _: SimpleNamespace(num_cores=8))
    threads = torch.get_num_threads()
    torchrun = {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}
    settings = runtime.runtime_settings(run(tmp_path, offload="cpu"), World(1, 2, 1), torchrun)
    with settings as lines:
        assert torch.get_num_threads() == 4
        assert "each of 2 processes here has 4 CPU threads, bound to 4 cores" in lines
    assert bound == [{4, 5, 6, 7}, set(range(8))]
    assert torch.get_num_threads() == threads


def test_a_cpu_is_left_as_it_was(tmp_path: Path) -> None:
    environment = {"OMP_NUM_THREADS": "1"}
    with runtime.runtime_settings(run(tmp_path), ALONE, environment) as lines:
        assert lines == []
        assert torch.get_num_threads() == 1
    assert environment == {"OMP_NUM_THREADS": "1"}


CAPABILITY: dict[str, tuple[tuple[int, int], bool, str, str]] = {
    "an H100 with its package": ((9, 0), True, "auto", "attention: FlashAttention 3"),
    "an H100 without": ((9, 0), False, "sdpa", "flash_attn_interface is not installed"),
    "an A100": ((8, 0), True, "auto", "needs a Hopper GPU"),
    "attention of the user's": ((9, 0), True, "flex_attention", ""),
}


@pytest.mark.parametrize("name", CAPABILITY)
def test_flash_attention_3_is_taken_where_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, is_installed, attention, text = CAPABILITY[name]
    active: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if is_installed else None
    )
    monkeypatch.setattr(runtime, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(runtime, "restore_flash_attention_impl", lambda _raise_warn: active.clear())
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    with runtime.fast_attention(attention) as lines:
        assert [text in line for line in lines] == ([True] if text else [])
        takes = capability[0] == 9 and is_installed and bool(text)
        assert active == (["FA3"] if takes else [])
        assert torch.backends.cuda.cudnn_sdp_enabled() is (has_cudnn and not takes)
    assert active == []
    assert torch.backends.cuda.cudnn_sdp_enabled() is has_cudnn
