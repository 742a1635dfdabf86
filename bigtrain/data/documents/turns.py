"""Messages of a row: roles, ShareGPT's turns, and tool calls that are separate turns. Pure.

A message of any format may be a turn with ``from`` and ``value`` (ShareGPT,
LLaMA-Factory). A call may be a separate turn, whose text is the call's JSON (`CALL_ROLES`); it
becomes a call of the assistant's message before it, as ms-swift and LLaMA-Factory render it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.data.documents.conversations import FLAGS, from_text
from bigtrain.data.documents.exact_json import loads
from bigtrain.data.tokenizers.chat_template import ConversationError

Messages = list[dict[str, Any]]
Roles = Mapping[str, str]
"""User-defined meanings of role names in the data (``--role``)."""

CALL_ROLES = ("function_call", "tool_call")
"""Roles of a turn whose text is the JSON of one or more calls: LLaMA-Factory's, ms-swift's."""
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "bot": "assistant",
    **dict.fromkeys(CALL_ROLES, "assistant"),
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Names of ShareGPT, LLaMA-Factory, Axolotl and ms-swift, and the names that templates use."""
_NOT_OF_TEMPLATES = ("human", "gpt", "chatgpt", "bard", "bing", "tool_response")
_MISSPELT = 0.75
"""Similarity, of difflib, from which a name is taken for a misspelt one: usre is a user."""
PEOPLE = {name: ROLES[name] for name in _NOT_OF_TEMPLATES}
"""Names that no template uses, so that their meaning does not depend on the format."""


def with_roles(value: object, roles: Roles, *, may_be_turns: bool = True) -> object:
    """Return messages with the roles of templates, and calls as keys of messages; anything but a
    list of messages unchanged. may_be_turns: also messages with ``from`` and ``value``."""
    messages = from_text(value)
    if not isinstance(messages, list):
        return messages
    named: list[Any] = []
    for number, message in enumerate(messages, 1):
        if may_be_turns and is_turn(message):
            named.append(message_of_turn(number, message, roles))
        elif isinstance(message, dict) and "role" in message:
            named.append(with_role(number, message, roles))
        else:
            named.append(message)
    return with_joined_calls(named)


def messages_in(value: object) -> object:
    """Return the messages in the JSON text `value`, as a column of csv holds them; anything else
    unchanged."""
    parsed = from_text(value)
    if isinstance(parsed, dict) and isinstance(value, str):
        parsed = [parsed]
    if not isinstance(parsed, list) or not parsed:
        return value
    are_messages = all(isinstance(m, dict) and ("role" in m or is_turn(m)) for m in parsed)
    return parsed if are_messages else value


def is_turn(message: object) -> bool:
    """Return whether `message` has ShareGPT's keys, and no role."""
    if not isinstance(message, dict) or "role" in message:
        return False
    return {"from", "value"} <= message.keys()


def message_of_turn(number: int, turn: Mapping[str, Any], roles: Roles) -> dict[str, Any]:
    """Return turn `number` of ShareGPT as a message. Raise ConversationError for a wrong one."""
    name = str(turn["from"])
    # The user's meaning of the name is a role of templates; other names are looked up in `ROLES`.
    role_or_name = roles.get(name) or name.lower()
    other_fields = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if role_or_name in CALL_ROLES:
        calls = _calls(f"turn {number} is from", name, turn["value"])
        return {"role": "assistant", "tool_calls": calls, _IS_CALL: True, **other_fields}
    if name not in roles and role_or_name not in ROLES:
        raise ConversationError(
            f"turn {number} is from {name!r}, which is not one of {', '.join(ROLES)} -> map it: "
            f"--role '{name}={misspelt_role(name) or 'user'}'"
        )
    role = role_or_name if name in roles else ROLES[role_or_name]
    return {"role": role, "content": turn["value"], **other_fields}


def misspelt_role(name: str) -> str | None:
    """Return the role of `ROLES` that `name` misspells; None for a role of `ROLES`, for a name
    without a similar role, and for a role with a number or a further word (user_2)."""
    if name in ROLES:
        return None
    words = re.fullmatch(r"(?P<role>[a-z]+)[\d_ -].*", name)
    if words is not None and words["role"] in ROLES:
        return None
    matches = difflib.get_close_matches(name.lower(), ROLES, n=1, cutoff=_MISSPELT)
    return matches[0] if matches else None


def with_role(number: int, message: Mapping[str, Any], roles: Roles) -> dict[str, Any]:
    """Return message `number` with its role mapped by `roles` and `PEOPLE`. Raise ConversationError
    for a call that is not one, and for a misspelt role of `ROLES`. A role that only a template
    knows passes."""
    name = message["role"]
    if isinstance(name, str) and name not in roles and (similar_role := misspelt_role(name)):
        raise ConversationError(
            f"message {number} has the role {name!r} -> did you mean {similar_role}? --role "
            f"'{name}={similar_role}' reads it so, and --role '{name}={name}' keeps it"
        )
    mapped_role = roles.get(str(name), name)
    if mapped_role in CALL_ROLES:
        calls = _calls(f"message {number} has the role", str(name), message.get("content"))
        other_fields = {key: value for key, value in message.items() if key != "content"}
        return {**other_fields, "role": "assistant", "tool_calls": calls, _IS_CALL: True}
    return {**message, "role": mapped_role if name in roles else PEOPLE.get(str(name), name)}


_IS_CALL = " call"
"""Key that marks a message that was a turn of calls; `with_joined_calls` removes it."""


def _calls(location: str, role: str, value: object) -> Messages:
    """Return the tool calls in the JSON `value` of a turn of calls. location: beginning of an
    error, which `role` continues."""
    fix = f"-> to treat it as plain text: --role {role}=assistant"
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError as error:
            raise ConversationError(f"{location} {role} and not JSON ({error}) {fix}") from error
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(
        isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls
    ):
        raise ConversationError(
            f"{location} {role} and not the JSON of an object with name and arguments {fix}"
        )
    return [{"type": "function", "function": call} for call in calls]


def with_joined_calls(messages: Sequence[Any]) -> list[Any]:
    """Return `messages` in which turns of calls are part of the assistant's message before them.
    Raise ConversationError if only a turn of calls, or only the message before it, is learned."""
    joined: list[Any] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or _IS_CALL not in message:
            joined.append(message)
            continue
        call = {key: value for key, value in message.items() if key != _IS_CALL}
        before = joined[-1] if joined and isinstance(joined[-1], dict) else {}
        if before.get("role") != "assistant":
            joined.append(call)
            continue
        # Both become one message, whose tokens are learned alike.
        if any(before.get(key) != call.get(key) for key in ("weight", *FLAGS)):
            raise ConversationError(
                f"message {number} is a call of the message before it, and only one of both has "
                "loss -> the same weight, train or loss in both"
            )
        calls = [*(from_text(before.get("tool_calls")) or []), *call["tool_calls"]]  # type: ignore[misc]
        joined[-1] = {**before, **call, "tool_calls": calls}
    return joined
