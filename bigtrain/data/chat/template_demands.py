"""Rendering of a conversation in the form that the chat template accepts, or what it demands.

Templates raise any exception: by their author ("Conversation roles must alternate") or by
a fault ("list object has no element 0"). The error names the fewest changes with which the template
accepts the messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

from bigtrain.data.documents.conversations import RESULTS
from bigtrain.data.tokenizers.chat_template import (
    ChatTemplate,
    ConversationError,
    Messages,
    TemplateRefusal,
    Tools,
)

OTHER_TEMPLATE = "use a template for such messages: --chat-template FILE"
MAX_CHANGES = 3
"""Maximum changes of a conversation that are tested together."""
SHOWN_ROLES = 8


class AcceptedRendering(NamedTuple):
    """Messages in the form that the template accepts, their rendering and its blocks."""

    messages: list[dict[str, Any]]
    text: str
    blocks: list[tuple[int, int]]


def render_accepted(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: Any
) -> AcceptedRendering:
    """Return the rendering of `messages`. Some templates (DeepSeek's) require tool calls in
    OpenAI's format: arguments as JSON text, and null as the content. Raises ConversationError if
    the template accepts neither."""
    try:
        return AcceptedRendering(messages, *template.render(messages, tools))
    except TemplateRefusal as refusal:
        if any(message.get("tool_calls") for message in messages):
            openai_messages = [_in_openai_format(message) for message in messages]
            with suppress(TemplateRefusal):
                return AcceptedRendering(openai_messages, *template.render(openai_messages, tools))
        raise explained_error(template, messages, tools, refusal) from refusal


def _in_openai_format(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with arguments of tool calls as JSON text, and null for empty content."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            call = {"type": "function", **call, "function": {**function, "arguments": text}}
        calls.append(call)
    return {**message, "content": message.get("content") or None, "tool_calls": calls}


def explained_error(
    template: ChatTemplate, messages: Messages, tools: Tools, refusal: TemplateRefusal
) -> ConversationError:
    """Return the error for a conversation that the template refuses: the exception, the changes
    with which it would be accepted, and how to make them."""
    if any(m.get("tool_calls") for m in messages) and not template.supports_calls(tools):
        return ConversationError(
            f"{refusal}, which does not support tool calls -> {OTHER_TEMPLATE}"
        )
    for changed in _changed(messages, tools):
        with suppress(TemplateRefusal):
            template.render([message.content for message in changed.messages], changed.tools)
            demands, fixes = ", ".join(changed.demands), "; ".join(changed.fixes)
            return ConversationError(
                f"{refusal}; the template accepts these messages {demands} -> {fixes}; "
                f"or {OTHER_TEMPLATE}; or skip such documents: --skip-bad"
            )
    roles = ", ".join(message["role"] for message in messages[:SHOWN_ROLES])
    roles += ", ..." if len(messages) > SHOWN_ROLES else ""
    # The author of the template may refuse few rows, which is no reason for another template.
    fix = "" if refusal.by_author else f" -> {OTHER_TEMPLATE}"
    return ConversationError(f"{refusal} (roles: {roles}){fix}")


@dataclass(frozen=True)
class _Numbered:
    """Message and its number in the user's conversation; 0 for an added one."""

    number: int
    content: dict[str, Any]

    @property
    def role(self) -> str:
        return str(self.content["role"])

    @property
    def name(self) -> str:
        return f"message {self.number} ({self.role})"


@dataclass(frozen=True)
class _Changed:
    """Conversation after changes, their `demands` and their `fixes` in words of an error."""

    messages: Sequence[_Numbered]
    tools: Tools
    demands: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()

    def by(self, demand: str, fix: str, messages: Sequence[_Numbered]) -> _Changed:
        return replace(
            self, messages=messages, demands=(*self.demands, demand), fixes=(*self.fixes, fix)
        )


def _changed(messages: Messages, tools: Tools) -> Iterator[_Changed]:
    """Yield the conversations after one change of `CHANGES`, then after each combination of more.
    A change that does not apply returns None."""
    conversation = _Changed([_Numbered(n, message) for n, message in enumerate(messages, 1)], tools)
    for size in range(1, MAX_CHANGES + 1):
        for changes in combinations(CHANGES, size):
            changed: _Changed | None = conversation
            for change in changes:
                changed = None if changed is None else change(changed)
            if changed is not None:
                yield changed


def _begin_with_user(conversation: _Changed) -> _Changed | None:
    messages = conversation.messages
    first_other = next((n for n, m in enumerate(messages) if not _is_system(m)), len(messages))
    if first_other == len(messages) or messages[first_other].role == "user":
        return None
    added = _Numbered(0, {"role": "user", "content": "a"})
    return conversation.by(
        "after a message of the user",
        f"put a message of the user before {messages[first_other].name}",
        [*messages[:first_other], added, *messages[first_other:]],
    )


def _begin_with_system(conversation: _Changed) -> _Changed | None:
    system_messages = [message for message in conversation.messages if _is_system(message)]
    other_messages = [message for message in conversation.messages if not _is_system(message)]
    reordered = [*system_messages, *other_messages]
    if reordered == [*conversation.messages]:
        return None
    # The first system message that is not at its place: the first one after another message.
    first_other = next(n for n, m in enumerate(conversation.messages) if not _is_system(m))
    late = next(m for m in conversation.messages[first_other:] if _is_system(m))
    return conversation.by(
        "with the system message first", f"move {late.name} to the start", reordered
    )


def _omit_system(conversation: _Changed) -> _Changed | None:
    system_messages = [message for message in conversation.messages if _is_system(message)]
    if not system_messages:
        return None
    return conversation.by(
        "without a system message",
        f"put the text of {system_messages[0].name} into a message of the user",
        [message for message in conversation.messages if not _is_system(message)],
    )


def _join_neighbours(conversation: _Changed) -> _Changed | None:
    joined: list[_Numbered] = []
    neighbours: list[tuple[_Numbered, _Numbered]] = []
    for message in conversation.messages:
        is_plain = message.role not in RESULTS and not message.content.get("tool_calls")
        if joined and is_plain and joined[-1].role == message.role:
            neighbours.append((joined[-1], message))
        else:
            joined.append(message)
    if not neighbours:
        return None
    first, second = neighbours[0]
    return conversation.by(
        "with alternating roles",
        f"join messages {first.number} and {second.number}, both of role {first.role}",
        joined,
    )


def _omit_tools(conversation: _Changed) -> _Changed | None:
    has_calls = any(message.content.get("tool_calls") for message in conversation.messages)
    if not has_calls and not conversation.tools:
        return None
    # A message of calls may have no content, which a template could refuse.
    remaining = [
        replace(message, content={"content": "a", **message.content, "tool_calls": None})
        for message in conversation.messages
        if message.role not in RESULTS
    ]
    without_calls = conversation.by("without tools and calls", "remove tools and calls", remaining)
    return replace(without_calls, tools=None)


def _is_system(message: _Numbered) -> bool:
    return message.role in ("system", "developer")


CHANGES: tuple[Callable[[_Changed], _Changed | None], ...] = (
    _begin_with_user,
    _begin_with_system,
    _omit_system,
    _join_neighbours,
    _omit_tools,
)
