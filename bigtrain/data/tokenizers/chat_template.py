"""Chat templates: rendering of conversations to text, with the assistant's character ranges."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from bigtrain.errors import first_line

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None
CHAT_TEMPLATE_NAME = "chat_template.jinja"
"""Name used by transformers, which prefers this file to the one in tokenizer_config.json."""
_GENERATION = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
"""Pattern used by transformers."""
_RENDERING = Lock()
"""transformers stores the ranges of a rendering in the compiled template, shared by threads."""


class ConversationError(Exception):
    """Unusable conversation: the text is the reason, for the list of bad documents."""


class TemplateRefusal(ConversationError):
    """Exception of a template: `reason` is its type and text. by_author: raised by the template's
    own ``raise_exception``, not by a fault."""

    def __init__(self, error: Exception) -> None:
        self.reason = f"{type(error).__name__}: {first_line(error)}"
        self.by_author = type(error).__name__ == "TemplateError"
        super().__init__(f"the chat template refuses it: {self.reason}")


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template, rendered by transformers. Can be pickled. source: the Jinja text;
    source_with_tools: for conversations with tools. variables: the special tokens by name.
    literals: the strings in both sources."""

    source: str
    source_with_tools: str
    variables: dict[str, str]
    literals: frozenset[str]

    @property
    def hash(self) -> str:
        """SHA-256 of all inputs of a rendering, as 64 hexadecimal digits."""
        parts = [self.source, self.source_with_tools, self.variables]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def marks_assistant(self, tools: object) -> bool:
        """Return whether the template itself marks the assistant's text by ``{% generation %}``."""
        return _GENERATION.search(self._source(tools)) is not None

    def render(
        self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and its character ranges in ``{% generation %}`` blocks. Raises
        ConversationError."""
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        try:
            with _RENDERING:
                texts, ranges = render(
                    conversations=[list(messages)],
                    tools=tools,
                    chat_template=self._source(tools),
                    return_assistant_tokens_mask=self.marks_assistant(tools),
                    add_generation_prompt=add_generation_prompt,
                    **self.variables,
                )
        except Exception as error:  # a foreign template may raise anything
            raise TemplateRefusal(error) from error
        return texts[0], ranges[0] if ranges else []

    def supports_calls(self, tools: object) -> bool:
        """Return whether the template reads the tool calls of messages."""
        return "tool_calls" in self._source(tools)

    def save(self, directory: Path) -> None:
        (directory / CHAT_TEMPLATE_NAME).write_text(self.source, encoding="utf-8")

    def _source(self, tools: object) -> str:
        return self.source if tools is None else self.source_with_tools
