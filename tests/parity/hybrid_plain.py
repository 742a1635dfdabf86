"""The plain loop of a family of the hybrid grid, how far the family's cells are from it, and how
far plain loops are from each other that only round otherwise."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from bigtrain.engine.checkpoint.io import read_full
from bigtrain.models.torch_patches import shadowed
from tests.parity.cases import PlainRuns
from tests.parity.conftest import SavedModels
from tests.parity.hybrid_grid import NUM_STEPS, cells_of, chain_of, run_of
from tests.parity.hybrid_models import MODELS
from tests.parity.plain import NEVER_DECAYED, Training, adamw

Tensors = Mapping[str, torch.Tensor]
_MOMENT_SHARE = 1 - 0.9**NUM_STEPS
"""What AdamW's first moment is divided by to be a mean of the gradients of all steps."""
_DELTA_RULES = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
"""Functions of transformers (5.23) that compute the same in chunks, and token by token."""


@dataclass(frozen=True)
class PlainRun:
    """What a plain loop computes. gradients: by parameter, the mean of the clipped gradients of all
    steps. buffers: names of tensors that are saved and not trained."""

    training: Training
    gradients: dict[str, torch.Tensor]
    buffers: frozenset[str]


@dataclass(frozen=True)
class Distances:
    """The largest differences of a run from a plain loop. loss: in nats; norm: relative;
    weights, gradients: absolute, by name."""

    loss: float
    norm: float
    weights: dict[str, float]
    gradients: dict[str, float]

    @classmethod
    def of(cls, result: Mapping[str, Any], place: Path, plain: PlainRun) -> Distances:
        """Compare the losses, the norms and the state saved in `place` of a run. Every tensor must
        be saved."""
        saved, training = read_full(place / "tensors"), plain.training
        weights = _named(saved, "master/")
        moments = _named(saved, "exp_avg/")
        gradients = {name: moment / _MOMENT_SHARE for name, moment in moments.items()}
        assert weights.keys() - plain.buffers == training.weights.keys()
        assert gradients.keys() >= plain.gradients.keys()
        pairs = zip(result["norms"], training.norms, strict=True)
        return cls(
            max(abs(a - b) for a, b in zip(result["losses"], training.losses, strict=True)),
            max(abs(a - b) / b for a, b in pairs),
            largest_differences(weights, training.weights),
            largest_differences(gradients, plain.gradients),
        )


def _named(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    keys = [key for key in tensors if key.startswith(prefix)]
    return {key.removeprefix(prefix): tensors[key] for key in keys}


def largest_differences(tensors: Tensors, expected: Tensors) -> dict[str, float]:
    """Return the largest difference of each tensor of `expected`, by name."""
    return {name: float((tensors[name] - x).abs().max()) for name, x in expected.items()}


def change_weights(_family: str, model: Any) -> None:
    """Make weights that no run begins with: the initial ones with noise."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


class FamilyRuns:
    """The cells of a family that begin with the same weights, and the plain loop for all of
    them."""

    def __init__(self, directory: Path, data: Path, family: str, *, imported: bool) -> None:
        directory.mkdir()
        self.directory, self.chain = directory, chain_of(family, imported=imported)
        self._masters: Tensors = {}
        self._buffers: frozenset[str] = frozenset()
        self._optimizer: Any = None
        self._cells = cells_of(family, imported=imported)
        change = change_weights if imported else lambda _name, _model: None
        self.runs = PlainRuns(
            directory,
            data,
            MODELS,
            self._cells,
            directories=SavedModels(MODELS, directory / "hf", change),
            from_files=imported,
            config_of=lambda case, model: run_of(case, model, data),
            plain_of=lambda _: {"optimizer_of": self._optimizer_of},
            save_at=NUM_STEPS,
        )

    def _optimizer_of(
        self, masters: dict[str, torch.Tensor], section: dict[str, Any]
    ) -> torch.optim.Optimizer:
        """Make the plain loop's AdamW, and keep it for its moments."""
        exempt = [master for name, master in masters.items() if re.search(NEVER_DECAYED, name)]
        self._masters = masters
        self._optimizer = adamw(list(masters.values()), section, exempt)
        return self._optimizer

    def _plain(self, change: Callable[[Any], object] = bool) -> PlainRun:
        """Train the plain loop on a model that `change` is called with before."""

        def watch(model: Any) -> None:
            self._buffers = frozenset(name for name, _ in model.named_buffers())
            change(model)

        training = self.runs.plain(self._cells[0], watch=watch)
        states = {name: self._optimizer.state.get(x, {}) for name, x in self._masters.items()}
        gradients = {
            name: state["exp_avg"] / _MOMENT_SHARE for name, state in states.items() if state
        }
        return PlainRun(training, gradients, self._buffers)

    @cached_property
    def plain(self) -> PlainRun:
        return self._plain()

    @cached_property
    def floor(self) -> Distances:
        """Return the largest differences of plain loops from `plain` in which only rounding
        differs: of weights and layers' outputs, or in the recurrences. Loss and norm are 0."""
        plain = self.plain
        runs = [self._plain(partial(_round_otherwise, seed)) for seed in range(4)]
        for replaced in _other_delta_rules(self.runs.directories[self._cells[0].model]):
            with replaced:
                runs.append(self._plain())
        weights = [
            largest_differences(run.training.weights, plain.training.weights) for run in runs
        ]
        gradients = [largest_differences(run.gradients, plain.gradients) for run in runs]
        return Distances(0.0, 0.0, _largest(weights), _largest(gradients))


def _largest(differences: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(each[name] for each in differences) for name in differences[0]}


def _round_otherwise(seed: int, model: Any) -> None:
    """Change every weight, and what every layer without layers in it returns, by up to half of the
    distance of neighboring numbers of float32."""
    generator = torch.Generator().manual_seed(seed)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        parts = torch.rand(values.shape, generator=generator) - 0.5
        return values * (1 + parts * torch.finfo(torch.float32).eps)

    def hook(_module: Any, _inputs: Any, output: Any) -> Any:
        is_rounded = torch.is_tensor(output) and output.is_floating_point()
        return rounded(output) if is_rounded else output

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(rounded(parameter))
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(hook)


def _other_delta_rules(directory: Path) -> Iterator[Any]:
    """Yield contexts in which transformers computes the delta rule of a model token by token, or in
    other chunks; none for a model without a delta rule."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    module = sys.modules[AutoModelForCausalLM._model_mapping[type(config)].__module__]
    for name, stepwise_name in _DELTA_RULES.items():
        in_chunks, stepwise = getattr(module, name, None), getattr(module, stepwise_name, None)
        if in_chunks is None or stepwise is None:
            continue
        yield shadowed(module, {name: partial(_without_chunks, stepwise)})
        for chunk_size in (2, 8, 16):
            yield shadowed(module, {name: partial(in_chunks, chunk_size=chunk_size)})


def _without_chunks(function: Any, *args: Any, chunk_size: int = 0, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
