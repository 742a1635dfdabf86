"""What ``auto`` chooses for the layers of a run on CUDA. Pure: of the run's facts, the device, the
installed packages and the model.

Compiled layers and Liger's kernels fuse equal elementwise operations, and a step is priced the
same with either (`make gpu-roofline`): 306 ms of Llama 3.2 1B on an H100, where 372 are taken
without. Compilation comes first, since it fuses the layers of every architecture and the casts of
float8; Liger's kernels follow where it is not allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bigtrain.settings.compatibility.check import adds_violation
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.sections.model import LossKind, ModelSection

LossKernels = Literal["operators", "compiled", "liger"]
"""Kernels of the cross-entropies of logits and of their gradients: operators of PyTorch, two
kernels that Inductor generates, or Liger's kernel, which computes the head's products, too."""


@dataclass(frozen=True)
class LayerMachine:
    """What a run's layers may use: whether its devices are CUDA's. triton_problem: why Triton
    cannot build kernels there, empty if it can. has_liger: whether liger-kernel is installed, with
    kernels for the model types `liger_models`."""

    is_cuda: bool
    triton_problem: str = ""
    has_liger: bool = False
    liger_models: frozenset[str] = frozenset()


CPU = LayerMachine(is_cuda=False)
ANY_CUDA = LayerMachine(is_cuda=True)
"""A CUDA device that is not here: torch for CUDA brings Triton, and nobody knows of Liger."""


@dataclass(frozen=True)
class FastPath:
    """How the layers of a run compute. kernels, compiles: what is used of ``model.kernels`` and
    ``model.compile``. refused: what ``auto`` did not take, each with the reason."""

    kernels: Literal["none", "liger"]
    compiles: bool
    refused: tuple[str, ...] = ()

    @property
    def fuses_layers(self) -> bool:
        """Whether elementwise operations of the layers are fused."""
        return self.compiles or self.kernels == "liger"

    def loss_kernels(self, loss: LossKind, *, has_plain_entropies: bool) -> LossKernels:
        """Return the kernels of a loss of ``model.loss``. The loss of chunks is compiled where
        layers are compiled. has_plain_entropies: as `ObjectiveSection`."""
        if loss == "liger":
            return "liger"
        is_compiled = self.compiles and loss != "plain" and has_plain_entropies
        return "compiled" if is_compiled else "operators"

    @property
    def words(self) -> str:
        """The kernels that are used, for a log line."""
        if self.kernels == "liger":
            return "by Liger's kernels" + (", compiled" if self.compiles else "")
        return "compiled" if self.compiles else "by single kernels"

    def line(self) -> str:
        """Return what is used, and what ``auto`` refused and why, as one line of a log."""
        text = f"layers: {self.words}"
        return f"{text} (not {'; not '.join(self.refused)})" if self.refused else text


SINGLE_KERNELS = FastPath("none", compiles=False)


def choose_fast_path(
    section: ModelSection,
    facts: Facts,
    machine: LayerMachine,
    model_type: str = "",
    compilation_refusal: str = "",
) -> FastPath:
    """Return how the layers of a run with `section` and `facts` compute on `machine`. Explicit
    settings stay. `compilation_refusal`: why the model's layers are not compiled, found by a
    trial."""
    compiles, is_liger = section.compile == "on", section.kernels == "liger"
    if not machine.is_cuda:
        return FastPath("liger" if is_liger else "none", compiles)
    refused: list[str] = []
    if section.compile == "auto" and not is_liger:
        if reason := _why_not_compiled(facts, machine) or compilation_refusal:
            refused.append(f"compiled: {reason}")
        else:
            compiles = True
    if section.kernels == "auto" and not compiles:
        if reason := _why_not_liger(facts, machine, model_type):
            refused.append(f"by Liger's kernels: {reason}")
        else:
            is_liger = True
    return FastPath("liger" if is_liger else "none", compiles, tuple(refused))


def _why_not_compiled(facts: Facts, machine: LayerMachine) -> str:
    if machine.triton_problem:
        return machine.triton_problem
    if facts.isolates and facts.attention.startswith("flash"):
        return "flash attention takes the lengths of documents, with which graphs change"
    if adds_violation(facts, Facts(compiles="on")):
        return "the run's other settings do not allow it"
    return ""


def _why_not_liger(facts: Facts, machine: LayerMachine, model_type: str) -> str:
    if not machine.has_liger:
        return "liger-kernel is not installed"
    if machine.triton_problem:
        return machine.triton_problem
    if model_type not in machine.liger_models:
        return f"liger-kernel has none for model_type {model_type}"
    if adds_violation(facts, Facts(kernels="liger")):
        return "the run's other settings do not allow them"
    return ""
