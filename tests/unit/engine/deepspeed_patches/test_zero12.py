"""Parameters of ZeRO 1 and 2 are made views of their flat tensor again only where they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from bigtrain.engine.deepspeed_patches.zero12 import keep_views, skip_redundant_work_of_zero12


class Group:
    """One group of two parameters, in a flat tensor as DeepSpeed has it."""

    def __init__(self) -> None:
        parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
        self.calls = 0
        self.optimizer: Any = SimpleNamespace(
            bit16_groups=[parameters],
            bit16_groups_flat=[torch.arange(10.0)],
            round_robin_bit16_groups=[parameters[::-1]],
            round_robin_bit16_meta=[[torch.empty(4), torch.empty(2, 3)]],
            round_robin_bit16_offsets=[[0, 4]],
            round_robin_bit16_indices=[[1, 0]],
            _update_model_bit16_weights=self.update,
        )

    def update(self, group_index: int) -> None:
        self.calls += 1
        DeepSpeedZeroOptimizer._update_model_bit16_weights(self.optimizer, group_index)

    def values(self) -> list[list[float]]:
        return [p.detach().flatten().tolist() for p in self.optimizer.bit16_groups[0]]


def test_views_are_made_once_and_follow_the_flat_tensor() -> None:
    group = Group()
    keep_views(group.optimizer)
    for _ in range(3):
        group.optimizer._update_model_bit16_weights(0)
    assert group.calls == 1
    assert group.values() == [[4, 5, 6, 7, 8, 9], [0, 1, 2, 3]]
    group.optimizer.bit16_groups_flat[0].add_(1.0)  # an update
    group.optimizer._update_model_bit16_weights(0)
    assert group.calls == 1
    assert group.values() == [[5, 6, 7, 8, 9, 10], [1, 2, 3, 4]]


def test_views_are_made_again_where_the_flat_tensor_or_a_parameter_has_moved() -> None:
    group = Group()
    keep_views(group.optimizer)
    group.optimizer._update_model_bit16_weights(0)
    group.optimizer.bit16_groups_flat[0].data = torch.arange(10.0) + 20.0  # as offloading does
    group.optimizer._update_model_bit16_weights(0)
    assert group.values() == [[24, 25, 26, 27, 28, 29], [20, 21, 22, 23]]
    group.optimizer.bit16_groups_flat[0] = torch.arange(10.0) + 40.0
    group.optimizer._update_model_bit16_weights(0)
    assert group.values() == [[44, 45, 46, 47, 48, 49], [40, 41, 42, 43]]
    group.optimizer.bit16_groups[0][1].data = torch.zeros(4)
    group.optimizer._update_model_bit16_weights(0)
    assert group.values() == [[44, 45, 46, 47, 48, 49], [40, 41, 42, 43]]
    assert group.calls == 4


def test_other_optimizers_stay_as_they_are() -> None:
    other = SimpleNamespace(report_ipg_memory_usage=len)
    skip_redundant_work_of_zero12(other)
    assert vars(other) == {"report_ipg_memory_usage": len}
