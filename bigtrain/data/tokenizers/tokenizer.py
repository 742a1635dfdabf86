"""Tokenizers: loading and identity; `bigtrain.data.tokenizers.encoders` encodes.

transformers is imported only in the functions that need it: a tokenizing worker needs only
`tokenizers`, whose import is a hundred times faster, and so does loading a directory that was
loaded before (`bigtrain.data.tokenizers.cache`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy.typing as npt

from bigtrain.data.shards.manifest import BeginningOfText
from bigtrain.data.tokenizers.cache import (
    HUB_TIMEOUT_S,
    CachedTokenizer,
    fingerprint,
    get_cached_tokenizer,
    put_cached_tokenizer,
)
from bigtrain.data.tokenizers.chat_template import ChatTemplate
from bigtrain.data.tokenizers.encoders import ReferenceEncoder
from bigtrain.data.tokenizers.own_file import FILE as OWN_FILE
from bigtrain.data.tokenizers.own_file import as_in_file, without_class
from bigtrain.data.tokenizers.transformers_patches import decodes_plainly, template_syntax_tree
from bigtrain.errors import DataError, first_line, without_secrets
from bigtrain.system.hub_cache import cached_hub_file
from bigtrain.system.storage.local_path import local_path
from bigtrain.system.storage.stores import is_address
from bigtrain.system.text_files import TextFileError, read_text

logger = logging.getLogger(__name__)

FACTS = ("hash", "vocab_size", "end_of_document_id")
_USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>")
"""End tokens that a tokenizer may have without naming one."""
_DATE_FUNCTION = "strftime_now"


class NoChatTemplate(DataError):
    """Error for a tokenizer without a chat template."""


@dataclass(frozen=True)
class Tokenizer:
    """Loaded Hugging Face tokenizer, and the facts that a dataset records about it. Token ids are
    below `vocab_size`, which counts added tokens and gaps. `hash` is `tokenizer_hash`. It was
    `loaded` by transformers, or is `cached`, or both."""

    name: str
    hash: str
    vocab_size: int
    end_of_document_id: int
    loaded: Any = None
    cached: CachedTokenizer | None = None
    directory: str = ""
    """Local copy, if `name` is an address."""
    eos_id: int | None = None
    """Its end-of-sequence token, if another one ends documents (`with_end_of_document`)."""

    @property
    def load_path(self) -> str:
        """Directory or name from which it can be loaded again."""
        return self.directory or self.name

    @cached_property
    def huggingface(self) -> Any:
        """Tokenizer object of ``AutoTokenizer``; imports transformers."""
        return _load_with_transformers(self.load_path)[0] if self.loaded is None else self.loaded

    def encoder(
        self,
        parse_special_tokens: bool = False,
        ends: bool = True,
        beginning_ids: tuple[int, ...] = (),
    ) -> ReferenceEncoder:
        """Return the reference encoder; `equivalence` selects a faster one. `ends`: append the
        end-of-document token to each document; `beginning_ids`: begin it with these."""
        end = self.end_of_document_id if ends else None
        return ReferenceEncoder(self.backend_json, end, parse_special_tokens, beginning_ids)

    def beginning(self, policy: BeginningOfText) -> tuple[int, ...]:
        """Return the tokens that begin a text; auto: tokens that the tokenizer itself adds. Raises
        DataError for always if the tokenizer has no token for it."""
        beginning_ids = () if policy == "never" else self.added_beginning()
        if beginning_ids or policy != "always":
            return beginning_ids
        bos_id = self.huggingface.bos_token_id
        if bos_id is None:
            raise DataError(
                f"--beginning-of-text always: tokenizer {self.name} has no beginning-of-text token "
                "-> set bos_token in its tokenizer_config.json, or auto"
            )
        return (int(bos_id),)

    def with_end_of_document(self, token: str | None) -> Tokenizer:
        """Return the tokenizer with `token` as end of documents. Raise DataError if unknown."""
        if token is None:
            return self
        ids = self.ids_of([token])
        if not ids:
            ends = " or ".join(self.generation_ends().values())
            raise DataError(
                f"--end-of-document {token}: not a token of {self.name} -> one of its tokens, such "
                f"as {ends}"
            )
        return replace(self, end_of_document_id=ids[0], eos_id=self.end_of_document_id)

    @property
    def backend_json(self) -> str:
        """``tokenizer.json`` of the tokenizer as loaded by transformers, for `tokenizers`."""
        if self.cached is not None:
            return self.cached.backend_json
        return str(self.huggingface.backend_tokenizer.to_str())

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer as Backend

        return Backend.from_str(self.backend_json)

    @property
    def end_text(self) -> str:
        """Text of the end-of-document token."""
        return str(self._backend.id_to_token(self.end_of_document_id))

    def added_beginning(self) -> tuple[int, ...]:
        """Return the special tokens that it adds at the start of every text."""
        plain_ids = self._backend.encode("a", add_special_tokens=False).ids
        full_ids = self._backend.encode("a", add_special_tokens=True).ids
        offsets = range(len(full_ids) - len(plain_ids) + 1)
        matches = (n for n in offsets if full_ids[n : n + len(plain_ids)] == plain_ids)
        num_before = next(matches, 0)
        return tuple(full_ids[:num_before])

    def ids_of(self, names: Iterable[str]) -> list[int]:
        """Return the ids of the `names` that are tokens."""
        ids = map(self._backend.token_to_id, names)
        return [token_id for token_id in ids if token_id is not None]

    def joins(self, first: str, second: str) -> bool:
        """Return whether the tokens of two texts decode to the two texts, joined."""
        encodings = [
            self._backend.encode(text, add_special_tokens=False) for text in (first, second)
        ]
        ids = [token_id for encoding in encodings for token_id in encoding.ids]
        return bool(self._backend.decode(ids, skip_special_tokens=False) == first + second)

    def generation_ends(self) -> dict[int, str]:
        """Return the tokens that end generation, with their texts: the end-of-sequence token, and
        the tokens of ``generation_config.json`` in the directory, if it exists."""
        ids = [self.end_of_document_id if self.eos_id is None else self.eos_id]
        try:
            tree = json.loads((Path(self.load_path) / "generation_config.json").read_bytes())
            eos_ids = tree.get("eos_token_id")
            ids += eos_ids if isinstance(eos_ids, list) else [eos_ids]
        except (OSError, ValueError, AttributeError):
            pass  # missing, or not a file of transformers
        valid_ids = [token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0]
        texts = {token_id: self._backend.id_to_token(token_id) for token_id in valid_ids}
        return {token_id: name for token_id, name in texts.items() if name}

    def chat_template(self, file: Path | None = None) -> ChatTemplate:
        """Return the tokenizer's chat template, or the template `file`. Raises DataError if there
        is none, it cannot be read, or its syntax is invalid."""
        try:
            jinja = None if file is None else read_text(file)
        except TextFileError as error:
            raise DataError(f"--chat-template {file} {error}") from error
        try:
            # A tokenizer may have one template for conversations with tools and one for others.
            get_template = self.huggingface.get_chat_template
            template, with_tools = get_template(jinja, None), get_template(jinja, [])
        except ValueError as error:
            raise NoChatTemplate(
                f"tokenizer {self.name} has no chat template -> specify one: --chat-template FILE"
            ) from error
        literals = _literals({template, with_tools}, str(file or f"of tokenizer {self.name}"))
        if any(_DATE_FUNCTION in source for source in (template, with_tools)):
            logger.warning(
                "the chat template of %s writes the current date: tokens of the same conversations "
                "differ from day to day",
                file or self.name,
            )
        variables = dict(self.huggingface.special_tokens_map)
        return ChatTemplate(template, with_tools, variables, literals)

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of `tokens`, with special tokens."""
        ids = [int(token) for token in tokens]
        if self.cached is not None and self.cached.decodes_plainly:
            return self.cached.decode(ids)
        return str(
            self.huggingface.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def save(self, directory: Path) -> None:
        """Write the files that ``AutoTokenizer.from_pretrained(directory)`` loads."""
        if self.cached is not None:
            self.cached.save(directory)
        else:
            self.huggingface.save_pretrained(str(directory))


def _literals(sources: Iterable[str], origin: str) -> frozenset[str]:
    """Return the strings in chat templates. Raise DataError for invalid syntax."""
    from jinja2 import TemplateSyntaxError, nodes

    literals: set[str] = set()
    for source in sources:
        try:
            tree = template_syntax_tree(source)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template {origin} is invalid: line {error.lineno}: {error.message} -> "
                "correct the line, or render by another template: --chat-template FILE"
            ) from error
        literals |= {node.data for node in tree.find_all(nodes.TemplateData)}
        values = [node.value for node in tree.find_all(nodes.Const)]
        literals |= {value for value in values if isinstance(value, str)}
    return frozenset(literals)


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer in directory `name`, or of that name on the Hugging Face Hub or in its
    cache. Raises DataError if there is none, if the Hub is unreachable (detected in seconds), and
    if the tokenizer has no fast implementation or no end-of-sequence token."""
    if is_address(name):
        local_directory = local_path(name, weights=False)
        tokenizer = load_tokenizer(local_directory)
        return replace(tokenizer, name=without_secrets(name), directory=local_directory)
    directory = Path(name)
    key = fingerprint(directory, name) if directory.is_dir() else None
    cached = get_cached_tokenizer(directory, key) if key else None
    if cached is not None:
        if cached.remark:
            logger.warning("%s", cached.remark)
        facts: Any = {fact: getattr(cached, fact) for fact in FACTS}
        return Tokenizer(name=name, cached=cached, **facts)
    loaded, remark = _load_with_transformers(name)
    if remark:
        logger.warning("%s", remark)
    tokenizer = from_huggingface(name, loaded)
    if key and fingerprint(directory, name) == key:  # otherwise its files changed during loading
        facts = {fact: getattr(tokenizer, fact) for fact in FACTS} | {"remark": remark}
        cached = put_cached_tokenizer(directory, key, loaded, facts, decodes_plainly(loaded))
    return replace(tokenizer, cached=cached)


def own_file(name: str) -> Path | None:
    """Return the ``tokenizer.json`` of a directory, or of a Hub name in the local cache."""
    if Path(name).exists():
        return Path(name) / OWN_FILE if (Path(name) / OWN_FILE).is_file() else None
    return cached_hub_file(name, OWN_FILE)


def _load_with_transformers(name: str) -> tuple[Any, str]:
    """Load `name` by transformers; return it, and a remark for the log or "". Raise DataError."""
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    # A directory needs a tokenizer's file; a name that the Hub lacks may be in the local cache.
    directory = Path(name)
    is_local = directory.exists()
    hub_problem = None if is_local else _hub_problem(name)
    files = ("tokenizer.json", "tokenizer_config.json")
    if directory.is_file():
        folder = "a folder"
        if any((directory.parent / file).is_file() for file in files):
            folder = str(directory.parent)
        raise DataError(
            f"{name} is a file, and a tokenizer is a folder with {' or '.join(files)} -> {folder}"
        )
    if is_local and not any((directory / file).is_file() for file in files):
        raise DataError(
            f"{name} has no tokenizer ({' or '.join(files)}) -> train one with `bigtrain tokenizer`"
        )
    # Loaded by the class that the directory names, or else by the plain class; then compared with
    # the file, which has precedence. Warnings of transformers are not for the user.
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        options = {
            "trust_remote_code": False,
            "local_files_only": is_local or hub_problem is not None,
        }
        path = own_file(name) if is_local else None
        try:
            loaded: Any = AutoTokenizer.from_pretrained(name, **options)
        except Exception as error:  # for example a named class that does not match the file
            if path is None:
                raise
            try:
                loaded = without_class(path, **options)
            except DataError:  # a corrupt file: transformers' error has more details
                raise error from None
            return loaded, (
                f"transformers cannot load {name} by the class that it names "
                f"({first_line(error)}): {path} is used unchanged"
            )
        path = path or own_file(name)
        return (loaded, "") if path is None else as_in_file(loaded, path, **options)
    except DataError:
        raise
    except Exception as error:  # transformers may raise anything for foreign files
        if is_local:
            raise DataError(
                f"the tokenizer in {name} cannot be loaded: {first_line(error)}"
            ) from error
        raise DataError(
            f"tokenizer {name}: not a directory here, and "
            + (hub_problem or f"the Hugging Face Hub's cannot be loaded: {first_line(error)}")
            + " -> specify a directory (`bigtrain tokenizer` trains one) or a Hub tokenizer"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def _hub_problem(name: str) -> str | None:
    """Return why the Hub does not provide `name`; None if it does. Checked first with one short
    request: transformers itself retries an unreachable Hub for a minute and a half, and prints
    every retry."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except HFValidationError:
        return "not a valid name on the Hugging Face Hub"
    except RepositoryNotFoundError:
        return "the Hugging Face Hub has none of this name (or it is private: `hf auth login`)"
    except Exception as error:  # the client's transport errors differ between its versions
        return (
            "the Hugging Face Hub is unreachable, and it is not in the local cache "
            f"({first_line(error)})"
        )
    return None


def tokenizer_hash(huggingface: Any) -> str:
    """Return the SHA-256 of the parts of `huggingface` that determine the encoding of documents.
    These are normalizer, pre-tokenizer, model and added tokens of the fast tokenizer's canonical
    JSON, and the end-of-document id; not truncation, padding, post-processor and decoder. Saving
    and loading do not change it."""
    tree = json.loads(huggingface.backend_tokenizer.to_str())
    parts = {key: tree.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
    parts["end_of_document_id"] = huggingface.eos_token_id
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def from_huggingface(name: str, huggingface: Any) -> Tokenizer:
    """Return a transformers tokenizer with the facts that shards record. Raise DataError if it has
    no fast implementation or no end-of-sequence token."""
    if getattr(huggingface, "backend_tokenizer", None) is None:
        raise DataError(f"tokenizer {name} has no fast implementation (tokenizer.json)")
    if huggingface.eos_token_id is None:
        ends = [token for token in _USUAL_ENDS if token in huggingface.get_vocab()]
        such_as = f': "eos_token": {json.dumps(ends[0])}' if ends else ""
        raise DataError(
            f"tokenizer {name} has no end-of-sequence token to end documents with -> set eos_token "
            f"in its tokenizer_config.json{such_as}"
        )
    highest = max(huggingface.get_vocab().values())
    return Tokenizer(
        name=name,
        hash=tokenizer_hash(huggingface),
        vocab_size=max(len(huggingface), highest + 1),
        end_of_document_id=int(huggingface.eos_token_id),
        loaded=huggingface,
    )
