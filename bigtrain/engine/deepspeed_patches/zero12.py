"""What the optimizer of ZeRO 1 and 2 does for each parameter at every step, and need not.

Half of the host time of its steps above a bare loop's, together with what
`bigtrain.engine.train_engine` does not repeat at every step.
"""

from __future__ import annotations

from typing import Any


def skip_redundant_work_of_zero12(optimizer: Any) -> None:
    """Leave out what changes nothing. Call once; does nothing to other optimizers."""
    if not hasattr(optimizer, "round_robin_bit16_groups"):
        return
    skip_usage_reports(optimizer)
    keep_views(optimizer)


def skip_usage_reports(optimizer: Any) -> None:
    """Do not format how full the buckets are.

    DeepSpeed 0.19.8 (runtime/base_optimizer.py, `report_ipg_memory_usage`) makes a text of it for
    each gradient, and gives it to `see_memory_usage`, which returns at once unless it is forced
    (runtime/utils.py); here it never is.
    """
    optimizer.report_ipg_memory_usage = _say_nothing


def _say_nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def keep_views(optimizer: Any) -> None:
    """Do not make parameters views of their group's flat tensor that are so already.

    DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, `_update_model_bit16_weights`) makes them anew
    after every update. They are other ones only where somebody has moved the flat tensor or a
    parameter, which shows in its address.
    """
    update = optimizer._update_model_bit16_weights
    known: dict[int, list[int]] = {}

    def places(group_index: int) -> list[int]:
        parameters = optimizer.bit16_groups[group_index]
        return [t.data_ptr() for t in (optimizer.bit16_groups_flat[group_index], *parameters)]

    def update_where_moved(group_index: int) -> None:
        if known.get(group_index) != places(group_index):
            update(group_index)
            known[group_index] = places(group_index)

    optimizer._update_model_bit16_weights = update_where_moved
