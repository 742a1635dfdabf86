"""Choices for the layers of a run's model: how its loss is computed, which layers compute in
float8, and which in tiles. Only an unusual choice loads the code that it installs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from transformers import PreTrainedModel

from bigtrain.models.layers.adapter_names import computing_modules
from bigtrain.models.layers.token_loss import IGNORED_LABEL, NO_TERMS, LossTerms
from bigtrain.settings.sections.model import Float8

if TYPE_CHECKING:
    from bigtrain.models.layers.chunked_loss import ChunkedLoss, Fused


@dataclass(frozen=True)
class LossPlan:
    """Choice of the loss computation, and why, as a human-readable line. chunk_tokens: tokens whose
    logits exist at a time. softcap: of the logits, for Liger's kernel."""

    kind: Literal["plain", "chunked", "liger"]
    chunk_tokens: int
    reason: str
    softcap: float | None = None

    def install(self, model: PreTrainedModel, terms: LossTerms = NO_TERMS) -> ChunkedLoss | None:
        """Make `model` compute its loss, with `terms`, in this way; None if it still returns
        logits."""
        if self.kind == "plain":
            return None
        from bigtrain.models.layers.chunked_loss import ChunkedLoss

        fused: Fused | None = None
        if self.kind == "liger":
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            fused = LigerFusedLinearCrossEntropyLoss(
                ignore_index=IGNORED_LABEL, reduction="sum", softcap=self.softcap
            )
        return ChunkedLoss(model, self.chunk_tokens, fused, terms)


@dataclass(frozen=True)
class Float8Plan:
    """Linear layers whose products are in float8, by names in the model without adapters, and a
    human-readable line about them. is_emulated: for a CPU."""

    recipe: Float8 = "none"
    names: tuple[str, ...] = ()
    is_emulated: bool = False
    reason: str = ""


NO_FLOAT8 = Float8Plan()


@dataclass(frozen=True)
class TilePlan:
    """The modules of a run's model that are computed in tiles of `tile_tokens` tokens at most, and
    why, as a human-readable line."""

    modules: tuple[str, ...] = ()
    tile_tokens: int = 1
    reason: str = ""

    def install(self, model: PreTrainedModel) -> None:
        """Make the modules compute in tiles. Call it when the model is complete: split, sharded,
        with adapters and kernels. Skips modules of other pipeline stages."""
        if not self.modules:
            return
        from bigtrain.models.layers.tiled_mlp import Tiles

        modules = computing_modules(model)
        for name in self.modules:
            module = modules.get(name)
            if module is not None and not getattr(module, "is_placeholder", False):
                Tiles(module, self.tile_tokens)


NO_TILES = TilePlan()


@dataclass(frozen=True)
class CompilationPlan:
    """Whether the layers of a run's model may be compiled. refusal: why ``auto`` does not compile
    them. reason: a human-readable line about layers that are compiled nevertheless."""

    refusal: str = ""
    reason: str = ""


MAY_COMPILE = CompilationPlan()
