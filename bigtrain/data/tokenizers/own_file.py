"""Precedence of a directory's ``tokenizer.json`` over the class with which transformers loads it.

transformers 5 reads vocabulary and merges from the file, but gives some classes (`GPT2Tokenizer`,
`Qwen2Tokenizer`) a normalizer, pre-tokenizer and decoder regardless of the file
(tokenization_utils_tokenizers.py, `convert_to_native_format`). If ``tokenizer_config.json`` names
the wrong class, the tokens differ. Here the result is compared with the file, and loaded again
without the class if it encodes or decodes differently.
"""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from bigtrain.data.tokenizers.edge_cases import tokenizer_edge_cases
from bigtrain.errors import DataError, first_line

FILE = "tokenizer.json"
_ENCODING = ("normalizer", "pre_tokenizer", "model")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def as_in_file(tokenizer: Any, path: Path, **options: Any) -> tuple[Any, str]:
    """Return `tokenizer`, which transformers loaded, if it equals the tokenizer in `path`;
    otherwise the tokenizer in `path`, and why. `options`: of `from_pretrained`. Raises DataError
    for a file that the library `tokenizers` cannot read, or that transformers' plain class also
    changes."""
    file_tokenizer = _read(path)
    difference = _differences(tokenizer, file_tokenizer, path)
    if not difference:
        return tokenizer, ""
    plain_tokenizer = without_class(path, tokenizer, **options)
    still_different = _differences(plain_tokenizer, file_tokenizer, path)
    if still_different:
        raise DataError(
            f"{path} differs from the tokenizer that transformers loads from it, with the class "
            f"that tokenizer_config.json names ({difference}) and without it ({still_different}) "
            "-> save the tokenizer again with PreTrainedTokenizerFast"
        )
    note = (
        f"transformers' class {type(tokenizer).__name__} does not follow {path} ({difference}): "
        "the file is used unchanged"
    )
    if (path.parent / "config.json").is_file():
        note += (
            ", while transformers and programs that serve this model use that class and get other "
            "tokens, so a run with this model and an export is refused -> to train with what "
            f"transformers reads: {resave_commands(path.parent)}"
        )
    return plain_tokenizer, note


def resave_commands(directory: Path) -> str:
    """Return the commands that make a copy of a model's directory whose tokenizer transformers has
    saved, and what to do with the copy."""
    imports = "from transformers import AutoTokenizer as T"
    program = f"{imports}; T.from_pretrained('NEW').save_pretrained('NEW')"
    return (
        f'cp -r {shlex.quote(str(directory))} NEW; python -c "{program}"; then tokenize '
        "--tokenizer NEW, and train with model.path=NEW"
    )


def without_class(path: Path, class_tokenizer: Any = None, **options: Any) -> Any:
    """Return the tokenizer in `path` by transformers' plain class, with the special tokens of
    `class_tokenizer` that are in the file's vocabulary."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = _read(path).get_vocab(with_added_tokens=True)
    special = {}
    if class_tokenizer is not None:
        texts = {name: str(getattr(class_tokenizer, name, None)) for name in _NAMED}
        special = {name: text for name, text in texts.items() if text in vocabulary}
    plain_class: Any = PreTrainedTokenizerFast
    return plain_class.from_pretrained(str(path.parent), **special, **options)


def _read(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise DataError(f"{path} cannot be read: {first_line(error)}") from error


def _differences(tokenizer: Any, file_tokenizer: Any, path: Path) -> str:
    """Describe how `tokenizer` differs from `file_tokenizer`, the tokenizer of the file; empty if
    tokens and text are equal."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ""
    actual, expected = json.loads(backend.to_str()), json.loads(file_tokenizer.to_str())
    added = {token["content"]: token for token in actual["added_tokens"]}
    lacks_token = any(added.get(token["content"]) != token for token in expected["added_tokens"])
    file_tokens = {token["content"] for token in expected["added_tokens"]}
    plain_tokens = file_tokenizer.get_vocab(with_added_tokens=False).keys()
    extra = sorted(added.keys() - file_tokens - plain_tokens)
    if extra and (unnamed := [name for name in extra if name not in _settings(path)]):
        return f"it adds the token {unnamed[0]}"

    # Parts that determine tokens: reported if they change an edge case, or certainly another text.
    changed = [part for part in _ENCODING if _bare_part(actual, part) != _bare_part(expected, part)]
    if lacks_token:
        changed.append("added_tokens")
    if changed and (text := _encoded_otherwise(backend, file_tokenizer)) is not None:
        return f"{', '.join(changed)}; for example {text[:40]!a}"
    if certain := [part for part in changed if part in ("normalizer", "pre_tokenizer")]:
        return ", ".join(certain)
    if "model" in changed and _bare_model(actual) != _bare_model(expected):
        return "model"
    if _bare_part(actual, "decoder") != _bare_part(expected, "decoder"):
        return "decoder"
    # The file need not define the special tokens of a text if the settings do.
    sets_ends = any(f'"add_{end}_token"' in _settings(path) for end in ("bos", "eos"))
    if not sets_ends and backend.encode("a").ids != file_tokenizer.encode("a").ids:
        return "post_processor"
    return ""


def _bare_part(tree: Any, part: str) -> Any:
    """Return a part of a tokenizer without settings that do not affect tokens."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            ignored: tuple[str, ...] = ("trim_offsets",)
            if part == "decoder" and value.get("type") == "ByteLevel":
                ignored = ("trim_offsets", "add_prefix_space", "use_regex")
            return {key: bare(item) for key, item in value.items() if key not in ignored}
        return [bare(item) for item in value] if isinstance(value, list) else value

    value = tree.get(part)
    return value if part == "model" else bare(value)


def _bare_model(tree: Any) -> Any:
    """Return the model without the settings of the unknown token, which most models never need."""
    model = {**tree["model"], "unk_token": None, "fuse_unk": None}
    return {key: value or None for key, value in model.items()}  # "" is no prefix, like null


def _encoded_otherwise(backend: Any, file_tokenizer: Any) -> str | None:
    """Return the first edge case that is encoded differently, or not at all."""
    for text in tokenizer_edge_cases(file_tokenizer.to_str()):
        expected = file_tokenizer.encode(text, add_special_tokens=False).ids
        try:
            if backend.encode(text, add_special_tokens=False).ids != expected:
                return text
        except Exception:  # for example for an unknown token that is not in the vocabulary
            return text
    return None


def _settings(path: Path) -> str:
    """Return the texts of the files that may name further tokens."""
    texts = []
    for name in _SETTINGS:
        with suppress(OSError, ValueError):
            text = json.loads((path.parent / name).read_text(encoding="utf-8"))
            texts.append(json.dumps(text, ensure_ascii=False))
    return "\n".join(texts)
