"""Marks around the strings of a conversation, by which they are found in its rendering."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from bigtrain.data.documents.conversations import FLAGS, OTHER_LEARNING, WORDLESS
from bigtrain.data.documents.token_rows import PADDING
from bigtrain.data.tokenizers.chat_template import Messages, Tools

CONTENT, CALLS, TOOLS, REASONING = "content", "tool_calls", "tools", "reasoning"
STRIPPED, IGNORED, UNMARKED = "stripped_reasoning", "message_keys", "unmarked_answers"
COUNTED_ONLY = (STRIPPED, IGNORED, UNMARKED, PADDING)
"""Kinds of parts that are counted and reported, and cause no refusal. The kind of a key of messages
is `IGNORED`, a dot and the key."""
WRITTEN = (CONTENT, CALLS, REASONING)
"""Kinds of parts of a message that a template writes as its text."""
REASONING_KEYS = tuple(key for key in WORDLESS if key != "tool_calls")

FIRST_MARK = 0x100000
MAX_MARKED = 32_000
"""Maximum strings of a conversation that get marks: two code points of plane 16 each."""
_THINKING = re.compile("(<think>|</think>)")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keys of a JSON schema whose value has author-defined names as keys."""
_WORDS = ("description", "title", "enum", "default", "examples", "const")
"""Keys of a JSON schema with author-written strings."""
_READ_KEYS = {
    *("role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS),
    *("weight", *FLAGS, *OTHER_LEARNING),
}
"""Keys of a message that are checked separately, and the id that links a result to a call."""
_TOOL_KEYS = ("tools", "functions")
"""Keys of a message under which some rows have the tools of the conversation."""


@dataclass(frozen=True)
class ChatPart:
    """Part of a conversation, which a template may drop. message: number of the message from 1,
    None for tools. name: of the part in an error; number: of a tool call in a message, or of a
    tool."""

    part_kind: str
    message: int | None
    name: str
    number: int = 0


@dataclass(frozen=True)
class Piece:
    """String of a part. is_key: of an object, marked only at its end, which keeps the sort order.
    is_marked: can be marked; numbers and schema keywords cannot."""

    part: ChatPart
    text: str
    is_key: bool = False
    is_marked: bool = True


@dataclass
class Marking:
    """Copier of JSON values that marks every string and lists it as a `Piece`. only: number of the
    piece to mark; None: every piece."""

    only: int | None = None
    pieces: list[Piece] = field(default_factory=list)

    def text(self, part: ChatPart, value: str, may_think: bool = False) -> str:
        """Return `value` with marks around its text. may_think: text before ``</think>`` is a
        separate piece, which is reasoning."""
        segments, reasoning_end = [value], 0
        if may_think and "</think>" in value:
            segments = _THINKING.split(value)  # also returns the tags
            reasoning_end = len(segments) - 1 - segments[::-1].index("</think>")
        marked = []
        for index, segment in enumerate(segments):
            core = segment.strip()
            if not core or _THINKING.fullmatch(segment):
                marked.append(segment)
                continue
            segment_part = part
            if index < reasoning_end:
                segment_part = ChatPart(REASONING, part.message, f"the reasoning in {part.name}")
            begin_mark, end_mark = self._add(Piece(segment_part, core))
            num_leading = len(segment) - len(segment.lstrip())
            marked += [segment[:num_leading], begin_mark, core, end_mark]
            marked.append(segment[num_leading + len(core) :])
        return "".join(marked)

    def key(self, part: ChatPart, value: str) -> str:
        """Return the key `value` of an object with a mark at its end."""
        return value + self._add(Piece(part, value, is_key=True))[1]

    def plain(self, part: ChatPart, value: object) -> None:
        """Record a value that is searched in its JSON form."""
        literal = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if literal.strip():
            self._add(Piece(part, literal.strip(), is_marked=False))

    def tree(self, part: ChatPart, value: Any, keys: bool = True) -> Any:
        """Return a JSON value with marks in its strings, and in its keys if `keys`."""
        if isinstance(value, str):
            return self.text(part, value)
        if isinstance(value, list):
            return [self.tree(part, item, keys) for item in value]
        if isinstance(value, dict):
            marked: dict[str, Any] = {}
            for key, item in value.items():
                marked_key = self.key(part, key) if keys else key
                is_type = not keys and key == "type"  # a template compares it, and has its values
                marked[marked_key] = item if is_type else self.tree(part, item, keys)
            return marked
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.plain(part, value)
        return value

    def schema(self, part: ChatPart, node: Any) -> Any:
        """Return a JSON schema with marks in the author's names and words."""
        if isinstance(node, list):
            return [self.schema(part, item) for item in node]
        if not isinstance(node, dict):
            return node
        names: dict[str, str] = {}
        marked: dict[str, Any] = {}
        for key, value in node.items():
            if key in _NAMED and isinstance(value, dict):
                names |= {name: self.key(part, name) for name in value}
                marked[key] = {names[name]: self.schema(part, item) for name, item in value.items()}
            elif key in _WORDS:
                marked[key] = self.tree(part, value, keys=False)
            elif isinstance(value, dict | list) and key != "required":  # a schema below
                marked[key] = self.schema(part, value)
            else:
                if isinstance(value, str) and key != "type":
                    self.plain(part, value)
                marked[key] = value
        required = node.get("required")
        if isinstance(required, list):
            marked["required"] = [names.get(r, r) if isinstance(r, str) else r for r in required]
        return marked

    def _add(self, piece: Piece) -> tuple[str, str]:
        """List `piece`; return the marks before and after it, empty if it is not marked."""
        number = len(self.pieces)
        self.pieces.append(piece)
        if not piece.is_marked or number >= MAX_MARKED or self.only not in (None, number):
            return "", ""
        return marks_of(number)


def is_counted_only(part_kind: str) -> bool:
    """Return whether parts of a kind are counted and reported, and cause no refusal."""
    return part_kind.partition(".")[0] in COUNTED_ONLY


def parts_that_are_no_text(messages: Messages) -> list[tuple[str, ChatPart]]:
    """Return the keys of `messages` that may change a rendering and whose values are no text, which
    cannot be marked, each with its part."""
    return [
        (key, _part_of_key(number, key))
        for number, message in enumerate(messages, 1)
        for key, value in message.items()
        if key not in _READ_KEYS and not isinstance(value, str) and value not in (None, [], {})
    ]


def part_of_content(number: int) -> ChatPart:
    """Return the part that is the content of message `number`."""
    return ChatPart(CONTENT, number, f"the content of message {number}")


def _part_of_key(number: int, key: str) -> ChatPart:
    """Return the part of `key` of message `number`, which is not checked separately."""
    part_kind = TOOLS if key in _TOOL_KEYS else f"{IGNORED}.{key}"
    return ChatPart(part_kind, number, f"the key {key} of message {number}")


def marks_of(number: int) -> tuple[str, str]:
    """Return the marks before and after piece `number` of a conversation."""
    return chr(FIRST_MARK + 2 * number), chr(FIRST_MARK + 2 * number + 1)


def marked_conversation(
    marking: Marking, messages: Messages, tools: Tools
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages and tools with the marks of `marking` in their strings."""
    marked = [_marked_message(marking, n, message) for n, message in enumerate(messages, 1)]
    if tools is None:
        return marked, None
    return marked, [_marked_tool(marking, number, tool) for number, tool in enumerate(tools)]


def _marked_message(marking: Marking, number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return message `number` of a conversation with marks around its strings."""
    marked = dict(message)
    for key in REASONING_KEYS:
        if key in message:
            part = ChatPart(REASONING, number, f"the {key} of message {number}")
            marked[key] = marking.tree(part, message[key])
    content = message.get("content")
    part = part_of_content(number)
    if isinstance(content, str):
        marked["content"] = marking.text(part, content, may_think=message["role"] == "assistant")
    elif content is not None:
        marked["content"] = marking.tree(part, content, keys=False)
    for key, value in message.items():
        if key not in _READ_KEYS and isinstance(value, str) and value.strip():
            marked[key] = marking.text(_part_of_key(number, key), value)
    if isinstance(message.get("tool_calls"), list):
        calls = enumerate(message["tool_calls"])
        marked["tool_calls"] = [_marked_call(marking, number, index, c) for index, c in calls]
    return marked


def _marked_call(marking: Marking, number: int, index: int, call: dict[str, Any]) -> dict[str, Any]:
    """Return tool call `index` of message `number` with marks around its strings."""
    # The function may be the call itself.
    function = call["function"] if isinstance(call.get("function"), dict) else call
    part = ChatPart(
        CALLS, number, f"the tool call {function.get('name')!s} of message {number}", index
    )
    marked = dict(function)
    if isinstance(function.get("name"), str):
        marked["name"] = marking.text(part, function["name"])
    if "arguments" in function:
        marked["arguments"] = marking.tree(part, function["arguments"])
    return marked if function is call else {**call, "function": marked}


def _marked_tool(marking: Marking, number: int, tool: dict[str, Any]) -> dict[str, Any]:
    """Return tool `number` of a conversation with marks around its strings."""
    function = tool["function"] if isinstance(tool.get("function"), dict) else tool
    part = ChatPart(TOOLS, None, f"the definition of the tool {function.get('name')!s}", number)
    marked = dict(function)
    for key, value in function.items():
        if key in ("name", "description") and isinstance(value, str):
            marked[key] = marking.text(part, value)
        elif isinstance(value, dict | list):
            marked[key] = marking.schema(part, value)
        elif isinstance(value, str) and key != "type":  # searched without marks
            marking.plain(part, value)
    return marked if function is tool else {**tool, "function": marked}
