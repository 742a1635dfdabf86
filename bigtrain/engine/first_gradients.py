"""Comparison of a probe's result with the gradients of a run's first step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from bigtrain.engine.startup.mesh import Mesh
from bigtrain.errors import ModelError
from bigtrain.models.layers.adapter_names import adapted_weights, has_adapters

_SHOWN = 5


class FirstGradients:
    """Comparison of the first step with a probe: trained parameters get a gradient, and parameters
    of `unreached` weights get none.

    A gradient of zeros counts as a gradient: the first gradient of LoRA's A is zero, since B begins
    with zeros.

    unreached: frozen weights, or base weights whose adapters or copies are trained, by their names
    in the model without adapters.
    """

    def __init__(
        self, model: nn.Module, unreached: Collection[str], mesh: Mesh, device: torch.device
    ) -> None:
        self._mesh, self._device = mesh, device
        self._has_adapters = has_adapters(model)
        weights = adapted_weights(model)
        # All ranks of a stage have parameters of equal names in equal order.
        self._parameters = {
            name: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter.requires_grad or (name in unreached and not self._has_adapters)
        }
        self._is_unreached = [weights[name] in unreached for name in self._parameters]
        self._is_compared = False

    @contextmanager
    def compared(self, log: Callable[[str], object]) -> Iterator[None]:
        """Inside, the first time, record which parameters get a gradient. Then raise ModelError on
        every rank if an unreached parameter has a gradient on any rank, and `log` the trained
        parameters that have a gradient on no rank. Collective over all ranks then."""
        if self._is_compared:
            yield
            return
        # Let autograd compute gradients of frozen parameters, too. DeepSpeed's hooks, which it has
        # registered for trained parameters, do not see them.
        reached_indices: set[int] = set()
        frozen = [p for p in self._parameters.values() if not p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_()
        hooks = [
            parameter.register_hook(lambda _, index=index: reached_indices.add(index))
            for index, parameter in enumerate(self._parameters.values())
        ]
        yield
        for hook in hooks:
            hook.remove()
        for parameter in frozen:
            parameter.requires_grad_(False)
            parameter.grad = None

        # Parameters with a gradient on any rank: a row for each pipeline stage.
        max_parameters = torch.tensor(len(hooks), device=self._device)
        dist.all_reduce(max_parameters, dist.ReduceOp.MAX)
        stage = self._mesh.coordinates.pipeline_rank
        num_stages = self._mesh.topology.size("pipeline")
        is_reached = torch.zeros(
            num_stages, int(max_parameters), device=self._device, dtype=torch.int32
        )
        is_reached[stage, sorted(reached_indices)] = 1
        dist.all_reduce(is_reached, dist.ReduceOp.MAX)

        # Differences from the probe: in this stage, then in all stages.
        unexpected: list[str] = []
        absent: list[str] = []
        for name, has_gradient, is_unreached in zip(
            self._parameters,
            is_reached[stage, : len(hooks)].tolist(),
            self._is_unreached,
            strict=True,
        ):
            if has_gradient and is_unreached:
                unexpected.append(name)
            elif not has_gradient and not is_unreached:
                absent.append(name)
        names_by_stage: list[tuple[list[str], list[str]]] = [([], [])] * num_stages
        dist.all_gather_object(names_by_stage, (unexpected, absent), group=self._mesh.pipeline)
        self._is_compared, self._parameters, self._is_unreached = True, {}, []
        # Tied weights are in several stages.
        all_unexpected = list(dict.fromkeys(n for names, _ in names_by_stage for n in names))
        all_absent = list(dict.fromkeys(n for _, names in names_by_stage for n in names))
        if all_unexpected:
            raise ModelError(self._unexpected(all_unexpected))
        if all_absent:
            log(
                f"{len(all_absent)} trained parameters have no gradient in the first step, such as "
                f"an expert that no token chose: {_listed(all_absent)}; without one they are only "
                "decayed"
            )

    def _unexpected(self, names: Sequence[str]) -> str:
        if self._has_adapters:
            return (
                f"{_listed(names)}: trained without weight decay, since no gradient reached their "
                "base weights in a probe of the model, but the first step has a gradient for them; "
                "nothing was saved -> adapters.targets without them if they are not to be trained, "
                "or report the model's configuration"
            )
        return (
            f"{_listed(names)}: frozen, since no gradient reached them in a probe of the model, "
            "but the first step has a gradient for them; nothing was saved -> "
            f"model.frozen={list(names[:_SHOWN])} if they are not to be trained, or report the "
            "model's configuration"
        )


def _listed(names: Sequence[str]) -> str:
    remainder = "" if len(names) <= _SHOWN else f" and {len(names) - _SHOWN} more"
    return f"{', '.join(names[:_SHOWN])}{remainder}"
