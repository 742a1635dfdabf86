"""Inputs of a new run, as `bigtrain init` reads them: names of models, chat templates, shards."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from bigtrain.errors import DataError, Problem, first_line
from bigtrain.objectives.rows import Rows
from bigtrain.objectives.section import ROWS
from bigtrain.settings.loading import recipe_names
from bigtrain.system.hub_cache import cached_hub_file, is_hub_name
from bigtrain.system.shipped_files import published_configuration
from bigtrain.system.storage.stores import is_address

HUB_TIMEOUT_S = 10.0
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class ShardFacts:
    """What token shards determine of a run.

    vocab_size: token ids are below this. num_tokens, num_documents: of the training documents (a
    pair is two). num_held_out: documents held out. long_document:
    tokens that 99% of the training documents do not exceed. rows: of answers or labels; None for
    documents. is_chat: conversations. has_template: their tokenizer has a chat template.
    """

    vocab_size: int
    num_tokens: int
    num_documents: int
    num_held_out: int
    long_document: int
    rows: Rows | None
    is_chat: bool
    has_template: bool

    def num_samples(self, length: int) -> int:
        """Return about how many training samples of `length` tokens there are."""
        if self.rows is not None:
            return self.num_documents // len(ROWS[self.rows].documents)
        return self.num_tokens // length


def read_shards(path: str) -> ShardFacts:
    """Read manifest and indexes of the shards in directory `path`. Raises DataError."""
    from bigtrain.data.shards.inspection import inspect_shards

    inspected = inspect_shards(Path(path))
    manifest = inspected.manifest
    if manifest is None:
        raise DataError(f"{path} has no manifest.json -> make it with `bigtrain tokenize --output`")
    lengths = inspected.lengths("train")
    return ShardFacts(
        manifest.tokenizer.vocab_size,
        0 if lengths is None else lengths.num_tokens,
        0 if lengths is None else lengths.num_documents,
        sum(shard.documents for shard in manifest.splits.get("held_out", ())),
        1 if lengths is None else lengths.quantile(0.99),
        manifest.rows,
        manifest.options.chat and manifest.options.chat_format != "tokens",
        manifest.tokenizer.chat_template is not None,
    )


def model_problems(option: str, name: str) -> tuple[list[Problem], str]:
    """Return the problem of a model that is named by `option` and does not exist, or a note on one
    that could not be looked for. Asks the Hub for a name that is neither a directory here nor in
    the Hub's cache."""
    if is_address(name) or Path(name).exists() or published_configuration(name).is_file():
        return [], ""
    # Did the user mean a recipe, or a directory next to the missing path?
    parent = Path(name).parent
    names = {str(parent / entry.name) for entry in parent.iterdir()} if parent.is_dir() else set()
    recipes = recipe_names() if option == "--new-model" else []
    close = difflib.get_close_matches(name, [*recipes, *sorted(names)], n=1, cutoff=0.8)
    remedy = "a directory, or a name on the Hugging Face Hub"
    if close:
        remedy = f"did you mean {close[0]}?"
    if not is_hub_name(name):
        return [Problem(option, name, "no such directory", remedy)], ""
    if cached_hub_file(name, "config.json") is not None:
        return [], ""
    if close:
        return [Problem(option, name, "is not here, and not in the Hub's cache", remedy)], ""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except (HFValidationError, RepositoryNotFoundError):
        rule = "is not here, and the Hub has none of this name (or it is private: `hf auth login`)"
        return [Problem(option, name, rule, remedy)], ""
    except Exception as error:  # the client's transport errors differ between its versions
        return [], f"{name} is not here, and the Hub cannot be asked ({first_line(error)})"
    return [], ""


def template_problems(option: str, tokenizer: str) -> list[Problem]:
    """Return the problem of conversations for a tokenizer (directory or Hub name) whose files are
    here and have no chat template."""
    directory = Path(tokenizer)
    if not directory.is_dir():
        cached = cached_hub_file(tokenizer, "tokenizer_config.json")
        if cached is None:
            return []  # unknown until `bigtrain tokenize` loads it
        directory = cached.parent
    if any((directory / name).is_file() for name in _TEMPLATE_FILES):
        return []
    try:
        text = (directory / "tokenizer_config.json").read_text(encoding="utf-8")
        if json.loads(text).get("chat_template"):
            return []
    except (OSError, ValueError, AttributeError):
        return []  # not a tokenizer's directory, which `bigtrain tokenize` refuses
    rule = f"the tokenizer of {tokenizer} has no chat template"
    remedy = "a model tuned for chats (-Instruct, -Chat), or bigtrain tokenize --chat-template FILE"
    return [Problem(option, None, rule, remedy)]
