"""Comparison of a dataset's tokenizer with a model: its vocabulary, and the tokenizer next to its
weights.

Compares the two ``tokenizer.json`` files, without transformers: a token in both must have one id,
and both must split a text alike. Tokens that only one file has are allowed: a vocabulary may have
grown, or have space for tokens that the data lacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.manifest import TokenizerRecord
from bigtrain.errors import DataError, Problem
from bigtrain.settings.hf_config_keys import MAX_PADDING_ROWS
from bigtrain.settings.run_config import ModelSection, RunConfig
from bigtrain.system.storage.local_path import local_path

KEY, INITIAL = "data.allow_other_tokenizer", "checkpoint.initialize_from"
_PARTS = ("normalizer", "pre_tokenizer", "model")


def check_model_tokens(
    config: RunConfig, directory: Path, source: str, *, resumes: bool = False
) -> list[Problem]:
    """Check that a dataset's tokens, whose tokenizer is in `directory`, have the meaning that they
    have for the run's initial weights: ``model.path`` or ``checkpoint.initialize_from``, or, if it
    `resumes`, the weights that it saved. Weights without a ``tokenizer.json`` are not checked.
    source: the dataset, for the message."""
    if config.data.allow_other_tokenizer:
        return []
    if resumes:
        return _compare(config, directory, source, "output.directory", config.output.directory)
    problems: list[Problem] = []
    for key, name in (
        ("model.path", config.model.path),
        (INITIAL, config.checkpoint.initialize_from),
    ):
        if name is not None and not problems:  # one problem suffices: both have one fix
            problems = _compare(config, directory, source, key, name)
    return problems


def beginning_note(config: RunConfig, dataset: TokenDataset) -> str:
    """Return a log line if texts of the data begin differently than the tokenizer next to the
    weights of ``model.path`` begins them; empty if they do not, or if that is unknown.
    Conversations begin as their template writes, and resumed runs do not read the base."""
    record, base = dataset.table.tokenizer, config.model.path
    if base is None or record.chat_template is not None or _tokenizer_file(base) is None:
        return ""
    try:
        from bigtrain.data.tokenizers.tokenizer import load_tokenizer

        model_beginning = load_tokenizer(base).beginning("auto")
    except DataError:
        return ""
    if model_beginning == record.beginning_ids:
        return ""
    return (
        f"{dataset.path}: texts begin with {_listed(record.beginning_ids)}; the tokenizer of "
        f"model.path = {base} begins them with {_listed(model_beginning)} -> if that is not meant, "
        f"tokenize with the model's own: bigtrain tokenize --tokenizer {base}"
    )


def _listed(ids: Sequence[int] | None) -> str:
    return f"token {', '.join(map(str, ids))}" if ids else "no special token"


def _tokenizer_file(name: str) -> Path | None:
    """Return the tokenizer.json of a Hugging Face directory, Hub name, run, or run's checkpoint."""
    path = local_path(name, weights=False)
    for folder in (path, f"{path}/tokenizer", f"{path}/../../tokenizer"):
        if Path(folder, "tokenizer.json").is_file():
            return Path(folder, "tokenizer.json")
    from bigtrain.data.tokenizers.tokenizer import own_file

    return own_file(path)


def _compare(config: RunConfig, directory: Path, source: str, key: str, name: str) -> list[Problem]:
    """Return the problem of tokens with another meaning for the weights `name`, set by `key`."""
    data_file, model_file = directory / "tokenizer.json", _tokenizer_file(name)
    if model_file is None or not data_file.is_file():
        return []
    contents = data_file.read_bytes(), model_file.read_bytes()
    if contents[0] == contents[1]:
        return []
    try:
        trees: list[dict[str, Any]] = [json.loads(content) for content in contents]
        # The ids of the tokens in both files, by their texts.
        vocabularies: list[dict[str, int]] = []
        for tree in trees:
            vocabulary = tree["model"]["vocab"]
            if isinstance(vocabulary, list):  # of Unigram: pairs of text and score
                vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
            added = {token["content"]: token["id"] for token in tree.get("added_tokens") or []}
            vocabularies.append({**vocabulary, **added})
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # not a file of `tokenizers`: loading it is refused elsewhere
    difference = _other_ids(*vocabularies) or _other_splits(trees, vocabularies)
    if not difference:
        return []
    return [
        Problem(
            config.data.key_of(0),
            source,
            f"was tokenized with a different tokenizer than that of {key} = {name}: {difference}",
            f"tokenize with the model's own (bigtrain tokenize --tokenizer {model_file.parent}), "
            f"or, if this is meant, {KEY}=true",
        )
    ]


def _other_ids(data: Mapping[str, int], model: Mapping[str, int]) -> str:
    """Describe ids that mean different tokens, and tokens with different ids; empty for none."""
    data_texts = {number: text for text, number in data.items()}
    model_texts = {number: text for text, number in model.items()}
    common_ids = data_texts.keys() & model_texts.keys()
    wrong = sorted(id_ for id_ in common_ids if data_texts[id_] != model_texts[id_])
    if wrong:
        first = wrong[0]
        return (
            f"{len(wrong):,} ids mean other tokens, such as {first}: {data_texts[first]!a} in the "
            f"data, {model_texts[first]!a} for the model"
        )
    moved = sorted(text for text in data.keys() & model.keys() if data[text] != model[text])
    if not moved:
        return ""
    text = moved[0]
    return f"the token {text!a} has id {data[text]} in the data and {model[text]} for the model"


def _other_splits(trees: list[dict[str, Any]], vocabularies: list[dict[str, int]]) -> str:
    """Describe a text that the tokenizers of data and model, given as the trees of their files,
    split differently despite equal ids; empty for none."""
    if all(_comparable_part(trees[0], part) == _comparable_part(trees[1], part) for part in _PARTS):
        return ""
    from tokenizers import Tokenizer as Backend

    from bigtrain.data.tokenizers.edge_cases import tokenizer_edge_cases

    backends = [Backend.from_str(json.dumps(tree)) for tree in trees]
    unshared_tokens = vocabularies[0].keys() ^ vocabularies[1].keys()
    for text in tokenizer_edge_cases("{}"):
        # A token that only one of the tokenizers has may split its text differently.
        if any(token in text for token in unshared_tokens):
            continue
        try:
            ids = [backend.encode(text, add_special_tokens=False).ids for backend in backends]
        except Exception:  # a tokenizer that cannot encode every text
            continue
        if ids[0] != ids[1]:
            return (
                "its tokens have the same ids, but it splits text differently, such as "
                f"{text[:40]!a}"
            )
    return ""


def _comparable_part(tree: Mapping[str, Any], part: str) -> Any:
    """Return a part of a tokenizer without vocabulary, whose merges are pairs."""
    value = tree.get(part)
    if part == "model" and isinstance(value, dict):
        merges = [m.split(" ", 1) if isinstance(m, str) else m for m in value.get("merges") or []]
        return {**value, "vocab": None, "merges": merges}
    return value


def check_vocabulary(
    tokenizer: TokenizerRecord, model_vocab_size: int, *, trained: bool = False
) -> list[Problem]:
    """Check that the shards' token ids fit a model with `model_vocab_size` rows of embedding.
    `trained`: whether it has trained weights, whose vocabulary may grow."""
    fix = (
        f"set vocab_size to {tokenizer.vocab_size} (random weights), or tokenize with the "
        "model's own tokenizer"
    )
    if trained:
        fix = "tokenize with the model's own tokenizer"
    # Ids beyond the embedding cannot be read; many unused rows show another tokenizer.
    if tokenizer.vocab_size > model_vocab_size:
        rule = (
            f"too small: the shards were made with tokenizer {tokenizer.name}, whose vocabulary "
            f"has {tokenizer.vocab_size} tokens"
        )
        if trained:
            fix += (
                "; or, if it is the model's tokenizer with added tokens, grow the weights: "
                "model.vocabulary.new_rows=mean_covariance"
            )
    elif model_vocab_size - tokenizer.vocab_size > MAX_PADDING_ROWS:
        rule = (
            f"too large: the shards were made with tokenizer {tokenizer.name}, whose vocabulary "
            f"has {tokenizer.vocab_size} tokens, and more than {MAX_PADDING_ROWS} extra rows "
            "indicate a different tokenizer"
        )
    else:
        return []
    return [Problem("model vocab_size", model_vocab_size, rule, fix)]


def known_vocab_size(model: ModelSection) -> int | None:
    """Return `vocab_size` of the model's configuration, from overrides, the run's configuration or
    a file on this machine; None if none has it."""
    tree: Any = model.config
    if not isinstance(tree, dict):
        name = str(model.path if tree is None else tree)
        path = Path(local_path(name, weights=False)) / "config.json"
        try:
            tree = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None  # a Hub name, or a directory that the model layer will refuse
    # Overrides have precedence; a model of text and images has a text_config.
    for source in (model.overrides, tree):
        if isinstance(source, dict):
            text_config = source.get("text_config")
            for level in (source, text_config if isinstance(text_config, dict) else {}):
                if isinstance(level.get("vocab_size"), int):
                    return int(level["vocab_size"])
    return None
