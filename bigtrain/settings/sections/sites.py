"""The section on sites: distant worlds that train one model with rare communication (DiLoCo)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bigtrain.settings.sections.base import NonNegativeInt, PositiveInt, Section
from bigtrain.settings.sections.failures import Seconds

_FEW_SITES = 4
_LR_OF_FEW, _LR_OF_MANY = 0.6, 0.8
_MOMENTUM = 0.9
_LAST_PORT = (1 << 16) - 1


class OuterSection(Section):
    """The outer optimizer; its gradient is the mean of all sites' changes of the weights.

    Nesterov as `torch.optim.SGD` has it, in DiLoCo (Douillard et al. 2023, arXiv 2311.08105).
    """

    type: Literal["nesterov", "average", "momentum"] = Field(
        default="nesterov",
        description="average is local SGD: the mean of the sites' weights, or lr of the way there; "
        "momentum is SGD with momentum, nesterov with Nesterov's",
    )
    lr: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="outer learning rate, constant; default: 1 for average, else by the number of "
        "sites, 0.6 up to 4 and 0.8 beyond, which no size of model changes (Charles et al. 2025, "
        "arXiv 2503.09799)",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=None, description="of nesterov and momentum; default: 0.9"
    )

    @model_validator(mode="after")
    def _average_has_no_momentum(self) -> Self:
        if self.type == "average" and self.momentum is not None:
            raise ValueError(
                f"sites.outer.momentum = {self.momentum} is set, and sites.outer.type = average "
                "has none -> type: momentum, or take it out"
            )
        return self

    @property
    def has_momentum(self) -> bool:
        """Whether there is a state beside the global weights."""
        return self.type != "average"

    @property
    def decay(self) -> float:
        """The momentum in effect."""
        return _MOMENTUM if self.momentum is None else self.momentum


class SitesSection(Section):
    """Local training with a rare outer step (DiLoCo): each site is a complete run of its own, with
    its own launcher and engine, and `inner_steps` apart they agree on one set of weights."""

    count: PositiveInt = Field(description="sites that train together")
    index: NonNegativeInt = Field(default=0, description="which of them this one is, from 0")
    address: str | None = Field(
        default=None,
        description="host:port of the sites' rendezvous, the same for all: the host of site 0's "
        "main rank, as the other sites reach it; required for two sites or more",
    )
    inner_steps: PositiveInt = Field(
        description="optimizer steps of each site between two outer steps; the last window of a "
        "run is shorter where train.steps is no multiple"
    )
    outer: OuterSection = OuterSection()
    codec: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="what sites send: float32 weights, or differences to the global weights "
        "rounded to bfloat16",
    )
    timeout_seconds: Seconds = Field(
        default=600.0,
        description="for the other sites at the start and at each outer step, and for each "
        "transfer, after which a site ends and names those it waited for",
    )

    @model_validator(mode="after")
    def _index_is_one_of_them(self) -> Self:
        if self.index >= self.count:
            raise ValueError(
                f"sites.index = {self.index} is none of sites.count = {self.count} sites, counted "
                f"from 0 -> 0 to {self.count - 1}"
            )
        return self

    @model_validator(mode="after")
    def _they_can_meet(self) -> Self:
        if self.address is None:
            if self.count > 1:
                raise ValueError(
                    f"sites.address is missing, and sites.count = {self.count} sites have to meet "
                    "-> host:port of site 0's main rank"
                )
            return self
        host, _, port = self.address.rpartition(":")
        if not host.strip("[]") or not port.isdecimal() or not 1 <= int(port) <= _LAST_PORT:
            raise ValueError(
                f"sites.address = {self.address!r} is not host:port with a port from 1 to "
                f"{_LAST_PORT} -> such as 10.0.0.1:29600"
            )
        return self

    @property
    def host(self) -> str:
        """The host in `address`, which must be set; an IPv6 address without its brackets."""
        assert self.address is not None
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port in `address`, which must be set."""
        assert self.address is not None
        return int(self.address.rpartition(":")[2])

    @property
    def outer_lr(self) -> float:
        """The outer learning rate in effect."""
        if self.outer.lr is not None:
            return self.outer.lr
        if self.outer.type == "average":
            return 1.0
        return _LR_OF_FEW if self.count <= _FEW_SITES else _LR_OF_MANY

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether an outer step follows optimizer step `step` of `last_step`, from 1."""
        return step % self.inner_steps == 0 or step == last_step
