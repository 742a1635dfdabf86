"""Parts of a conversation in its rendering: their characters, and parts that a template drops.

Every string of a conversation gets a pair of unique private-use characters around its text, and the
conversation is rendered again. If the rendering contains both characters, the template wrote the
string, however short or escaped, and its characters are between them. Without the characters the
rendering must equal the first one; a template that inspects strings (``startswith``) may render
them differently. Then each string is marked in a separate rendering, and one that cannot be marked
is searched as text.

Message keys that the template does not read (``name``) are counted by key (`IGNORED`). A key whose
value is no text (a boolean) is not read if the rendering is equal without the key. Reasoning
that it writes only in the last message is dropped by design: counted as `STRIPPED`. Parts of
answers outside of ``{% generation %}`` blocks are counted as `UNMARKED` (`answer_spans`).
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigtrain.data.chat.marked_strings import (
    CONTENT,
    MAX_MARKED,
    REASONING,
    REASONING_KEYS,
    STRIPPED,
    TOOLS,
    WRITTEN,
    ChatPart,
    Marking,
    Piece,
    marked_conversation,
    marks_of,
    part_of_content,
    parts_that_are_no_text,
)
from bigtrain.data.documents.conversations import RESULTS
from bigtrain.data.tokenizers.chat_template import ChatTemplate, ConversationError, Messages, Tools

MAX_SINGLE_RENDERINGS = 64
"""Maximum renderings of a conversation with marks around one string only."""
# Escapes of a mark: in JSON two surrogates, in Python one code point; of any character.
_ESCAPED_MARK = re.compile(r"\\+udb[c-f][0-9a-f]\\+ud[c-f][0-9a-f]{2}|\\+U0010[0-9a-f]{4}")
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}"
    r"|\\U00[01][0-9a-fA-F]{5}|\\[nrtbf\"'/\\]"
)
_SHORT_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_NESTED_ESCAPES = 3
"""Levels of escapes that are tried: a template may write JSON text inside of JSON text."""
_MARKS = re.compile("[\U00100000-\U0010ffef]")
USUAL_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class RenderedString:
    """Characters `begin` to `end` of a rendering: string number `piece` of the conversation, in
    message `message` (from 1). part_kind: of the string's part."""

    piece: int
    message: int
    part_kind: str
    begin: int
    end: int


@dataclass(frozen=True)
class RenderedParts:
    """Parts of a conversation in its rendering. dropped: parts that the template drops, each once;
    strings: the strings of messages that it writes, by `begin`. A string that the template repeats
    is listed several times; a string that cannot be marked and whose text is ambiguous is not."""

    dropped: tuple[ChatPart, ...]
    strings: tuple[RenderedString, ...]


def find_parts(
    template: ChatTemplate, messages: Messages, tools: Tools, text: str
) -> RenderedParts:
    """Return the parts of a conversation in `text`, its rendering. Raises ConversationError for a
    message of an unusual role that the template ignores."""
    marking = Marking()
    marked = _rendered(template, *marked_conversation(marking, messages, tools))
    pieces = marking.pieces
    # The character ranges in `text` of every piece; none if the template drops it. Marks determine
    # them if the rendering without its marks is `text`.
    if marked is not None and not _MARKS.search(text) and _MARKS.sub("", marked) == text:
        positions = _mark_positions(marked)
        ranges_of_pieces = [_ranges(n, piece, positions, text) for n, piece in enumerate(pieces)]
    else:
        # Each piece is marked in a separate rendering, or else searched as text.
        ranges_of_pieces = []
        for number, piece in enumerate(pieces):
            marked = None
            if piece.is_marked and number < MAX_SINGLE_RENDERINGS and not _MARKS.search(text):
                marked = _rendered(
                    template, *marked_conversation(Marking(only=number), messages, tools)
                )
            if marked is not None and _MARKS.sub("", marked) == text:
                ranges_of_pieces.append(_ranges(number, piece, _mark_positions(marked), text))
            else:
                ranges_of_pieces.append(_ranges_of_text(piece, text))
    ranges_by_piece = list(zip(pieces, ranges_of_pieces, strict=True))

    # Parts with a piece without characters are dropped, and parts that do not change the rendering.
    dropped = list(dict.fromkeys(piece.part for piece, ranges in ranges_by_piece if not ranges))
    dropped = [part for part in dropped if not _is_written_otherwise(part, messages, dropped)]
    dropped += _unread_parts(template, messages, tools, text)
    unwritten_contents = _unwritten_contents(template, messages, tools, text)
    dropped += [part for part in unwritten_contents if part not in dropped]
    # A dropped message has most likely a role that the template does not know.
    for part in dropped:
        if part.part_kind == CONTENT and part.message is not None:
            message = messages[part.message - 1]
            role = message["role"]
            if role not in USUAL_ROLES and isinstance(message.get("content"), str):
                usual_role = "tool" if role in RESULTS else "user"
                if role == "developer":
                    usual_role = "system"
                raise ConversationError(
                    f"the chat template ignores message {part.message} (role {role!r}) -> map the "
                    f"role: --role {role}={usual_role}"
                )

    # The strings whose characters are known.
    strings = [
        RenderedString(number, piece.part.message, piece.part.part_kind, begin, end)
        for number, (piece, ranges) in enumerate(ranges_by_piece)
        if piece.is_marked and piece.part.message is not None and piece.part.part_kind in WRITTEN
        for begin, end in ranges
        if (begin, end) != ANYWHERE
    ]
    return RenderedParts(
        tuple(_with_stripped_kind(template, messages, tools, part) for part in dropped),
        tuple(sorted(strings, key=lambda string: string.begin)),
    )


def _unread_parts(
    template: ChatTemplate, messages: Messages, tools: Tools, text: str
) -> list[ChatPart]:
    """Return the parts of messages that are no text and without which the rendering is `text`."""
    keyed_parts = parts_that_are_no_text(messages)

    def are_unread(keys: Collection[str]) -> bool:
        reduced = [{k: v for k, v in message.items() if k not in keys} for message in messages]
        return _rendered(template, reduced, tools) == text

    # One rendering without all keys suffices for most templates; else each key is tested.
    keys = dict.fromkeys(key for key, _ in keyed_parts)
    unread_keys: Collection[str] = keys
    if keys and not are_unread(keys):
        unread_keys = [key for key in keys if are_unread([key])]
    return [part for key, part in keyed_parts if key in unread_keys]


def _unwritten_contents(
    template: ChatTemplate, messages: Messages, tools: Tools, text: str
) -> list[ChatPart]:
    """Return the contents that are no text, such as the object that a tool returns, and that may be
    replaced by a different content without a change of the rendering `text`."""
    unwritten = []
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        other_content: Any = 0 if content else 1
        if isinstance(content, dict):
            other_content = {**content, _OTHER_KEY: 0}
        elif isinstance(content, list):
            other_content = [*content, 0]
        changed = [*messages]
        changed[number - 1] = {**message, "content": other_content}
        if _rendered(template, changed, tools) == text:
            unwritten.append(part_of_content(number))
    return unwritten


_OTHER_KEY = "\U0010fffb"
"""Key of a content that no row has."""


def _rendered(template: ChatTemplate, messages: Any, tools: Any) -> str | None:
    """Return the rendering of marked messages, escaped marks decoded; None if refused."""
    try:
        text, _ = template.render(messages, tools)
    except ConversationError:
        return None
    return _ESCAPED_MARK.sub(_unescaped, text) if "\\" in text else text


def _unescaped(match: re.Match[str]) -> str:
    """Return the character of an escape: a code point, or the two halves of a surrogate pair."""
    digits = re.findall(r"[uU]([0-9a-fA-F]{8}|[0-9a-fA-F]{4})", match.group())
    codes = [int(code, 16) for code in digits]
    if len(codes) == 1:
        return chr(codes[0])
    return chr(0x10000 + ((codes[0] - 0xD800) << 10) + (codes[1] - 0xDC00))


def _mark_positions(marked: str) -> dict[str, list[int]]:
    """Return the positions of every mark in a marked rendering, counted without marks."""
    positions: dict[str, list[int]] = {}
    for number, match in enumerate(_MARKS.finditer(marked)):
        positions.setdefault(match.group(), []).append(match.start() - number)
    return positions


def _ranges(
    number: int, piece: Piece, positions: Mapping[str, Sequence[int]], text: str
) -> list[tuple[int, int]]:
    """Return the character ranges of a piece in `text`, the rendering of marked messages without
    marks; none if the template drops it."""
    if not piece.is_marked or number >= MAX_MARKED:
        return _ranges_of_text(piece, text)
    begin_mark, end_mark = marks_of(number)
    ends = positions.get(end_mark, ())
    if piece.is_key:
        # A key has a mark only at its end: its text is the longest form that ends there.
        forms = sorted(_forms(piece.text), key=len, reverse=True)
        matches = [[form for form in forms if text.endswith(form, 0, end)] for end in ends]
        return [(end - len(m[0]), end) for end, m in zip(ends, matches, strict=True) if m]
    # A template may write a part of the string as well: an end belongs to the last begin before it.
    begins = positions.get(begin_mark, ())
    ranges = []
    for end in ends:
        begins_before = [begin for begin in begins if begin <= end]
        if begins_before and _is_written(piece.text, text[begins_before[-1] : end]):
            ranges.append((begins_before[-1], end))
    return ranges


ANYWHERE = (-1, -1)
"""Range of a piece that is in a rendering, and that occurs more than once as text."""


def _ranges_of_text(piece: Piece, text: str) -> list[tuple[int, int]]:
    """Return the range of a piece that is searched as text; `ANYWHERE` if it is ambiguous."""
    forms = [form for form in _forms(piece.text) if form in text]
    if len(forms) == 1 and text.count(forms[0]) == 1:
        return [(text.index(forms[0]), text.index(forms[0]) + len(forms[0]))]
    return [ANYWHERE] if forms else []


def _is_written(text: str, written: str) -> bool:
    """Return whether `written` is `text`, possibly in nested escapes of JSON, Python or HTML."""
    forms = {written}
    for _ in range(_NESTED_ESCAPES):
        if text in forms:
            return True
        forms |= {_ESCAPE.sub(_unescaped_one, form) for form in forms} | {
            html.unescape(form) for form in forms
        }
    return text in forms


def _unescaped_one(match: re.Match[str]) -> str:
    """Return the character of an escape of `_ESCAPE`."""
    escape = match.group()
    if escape[1] in "uU":
        return _unescaped(match)
    return _SHORT_ESCAPES.get(escape[1], escape[1])


def _forms(text: str) -> set[str]:
    """Return the forms in which templates write a string: unchanged, and as JSON."""
    return {text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}


def _is_written_otherwise(
    part: ChatPart, messages: Sequence[Mapping[str, Any]], dropped: Sequence[ChatPart]
) -> bool:
    """Return whether dropped reasoning is also the text of another key of the message, which the
    template writes."""
    if part.part_kind != REASONING or part.message is None:
        return False
    message = messages[part.message - 1]
    names_by_key = {key: f"the {key} of message {part.message}" for key in REASONING_KEYS}
    dropped_names = {dropped_part.name for dropped_part in dropped}
    dropped_keys = [key for key in REASONING_KEYS if names_by_key[key] == part.name]
    return bool(dropped_keys) and any(
        message.get(key) == message[dropped_keys[0]] and names_by_key[key] not in dropped_names
        for key in REASONING_KEYS
    )


def _with_stripped_kind(
    template: ChatTemplate, messages: Messages, tools: Tools, part: ChatPart
) -> ChatPart:
    """Return `part`; reasoning becomes `STRIPPED` if the template writes it in a conversation that
    ends with its message."""
    # Messages are numbered from 1.
    if part.part_kind != REASONING or part.message is None or part.message == len(messages):
        return part
    messages_to_part = messages[: part.message]
    try:
        text, _ = template.render(messages_to_part, tools)
        still_dropped = find_parts(template, messages_to_part, tools, text).dropped
    except ConversationError:
        return part
    return part if part in still_dropped else ChatPart(STRIPPED, part.message, part.name)


def dropped_part_error(template: ChatTemplate, part: ChatPart) -> ConversationError:
    """Return the error for a part that the template drops."""
    sources = template.source + template.source_with_tools
    read_keys = [key for key in REASONING_KEYS if re.search(rf"\b{key}\b", sources)]
    hint = ""
    if part.part_kind == REASONING and read_keys:
        hint = f" (the template reads the key {' or '.join(read_keys)})"
    elif part.part_kind == TOOLS and part.message is not None:
        hint = " (tools are a key of the row, next to its messages)"
    return ConversationError(
        f"the chat template does not write {part.name}{hint} -> use a "
        "template that does: --chat-template FILE; or allow dropped parts: --max-unrendered N"
    )
