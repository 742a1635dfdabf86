"""Interface of bigtrain's optimizers: one update rule per file, which updates masters in place.

DeepSpeed gives the inner torch optimizer full parameters (ZeRO 0) or flat ranges of many parameters
(ZeRO 1 to 3), group by group. A rule gets them as `Master`s; `UpdateRule.attach` gives it the
parameters that masters contain. A row in `settings/sections/optimizer.py` names the module of a
rule, whose `RULE` is the class.

Optimizer states may be bfloat16. Rounding is then stochastic, since small changes would be lost,
and seeded by a hash of the element's gradient and value, so that a resumed run rounds equally.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from bigtrain.engine.optimizers.masters import MasterPart, cut_parts
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.settings.run_config import OptimizerSection
from bigtrain.settings.sections.optimizer import facts_of_optimizer
from bigtrain.system.boxes import Box

AVERAGE = "ema"
"""Name of the state that holds the moving average of a master (``optimizer.ema``)."""

ALLOCATES = "allocates"
"""Key of a torch parameter group: true in the update of `ensure_optimizer_states`, which only
allocates states and which not all ranks may make at the same time."""

_AVERAGE_BYTES = 4
_CHUNK = 1 << 24
"""Elements converted to float32 at a time."""


def chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Return an iterator over parts of equally shaped contiguous tensors, as 1-D views."""
    flat = [tensor.view(-1) for tensor in tensors]
    return zip(*(tensor.split(_CHUNK) for tensor in flat), strict=True)


def store(moment: torch.Tensor, value: torch.Tensor, gradient: torch.Tensor) -> None:
    """Write the float32 `value` into `moment` of either dtype; `gradient` seeds the rounding."""
    if moment.dtype == torch.float32:
        if moment.data_ptr() != value.data_ptr():
            moment.copy_(value)
    else:
        # Round the lower 16 bits stochastically: add uniform noise below 2**16, and set them to 0.
        bits = value.contiguous().view(torch.int32)
        # The noise is a hash of value and gradient; every bit of the hash depends on every input
        # bit (Wellons, "hash-prospector", lowbias32). Masks make the shifts of int32 logical.
        noise = gradient.contiguous().view(torch.int32) * 3 ^ bits
        noise = (noise ^ ((noise >> 16) & 0xFFFF)) * 0x7FEB352D
        noise = (noise ^ ((noise >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846CA68B
        noise = (noise ^ ((noise >> 16) & 0xFFFF)) & 0xFFFF
        moment.copy_(((bits + noise) & ~0xFFFF).view(torch.float32))


@dataclass(frozen=True)
class Master:
    """Tensor that the optimizer updates, its gradient and its states: float32, except for states of
    another dtype."""

    values: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, Any]

    def moment(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the state `name`, shaped like the values; zeros at first."""
        if name not in self.state:
            self.state[name] = torch.zeros_like(
                self.values, dtype=dtype, memory_format=torch.preserve_format
            )
        moment: torch.Tensor = self.state[name]
        return moment

    def step_count(self) -> torch.Tensor:
        """Return the number of updates, a float32 scalar on the device of the values, which the
        rule increments."""
        if "step" not in self.state:
            self.state["step"] = torch.zeros((), device=self.values.device)
        count: torch.Tensor = self.state["step"]
        return count

    def update_average(self, decay: float) -> None:
        """Move the average towards the values after an update; after the first update it is a copy
        of the values."""
        if AVERAGE not in self.state:
            self.state[AVERAGE] = self.values.clone()
            return
        # On the device, so that the host does not wait for the count.
        weight = torch.where(self.step_count() > 1, 1 - decay, 1.0)
        self.state[AVERAGE].lerp_(self.values, weight.to(self.values.dtype))


def names_in_update(
    parts: Sequence[MasterPart], masters: Sequence[Master], group: Mapping[str, Any]
) -> list[str]:
    """Return the names of the parameters that an update of `masters` covers, equal on all ranks of
    a stage: the parameters of the group without a part in another master. ZeRO 1 and 2 update a
    group's parameters together, and a rank may have no part of a parameter; ZeRO 3 gives every rank
    a part of every parameter, and updates a few parameters at a time."""
    master_ids = {id(master.values) for master in masters}
    skipped_names = {part.name for part in parts if id(part.master) not in master_ids}
    return [name for name in group["names"] if name not in skipped_names]


@dataclass(frozen=True)
class UpdatedRectangle:
    """Rectangle `box` of a parameter, with views into its master, its gradient and its states."""

    parameter: str
    box: Box
    values: torch.Tensor
    gradient: torch.Tensor
    states: tuple[torch.Tensor, ...]


def updated_rectangles(
    parts: Sequence[MasterPart],
    masters: Sequence[Master],
    states: Callable[[Master], Iterable[torch.Tensor]] = lambda master: (),
    max_elements: int = sys.maxsize,
) -> Iterator[UpdatedRectangle]:
    """Yield the rectangles of parameters in `masters`, of at most `max_elements` each. states:
    returns the states of a master whose views are added."""
    masters_by_id = {id(master.values): master for master in masters}
    for part in parts:
        master = masters_by_id.get(id(part.master))
        if master is None:
            continue
        # Values, gradient and states have equal rectangles.
        tensors = (master.values, master.gradient, *states(master))
        parts_by_tensor = [cut_parts(part.shard, part.start, part.of(tensor)) for tensor in tensors]
        for boxes_and_views in zip(*parts_by_tensor, strict=True):
            box, _ = boxes_and_views[0]
            for sub_box in box.split(max_elements):
                slices = sub_box.relative_to(box).slices
                values, gradient, *state_views = (view[slices] for _, view in boxes_and_views)
                yield UpdatedRectangle(part.name, sub_box, values, gradient, tuple(state_views))


@dataclass(frozen=True)
class RuleInputs:
    """Inputs of a rule: the run's section and state dtype, this rank's stage of the model, its
    mesh, and a device that the groups' backend takes."""

    section: OptimizerSection
    state_dtype: torch.dtype
    model: nn.Module
    mesh: Mesh
    device: torch.device


class UpdateRule(ABC):
    """Update of the masters of a group. Checkpoints save, load and reshard states that are shaped
    like their master without further code; the state `step` counts updates. sent_bytes: bytes that
    this rank has sent to other ranks since it was set to 0; None for a rule that does not count."""

    sent_bytes: int | None = None

    @classmethod
    @abstractmethod
    def of(cls, inputs: RuleInputs) -> Self:
        """Return the rule of a run. Collective over all ranks. Raises ConfigError for settings that
        do not fit the model."""

    def attach(self, parts: Sequence[MasterPart]) -> None:  # noqa: B027
        """Set the parts of parameters in the masters, once DeepSpeed has made the masters.
        Collective over the ranks of a stage. Updates before this only allocate states."""

    def small_states(self) -> Iterable[tuple[str, dict[str, torch.Tensor]]]:
        """Return states that are not shaped like masters, by parameter name and state name: full,
        on the CPU and equal on every rank of a stage."""
        return ()

    @abstractmethod
    def update(self, masters: Sequence[Master], group: Mapping[str, Any]) -> None:
        """Do one update. Collective if the rule is. `group`: the torch parameter group, with `lr`,
        `weight_decay` and the `names` of the group's parameters."""


class RuleOptimizer(torch.optim.Optimizer):
    """Torch optimizer that DeepSpeed wraps; each parameter group names its update rule."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        rules: Mapping[str, UpdateRule],
        lr: float,
        state_dtype: torch.dtype,
        average_decay: float | None = None,
    ) -> None:
        """groups: torch's parameter groups, each with the name of its `rule`. rules: by name
        (``optimizer.type``). average_decay: decay of the masters' averages; None: no averages."""
        self.rules = dict(rules)
        self.state_dtype = state_dtype
        self.average_decay = average_decay
        super().__init__(groups, {"lr": lr})

    def attach(self, parts: Sequence[MasterPart]) -> None:
        """See `UpdateRule.attach`. Collective over the ranks of a stage."""
        for rule in self.rules.values():
            rule.attach(parts)

    def small_states(self) -> list[tuple[str, dict[str, torch.Tensor]]]:
        """See `UpdateRule.small_states`."""
        return [item for rule in self.rules.values() for item in rule.small_states()]

    def begin_count(self) -> None:
        """Set the bytes that the rules have sent to 0."""
        for rule in self.rules.values():
            if rule.sent_bytes is not None:
                rule.sent_bytes = 0

    def sent_bytes(self) -> int | None:
        """Return the bytes that this rank has sent to other ranks since `begin_count`; None, on all
        ranks, if no rule counts."""
        counts = [rule.sent_bytes for rule in self.rules.values() if rule.sent_bytes is not None]
        return sum(counts) if counts else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every group by its rule. Collective if a rule is."""
        assert closure is None
        for group in self.param_groups:
            masters = [
                Master(values, values.grad.contiguous(), self.state[values])
                for values in group["params"]
                if values.grad is not None
            ]
            self.rules[group["rule"]].update(masters, group)
            if self.average_decay is not None:
                for master in masters:
                    master.update_average(self.average_decay)

    @torch.no_grad()
    def restart_averages(self) -> None:
        """Set every average, if there are any, to its master."""
        for values, state in self.state.items():
            if AVERAGE in state:
                state[AVERAGE].copy_(values)


def state_bytes_by_name(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the bytes of optimizer states per element, by name of parameters that a
    `RuleOptimizer` updates."""
    if not isinstance(optimizer, RuleOptimizer):
        return {}
    itemsize = optimizer.state_dtype.itemsize
    average_bytes = 0 if optimizer.average_decay is None else _AVERAGE_BYTES
    bytes_by_name: dict[str, float] = {}
    for group in optimizer.param_groups:
        state_bytes = facts_of_optimizer(group["rule"]).bytes_per_element(itemsize)
        bytes_by_name |= dict.fromkeys(group["names"], state_bytes + average_bytes)
    return bytes_by_name
