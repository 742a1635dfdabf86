"""Tokenizers: training, loading, identity; `bigtrain.data.tokenizers.encoders` encodes.

The only file of the data layer that imports transformers, and only inside the functions that need
it: a tokenizing worker gets along with `tokenizers`, whose import is a hundred times faster, and so
does loading a directory that was loaded before (`bigtrain.data.tokenizers.cache`).
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
from bigtrain.errors import DataError, first_line
from bigtrain.system.storage.copies import local_path
from bigtrain.system.storage.stores import is_address, without_secrets

logger = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
FACTS = ("hash", "vocab_size", "end_of_document_id")
_DATE_FUNCTION = "strftime_now"


class NoChatTemplate(DataError):
    """A tokenizer without a chat template."""


@dataclass(frozen=True)
class Tokenizer:
    """A loaded Hugging Face tokenizer and what a dataset records of it.

    Token ids are below `vocab_size`, which counts added tokens and holes. `hash` is
    `tokenizer_hash`. It was `loaded` by transformers, or is `cached`, or both.
    """

    name: str
    hash: str
    vocab_size: int
    end_of_document_id: int
    loaded: Any = None
    cached: CachedTokenizer | None = None
    directory: str = ""
    """Where it was copied to from the address `name`."""
    eos_id: int | None = None
    """Its end-of-sequence token, where another one ends documents (`with_end_of_document`)."""

    @property
    def place(self) -> str:
        """What it can be loaded from again."""
        return self.directory or self.name

    @cached_property
    def huggingface(self) -> Any:
        """What ``AutoTokenizer`` makes of it; imports transformers."""
        return _load_with_transformers(self.place)[0] if self.loaded is None else self.loaded

    def encoder(
        self,
        parse_special_tokens: bool = False,
        ends: bool = True,
        beginning_ids: tuple[int, ...] = (),
    ) -> ReferenceEncoder:
        """Return the reference encoder; `bigtrain.data.tokenizers.selection` finds a faster one.

        `ends`: each document gets the end-of-document token; `beginning_ids`: it begins with these.
        """
        end = self.end_of_document_id if ends else None
        return ReferenceEncoder(self.backend_json, end, parse_special_tokens, beginning_ids)

    def beginning(self, policy: BeginningOfText) -> tuple[int, ...]:
        """Return the tokens that begin a text; auto: those that the tokenizer itself adds. Raises
        DataError if there always is to be one and the tokenizer has no token for it."""
        own = () if policy == "never" else self.text_ends()[0]
        if own or policy != "always":
            return own
        found = self.huggingface.bos_token_id
        if found is None:
            raise DataError(
                f"--beginning-of-text always: tokenizer {self.name} has no beginning-of-text token "
                "-> set bos_token in its tokenizer_config.json, or auto"
            )
        return (int(found),)

    def with_end_of_document(self, token: str | None) -> Tokenizer:
        """Return the same with `token` as the one that ends documents. Raises DataError if it is
        none."""
        if token is None:
            return self
        ids = self.ids_of([token])
        if not ids:
            ends = " or ".join(self.generation_ends().values())
            raise DataError(
                f"--end-of-document {token}: is not a token of {self.name} -> one of its tokens, "
                f"such as {ends}"
            )
        return replace(self, end_of_document_id=ids[0], eos_id=self.end_of_document_id)

    @property
    def backend_json(self) -> str:
        """``tokenizer.json`` of what transformers makes of it, for `tokenizers`."""
        if self.cached is not None:
            return self.cached.backend_json
        return str(self.huggingface.backend_tokenizer.to_str())

    def text_ends(self) -> tuple[tuple[int, ...], str]:
        """Return the special tokens that it begins every text with by itself, and the letters of
        the end-of-document token."""
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(self.backend_json)
        alone = backend.encode("a", add_special_tokens=False).ids
        found = backend.encode("a", add_special_tokens=True).ids
        places = range(len(found) - len(alone) + 1)
        begin = next((n for n in places if found[n : n + len(alone)] == alone), 0)
        return tuple(found[:begin]), str(backend.id_to_token(self.end_of_document_id))

    def ids_of(self, names: Iterable[str]) -> list[int]:
        """Return the ids of tokens, by their texts."""
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(self.backend_json)
        found = [backend.token_to_id(name) for name in names]
        return [number for number in found if number is not None]

    def generation_ends(self) -> dict[int, str]:
        """Return the tokens that end generation, and their texts: the end-of-sequence token, and
        those of the ``generation_config.json`` in its directory, if there is one."""
        from tokenizers import Tokenizer as Backend

        ids = [self.end_of_document_id if self.eos_id is None else self.eos_id]
        try:
            tree = json.loads((Path(self.place) / "generation_config.json").read_bytes())
            listed = tree.get("eos_token_id")
            ids += listed if isinstance(listed, list) else [listed]
        except (OSError, ValueError, AttributeError):
            pass  # none, or not one of transformers
        backend = Backend.from_str(self.backend_json)
        known = {n: backend.id_to_token(n) for n in ids if isinstance(n, int) and n >= 0}
        return {number: name for number, name in known.items() if name}

    def chat_template(self, file: Path | None = None) -> ChatTemplate:
        """Return the tokenizer's chat template, or the one in `file`.

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
            raise NoChatTemplate(
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
        ids = [int(token) for token in tokens]
        if self.cached is not None and self.cached.decodes_plainly:
            return self.cached.decode(ids)
        return str(
            self.huggingface.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def save(self, directory: Path) -> None:
        """Write what ``AutoTokenizer.from_pretrained(directory)`` loads."""
        if self.cached is not None:
            self.cached.save(directory)
        else:
            self.huggingface.save_pretrained(str(directory))


def _literals(sources: Iterable[str], where: str) -> frozenset[str]:
    """Return the strings in chat templates. Raises DataError where one is not a template."""
    from jinja2 import TemplateSyntaxError, nodes

    found: set[str] = set()
    for source in sources:
        try:
            tree = template_syntax_tree(source)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template {where} is not one: line {error.lineno}: {error.message}"
            ) from error
        found |= {node.data for node in tree.find_all(nodes.TemplateData)}
        values = [node.value for node in tree.find_all(nodes.Const)]
        found |= {value for value in values if isinstance(value, str)}
    return frozenset(found)


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer in directory `name`, or of that name on the Hugging Face hub or in its
    cache.

    Raises DataError where there is none, where the hub cannot be reached (found out in seconds),
    and where the tokenizer has no fast implementation or no end-of-sequence token.
    """
    if is_address(name):
        place = local_path(name, weights=False)
        return replace(load_tokenizer(place), name=without_secrets(name), directory=place)
    directory = Path(name)
    if not directory.is_dir():
        return describe(name, _said(*_load_with_transformers(name)))
    key = fingerprint(directory, name)
    known = get_cached_tokenizer(directory, key) if key else None
    if known is not None:
        _said(known, known.remark)
        facts: Any = {fact: getattr(known, fact) for fact in FACTS}
        return Tokenizer(name=name, cached=known, **facts)
    loaded, remark = _load_with_transformers(name)
    tokenizer = describe(name, _said(loaded, remark))
    if key and fingerprint(directory, name) == key:  # its files are those that were loaded
        facts = {fact: getattr(tokenizer, fact) for fact in FACTS}
        plain = decodes_plainly(tokenizer.loaded)
        known = put_cached_tokenizer(directory, key, loaded, {**facts, "remark": remark}, plain)
    return replace(tokenizer, cached=known)


def _said(loaded: Any, remark: str) -> Any:
    if remark:
        logger.warning("%s", remark)
    return loaded


def own_file(name: str) -> Path | None:
    """Return the ``tokenizer.json`` of a directory, or of a hub name in the local cache."""
    if Path(name).exists():
        return Path(name) / OWN_FILE if (Path(name) / OWN_FILE).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, OWN_FILE)
    except ValueError:  # not a possible name
        return None
    return Path(found) if isinstance(found, str) else None


def _load_with_transformers(name: str) -> tuple[Any, str]:
    """What transformers makes of `name`, and a remark for the log, or none. Raises DataError."""
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    directory = Path(name)
    problem = None if directory.exists() else _hub_problem(name)
    if directory.exists():
        if (
            not (directory / "tokenizer_config.json").is_file()
            and not (directory / "tokenizer.json").is_file()
        ):
            raise DataError(
                f"{name} holds no tokenizer (tokenizer.json or tokenizer_config.json) -> train "
                "one with `bigtrain tokenizer`"
            )
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        local = directory.exists() or problem is not None
        options = {"trust_remote_code": False, "local_files_only": local}
        path = own_file(name) if directory.exists() else None
        try:
            found: Any = AutoTokenizer.from_pretrained(name, **options)
        except Exception as error:  # of a class that the file is not of
            if path is None:
                raise
            try:
                found = without_class(path, **options)
            except DataError:  # of a corrupt file transformers has said more
                raise error from None
            return found, (
                f"transformers cannot load {name} by the class that it names "
                f"({first_line(error)}): {path} is used as it is"
            )
        path = path or own_file(name)
        return (found, "") if path is None else as_in_file(found, path, **options)
    except DataError:
        raise
    except Exception as error:  # whatever a foreign tokenizer's files make transformers raise
        if directory.exists():
            raise DataError(
                f"the tokenizer in {name} cannot be loaded: {first_line(error)}"
            ) from error
        raise DataError(
            f"tokenizer {name}: not a directory here, and "
            + (problem or f"the Hugging Face hub's cannot be loaded: {first_line(error)}")
            + " -> name a directory (`bigtrain tokenizer` trains one) or a hub tokenizer"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def _hub_problem(name: str) -> str | None:
    """Return why the hub does not give `name`; None where it does.

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
            f"({first_line(error)})"
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


def describe(name: str, huggingface: Any) -> Tokenizer:
    """Return a tokenizer of transformers, with what shards must know of it. Raises DataError where
    it cannot be used: no fast implementation, no end-of-sequence token."""
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
