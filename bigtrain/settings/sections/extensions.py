"""Names of user code in the run YAML, and the section of callbacks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, WithJsonSchema

from bigtrain.settings.sections.base import Section

_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"


GIVEN = "bigtrain:given"
"""``data.samples.type`` of an object that a program passes to `bigtrain.train_run`."""


def is_imported(name: str) -> bool:
    """Return whether `name` has the form of user code, ``package.module:Name``."""
    return re.match(_PATTERN, name) is not None


def _imported(name: str) -> str:
    if not is_imported(name):
        raise ValueError("must name code of yours as package.module:Name")
    return name


ImportedName = Annotated[
    str, AfterValidator(_imported), WithJsonSchema({"type": "string", "pattern": _PATTERN})
]
"""Name of user code: ``package.module:Name``."""

CodeSettings = Annotated[dict[str, JsonValue], WithJsonSchema({"type": "object"})]
"""Arguments of user code, by name: plain data, as YAML and checkpoints hold it."""


def known_or_imported(name: object, known: Sequence[str]) -> object:
    """Return `name`. Raises ValueError if it is neither one of `known` nor user code."""
    if isinstance(name, str) and name not in known and not is_imported(name):
        quoted = [f"'{one}'" for one in known]
        choices = f"{', '.join(quoted[:-1])} or {quoted[-1]}"
        raise ValueError(f"Input should be {choices}, or code of yours as package.module:Name")
    return name


class SamplesSection(Section):
    """Training samples from code of yours, in the order of bigtrain. See docs/howto/extend.md."""

    type: ImportedName
    """class of yours with __len__ and __getitem__, as package.module:Class; an item is a sample of
    at most batch.sequence_length + 1 tokens"""
    settings: CodeSettings = Field(default_factory=dict)
    """arguments of its constructor, by name"""


class CallbackSection(Section):
    """Code of yours that is called at points of the run. See docs/howto/extend.md."""

    type: ImportedName
    """class with one or more of the methods start, step, evaluation, checkpoint and end, as
    package.module:Class"""
    settings: CodeSettings = Field(default_factory=dict)
    """arguments of its constructor, by name"""
