"""The outer optimizer's update of a flat tensor. No communication."""

from __future__ import annotations

import torch

from bigtrain.settings.sections.sites import SitesSection


@torch.no_grad()
def outer_update(
    weights: torch.Tensor,
    momentum: torch.Tensor | None,
    mean: torch.Tensor,
    sites: SitesSection,
) -> None:
    """One outer step, in place.

    Parameters: `weights` [N], the global weights before it; `momentum` [N], None if the outer
    optimizer has no momentum; `mean` [N], of the weights of all sites; all float32. `mean` is
    overwritten.

    With the outer gradient ``g = weights - mean``, the mean over sites of what they have changed:
    average is ``weights - lr g``, and exactly `mean` for a rate of 1; momentum and nesterov are
    `torch.optim.SGD` (2.13, torch/optim/sgd.py, `_single_tensor_sgd`) without decay and dampening:
    ``m = decay m + g``, then ``weights - lr m`` or ``weights - lr (g + decay m)``.
    """
    outer, lr = sites.outer, sites.outer_lr
    if momentum is None:
        # Not by the gradient: `weights - (weights - mean)` is `mean` but for its last bits.
        weights.copy_(torch.lerp(weights, mean, lr))
        return
    gradient = torch.sub(weights, mean, out=mean)
    momentum.mul_(outer.decay).add_(gradient)
    direction = momentum
    if outer.type == "nesterov":
        direction = gradient.add_(momentum, alpha=outer.decay)
    weights.sub_(direction, alpha=lr)
