"""Tokenizers: training, loading, identity; `bigtrain.data.encoders` encodes.

The only file of the data layer that imports transformers, and only inside the functions that need
it: a tokenizing worker gets along with `tokenizers`, whose import is a hundred times faster, and so
does loading a directory that was loaded before (`bigtrain.data.remembered`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy.typing as npt

from bigtrain.data.conversations import ConversationError
from bigtrain.data.encoders import ReferenceEncoder
from bigtrain.data.remembered import (
    RememberedTokenizer,
    fingerprint,
    recall_tokenizer,
    remember_tokenizer,
)
from bigtrain.errors import DataError

logger = logging.getLogger(__name__)

END_OF_DOCUMENT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257
"""One token per byte and the end of document."""

HUB_TIMEOUT_S = 10.0
FACTS = ("hash", "vocab_size", "end_of_document_id")
CHAT_TEMPLATE_NAME = "chat_template.jinja"
"""As transformers calls it, and prefers it to what stands in tokenizer_config.json."""

# Llama 3's: words with one leading space or mark, digits in threes, runs of marks, line ends, and
# indentation apart from the word after it.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# As transformers looks for it.
_GENERATION = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
_DATE_FUNCTION = "strftime_now"
_RENDERING = Lock()
"""transformers keeps the ranges of a rendering in the compiled template, which threads share."""


@dataclass(frozen=True)
class Tokenizer:
    """A loaded Hugging Face tokenizer and what a dataset records of it.

    Token ids are below `vocab_size`, which counts added tokens and holes. `hash` is
    `tokenizer_hash`. It was `loaded` by transformers, or is `remembered`, or both.
    """

    name: str
    hash: str
    vocab_size: int
    end_of_document_id: int
    loaded: Any = None
    remembered: RememberedTokenizer | None = None

    @cached_property
    def huggingface(self) -> Any:
        """What ``AutoTokenizer`` makes of it; imports transformers."""
        return _load_with_transformers(self.name) if self.loaded is None else self.loaded

    def encoder(self, parse_special_tokens: bool = False, ends: bool = True) -> ReferenceEncoder:
        """The reference encoder; `bigtrain.data.encoder_choice` finds a faster one.

        `ends`: each document gets the end-of-document token.
        """
        end = self.end_of_document_id if ends else None
        return ReferenceEncoder(self._backend_json(), end, parse_special_tokens)

    def chat_template(self, file: Path | None = None) -> ChatTemplate:
        """The tokenizer's chat template, or the one in `file`.

        Raises DataError where there is none, it cannot be read, or it is not a template.
        """
        try:
            given = None if file is None else file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--chat-template {file} cannot be read: {error}") from error
        try:
            # A tokenizer may have one template for conversations with tools and one for others.
            find = self.huggingface.get_chat_template
            without, with_tools = find(given, None), find(given, [])
        except ValueError as error:
            raise DataError(
                f"tokenizer {self.name} has no chat template -> give one: --chat-template FILE"
            ) from error
        literals = _literals({without, with_tools}, str(file or f"of tokenizer {self.name}"))
        if any(_DATE_FUNCTION in source for source in (without, with_tools)):
            logger.warning(
                "the chat template of %s writes the date of the day it is rendered: tokens of the "
                "same conversations differ from day to day",
                file or self.name,
            )
        variables = dict(self.huggingface.special_tokens_map)
        return ChatTemplate(without, with_tools, variables, literals)

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """Text of `tokens`, special tokens included."""
        ids = [int(token) for token in tokens]
        if self.remembered is not None and self.remembered.decodes_plainly:
            return self.remembered.decode(ids)
        return str(
            self.huggingface.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def save(self, directory: Path) -> None:
        """Write what ``AutoTokenizer.from_pretrained(directory)`` loads."""
        if self.remembered is not None:
            self.remembered.save(directory)
        else:
            self.huggingface.save_pretrained(str(directory))

    def _backend_json(self) -> str:
        if self.remembered is not None:
            return self.remembered.backend_json
        return str(self.huggingface.backend_tokenizer.to_str())


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, rendered by transformers. Can be pickled.

    source: the Jinja text; source_with_tools: that of conversations with tools. variables: the
    special tokens by name. literals: the strings that stand in the two.
    """

    source: str
    source_with_tools: str
    variables: dict[str, str]
    literals: frozenset[str]

    @property
    def hash(self) -> str:
        """SHA-256 of all that decides what is rendered, as 64 hexadecimal digits."""
        parts = [self.source, self.source_with_tools, self.variables]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def marks_assistant(self, tools: object) -> bool:
        """Whether the template itself says, by ``{% generation %}``, what the assistant wrote."""
        return _GENERATION.search(self._source(tools)) is not None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character ranges of it that are in ``{% generation %}`` blocks.

        Raises ConversationError.
        """
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
        except Exception as error:  # whatever a foreign template raises
            raise ConversationError(
                f"the chat template refuses it: {type(error).__name__}: {_first_line(error)}"
            ) from error
        return texts[0], ranges[0] if ranges else []

    def save(self, directory: Path) -> None:
        """Make it the template of the tokenizer in `directory`."""
        (directory / CHAT_TEMPLATE_NAME).write_text(self.source, encoding="utf-8")

    def _source(self, tools: object) -> str:
        return self.source if tools is None else self.source_with_tools


def _literals(sources: Iterable[str], where: str) -> frozenset[str]:
    """The strings in chat templates. Raises DataError where one is not a template."""
    from jinja2 import TemplateSyntaxError, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compile_: Any = _compile_jinja_template
    found: set[str] = set()
    for source in sources:
        try:
            tree = compile_(source).environment.parse(source)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template {where} is not one: line {error.lineno}: {error.message}"
            ) from error
        found |= {node.data for node in tree.find_all(nodes.TemplateData)}
        values = [node.value for node in tree.find_all(nodes.Const)]
        found |= {value for value in values if isinstance(value, str)}
    return frozenset(found)


def train_tokenizer(batches: Iterable[Sequence[str]], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` tokens on batches of texts.

    Every text can be encoded and decodes to itself. Id 0 is ``<|endoftext|>``, the 256 bytes
    follow. On little text there may be fewer merges than asked for: see `vocab_size` of the
    result. Raises DataError for a `vocab_size` below 257 and where there is no text.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"--vocab-size {vocab_size} is too small: 256 bytes and {END_OF_DOCUMENT} need "
            f"{MIN_VOCAB_SIZE}"
        )
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend: Any = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = [0]
    backend.train_from_iterator(_counted(batches, seen), trainer)
    if not seen[0]:
        raise DataError("there is no text to train a tokenizer on: every document is empty")
    wrapper: Any = PreTrainedTokenizerFast
    wrapped = wrapper(
        tokenizer_object=backend,
        eos_token=END_OF_DOCUMENT,
        clean_up_tokenization_spaces=False,
    )
    return _describe("trained here", wrapped)


def _counted(batches: Iterable[Sequence[str]], seen: list[int]) -> Iterator[Sequence[str]]:
    for batch in batches:
        seen[0] += sum(map(len, batch))
        yield batch


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer in directory `name`, or of that name on the Hugging Face hub or in its cache.

    Raises DataError where there is none, where the hub cannot be reached (found out in seconds),
    and where the tokenizer has no fast implementation or no end-of-sequence token.
    """
    directory = Path(name)
    if not directory.is_dir():
        return _describe(name, _load_with_transformers(name))
    key = fingerprint(directory, name)
    known = recall_tokenizer(directory, key) if key else None
    if known is not None:
        facts: Any = {fact: getattr(known, fact) for fact in FACTS}
        return Tokenizer(name=name, remembered=known, **facts)
    tokenizer = _describe(name, _load_with_transformers(name))
    if key and fingerprint(directory, name) == key:  # its files are those that were loaded
        facts = {fact: getattr(tokenizer, fact) for fact in FACTS}
        plain = _decodes_plainly(tokenizer.loaded)
        known = remember_tokenizer(directory, key, tokenizer.loaded, facts, plain)
    return replace(tokenizer, remembered=known)


def _decodes_plainly(huggingface: Any) -> bool:
    """Whether decoding is what `tokenizers` does and nothing after it."""
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(huggingface), PreTrainedTokenizerFast
    return kind.decode is plain.decode and kind._decode is plain._decode


def _load_with_transformers(name: str) -> Any:
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    directory = Path(name)
    arguments: dict[str, Any] = {"trust_remote_code": False}
    if directory.exists():
        if (
            not (directory / "tokenizer_config.json").is_file()
            and not (directory / "tokenizer.json").is_file()
        ):
            raise DataError(
                f"{name} holds no tokenizer (tokenizer.json or tokenizer_config.json) -> train "
                "one with `bigtrain tokenizer`"
            )
        arguments["local_files_only"] = True
    else:
        problem = _hub_problem(name)
        if problem is not None:
            arguments["local_files_only"] = True
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        return AutoTokenizer.from_pretrained(name, **arguments)
    except Exception as error:  # whatever a foreign tokenizer's files make transformers raise
        if directory.exists():
            raise DataError(
                f"the tokenizer in {name} cannot be loaded: {_first_line(error)}"
            ) from error
        raise DataError(
            f"tokenizer {name}: not a directory here, and "
            + (problem or f"the Hugging Face hub's cannot be loaded: {_first_line(error)}")
            + " -> name a directory (`bigtrain tokenizer` trains one) or a hub tokenizer"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def _hub_problem(name: str) -> str | None:
    """Why the hub does not give `name`; None where it does.

    Asked first with one short request: transformers itself retries an unreachable hub for a
    minute and a half, and prints every try.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except HFValidationError:
        return "not a possible name on the Hugging Face hub"
    except RepositoryNotFoundError:
        return "the Hugging Face hub has none of this name (or it is private: `hf auth login`)"
    except Exception as error:  # the client's transport errors differ between its versions
        return (
            "the Hugging Face hub cannot be reached, nor is it in the local cache "
            f"({_first_line(error)})"
        )
    return None


def tokenizer_hash(huggingface: Any) -> str:
    """SHA-256 of what decides how `huggingface` encodes documents, as 64 hexadecimal digits.

    That is normalizer, pre-tokenizer, model and added tokens of the fast tokenizer's canonical
    JSON, and the end-of-document id. Truncation, padding, post-processor and decoder play no part
    in encoding documents. The same after saving and loading.
    """
    tree = json.loads(huggingface.backend_tokenizer.to_str())
    parts = {key: tree.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
    parts["end_of_document_id"] = huggingface.eos_token_id
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _describe(name: str, huggingface: Any) -> Tokenizer:
    if getattr(huggingface, "backend_tokenizer", None) is None:
        raise DataError(f"tokenizer {name} has no fast implementation (tokenizer.json)")
    if huggingface.eos_token_id is None:
        raise DataError(
            f"tokenizer {name} has no end-of-sequence token to end documents with -> set eos_token "
            "in its tokenizer_config.json"
        )
    highest = max(huggingface.get_vocab().values())
    return Tokenizer(
        name=name,
        hash=tokenizer_hash(huggingface),
        vocab_size=max(len(huggingface), highest + 1),
        end_of_document_id=int(huggingface.eos_token_id),
        loaded=huggingface,
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
