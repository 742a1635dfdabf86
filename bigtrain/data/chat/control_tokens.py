"""Protection against injected control tokens: only those written by the chat template are encoded.

A tokenizer converts the text ``<|im_end|>`` to its control token, also in user data. A conversation
whose strings cannot form a control token's text, by themselves or together with the adjacent text
of the template, is encoded unchanged. Any other is rendered again with a mark inserted into its
strings wherever they contain, or could be part of, a control token's text: control tokens that are
still intact were written by the template. Without the marks this must equal the first rendering,
otherwise the conversation is refused. It is encoded by a copy of the tokenizer whose control tokens
are renamed to private-use characters, which replace the template's.

A template that splits strings and rejoins the pieces can defeat this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bigtrain.data.tokenizers.chat_template import ConversationError
from bigtrain.data.tokenizers.encoders import hide_words

MARK = "\U0010fffc"
FIRST_NAME = 0xF0000
FILLER = "\U0010fffd"
KNOWN_ROLES = frozenset(
    ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")
)
"""Roles from which templates build control tokens, as in ``'<|' + role + '|>'``."""


class ControlTokens:
    """Special tokens of a tokenizer, read from its ``tokenizer.json``. Can be pickled. `literals`:
    strings in the chat template. `are_normalized`: the tokenizer also finds them in text that only
    a normalizer makes equal to their texts, for example capital letters."""

    def __init__(self, tokenizer_json: str, literals: Collection[str]) -> None:
        self._tokenizer_json = tokenizer_json
        tree = json.loads(tokenizer_json)
        added = tree.get("added_tokens") or []
        self.ids = {token["content"]: token["id"] for token in added if token["special"]}
        self.are_normalized = tree.get("normalizer") is not None and any(
            token["special"] and token["normalized"] for token in added
        )
        # The token for unknown text is not a control token; a Unigram model has its number.
        model = tree["model"]
        unknown_token = model.get("unk_token")
        if model.get("unk_id") is not None:
            unknown_token = model["vocab"][model["unk_id"]][0]
        self._control_ids = [id_ for name, id_ in self.ids.items() if name != unknown_token]
        names = sorted(filter(None, self.ids), key=len, reverse=True)
        self._full_name = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._beginnings = {name[:end] for name in names for end in range(1, len(name))}
        self._endings = {name[begin:] for name in names for begin in range(1, len(name))}
        self._longest_part = max(map(len, names), default=1) - 1
        # Middles of names of which the template has the beginning and the end in two literals.
        self._middles: set[str] = set()
        for name in names:
            splits = range(1, len(name))
            begins = [i for i in splits if any(text.endswith(name[:i]) for text in literals)]
            ends = [i for i in splits if any(text.startswith(name[i:]) for text in literals)]
            self._middles |= {name[begin:end] for begin in begins for end in ends if begin < end}
        self._first = _any_of(name[0] for name in names)
        self._last = _any_of(name[-1] for name in names)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_renamed"}

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the control tokens' texts in `text`, as the tokenizer finds them."""
        return self._full_name.finditer(text)

    def could_be_from(self, value: object) -> bool:
        """Return whether strings in `value` (messages, tools) could form a control token's text.
        Raises ConversationError for a key that does, and for an unknown role that could."""
        # A list, not a generator: every string is checked, and may raise.
        return any([self._mark_positions(string) for string in self._strings(value)])

    def marked(self, value: Any) -> Any:
        """Return `value` with `MARK` in its strings where they could be part of a control token."""
        if isinstance(value, str):
            for position in sorted(set(self._mark_positions(value)), reverse=True):
                value = value[:position] + MARK + value[position:]
            return value
        if isinstance(value, dict):
            return {
                key: item if key == "role" and item in KNOWN_ROLES else self.marked(item)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.marked(item) for item in value]
        return value

    def written_by_template(self, text: str, marked_text: str) -> list[tuple[int, int]]:
        """Return the character ranges of `text` with the template's own control tokens.
        `marked_text` is the rendering of `marked` strings. Raises ConversationError if the two
        differ in more than the marks."""
        if marked_text.replace(MARK, "") != text:
            raise ConversationError(
                "it contains the text of a control token, and the rendering does not distinguish "
                "it from the template's own -> remove it, or trust the data: "
                "--parse-special-tokens"
            )
        # A token that is intact in the marked text has no mark inside. Its position in `text` is
        # less by the number of marks before it.
        ranges, counted_to, num_marks = [], 0, 0
        for match in self.find(marked_text):
            num_marks += marked_text.count(MARK, counted_to, match.start())
            counted_to = match.start()
            ranges.append((match.start() - num_marks, match.end() - num_marks))
        return ranges

    def encode(
        self, text: str, control: Sequence[tuple[int, int]] | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Encode `text` by the reference tokenizer; return ids [n] and character ranges [n, 2].
        `control`: ranges that are control tokens; None: ranges that the tokenizer finds. Raises
        ConversationError if it would encode other text as a control token."""
        backend, original_ids, new_names = self._renamed
        has_ranges = control is not None
        if control is None:
            control = [match.span() for match in self.find(text)]
        pieces, previous_end = [], 0
        if any(FIRST_NAME <= ord(character) for character in set(text)):
            raise ConversationError("it contains private-use characters of planes 15 and 16")
        for begin, end in control:
            pieces += [text[previous_end:begin], new_names[text[begin:end]]]
            previous_end = end
        pieces.append(text[previous_end:])
        encoding = backend.encode("".join(pieces), add_special_tokens=False)
        ids = original_ids[np.array(encoding.ids, np.int64)]
        if has_ranges and np.isin(ids, self._control_ids).sum() > len(control):
            raise ConversationError("the tokenizer encodes other text as a control token")
        return ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)

    @cached_property
    def _renamed(self) -> tuple[Any, npt.NDArray[np.int64], dict[str, str]]:
        """Copy of the tokenizer with renamed control tokens, the original id by an id of the copy,
        and the new name by a token's text: of equal length, so that ranges do not change."""
        from tokenizers import Tokenizer

        tree = json.loads(self._tokenizer_json)
        hide_words(tree["model"], self.ids)  # no text becomes a control token
        names = {
            name: chr(FIRST_NAME + number) + FILLER * (len(name) - 1)
            for number, name in enumerate(self.ids)
        }
        original_id_by_content = {}
        for token in tree.get("added_tokens") or []:
            if token["special"]:
                token["content"] = names[token["content"]]
            original_id_by_content[token["content"]] = token["id"]
        tree["post_processor"] = tree["truncation"] = tree["padding"] = None
        backend = Tokenizer.from_str(json.dumps(tree))
        vocabulary = backend.get_vocab(with_added_tokens=True)
        original_ids = np.arange(max(vocabulary.values()) + 1)
        for content, original_id in original_id_by_content.items():
            original_ids[vocabulary[content]] = original_id
        return backend, original_ids, names

    def _strings(self, value: object) -> Iterator[str]:
        """Yield the strings in `value`, except keys and roles. Raise as `could_be_from`."""
        if isinstance(value, str):
            if MARK in value:
                raise ConversationError(f"it contains the character {MARK!a}, which is not text")
            yield value
        elif isinstance(value, list):
            for item in value:
                yield from self._strings(item)
        elif isinstance(value, dict):
            for key, item in value.items():
                if self._full_name.search(key):
                    raise ConversationError(f"the key {key!r} contains a control token's text")
                if key == "role" and isinstance(item, str):
                    if item not in KNOWN_ROLES and self._mark_positions(item):
                        raise ConversationError(f"the role {item!r} is part of a control token")
                else:
                    yield from self._strings(item)

    def _mark_positions(self, string: str) -> list[int]:
        """Return a position inside of every control token in `string`, and inside of the part of a
        control token that text before or after `string` could complete."""
        begins = (match.start() for match in self._first.finditer(string))
        positions = [begin + 1 for begin in begins if self._full_name.match(string, begin)]
        # The beginning of a token at the end, or its end at the start. Templates strip white space.
        stripped = string.rstrip()
        max_part = self._longest_part
        for match in self._first.finditer(stripped, max(0, len(stripped) - max_part)):
            if stripped[match.start() :] in self._beginnings:
                positions.append(match.start() + 1)
        begin = len(string) - len(string.lstrip())
        for match in self._last.finditer(stripped, begin, min(begin + max_part, len(stripped))):
            if stripped[begin : match.end()] in self._endings:
                positions.append(match.start())
        if string in self._middles or stripped[begin:] in self._middles:
            positions.append(begin + 1)
        return positions


def _any_of(characters: Iterable[str]) -> re.Pattern[str]:
    unique = "".join(sorted(set(characters)))
    return re.compile(f"[{re.escape(unique)}]" if unique else "(?!)")
