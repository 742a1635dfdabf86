"""Names of user code in the run YAML, and the section of callbacks."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, JsonValue, WithJsonSchema, field_validator

from bigtrain.settings.sections.base import Section

_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"


GIVEN = "bigtrain:given"
"""``data.samples.type`` of an object that a program passes to `bigtrain.train_run`."""


def is_imported(name: str) -> bool:
    """Return whether `name` has the form of user code, ``package.module:Name``."""
    return re.match(_PATTERN, name) is not None


def _check_imported_name(name: str) -> str:
    if not is_imported(name):
        raise ValueError("must name code of yours as package.module:Name")
    return name


ImportedName = Annotated[
    str,
    AfterValidator(_check_imported_name),
    WithJsonSchema({"type": "string", "pattern": _PATTERN}),
]
"""Name of user code: ``package.module:Name``."""

CodeSettings = Annotated[dict[str, JsonValue], WithJsonSchema({"type": "object"})]
"""Arguments of user code, by name: plain data, as YAML and checkpoints hold it."""


def known_or_imported(name: object, known_names: Sequence[str]) -> object:
    """Return `name`. Raises ValueError if it is neither one of `known_names` nor user code."""
    if isinstance(name, str) and name not in known_names and not is_imported(name):
        quoted = [f"'{known_name}'" for known_name in known_names]
        choices = f"{', '.join(quoted[:-1])} or {quoted[-1]}"
        raise ValueError(f"Input should be {choices}, or code of yours as package.module:Name")
    return name


class SamplesSection(Section):
    """Training samples from code of yours, in the order of bigtrain, or of a stream in its own. See
    docs/howto/extend.md."""

    type: ImportedName
    """class of yours, as package.module:Class, with __len__ and __getitem__, or a stream with
    __iter__, state_dict and load_state_dict; an item is a sample of at most batch.sequence_length
    + 1 tokens"""
    settings: CodeSettings = Field(default_factory=dict)
    """arguments of its constructor, by name"""


class WebhookSettings(Section):
    """Settings of the callback `webhook`."""

    url_env: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] = "BIGTRAIN_WEBHOOK_URL"
    """environment variable of the main rank with the address, which is a secret"""
    url_file: Annotated[str, Field(pattern="^[^:]+$")] | None = None
    """file with the address, on the host of the main rank; instead of url_env"""
    stall_seconds: Annotated[float, Field(gt=0)] | None = 1800.0
    """without a finished step, after which the run is reported as stalled, once until its next
    step; evaluations, saves and the start count; null: never"""
    timeout_seconds: Annotated[float, Field(gt=0)] = 10.0
    """for one message to be accepted"""


class PrometheusSettings(Section):
    """Settings of the callback `prometheus`."""

    port: Annotated[int, Field(ge=1, le=65535)] = 9464
    """of the endpoint, on the host of the main rank"""
    address: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """that it listens at, by default for this host only; 0.0.0.0: all addresses, where every host
    that reaches this one can read the metrics"""


class NoSettings(Section):
    """Settings of a callback that has none."""


KnownCallback = Literal["webhook", "prometheus", "opentelemetry", "trainjob"]


@dataclass(frozen=True)
class ShippedCallback:
    """A callback of bigtrain. code: its class, as user code is named. modules: imported ones, of
    the extra with the callback's name."""

    code: str
    settings: type[Section] = NoSettings
    modules: tuple[str, ...] = ()


SHIPPED_CALLBACKS: Mapping[str, ShippedCallback] = MappingProxyType(
    {
        "webhook": ShippedCallback("bigtrain.run.shipped.webhook:Webhook", WebhookSettings),
        "prometheus": ShippedCallback(
            "bigtrain.run.shipped.prometheus:Prometheus", PrometheusSettings, ("prometheus_client",)
        ),
        "opentelemetry": ShippedCallback(
            "bigtrain.run.shipped.opentelemetry:OpenTelemetry",
            modules=("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
        ),
        "trainjob": ShippedCallback("bigtrain.run.shipped.trainjob:TrainJob"),
    }
)
"""By the name that users type."""


class CallbackSection(Section):
    """Code that is called at points of the run. See docs/howto/extend.md."""

    type: KnownCallback | ImportedName
    """webhook (messages when the run ends, dies or stalls), prometheus, opentelemetry (metrics) or
    trainjob (progress for Kubeflow Trainer); or, as package.module:Class, a class of yours with one
    or more of the methods start, step, evaluation, checkpoint, end and close"""
    settings: CodeSettings = Field(default_factory=dict)
    """of a callback of bigtrain, or arguments of your constructor, by name"""

    @field_validator("type", mode="before")
    @classmethod
    def _is_known(cls, name: object) -> object:
        return known_or_imported(name, get_args(KnownCallback))
