"""The section on the tokenizer: tokens that were added to one before the data was tokenized."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from bigtrain.settings.sections.base import Section, refuse_secrets


class TokenizerSection(Section):
    """Tokens added to a tokenizer. `bigtrain tokenizer --config` writes the grown one, the data is
    tokenized with it, and a run compares it with that of the data."""

    base: str | None = Field(
        default=None,
        description="directory, hub name or address of the tokenizer that tokens are added to; "
        "default: model.path",
    )
    add_special_tokens: tuple[str, ...] = Field(
        default=(),
        description="texts that become control tokens, such as <|im_start|>: the text of documents "
        "never becomes them, and decoding can leave them out; their ids come first",
    )
    add_tokens: tuple[str, ...] = Field(
        default=(), description="texts that become one token each, wherever they stand"
    )

    @property
    def added(self) -> tuple[str, ...]:
        """All added texts, in the order of their ids."""
        return (*self.add_special_tokens, *self.add_tokens)

    def key_of(self, text: str) -> str:
        """The setting that names an added text."""
        name = "add_special_tokens" if text in self.add_special_tokens else "add_tokens"
        return f"tokenizer.{name}"

    @field_validator("base")
    @classmethod
    def _shows_no_secret(cls, name: str | None) -> str | None:
        if name is not None:
            refuse_secrets(name)
        return name

    @model_validator(mode="after")
    def _adds_each_text_once(self) -> Self:
        if not self.added:
            raise ValueError(
                "tokenizer adds no tokens -> name them in tokenizer.add_special_tokens or "
                "tokenizer.add_tokens; or leave tokenizer out (data.tokenizer names one that the "
                "data must have been tokenized with)"
            )
        for number, text in enumerate(self.added):
            if not text.strip():
                raise ValueError(
                    f"{self.key_of(text)}: {text!r} must have other characters than space -> "
                    "leave it out"
                )
            if text in self.added[:number]:
                raise ValueError(f"{self.key_of(text)}: {text} is to be added twice -> once")
        return self
