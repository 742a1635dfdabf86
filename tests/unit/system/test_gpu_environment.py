from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.system.machine import allocator_settings, nccl_defaults

RUN = Path("/runs/one")


def test_nccl_gets_what_the_user_has_not_set() -> None:
    assert nccl_defaults({}, RUN) == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/runs/one/nccl_trace_rank_",
    }


@pytest.mark.parametrize(
    ("set_by_user", "left_out"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    ],
)
def test_a_users_variable_wins_by_either_name(set_by_user: str, left_out: str) -> None:
    defaults = nccl_defaults({set_by_user: "0"}, RUN)
    assert left_out not in defaults
    assert len(defaults) == 3


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_users_settings_of_the_allocator_stay(name: str) -> None:
    settings = allocator_settings({name: "max_split_size_mb:128,expandable_segments:False"})
    assert settings == [
        "max_split_size_mb:128,expandable_segments:False,pinned_max_round_threshold_mb:64"
    ]
    assert allocator_settings({name: f"{settings[0]}"}) == []
    assert allocator_settings({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}) == []
    assert allocator_settings({}) == [  # less where torch does not know a key
        "expandable_segments:True,pinned_max_round_threshold_mb:64",
        "expandable_segments:True",
    ]
