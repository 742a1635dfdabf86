"""Inputs of a new run, as `bigtrain init` reads them: names of models, chat templates, shards."""

from __future__ import annotations

import difflib
import glob
import json
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from bigtrain.data.tokenize_job.options import TokenizeOptions
from bigtrain.errors import DataError, Problem, first_line
from bigtrain.objectives.preference import PAIRS
from bigtrain.objectives.rows import Rows
from bigtrain.objectives.section import ROWS
from bigtrain.settings.loading import recipe_names
from bigtrain.system.hub_cache import cached_hub_file, is_hub_name
from bigtrain.system.shipped_files import published_configuration
from bigtrain.system.storage.stores import is_address

HUB_TIMEOUT_S = 10.0
_SETTINGS_SUFFIXES = (".yaml", ".yml", ".toml", ".ini", ".cfg")
_SHOWN_KEYS = 8
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class ShardFacts:
    """Facts about token shards that determine settings of a run.

    vocab_size: token ids are below this. num_tokens, num_documents: of the training documents (a
    pair is two documents). num_held_out: documents held out. long_document: tokens that 99% of the
    training documents do not exceed. rows: format of answers or labels; None for documents.
    is_chat: whether the documents are conversations. has_template: whether the tokenizer has a chat
    template.
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
        """Return an estimate of the number of training samples of `length` tokens."""
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
    lengths = inspected.lengths("train")  # None without training documents
    return ShardFacts(
        vocab_size=manifest.tokenizer.vocab_size,
        num_tokens=0 if lengths is None else lengths.num_tokens,
        num_documents=0 if lengths is None else lengths.num_documents,
        num_held_out=sum(shard.documents for shard in manifest.splits.get("held_out", ())),
        long_document=1 if lengths is None else lengths.quantile(0.99),
        rows=manifest.rows,
        is_chat=manifest.options.chat and manifest.options.chat_format != "tokens",
        has_template=manifest.tokenizer.chat_template is not None,
    )


def model_problems(option: str, name: str) -> tuple[list[Problem], str]:
    """Return the problem of a model that `option` names and that does not exist; and a note, empty
    unless the Hub could not be asked. The Hub is asked for a name that is neither a directory on
    this machine nor in the Hub's cache."""
    if option == "--model" and Path(name).is_file():
        rule = "is a file, and a model is a directory"
        return [Problem(option, name, rule, f"its directory, such as {Path(name).parent}")], ""
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


def inspect_data(
    data: str, tokenizer: str, *, is_text: bool = False, has_pairs: bool = False
) -> tuple[str | None, list[Problem], str]:
    """Return the format of the first rows of untokenized `data` (``text``, or a ``--format`` of
    `bigtrain tokenize`; None if unknown), the problems, and a note, empty unless the Hub could not
    be asked.

    tokenizer: for suggested commands. is_text, has_pairs: whether the user named this format.
    Missing and empty data, files of settings, and rows without text are problems. An address is not
    read; the Hub is asked for a dataset whose name is not a path on this machine.
    """
    from bigtrain.data.documents.chat_formats import also_preferences
    from bigtrain.data.documents.discovery import find_sources
    from bigtrain.data.documents.formats import DocumentReader, keys_in
    from bigtrain.data.documents.reader import RejectedDocuments
    from bigtrain.python_api.tokenizing import detected_format, read_options

    if is_address(data) or data == "-":
        return None, [], ""
    if not Path(data).exists() and not glob.has_magic(data):
        return None, *_hub_data_problems(data)
    if Path(data).is_file() and Path(data).suffix.lower() in _SETTINGS_SUFFIXES and not is_text:
        rule = "is a file of settings, and neither text nor rows"
        remedy = "a file of conversations, pairs or text (.jsonl, .parquet, .csv, .txt)"
        return None, [Problem("--data", data, rule, remedy)], ""
    # Read the first row, and find its format by its keys.
    reading = read_options(TokenizeOptions(inputs=[data], tokenizer="", output=""))
    try:
        sources = find_sources(reading.selection)
        if all(source.record.bytes == 0 and not source.read_once for source in sources):
            remedy = "a file or folder with text or rows"
            return None, [Problem("--data", data, "is empty", remedy)], ""
        first_row = keys_in(sources[0], reading)
        keys = set(first_row)
        is_readable = not (sources[0].needs_decompression or sources[0].read_once)
        if not keys and sources[0].format.has_rows and is_readable:
            # The reader raises the reason why the file begins with no object.
            next(DocumentReader(sources[:1], reading, RejectedDocuments(False)).blocks(), None)
        if is_text:
            row_format = "text"
        elif has_pairs and {"chosen", "rejected"} <= keys:
            row_format = PAIRS.name
        elif choices := also_preferences(keys):
            remedy = _tokenize_remedy(data, tokenizer, choices[0])
            remedy = "; or instead ".join((remedy, *choices[1:]))
            rule = "its first row has the keys of several formats"
            return None, [Problem("--data", data, rule, remedy)], ""
        else:
            row_format = detected_format(reading, lambda text: None)
    except DataError as error:
        rule, _, remedy = str(error).removeprefix(f"--input {data}: ").partition(" -> ")
        return None, [Problem("--data", data, rule, remedy)], ""
    if row_format != "text" or not keys or keys & set(reading.text_keys):
        return row_format, [], ""
    return None, [_problem_of_unknown_rows(data, tokenizer, first_row, is_text=is_text)], ""


def _problem_of_unknown_rows(
    data: str, tokenizer: str, first_row: Collection[str], *, is_text: bool
) -> Problem:
    """Return the problem of `data` whose `first_row` has no text, with the command that tokenizes
    the data. is_text: whether the user named the rows as texts."""
    from bigtrain.data.documents.chat_formats import remedy_for, suggestion_for
    from bigtrain.data.documents.other_names import Suggestion

    key_names = ", ".join(sorted(first_row)[:_SHOWN_KEYS])
    rule, suggestion = f"its first row has the keys {key_names}, and no text", None
    if not is_text:
        rule += ", conversation or pair"
        suggestion = suggestion_for(first_row)
        if suggestion is None and (remedy := remedy_for(first_row)):
            return Problem("--data", data, rule, remedy.removeprefix(" -> "))
    options, unread = suggestion or Suggestion("--text-key KEY")
    remedy = _tokenize_remedy(data, tokenizer, options)
    if unread:
        remedy += f" (not read: {', '.join(unread)})"
    return Problem("--data", data, rule, remedy)


def _tokenize_remedy(data: str, tokenizer: str, options: str) -> str:
    """Return the command that tokenizes `data` with `options`, and what to type after it."""
    names = f"--input {shlex.quote(data)} --tokenizer {shlex.quote(tokenizer)}"
    return f"bigtrain tokenize {names} {options} --output shards/, and then --data shards/"


def _hub_data_problems(data: str) -> tuple[list[Problem], str]:
    """Return the problem of data that is neither here nor a dataset on the Hub, or a note if the
    Hub cannot be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(data, timeout=HUB_TIMEOUT_S)
    except (HFValidationError, RepositoryNotFoundError):
        rule = "is not here, and the Hub has no dataset of this name (or it is private)"
        return [Problem("--data", data, rule, "a file, a folder, or the name of a dataset")], ""
    except Exception as error:  # the client's transport errors differ between its versions
        return [], f"{data} is not here, and the Hub cannot be asked for it ({first_line(error)})"
    return [], ""


def row_problems(
    data: str, tokenizer: str, row_format: str, *, chat: bool, preference: bool, infers: bool
) -> list[Problem]:
    """Return the problem of `chat` or `preference` if the option contradicts the format of the
    first rows of `data`, or if the format needs an option. infers: without an option the format
    decides."""
    is_pairs = row_format == PAIRS.name
    is_chat = row_format not in ("text", "tokens", *ROWS)
    format_text = f"rows of --format {row_format}"
    if row_format == "text":
        format_text = "text without conversations"
    option = "--preference" if is_pairs else ""  # that the format needs
    if is_chat:
        option = "--chat"
    if chat and not is_chat and row_format != "tokens":
        remedy = f"{option} instead" if option and not infers else "remove --chat"
        return [Problem("--chat", None, f"{data} has {format_text}", remedy)]
    if preference and not is_pairs:
        remedy = f"{option} instead" if option and not infers else "remove --preference"
        return [Problem("--preference", None, f"{data} has {format_text}", remedy)]
    if infers or chat or preference or row_format in ("text", "tokens"):
        return []
    remedy = f"add {option}"
    if not option:
        remedy = _tokenize_remedy(data, tokenizer, f"--format {row_format}")
    return [Problem("--data", data, f"has {format_text}", remedy)]


def template_problems(option: str, tokenizer: str) -> list[Problem]:
    """Return the problem of a tokenizer (directory, or Hub name in the cache) without a chat
    template; none for a tokenizer that is not on this machine."""
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
