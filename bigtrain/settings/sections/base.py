"""Base class and checks of every section of the run YAML."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
)

from bigtrain.errors import without_secrets

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Epochs = Annotated[float, Field(gt=0.0)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no NaN or infinity. The text below a field
    describes it in the reference, the schema and commented YAML."""

    # The schema of a section is built with the schema of the run, not at its definition, too: so
    # sections that are defaults are made by `model_construct`, which needs no schema.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the text below each field in the source, by field, also of fields of base classes.
        The source is read at this call, since most programs do not show the texts."""
        from bigtrain.system.arguments import field_texts

        return field_texts(cls, Section)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, text in cls.descriptions().items():
            properties[name]["description"] = text
        return schema

    # One validator of all fields, not two: pydantic reads a signature for every field.
    @field_validator("*", mode="before")
    @classmethod
    def _check_plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse secrets, since settings are recorded, logged and sent to trackers; paths with ~;
        and what pydantic would convert: true to the number 1, and 1, "yes" and "on" to true."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        # A section within checks its own values, so that the error names the key.
        _refuse_secrets(value, in_dictionaries=section_within(annotation) is None)
        if isinstance(value, str) and value.startswith("~/"):
            raise ValueError(
                "must be written out: ~ is expanded by a shell, not in a file -> "
                f"{os.path.expanduser(value)}"
            )
        if annotation is bool:
            if not isinstance(value, bool):
                raise ValueError("must be true or false")
        elif takes_numbers(annotation):
            items = value if isinstance(value, (list, tuple)) else (value,)
            if any(isinstance(item, bool) for item in items):
                words = words_of(annotation)
                choice = word_for_switch(value, words)
                types = " or ".join([*words, "a number"])
                fix = f"did you mean {choice}?" if choice else "write a number"
                raise ValueError(f"must be {types}, not true or false -> {fix}")
        return value


# pydantic reads the signature of this validator for each of 300 fields, a fortieth of a check, and
# Python takes the stored value.
_validator = Section.__dict__["_check_plain_value"].__func__
_validator.__signature__ = inspect.signature(_validator)


def refuse_two_units(section: str, steps: int | None, epochs: float | None) -> None:
    """Raise ValueError for a period that is given in steps and in epochs."""
    if steps is not None and epochs is not None:
        raise ValueError(
            f"{section}.every_epochs = {epochs:g} and {section}.every_steps = {steps} are the same "
            "distance in two units -> keep one of them"
        )


def nearest_multiples(number: int, unit: int) -> str:
    """Return the text that names the multiples of `unit` around `number`, without 0."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section that a field of `annotation` holds; None for any other field."""
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def section_within(annotation: Any) -> type[Section] | None:
    """Return the section that a field of `annotation` holds, also as items of a list or as values
    of a dictionary; None for any other field."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    sections = map(section_within, get_args(annotation))
    return next((section for section in sections if section is not None), None)


def words_of(annotation: Any) -> list[str]:
    """Return the words that a field of `annotation` takes, in every branch of a union."""
    if get_origin(annotation) is Literal:
        return [word for word in get_args(annotation) if isinstance(word, str)]
    return [word for branch in get_args(annotation) for word in words_of(branch)]


def word_for_switch(value: object, words: Sequence[str]) -> str | None:
    """Return the word of `words` that a user means by true or false, on or off, yes or no; None for
    any other value, or if no word of `words` has this meaning."""
    words_by_switch = {
        **dict.fromkeys(("true", "on", "yes"), ("on", "full", "auto")),
        **dict.fromkeys(("false", "off", "no"), ("off", "none")),
    }
    candidates = words_by_switch.get(str(value).lower(), ())
    return next((word for word in candidates if word in words), None)


def takes_numbers(annotation: Any) -> bool:
    """Return whether a field of `annotation` holds numbers."""
    return annotation in (int, float) or any(map(takes_numbers, get_args(annotation)))


def _refuse_secrets(value: Any, *, in_dictionaries: bool) -> None:
    """Raise ValueError for an address with a password or a signature, in lists too, and with
    `in_dictionaries` in values of dictionaries."""
    if isinstance(value, dict) and in_dictionaries:
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _refuse_secrets(item, in_dictionaries=in_dictionaries)
    elif isinstance(value, str) and without_secrets(value) != value:
        raise ValueError(
            "contains a password or a signature, and settings are recorded and logged -> pass "
            "credentials by the environment (AWS_ACCESS_KEY_ID, ~/.netrc, ...)"
        )
