"""Encoder of conversations: tokens, and a mask of the assistant's tokens.

A conversation is a list of messages in the format of transformers' ``apply_chat_template``. The
tokens equal that function's, and so does the mask (``return_assistant_tokens_mask``) of templates
with ``{% generation %}`` blocks; for others see `bigtrain.data.chat.answer_spans`. A block ends
with the first token that contains part of the block's last character. If transformers does not find
the last token of a block, it marks everything after it, and if it does not find the first, no
further block: here the tokens that contain characters of the block are marked. A message of
``weight: 0`` is not marked; any other weight of a message is the factor of the tokens' losses.

A plain-text prompt and completion (`row_format.Completion`) are encoded unchanged, as by TRL's
SFTTrainer: after the special tokens that the tokenizer adds at the start of every text, before one
end-of-document token. All tokens after the common prefix with the encoded prompt are marked,
including the end.

Conversations are encoded in batches. Token bytes determine the characters of a token; if these do
not add up to the text (a normalizer changed it), the conversation is encoded again by the reference
tokenizer, which returns offsets.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
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
from bigtrain.data.chat.document_forms import (
    BatchResult,
    Document,
    DocumentTokens,
    Integers,
    PlainText,
    RenderedChat,
    Spans,
    TextEnds,
    TokenizedRow,
)
from bigtrain.data.chat.marked_strings import CALLS, CONTENT, is_counted_only
from bigtrain.data.chat.rendered_parts import dropped_part_error, find_parts
from bigtrain.data.chat.template_demands import render_accepted
from bigtrain.data.chat.token_bytes import TokenBytes, token_bytes
from bigtrain.data.documents.conversations import weight_of
from bigtrain.data.documents.exact_json import read_document
from bigtrain.data.documents.token_rows import PADDING, TokenRow
from bigtrain.data.shards.format import Mask, Weights
from bigtrain.data.tokenizers.chat_template import ChatTemplate, ConversationError
from bigtrain.data.tokenizers.encoders import Encoded, Encoder
from bigtrain.data.tokenizers.equivalence import Checks

__all__ = ["ChatEncoder", "ChatRules", "EncodedChats", "TextEnds"]


@dataclass(frozen=True)
class EncodedChats:
    """Conversations as tokens.

    `tokens` [sum of lengths]; `mask` bool, true for the assistant's tokens; `lengths` and
    `text_bytes` (UTF-8 of the rendered text), int64 [conversations]. `problems`: number and reason
    of every unusable conversation, whose length is 0. Of the usable conversations: `unrendered`,
    number of parts that the template drops, by kind; `ends`, `inner_controls`, texts of the control
    tokens that end answers, and of other control tokens in answers; `spelled`, texts of control
    tokens that are encoded as letters, and how often. `weights`: factors of the losses, float32 of
    the length of `mask`; None if all are 1.
    """

    tokens: npt.NDArray[np.integer[Any]]
    mask: Mask
    lengths: Integers
    text_bytes: Integers
    problems: tuple[tuple[int, str], ...] = ()
    unrendered: Mapping[str, int] = field(default_factory=dict)
    ends: frozenset[str] = frozenset()
    inner_controls: frozenset[str] = frozenset()
    weights: Weights | None = None
    spelled: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatRules:
    """Rules for a conversation. `eos`: texts of the tokens that end generation by the tokenizer's
    settings; `allow_unrendered`: the template may drop parts."""

    eos: tuple[str, ...]
    allow_unrendered: bool = False


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
        group: number of consecutive documents of a row; `unrendered`, `ends`, `inner_controls` and
        `spelled` count the documents of rows in which no document has a problem. is_complete: every
        token is a target, of a text (``text``), to which no end is added, or of a conversation as
        its template renders it. Raises EncoderError if `checks` of the texts find the encoder
        wrong."""
        documents: list[Document | None] = []
        problems: dict[int, str] = {}
        for number, content in enumerate(contents):
            try:
                documents.append(self._document_of(read_document(content), is_complete))
            except ConversationError as error:
                problems[number] = str(error)
                documents.append(None)

        # All texts are encoded at once, by all cores.
        texts = [b"" if doc is None else doc.text.encode("utf-8") for doc in documents]
        encoded = self.encoder.encode_utf8(texts)
        if checks is not None:
            checks.run(self.encoder, self.reference, texts, encoded)
        results = self._batch_results(encoded, documents, texts)

        per_document = []
        for number, document in enumerate(documents):
            document_tokens = DocumentTokens(encoded.tokens[:0], np.zeros(0, np.bool_))
            if document is not None:
                try:
                    document_tokens = document.tokens_and_mask(results[number], self.control)
                    if is_complete:
                        tokens, _, weights = document_tokens
                        mask = np.ones(len(tokens), np.bool_)
                        document_tokens = DocumentTokens(tokens, mask, weights)
                    if is_complete and not len(document_tokens.tokens):
                        raise ConversationError("it has no tokens")
                    # No token predicts the first one, so a target is a later one.
                    if not is_complete and not document_tokens.mask[1:].any():
                        raise ConversationError(f"no {document.target_noun} to train on")
                except ConversationError as error:
                    problems[number] = str(error)
                    tokens, mask, weights = document_tokens
                    document_tokens = DocumentTokens(tokens[:0], mask[:0], weights)
            per_document.append(document_tokens)

        # Statistics cover the documents of rows in which no document has a problem.
        bad_rows = {number // group for number in problems}
        used_documents = [doc for n, doc in enumerate(documents) if n // group not in bad_rows]
        conversations = [doc for doc in used_documents if isinstance(doc, RenderedChat)]
        dropped = Counter(part.part_kind for doc in conversations for part in doc.dropped)
        padding = sum(doc.row.padding for doc in used_documents if isinstance(doc, TokenizedRow))
        lengths = [len(tokens) for tokens, _, _ in per_document]
        return EncodedChats(
            tokens=np.concatenate([encoded.tokens[:0], *(doc.tokens for doc in per_document)]),
            mask=np.concatenate([np.zeros(0, np.bool_), *(doc.mask for doc in per_document)]),
            lengths=np.array(lengths, np.int64),
            text_bytes=np.fromiter(map(len, texts), np.int64, len(texts)),
            problems=tuple(sorted(problems.items())),
            unrendered=dropped + Counter({PADDING: padding}),
            ends=frozenset[str]().union(*(doc.ends for doc in conversations)),
            inner_controls=frozenset[str]().union(*(doc.inner_controls for doc in conversations)),
            weights=_joined_weights(per_document),
            spelled=self._spelled([doc for doc in used_documents if doc is not None]),
        )

    def _spelled(self, documents: Sequence[Document]) -> Counter[str]:
        """Return the texts of control tokens in `documents` that are encoded as letters."""
        spelled: Counter[str] = Counter()
        for document in documents:
            if document.control is not None:  # None: all texts of control tokens are control tokens
                controls = {begin for begin, _ in document.control}
                matches = self.control.find(document.text)
                spelled.update(match.group() for match in matches if match.start() not in controls)
        return spelled

    def _batch_results(
        self, encoded: Encoded, documents: Sequence[Document | None], texts: Sequence[bytes]
    ) -> list[BatchResult]:
        """Return tokens, mask and prompt of every document; None for a mask, or the tokens of a
        prompt, that the batch does not determine: they are computed separately, slowly."""
        masks = self._masks(encoded, documents, texts)
        # The prompts of plain text are a second batch, without prompts that have control ranges.
        prompts = {
            number: document.prompt.encode()
            for number, document in enumerate(documents)
            if isinstance(document, PlainText) and document.control is None
        }
        encoded_prompts = self.encoder.encode_utf8(list(prompts.values()))
        prompt_ends = np.cumsum(encoded_prompts.lengths)
        split_prompts = np.split(encoded_prompts.tokens, prompt_ends[:-1])
        prompt_tokens = {n: split_prompts[index].tolist() for index, n in enumerate(prompts)}
        token_ends = [0, *np.cumsum(encoded.lengths).tolist()]
        return [
            BatchResult(encoded.tokens[begin:end], masks[number], prompt_tokens.get(number))
            for number, (begin, end) in enumerate(pairwise(token_ends))
        ]

    def _masks(
        self, encoded: Encoded, documents: Sequence[Document | None], texts: Sequence[bytes]
    ) -> list[Mask | None]:
        """Return the masks of conversations by the bytes of tokens; None for a conversation
        that must be encoded again, slowly."""
        table = self._token_bytes
        if table is None:
            return [None] * len(documents)

        # Number of bytes up to the end of every token, and up to the begin of every text. A text is
        # undetermined if its tokens have other bytes than the text, or if control tokens or weights
        # need character ranges.
        tokens, lengths = encoded.tokens, encoded.lengths
        byte_ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(table.sizes[tokens])])
        token_ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        text_begins = byte_ends[token_ends]
        is_undetermined = np.diff(text_begins) != np.fromiter(map(len, texts), np.int64, len(texts))
        span_first_bytes: list[int] = []
        span_last_bytes: list[int] = []
        for number, document in enumerate(documents):
            if not isinstance(document, RenderedChat):
                continue
            if document.control is not None or document.weights is not None:
                is_undetermined[number] = True
            if is_undetermined[number]:
                continue
            content, text_begin = texts[number], int(text_begins[number])
            sizes_prove = table.sums_prove or (table.keeps_ascii and content.isascii())
            if not sizes_prove:  # compare the bytes themselves
                document_tokens = tokens[token_ends[number] : token_ends[number + 1]]
                if b"".join([table.contents[t] for t in document_tokens.tolist()]) != content:
                    is_undetermined[number] = True
                    continue
            is_ascii = len(content) == len(document.text)
            for begin, end in document.spans:
                if begin >= end:
                    continue
                last = end - 1
                if not is_ascii:  # spans count characters, tokens bytes
                    begin = len(document.text[:begin].encode("utf-8"))
                    last = len(document.text[:last].encode("utf-8"))
                span_first_bytes.append(text_begin + begin)
                span_last_bytes.append(text_begin + last)

        # The token that contains a byte is the first that ends after the byte. Changes: +1 at the
        # first token of a span, -1 after its last token; their running sum is positive in spans.
        span_changes = np.zeros(len(tokens) + 1, np.int64)
        first_tokens = np.searchsorted(byte_ends[1:], np.array(span_first_bytes, np.int64), "right")
        last_tokens = np.searchsorted(byte_ends[1:], np.array(span_last_bytes, np.int64), "right")
        np.add.at(span_changes, first_tokens, 1)
        np.add.at(span_changes, last_tokens + 1, -1)
        mask = np.cumsum(span_changes[:-1]) > 0
        return [
            None if is_undetermined[number] else mask[token_ends[number] : token_ends[number + 1]]
            for number in range(len(documents))
        ]

    def _document_of(self, tree: dict[str, Any], is_complete: bool) -> Document:
        """Return a document with the text to encode. Raise ConversationError if it is unusable."""
        if "input_ids" in tree:
            row = TokenRow.of_document(tree)
            row.require_in_vocabulary(self.vocab_size)
            return TokenizedRow(row)
        if "text" in tree:
            return self._plain_text("", tree["text"], is_open=True)
        if "prompt" in tree:
            return self._plain_text(tree["prompt"], tree["completion"])
        if self.template is None:
            raise ConversationError(
                "it consists of messages, and the tokenizer has no chat template -> specify one: "
                "--chat-template FILE"
            )
        return self._conversation(self.template, tree["messages"], tree.get("tools"), is_complete)

    def _plain_text(self, prompt: str, completion: str, *, is_open: bool = False) -> PlainText:
        """Return plain text, of which nothing becomes a control token without trust."""
        assert self.plain_ends is not None
        # Data made for other tools may contain the end as text.
        text = prompt + completion.removesuffix(self.plain_ends.end_text)
        may_spell_control = self.control.are_normalized or self.control.could_be_from(
            [prompt, completion]
        )
        control: Spans | None = () if may_spell_control and not self.trusted else None
        return PlainText(prompt, text, control, self.plain_ends, is_open, self.trusted)

    def _conversation(
        self, template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, is_complete: bool
    ) -> RenderedChat:
        """Return a conversation as text, with the learned ranges. Raise ConversationError if the
        template refuses or drops a part, or if the ranges cannot be determined."""
        accepted = render_accepted(template, messages, tools)
        messages, text = accepted.messages, accepted.text

        # Parts that the template drops are refused, or counted.
        parts = find_parts(template, messages, tools, text)
        dropped = parts.dropped
        if self.rules is not None and not self.rules.allow_unrendered:
            for part in dropped:
                if not is_counted_only(part.part_kind):
                    raise dropped_part_error(template, part)
        if is_complete:  # every token is learned, so no search for answers
            control = self._written_control(template, text, messages, tools)
            return RenderedChat(text, (), control, dropped)

        # Characters of the answers: in {% generation %} blocks, or by further renderings.
        has_blocks = template.marks_assistant(tools)
        rendering = Rendering(messages, tools, text, parts.strings)
        if has_blocks:
            answers = learned_blocks(rendering, accepted.blocks)
            dropped += tuple(unmarked_parts(rendering, answers))
        else:
            answers = assistant_spans(template, self.control, rendering)
        control = self._written_control(template, text, messages, tools)
        if self.answer_ends is None:
            spans = [span for answer in answers for span in answer.spans]
            return RenderedChat(text, spans, control, dropped, _weights(rendering, answers))

        # Every answer must end in a token that ends generation. An answer of which the template
        # drops the content or the calls, and writes only the end, is not learned.
        dropped_messages = {part.message for part in dropped if part.part_kind in (CONTENT, CALLS)}
        learned = []
        for answer in answers:
            spans = [(begin, end) for begin, end in answer.spans if begin < end]
            if not spans:
                continue
            if answer.number in dropped_messages:
                answer_text = "".join(text[begin:end] for begin, end in spans)
                control_names = [match.group() for match in self.control.find(answer_text)]
                if answer_text.strip() in ("", *control_names):  # only the end of the answer
                    continue
            learned.append(Answer(answer.number, tuple(spans)))
        conversation = RenderedChat(text, (), control, dropped, _weights(rendering, learned))
        return self.answer_ends.finish(conversation, rendering, learned, has_blocks=has_blocks)

    def _written_control(
        self, template: ChatTemplate, text: str, messages: Any, tools: Any
    ) -> Spans | None:
        """Return the template's control tokens in `text`; None if the text of every control token
        is one."""
        if not self.trusted and self.control.could_be_from([messages, tools]):
            marked, marked_tools = self.control.marked([messages, tools])
            marked_text, _ = template.render(marked, marked_tools)
            return self.control.written_by_template(text, marked_text)
        # No string spells a control token, but the normalizer may make one of other text.
        if not self.trusted and self.control.are_normalized:
            return [match.span() for match in self.control.find(text)]
        return None

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        return token_bytes(json.loads(self.encoder.tokenizer_json))


def _weights(rendering: Rendering, answers: Sequence[Answer]) -> tuple[float, ...] | None:
    """Return the weights of the losses in the ranges of `answers`; None if all are 1."""
    messages = rendering.messages
    weights = tuple(weight_of(messages[a.number - 1]) for a in answers for _span in a.spans)
    is_weighted = any(weight != 1 for weight in weights)
    return weights if is_weighted else None


def _joined_weights(documents: Sequence[DocumentTokens]) -> Weights | None:
    """Return the weights of the losses in all documents; None if all are 1."""
    if all(document.weights is None for document in documents):
        return None
    parts = [
        np.ones(len(tokens), np.float32) if weights is None else weights[: len(tokens)]
        for tokens, _, weights in documents
    ]
    return np.concatenate(parts)
