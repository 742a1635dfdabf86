"""One process of a world that trains cases of the hybrid grid with a fault each.

Arguments as those of `worker.py`; `mutation` of a case names its fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch

from bigtrain.models.layers import parameter_roles
from bigtrain.models.layers.recurrence import restarts
from bigtrain.models.layers.recurrence.functions import CONVOLUTION, Call
from bigtrain.models.parallel import recurrent_layers, state_passing
from bigtrain.models.torch_patches import shadowed
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.processes import exit_process
from bigtrain.system.world import World
from tests.parity import worker

_run_by_document, _gather = restarts.run_by_document, state_passing.gather


def _only(is_reset: Callable[[Call], bool]) -> Callable[[Call], torch.Tensor | None]:
    """Return what starts afresh at each document in the calls that `is_reset` is true of."""
    return lambda call: _run_by_document(call) if is_reset(call) else None


def _gather_changed(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    def gather(exchange: Any, values: torch.Tensor, through: torch.Tensor) -> Any:
        gathered, passed = _gather(exchange, change("sent", values), through)
        return change("received", gathered), passed

    return gather


MUTATIONS: dict[str, tuple[Any, Mapping[str, Any]]] = {
    "convolution not reset": (
        restarts,
        {"run_by_document": _only(lambda call: call.function.kind != CONVOLUTION)},
    ),
    "state not reset": (
        restarts,
        {"run_by_document": _only(lambda call: call.function.kind == CONVOLUTION)},
    ),
    "state handed to the wrong rank": (
        state_passing,
        {"gather": _gather_changed(lambda way, x: x.roll(1, 0) if way == "received" else x)},
    ),
    "state without a gradient": (
        state_passing,
        {"gather": _gather_changed(lambda way, x: x.detach() if way == "sent" else x)},
    ),
    "gradient of shared groups of one rank": (
        recurrent_layers,
        {"sum_gradient": lambda x, group: x},
    ),
    "decay on recurrent states": (
        parameter_roles,
        {"_PRODUCTS": parameter_roles._PRODUCTS | {parameter_roles.Role.STATE}},
    ),
}
"""A module, and what is replaced in it."""


def run_mutated(case: dict[str, Any], world: World, device: torch.device) -> dict[str, Any]:
    """Train a case with its fault, which the trial of a run's model does not meet: it is before."""
    config = RunConfig.model_validate(case["config"])
    if world.is_main:
        worker.isolation_of(config.model.model_dump_json(), config.data.isolates, config)
    module, replaced = MUTATIONS[case["mutation"]]
    with shadowed(module, replaced):
        return run_case(case, world, device)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_case = worker.run_case
    with patch.object(worker, "run_case", run_mutated):
        worker.main()
    exit_process(0)
