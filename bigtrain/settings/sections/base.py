"""Base class and checks of every section of the run YAML."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from bigtrain.system.storage.stores import is_address, without_secrets

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic converts true to 1, and 1, "yes" and "on" to true.
        annotation = cls.model_fields[str(info.field_name)].annotation
        if annotation is bool:
            if not isinstance(value, bool):
                raise ValueError("must be true or false")
        elif _takes_numbers(annotation):
            items = value if isinstance(value, (list, tuple)) else (value,)
            if any(isinstance(item, bool) for item in items):
                raise ValueError("must be a number, not true or false")
        return value


def _takes_numbers(annotation: Any) -> bool:
    return annotation in (int, float) or any(map(_takes_numbers, get_args(annotation)))


def refuse_secrets(address: str) -> None:
    """Raise ValueError for an address with a password or a signature: settings are recorded."""
    if is_address(address) and without_secrets(address) != address:
        raise ValueError(
            "contains a password or a signature, and settings are recorded and logged -> pass "
            "credentials by the environment (AWS_ACCESS_KEY_ID, ~/.netrc, ...)"
        )
