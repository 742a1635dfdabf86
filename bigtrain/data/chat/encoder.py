"""Encoder of conversations: tokens, and a mask of the assistant's tokens.

A conversation is a list of messages in the format of transformers' ``apply_chat_template``. The
tokens equal that function's, and so does the mask (``return_assistant_tokens_mask``) of templates
with ``{% generation %}`` blocks; for others see `bigtrain.data.chat.answer_spans`. A block ends
with the first token that contains part of its last character. If transformers does not find the
last token of a block, it marks everything after it, and if it does not find the first, no further
block: here the tokens that contain characters of the block are marked. A message of ``weight: 0``
is not marked, and the marked tokens of one with another weight have it as the factor of their loss.

A plain-text prompt and completion (`completion_bytes`) are encoded unchanged, as by TRL's
SFTTrainer: after the special tokens that the tokenizer adds at the start of every text, before one
end-of-document token. All tokens after the common prefix with the encoded prompt are marked,
including the end.

Conversations are encoded in batches. Token bytes determine the characters of each token; if these
do not add up to the text (a normalizer changed it), the conversation is encoded again by the
reference tokenizer, which returns offsets.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bigtrain.data.chat.answer_ends import AnswerEnds
from bigtrain.data.chat.answer_spans import (
    Answer,
    Rendering,
    assistant_spans,
    learned_blocks,
    unmarked_parts,
)
from bigtrain.data.chat.control_tokens import ControlTokens
from bigtrain.data.chat.rendered_parts import CALLS, CONTENT, COUNTED_ONLY, Lost, find_parts, refuse
from bigtrain.data.chat.template_demands import explained
from bigtrain.data.documents.conversations import ConversationError, weight_of
from bigtrain.data.documents.exact_json import read_document
from bigtrain.data.documents.token_rows import PADDING, TokenRow
from bigtrain.data.shards.format import Mask, Weights
from bigtrain.data.tokenizers.chat_template import ChatTemplate, TemplateRefusal
from bigtrain.data.tokenizers.encoders import Encoder
from bigtrain.data.tokenizers.equivalence import Checks

Integers = npt.NDArray[np.int64]
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class EncodedChats:
    """Conversations as tokens.

    `tokens` [sum of lengths]; `mask` bool of the same length, true for the assistant's; `lengths`
    and `text_bytes` (UTF-8 of the rendered text), int64 [conversations]. `problems`: number and
    reason of each unusable conversation, whose length is 0. `unrendered`: number of parts of each
    kind that the template drops from the others; `ends`, `inside`: texts of the control tokens that
    end answers, and of others in them; `spelled`: texts of control tokens that are encoded as
    letters, and how often. `weights`: float32 of the length of `mask`, of the losses; None if all
    are 1.
    """

    tokens: npt.NDArray[np.integer[Any]]
    mask: Mask
    lengths: Integers
    text_bytes: Integers
    problems: tuple[tuple[int, str], ...] = ()
    unrendered: Mapping[str, int] = field(default_factory=dict)
    ends: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    weights: Weights | None = None
    spelled: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatRules:
    """Rules for a conversation. `eos`: texts of the tokens that end generation by the tokenizer's
    settings; `allow_unrendered`: the template may drop parts."""

    eos: tuple[str, ...]
    allow_unrendered: bool = False


@dataclass(frozen=True)
class _Rendered:
    """Conversation as text, its assistant's character ranges, and the template's control tokens if
    not every control token's text is one. `prompt`: start of `text` if it is plain text. `row`: one
    that is already tokenized, without text. `is_open`: plain text without an end. `weights`: of the
    losses in `spans`; None if all are 1."""

    text: str
    spans: Spans = ()
    control: Spans | None = None
    prompt: str | None = None
    lost: tuple[Lost, ...] = ()
    ends: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    row: TokenRow | None = None
    is_open: bool = False
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class TextEnds:
    """Tokens that the tokenizer adds at the start of every text, and the token (id and text) that
    ends a document."""

    prefix: tuple[int, ...]
    end_id: int
    end_text: str


@dataclass
class ChatEncoder:
    """Encoder of conversations to tokens and masks. Can be pickled; thread-safe.

    `encoder` and `reference` add no ends and parse special tokens. With `trusted` the text of
    control tokens in a conversation becomes control tokens. `template`: None: only plain text can
    be encoded. `plain_ends`: start and end of plain text. `rules`: None: accept the template's
    rendering unchecked. `vocab_size`: of the tokenizer, for rows that are already tokenized.
    """

    encoder: Encoder
    reference: Encoder
    template: ChatTemplate | None
    trusted: bool
    plain_ends: TextEnds | None = None
    rules: ChatRules | None = None
    vocab_size: int = 0

    def __post_init__(self) -> None:
        assert self.encoder.parse_special_tokens
        assert self.encoder.end_of_document_id is None
        literals = () if self.template is None else self.template.literals
        self.control = ControlTokens(self.encoder.tokenizer_json, literals)
        self.answer_ends = None
        if self.rules is not None and self.template is not None:
            self.answer_ends = AnswerEnds(self.template, self.control, self.rules.eos)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_token_bytes"}

    def encode(
        self,
        contents: Sequence[bytes],
        checks: Checks | None = None,
        group: int = 1,
        *,
        is_complete: bool = False,
    ) -> EncodedChats:
        """Encode conversations given as `bigtrain.data.documents.conversations.conversation_bytes`.
        group: so many consecutive ones are used together, and `unrendered`, `ends`, `inside` and
        `spelled` are of groups without a problem. is_complete: all tokens are targets, those of a
        text (``text``) without an end, or of a conversation as its template renders it.
        Raises EncoderError if `checks` (of their texts) find the encoder wrong."""
        rendered: list[_Rendered] = []
        problems: dict[int, str] = {}
        for number, content in enumerate(contents):
            try:
                rendered.append(self._render(read_document(content), is_complete))
            except ConversationError as error:
                problems[number] = str(error)
                rendered.append(_Rendered(""))
        texts = [chat.text.encode("utf-8") for chat in rendered]
        encoded = self.encoder.encode_utf8(texts)
        if checks is not None:
            checks.run(self.encoder, self.reference, texts, encoded)
        mask, slow = self._mask(encoded.tokens, encoded.lengths, rendered, texts)
        prompts = self._prompts(rendered)
        ends = np.cumsum(encoded.lengths)
        parts, weights = [], []
        for number, chat in enumerate(rendered):
            low, high = int(ends[number] - encoded.lengths[number]), int(ends[number])
            tokens, own_mask = encoded.tokens[low:high], mask[low:high]
            own_weights = None if chat.row is None else chat.row.weights
            try:
                if chat.row is not None:
                    tokens, own_mask = chat.row.tokens, chat.row.learned
                elif number in prompts:
                    tokens, own_mask = self._completion(chat, tokens, prompts[number])
                elif slow[number]:
                    tokens, own_mask, own_weights = self._encode_slowly(chat)
                if is_complete:
                    own_mask = np.ones(len(tokens), np.bool_)
                if number not in problems and is_complete and not len(tokens):
                    raise ConversationError("it has no tokens")
                if number not in problems and not is_complete and not own_mask[1:].any():
                    what = "assistant tokens" if chat.row is None else "token after the first"
                    raise ConversationError(f"no {what} to train on")
            except ConversationError as error:
                problems[number] = str(error)
            if number in problems:
                tokens, own_mask = tokens[:0], own_mask[:0]
            parts.append((tokens, own_mask))
            weights.append(own_weights)
        bad = {number // group for number in problems}
        good = [chat for number, chat in enumerate(rendered) if number // group not in bad]
        return EncodedChats(
            np.concatenate([encoded.tokens[:0], *(tokens for tokens, _ in parts)]),
            np.concatenate([mask[:0], *(own_mask for _, own_mask in parts)]),
            np.fromiter((len(tokens) for tokens, _ in parts), np.int64, len(parts)),
            np.fromiter(map(len, texts), np.int64, len(texts)),
            tuple(sorted(problems.items())),
            _count_lost(good),
            frozenset[str]().union(*(chat.ends for chat in good)),
            frozenset[str]().union(*(chat.inside for chat in good)),
            _joined(weights, [len(tokens) for tokens, _ in parts]),
            self._spelled(good),
        )

    def _spelled(self, chats: Sequence[_Rendered]) -> Counter[str]:
        """Return the texts of control tokens in `chats` that are encoded as letters."""
        spelled: Counter[str] = Counter()
        for chat in chats:
            if chat.control is not None:  # None: all texts of control tokens are control tokens
                begins = {begin for begin, _ in chat.control}
                matches = self.control.find(chat.text)
                spelled.update(m.group() for m in matches if m.start() not in begins)
        return spelled

    def _prompts(self, rendered: Sequence[_Rendered]) -> dict[int, list[int]]:
        """Return the tokens of each plain-text prompt, encoded separately."""
        known = {number: chat for number, chat in enumerate(rendered) if chat.prompt is not None}
        quick = {number: chat for number, chat in known.items() if chat.control is None}
        encoded = self.encoder.encode_utf8([(c.prompt or "").encode() for c in quick.values()])
        parts = np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1]) if quick else []
        prompts = {n: part.tolist() for n, part in zip(quick, parts, strict=True)}
        for number in known.keys() - quick.keys():
            chat = known[number]
            prompts[number] = self.control.encode(chat.prompt or "", chat.control)[0].tolist()
        return prompts

    def _completion(
        self, chat: _Rendered, tokens: npt.NDArray[np.integer[Any]], prompt: list[int]
    ) -> tuple[Integers, Mask]:
        """Return tokens and mask of plain text; its `tokens` are given if it has no control token.
        Equals TRL's, also if a token contains the end of the prompt and the start of the
        completion."""
        assert self.plain_ends is not None
        if chat.control is not None:
            tokens, _ = self.control.encode(chat.text, chat.control)
        ids = tokens.tolist()
        pairs = zip(ids, prompt, strict=False)
        common = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(prompt)))
        begin = list(self.plain_ends.prefix)
        if self.trusted and ids[: len(begin)] == begin:  # spelled as tokens: once
            begin = []
        end = [] if chat.is_open else [self.plain_ends.end_id]
        full = np.array([*begin, *ids, *end], np.int64)
        return full, np.arange(len(full)) >= len(begin) + common

    def _render_plain(self, prompt: str, completion: str) -> _Rendered:
        assert self.plain_ends is not None
        # Data made for other tools may contain the end as text.
        text = prompt + completion.removesuffix(self.plain_ends.end_text)
        doubtful = self.control.are_normalized or self.control.could_be_from([prompt, completion])
        return _Rendered(text, (), () if doubtful and not self.trusted else None, prompt)

    def _render(self, conversation: dict[str, Any], is_complete: bool = False) -> _Rendered:
        if "input_ids" in conversation:
            row = TokenRow.of_document(conversation)
            row.require_in_vocabulary(self.vocab_size)
            return _Rendered("", row=row)
        if "text" in conversation:
            return replace(self._render_plain("", conversation["text"]), is_open=True)
        if "prompt" in conversation:
            return self._render_plain(conversation["prompt"], conversation["completion"])
        if self.template is None:
            raise ConversationError(
                "it consists of messages, and the tokenizer has no chat template -> specify one: "
                "--chat-template FILE"
            )
        tools = conversation.get("tools")
        messages, text, spans = _rendered(self.template, conversation["messages"], tools)
        parts = find_parts(self.template, messages, tools, text)
        lost = parts.lost
        if self.rules is not None and not self.rules.allow_unrendered:
            for part in lost:
                if part.kind not in COUNTED_ONLY:
                    raise refuse(self.template, part)
        if is_complete:
            control = self._written_control(self.template, text, messages, tools)
            return _Rendered(text, (), control, lost=lost)
        marked = self.template.marks_assistant(tools)
        rendering = Rendering(messages, tools, text, parts.strings)
        if marked:
            answers = learned_blocks(rendering, spans)
            lost += tuple(unmarked_parts(rendering, answers))
        else:
            answers = assistant_spans(self.template, self.control, rendering)
        control = self._written_control(self.template, text, messages, tools)
        if self.answer_ends is None:
            every = [span for answer in answers for span in answer.spans]
            weights = _span_weights(messages, answers)
            return _Rendered(text, every, control, lost=lost, weights=weights)
        filled = [
            Answer(n.number, tuple(span for span in n.spans if span[0] < span[1])) for n in answers
        ]
        kept = [answer for answer in filled if answer.spans]
        if lost:  # only the end of a dropped answer remains
            dropped = {part.message for part in lost if part.kind in (CONTENT, CALLS)}
            kept = [n for n in kept if n.number not in dropped or self._says_something(text, n)]
        ended = self.answer_ends.finish(messages, tools, text, kept, control, marked=marked)
        return _Rendered(
            ended.text, ended.spans, ended.control, None, lost, ended.ends, ended.inside,
            weights=_span_weights(messages, kept),
        )  # fmt: skip

    def _says_something(self, text: str, answer: Answer) -> bool:
        written = "".join(text[begin:end] for begin, end in answer.spans)
        names = [match.group() for match in self.control.find(written)]
        return bool(written.strip()) and written.strip() not in names

    def _written_control(
        self, template: ChatTemplate, text: str, messages: Any, tools: Any
    ) -> Spans | None:
        """Return the template's control tokens in `text`; None if all control tokens' texts are."""
        if not self.trusted and self.control.could_be_from([messages, tools]):
            marked, marked_tools = self.control.marked([messages, tools])
            marked_text, _ = template.render(marked, marked_tools)
            return self.control.written_by_template(text, marked_text)
        if not self.trusted and self.control.are_normalized:
            return [match.span() for match in self.control.find(text)]
        return None

    def _encode_slowly(self, chat: _Rendered) -> tuple[Integers, Mask, Weights | None]:
        """Return tokens, mask and weights by the reference tokenizer's own character ranges."""
        tokens, ranges = self.control.encode(chat.text, chat.control)
        mask, weights = np.zeros(len(tokens), np.bool_), np.ones(len(tokens), np.float32)
        of_spans = chat.weights or (1.0,) * len(chat.spans)
        for (begin, end), weight in zip(chat.spans, of_spans, strict=True):
            # transformers' rule: from the first token with the first character to the first with
            # the last one. If a tokenizer drops characters: the tokens inside the range.
            first, last = _first_at(ranges, begin), _first_at(ranges, end - 1)
            if first is None or last is None:
                inside = np.flatnonzero((ranges[:, 1] > begin) & (ranges[:, 0] < end))
                if not len(inside):
                    continue
                first = int(inside[0]) if first is None else first
                last = int(inside[-1]) if last is None else last
            mask[first : last + 1] = True
            weights[first : last + 1] = weight
        return tokens, mask, None if chat.weights is None else weights

    def _mask(
        self,
        tokens: npt.NDArray[np.integer[Any]],
        lengths: Integers,
        rendered: Sequence[_Rendered],
        texts: Sequence[bytes],
    ) -> tuple[Mask, npt.NDArray[np.bool_]]:
        """Return the mask of all tokens, and which conversations must be encoded again, slowly."""
        slow = np.fromiter(
            (chat.control is not None or chat.weights is not None for chat in rendered),
            bool,
            len(rendered),
        )
        table = self._token_bytes
        if table is None:
            slow[:] = True
            return np.zeros(len(tokens), np.bool_), slow
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(table.sizes[tokens])])
        token_ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        bases = ends[token_ends]
        slow |= np.diff(bases) != np.fromiter(map(len, texts), np.int64, len(texts))
        begins_at: list[int] = []
        ends_at: list[int] = []
        for number, chat in enumerate(rendered):
            if slow[number]:
                continue
            content, base = texts[number], int(bases[number])
            if not table.sums_prove and not (table.keeps_ascii and content.isascii()):
                own = tokens[token_ends[number] : token_ends[number + 1]]
                if b"".join([table.contents[t] for t in own.tolist()]) != content:
                    slow[number] = True
                    continue
            ascii_text = len(content) == len(chat.text)
            for begin, end in chat.spans:
                if begin >= end:
                    continue
                last = end - 1
                if not ascii_text:
                    begin = len(chat.text[:begin].encode("utf-8"))
                    last = len(chat.text[:last].encode("utf-8"))
                begins_at.append(base + begin)
                ends_at.append(base + last)
        marks = np.zeros(len(tokens) + 1, np.int64)
        # The token that contains byte b is the first that ends after it.
        np.add.at(marks, np.searchsorted(ends[1:], np.array(begins_at, np.int64), "right"), 1)
        np.add.at(marks, np.searchsorted(ends[1:], np.array(ends_at, np.int64), "right") + 1, -1)
        return np.cumsum(marks[:-1]) > 0, slow

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        return token_bytes(json.loads(self.encoder.tokenizer_json))


def _span_weights(
    messages: Sequence[Mapping[str, Any]], answers: Sequence[Answer]
) -> tuple[float, ...] | None:
    """Return the weights of the losses in the ranges of `answers`; None if all are 1."""
    weights = tuple(weight_of(messages[one.number - 1]) for one in answers for _ in one.spans)
    return None if all(weight == 1 for weight in weights) else weights


def _joined(rows: Sequence[Weights | None], lengths: Sequence[int]) -> Weights | None:
    """Return the weights of the losses of all tokens, `lengths` of each document; None if all
    are 1."""
    if all(weights is None for weights in rows):
        return None
    parts = [
        np.ones(length, np.float32) if weights is None else weights[:length]
        for weights, length in zip(rows, lengths, strict=True)
    ]
    return np.concatenate(parts)


def _count_lost(chats: Sequence[_Rendered]) -> Counter[str]:
    lost = Counter(part.kind for chat in chats for part in chat.lost)
    padding = sum(chat.row.padding for chat in chats if chat.row is not None)
    return lost + Counter({PADDING: padding})


def _first_at(ranges: Integers, place: int) -> int | None:
    matches = np.flatnonzero((ranges[:, 0] <= place) & (ranges[:, 1] > place))
    return int(matches[0]) if len(matches) else None


def _rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: Any
) -> tuple[list[dict[str, Any]], str, list[tuple[int, int]]]:
    """Return the messages in the form that the template accepts, their rendering and its blocks.
    Some templates (DeepSeek's) require tool calls in OpenAI's format: arguments as JSON text, and
    null as the content. Raises ConversationError if the template accepts neither."""
    try:
        return (messages, *template.render(messages, tools))
    except TemplateRefusal as refusal:
        if any(message.get("tool_calls") for message in messages):
            in_openai_form = [_as_openai_has_it(message) for message in messages]
            with suppress(TemplateRefusal):
                return (in_openai_form, *template.render(in_openai_form, tools))
        raise explained(template, messages, tools, refusal) from refusal


def _as_openai_has_it(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        own = call.get("function")
        if isinstance(own, dict) and isinstance(own.get("arguments"), dict):
            text = json.dumps(own["arguments"], ensure_ascii=False)
            call = {"type": "function", **call, "function": {**own, "arguments": text}}
        calls.append(call)
    return {**message, "content": message.get("content") or None, "tool_calls": calls}


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of every token: `contents`, and their `sizes`, int64 [vocabulary]. sums_prove: if the
    sizes of a text's tokens add up to its own, their bytes equal the text's. keeps_ascii: the same,
    only for ASCII text."""

    contents: Sequence[bytes]
    sizes: npt.NDArray[np.int64]
    sums_prove: bool
    keeps_ascii: bool


def token_bytes(tree: dict[str, Any]) -> TokenBytes | None:
    """Return the bytes of all tokens; None if they are not bytes of the text (``ByteLevel``)."""
    parts = {part["type"]: part for part in _steps(tree.get("pre_tokenizer"), "pretokenizers")}
    if "ByteLevel" not in parts or tree["model"]["type"] != "BPE":
        return None
    alphabet = _byte_alphabet()
    vocabulary: dict[str, int] = tree["model"]["vocab"]
    added = tree.get("added_tokens") or []
    contents = [b""] * (max([*vocabulary.values(), *(token["id"] for token in added)]) + 1)
    for token, number in vocabulary.items():
        contents[number] = bytes(alphabet[c] for c in token if c in alphabet)
    for token in added:
        contents[token["id"]] = token["content"].encode("utf-8")
    plain = not parts["ByteLevel"].get("add_prefix_space") and not any(
        token["lstrip"] or token["rstrip"] for token in added
    )
    normalizers = {part["type"] for part in _steps(tree.get("normalizer"), "normalizers")}
    return TokenBytes(
        contents,
        np.fromiter(map(len, contents), np.int64, len(contents)),
        sums_prove=plain and not normalizers,
        keeps_ascii=plain and normalizers <= {"NFC", "NFD", "NFKC", "NFKD"},
    )


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that represent bytes in byte-level tokens (OpenAI's GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}
