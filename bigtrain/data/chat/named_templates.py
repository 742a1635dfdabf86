"""Chat templates that ship with bigtrain, by the names that other trainers give the templates.

Each marks what the assistant wrote ({% generation %}), and writes texts of messages, no tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bigtrain.data.tokenizers.tokenizer import Tokenizer
from bigtrain.errors import DataError

CONTROL_TOKENS: Mapping[str, Sequence[str]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "qwen2_5": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>"),
    "deepseek3": ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
    "deepseek": (),
    "llama2": (),
    "mistral": (),
    "zephyr": (),
    "vicuna": (),
    "alpaca": (),
}
"""Control tokens that a template writes, which the tokenizer must have, by the template's name; in
addition to the tokenizer's end-of-sequence and beginning-of-text tokens."""


def find_chat_template(name_or_file: str | Path) -> Path:
    """Return the file of a chat template: a path, or a name of `CONTROL_TOKENS`. Raises DataError
    for a word that is neither; a path of a file is not read here."""
    path = Path(name_or_file)
    if str(name_or_file) in CONTROL_TOKENS and not path.is_file():
        return Path(__file__).with_name(f"{name_or_file}.jinja")
    # Any other word, without a suffix and a folder, is taken for a name.
    if path.suffix or path.name != str(name_or_file) or path.is_file():
        return path
    names = ", ".join(CONTROL_TOKENS)
    raise DataError(
        f"--chat-template {name_or_file}: neither a file nor the name of a template -> {names}"
    )


def check_control_tokens(path: Path, tokenizer: Tokenizer) -> None:
    """Raise DataError if `path` is a template of bigtrain's and the tokenizer lacks its control
    tokens, which would be encoded as letters."""
    if path.parent != Path(__file__).parent:
        return
    missing = [name for name in CONTROL_TOKENS[path.stem] if not tokenizer.ids_of([name])]
    if missing:
        raise DataError(
            f"--chat-template {path.stem} writes {', '.join(missing)}, which tokenizer "
            f"{tokenizer.name} does not have as tokens -> add them (`bigtrain tokenizer --config`, "
            "tokenizer.add_special_tokens), or take another template"
        )
