"""The section on sites: distant worlds that train one model with rare communication (DiLoCo)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from bigtrain.settings.sections.base import (
    NonNegativeInt,
    PositiveInt,
    Section,
    nearest_multiples,
)
from bigtrain.settings.sections.running import Seconds

ONE_SITE = "not the weights with which the run ended on its sites"
"""Text on weights of one site that cannot pass as the weights of a run of several sites."""
_FEW_SITES = 4
_LR_OF_FEW, _LR_OF_MANY = 0.6, 0.8
_MOMENTUM = 0.9


class OuterSection(Section):
    """The outer optimizer; its gradient is the mean of all sites' changes of the weights.

    Nesterov as `torch.optim.SGD` has it, in DiLoCo (Douillard et al. 2023, arXiv 2311.08105).
    """

    type: Literal["nesterov", "average", "momentum"] = "nesterov"
    """average is local SGD: the mean of the sites' weights, or lr of the way there; momentum is SGD
    with momentum, nesterov with Nesterov's"""
    lr: Annotated[float, Field(gt=0)] | None = None
    """outer learning rate, constant; default: 1 for average, else by the number of sites, 0.6 up to
    4 and 0.8 beyond, which no size of model changes (Charles et al. 2025, arXiv 2503.09799)"""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """of nesterov and momentum; default: 0.9"""

    @model_validator(mode="after")
    def _average_has_no_momentum(self) -> Self:
        if self.type == "average" and self.momentum is not None:
            raise ValueError(
                f"sites.outer.momentum = {self.momentum} is set, and sites.outer.type = average "
                "has none -> type: momentum, or omit it"
            )
        return self

    @property
    def has_momentum(self) -> bool:
        """Whether there is a state in addition to the global weights."""
        return self.type != "average"

    @property
    def decay(self) -> float:
        """The momentum in effect."""
        return _MOMENTUM if self.momentum is None else self.momentum


class SitesSection(Section):
    """Local training with a rare outer step (DiLoCo): each site is a complete run of its own, with
    its own launcher and engine, and `inner_steps` apart they agree on one set of weights."""

    count: PositiveInt
    """sites that train together"""
    index: NonNegativeInt = 0
    """which of them this one is, from 0"""
    server: str | None = None
    """http://host:port or https://host:port of the `bigtrain outer-server` at which sites meet, the
    same for all; required for two sites or more"""
    token_file: str | None = None
    """file with the server's token; required with server"""
    certificate_file: str | None = None
    """certificate of an https server, or of its issuer; default: the system's"""
    exchange: Literal["server", "direct"] = "server"
    """how weights travel: to the server, which keeps the global weights and the outer momentum, so
    that sites open connections only outwards; or direct, from rank to rank between sites that the
    server introduces, whose hosts must reach each other"""
    start_server: bool = False
    """site 0's main rank starts the server, at the port of server, in
    output.directory/outer_server; it ends when all sites have left"""
    inner_steps: PositiveInt
    """optimizer steps of each site between two outer steps; the last window of a run is shorter
    where train.steps is not a multiple"""
    shares: tuple[PositiveInt, ...] | None = None
    """how the samples of a step are divided among the sites, by their speed: [2, 1] gives the first
    twice as many; its weights count so much in the mean. Default: equally"""
    outer: OuterSection = OuterSection.model_construct()
    codec: Literal["float32", "bfloat16", "int8", "int4"] = "float32"
    """what sites send: float32 weights, or differences to the global weights rounded to bfloat16,
    or to integers in blocks with a scale each (256 elements of int8, 64 of int4); what integers
    lose is added to what is sent next"""
    fragments: PositiveInt = 1
    """parts of the model that are exchanged in turn, inner_steps / fragments steps apart (Streaming
    DiLoCo, Douillard et al. 2025, arXiv 2501.18512): layers in turn, what is in no layer with the
    first; divides inner_steps"""
    overlap_steps: NonNegativeInt = 0
    """steps during the exchange of a fragment, before it takes effect (the paper's tau); less than
    inner_steps / fragments"""
    mixing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """share of its own weights that a site keeps when a fragment takes effect (the paper's alpha);
    after the last step none"""
    timeout_seconds: Seconds = 600.0
    """that sites wait for each other at the start, at each outer step, and within a transfer; then
    they continue without the missing ones, which a new run names and ends"""

    @model_validator(mode="after")
    def _index_is_below_count(self) -> Self:
        if self.index >= self.count:
            raise ValueError(
                f"sites.index = {self.index} is none of sites.count = {self.count} sites, counted "
                f"from 0 -> 0 to {self.count - 1}"
            )
        return self

    @model_validator(mode="after")
    def _every_site_has_a_share(self) -> Self:
        if self.shares is not None and len(self.shares) != self.count:
            raise ValueError(
                f"sites.shares = {list(self.shares)} has {len(self.shares)} numbers for "
                f"sites.count = {self.count} sites -> one for each"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _former_address_is_refused(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "address" in values:
            raise ValueError(
                f"sites.address = {values['address']!r} no longer exists: sites meet at an outer "
                "server -> sites.server: http://HOST:29700 and sites.token_file; with "
                "sites.exchange: direct and sites.start_server: true, site 0 starts it and weights "
                "travel between the sites as before"
            )
        return values

    @model_validator(mode="after")
    def _sites_have_a_server(self) -> Self:
        if self.server is not None:
            self._check_server(self.server)
        elif self.count > 1:
            raise ValueError(
                f"sites.server is missing, and sites.count = {self.count} sites have to meet -> "
                "http://HOST:PORT of a `bigtrain outer-server`, or of site 0 with "
                "sites.start_server: true"
            )
        elif self.start_server:
            raise ValueError(
                "sites.start_server = true needs the address at which sites meet -> sites.server: "
                "http://HOST:PORT of site 0, or omit sites.start_server"
            )
        return self

    def _check_server(self, server: str) -> None:
        """Raise ValueError if `server` is not an address, or for options that it excludes."""
        url = urlsplit(server)
        try:
            port = url.port
        except ValueError:  # not a number
            port = None
        if url.scheme not in ("http", "https") or not url.hostname or not port or url.path:
            raise ValueError(
                f"sites.server = {server!r} is not http://host:port or https://host:port -> such "
                "as https://10.0.0.1:29700"
            )
        if self.token_file is None:
            raise ValueError(
                f"sites.token_file is missing, and the server at {server} answers only sites that "
                "have its token -> the file that it was started with (--token-file)"
            )
        if self.start_server and url.scheme == "https":
            raise ValueError(
                f"sites.server = {server!r} is https, and sites.start_server = true starts a "
                "server without a certificate -> http://HOST:PORT, or start it yourself: "
                "`bigtrain outer-server` with --certificate and --key"
            )
        has_fragments = self.fragments > 1 or self.overlap_steps or self.mixing
        if self.exchange == "server" and has_fragments:
            raise ValueError(
                f"sites.fragments = {self.fragments}, overlap_steps = {self.overlap_steps}, mixing "
                f"= {self.mixing:g} with sites.exchange = 'server': a server exchanges complete "
                "models -> fragments: 1, overlap_steps: 0, mixing: 0, or sites.exchange: direct"
            )

    @model_validator(mode="after")
    def _fragments_take_turns(self) -> Self:
        steps, fragments = self.inner_steps, self.fragments
        if steps % fragments:
            divisors = [n for n in range(1, steps + 1) if steps % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - fragments))
            raise ValueError(
                f"sites.fragments = {fragments} does not divide sites.inner_steps = {steps} -> "
                f"fragments: {nearest}, or inner_steps: {nearest_multiples(steps, fragments)}"
            )
        if self.overlap_steps >= self.steps_between:
            raise ValueError(
                f"sites.overlap_steps = {self.overlap_steps} is not less than sites.inner_steps / "
                f"sites.fragments = {self.steps_between}: a fragment would still be under way when "
                f"the next one is sent -> {self.steps_between - 1} or less"
            )
        return self

    @property
    def server_place(self) -> tuple[str, int]:
        """Host and port of the server, which must be set."""
        url = urlsplit(self.server or "")
        assert url.hostname
        assert url.port
        return url.hostname, url.port

    @property
    def server_holds_weights(self) -> bool:
        """Whether the server keeps the global weights and the outer momentum."""
        return self.server is not None and self.exchange == "server"

    @property
    def outer_lr(self) -> float:
        """The outer learning rate in effect."""
        if self.outer.lr is not None:
            return self.outer.lr
        if self.outer.type == "average":
            return 1.0
        return _LR_OF_FEW if self.count <= _FEW_SITES else _LR_OF_MANY

    def weights(self) -> tuple[int, ...]:
        """Return the weight of each site in a mean over the sites."""
        return self.shares or (1,) * self.count

    @property
    def steps_between(self) -> int:
        """Optimizer steps between two outer steps."""
        return self.inner_steps // self.fragments

    def sent_after(self, step: int, last_step: int) -> range:
        """Return the fragments that sites send after optimizer step `step` (from 1): the next one
        in turn every `steps_between` steps, all fragments after `last_step`."""
        if step == last_step:
            return range(self.fragments)
        if step % self.steps_between:
            return range(0)
        fragment = (step // self.steps_between - 1) % self.fragments
        return range(fragment, fragment + 1)

    def merged_after(self, sent_step: int) -> int:
        """Return the step after which fragments that were sent after `sent_step` take effect."""
        return sent_step + self.overlap_steps
