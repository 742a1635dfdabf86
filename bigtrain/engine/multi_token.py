"""Loss of the layers for multi-token prediction, as a part of the loss of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.models.layers.chunked_loss import FurtherLosses
from bigtrain.models.layers.multi_token import MultiTokenLayers, labels_at_depth


class MultiTokenLoss:
    """Weighted loss of the `layers` of `model`: `weight` times the mean of the cross-entropies of
    the layers (DeepSeek-V3, arXiv 2412.19437, equation 24). Like the model's cross-entropy it is a
    sum over targets, divided by the number of targets of the next token in the global batch."""

    def __init__(
        self,
        model: Any,
        layers: MultiTokenLayers,
        weight: float,
        device: torch.device,
    ) -> None:
        self._model, self._layers = model, layers
        self.share = weight / len(layers.layers)
        # By layer: summed loss and number of targets since `read`.
        self._totals = torch.zeros(2, len(layers.layers), dtype=torch.float64, device=device)

    def of_batch(self, batch: MicroBatch, inputs: Mapping[str, Any]) -> FurtherLosses:
        """Return the request for the losses of the layers in the forward pass of `batch`, and count
        the targets. `batch` is on the host; `inputs`: of the model, on the device."""
        positions = batch.position_ids
        depths = range(1, len(self._layers.layers) + 1)
        labels = [labels_at_depth(batch.labels, depth, positions) for depth in depths]
        for depth, depth_labels in zip(depths, labels, strict=True):
            num_targets = int((depth_labels != IGNORED_LABEL).sum())
            self._totals[1, depth - 1] += num_targets

        def states(hidden: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            """Yield the last hidden states of each layer, and its labels."""
            options = dict(inputs)
            ids, position_ids = options.pop("input_ids"), options.pop("position_ids", None)
            hidden_states = self._layers.hidden_states(
                self._model, hidden, ids, position_ids, **options
            )
            yield from zip(hidden_states, labels, strict=True)

        return FurtherLosses(states, self.share)

    def weighted(self, losses: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the weighted sum of the `losses` of the layers, float32 [], and count them."""
        summed = torch.stack(losses)
        self._totals[0] += summed.detach()
        return self.share * summed.sum()

    def forget(self) -> None:
        """Forget the losses since the last `read`: the run has rolled back."""
        self._totals.zero_()

    def read(self, sum_over_replicas: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Return the mean over the layers of the mean loss per target since the last call, in nats.
        Collective; waits for the device."""
        losses, counts = sum_over_replicas(self._totals.clone())
        self._totals.zero_()
        return float((losses / counts.clamp(min=1)).mean())
