"""Rows of Axolotl's datasets: the commands that make a run's data. Pure. Types of datasets
and their prompts are as in Axolotl of July 2026 (utils/data/wrappers.py, prompt_strategies/,
prompters.py; commit 067b021c8b87a9e5e380b9173c704cf7340e30f5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bigtrain.settings.conversion.common import (
    held_out_options,
    set_data,
    set_packing,
    shard_directories,
    tokenize_command,
)
from bigtrain.settings.conversion.draft import Draft

_TEMPLATES = {
    "chatml": "chatml",
    "llama3": "llama3",
    "gemma3": "gemma3",
    "gemma3n": "gemma3",
    "phi_35": "phi3",
    "qwen_25": "qwen2_5",
}
"""Templates of Axolotl that write what one of `bigtrain.data.chat.named_templates` does."""

_PROMPT_STYLES = ("instruct", "chat", "chatml", "phi")
"""Styles of Axolotl's `AlpacaPrompter`, whose prompts `tokenize --format alpaca-STYLE` writes."""
_OPTIONS_BY_TYPE = {
    "alpaca_instruct.load_no_prompt": ["alpaca-instruct-bare"],
    "alpaca_chat.load_no_prompt": ["alpaca-chat-bare"],
    "alpaca_w_system": ["alpaca-chat-system"],
    "alpaca_w_system.load": ["alpaca-chat-system"],
    "alpaca_w_system.load_chat": ["alpaca-chat-system"],
    "alpaca_w_system.load_instruct": ["alpaca-instruct-system"],
    # Axolotl's class for open-orca types never reads the input of a row.
    "alpaca_w_system.load_open_orca": ["open-orca", "--ignore-key", "input"],
    "alpaca_w_system.load_open_orca_chatml": [
        *("open-orca-chatml", "--ignore-key", "input", "--parse-special-tokens"),
    ],
}
"""Types that name a function of Axolotl: the value of ``tokenize --format``, and options."""
_KEY_OPTIONS = {
    "alpaca": [],
    "gpteacher": ["--key", "output=response"],
    "oasst": [
        *("--key", "instruction=INSTRUCTION", "--key", "output=RESPONSE", "--ignore-key", "input"),
    ],
}
"""Types whose prompt has a style: the options of ``tokenize`` that read their rows."""


def set_rows(draft: Draft) -> None:
    """Set packing, and the commands that make the data."""
    has_pairs_or_labels = "objective" in draft.run  # rows that are not packed
    if not has_pairs_or_labels:
        packs = bool(draft.value("sample_packing"))
        set_packing(draft, packs=packs, length_key="sequence_len")
        # With flash, flex or xformers attention Axolotl joins a micro-batch into one long pack.
        micro_batch_size = draft.number("micro_batch_size", 1)
        joins_batch = any(
            draft.value(key) for key in ("flash_attention", "flex_attention", "xformers_attention")
        )
        joins_batch = joins_batch or str(draft.value("attn_implementation")).startswith("fl")
        if packs and joins_batch and micro_batch_size > 1:
            length = draft.run["batch"]["sequence_length"]
            draft.notes.append(
                f"sample_packing: Axolotl packs rows into {micro_batch_size * length} tokens "
                f"(micro_batch_size x sequence_len), a run into {length}, so that the number of "
                "steps may differ by some percent"
            )
        joins_rows = bool(draft.value("pretraining_dataset")) and not packs
        if joins_rows and "sample_packing" not in draft.omitted:
            rule = "without it rows of pretraining_dataset share samples, and see each other"
            fix = "sample_packing: true in the file, or --omit sample_packing: each row in a sample"
            draft.refuse("sample_packing", rule, fix)
    # Tokens and template.
    special_tokens = draft.value("special_tokens", {})
    if isinstance(special_tokens, Mapping) and {*special_tokens} - {"pad_token"}:
        draft.refuse(
            "special_tokens",
            "changes the tokenizer's control tokens: set them in the tokenizer's directory",
        )
    if draft.value("chat_template_jinja"):
        draft.notes.append("chat_template_jinja: write its text into template.jinja")
    # One command for each dataset.
    held_out = held_out_options(draft, "val_set_size")
    key = "pretraining_dataset" if draft.value("pretraining_dataset") else "datasets"
    datasets = draft.value(key, [])
    if not datasets and "data.path" not in draft.given_settings:
        draft.refuse(key, "is missing", f"{key} in the file, or data.path=SHARDS after the file")
    outputs = shard_directories(range(len(datasets)))
    commands = []
    template_options = _template_options(draft, "chat_template", draft.value("chat_template"))
    for number, (entry, output) in enumerate(zip(datasets, outputs, strict=True)):
        path = str(entry.get("path", "DATA"))
        row_options = _row_options(draft, f"{key}.{number}", entry, is_text=key != "datasets")
        if entry.get("chat_template"):
            template_key = f"{key}.{number}.chat_template"
            row_options += _template_options(draft, template_key, entry["chat_template"])
        else:
            row_options += template_options
        tokenizer = str(draft.value("base_model", "TOKENIZER"))
        commands.append(tokenize_command(path, tokenizer, [*row_options, *held_out], output))
    set_data(draft, commands, outputs)


def _template_options(draft: Draft, key: str, template: object) -> list[str]:
    """Return the options of `tokenize` for a chat template; a problem for one that bigtrain
    does not have. key: of the template in problems."""
    if template in _TEMPLATES:
        return ["--chat-template", _TEMPLATES[str(template)]]
    is_of_tokenizer = template in (None, "tokenizer_default")
    if not is_of_tokenizer and not draft.value("chat_template_jinja"):
        draft.refuse(
            key,
            "is a template of Axolotl's own, and a run takes the tokenizer's, or a file",
            f"--omit {key} takes the tokenizer's; or tokenize --chat-template FILE",
        )
    return []


def _row_options(draft: Draft, key: str, entry: Mapping[str, Any], *, is_text: bool) -> list[str]:
    """Return the options of `tokenize` for the rows of a dataset; a problem for rows around which
    Axolotl writes texts that no format writes. key: of the dataset in problems, such as datasets.0;
    entry: its keys; is_text: whether its rows are texts without a chat."""
    # Configuration and split, then options by the type of the rows.
    options = []
    if entry.get("name"):
        options += ["--dataset-config", str(entry["name"])]
    if entry.get("split") not in (None, "train"):
        options += ["--dataset-split", str(entry["split"])]
    row_type = draft.value_in_file(f"{key}.type")
    if is_text or row_type in ("completion", "pretrain"):
        field = entry.get("field") or entry.get("text_column") or "text"
        return [*options, "--text-key", str(field)]
    if isinstance(row_type, str) and row_type.split(".")[0] == "chat_template":
        if "objective" not in draft.run:
            return [*options, *_chat_options(draft, key, entry)]
        names = "field_messages message_field_role message_field_content message_property_mappings"
        for name in (*names.split(), "roles"):
            if entry.get(name):
                rule = "renames parts of a row, for which `tokenize` has --key and --role"
                draft.refuse(f"{key}.{name}", rule)
        return options
    # A type with a prompt of Axolotl's own; --omit of the type renders the rows by the template.
    is_omitted = f"{key}.type" in draft.omitted
    prompt_options = None if is_omitted else _prompt_options(entry)
    if prompt_options is not None:
        draft.notes.append(
            f"{key}.type = {row_type!r}: a prompt and its answer are tokenized together, so that a "
            "token may contain the end of the one and the start of the other; Axolotl tokenizes "
            "them apart"
        )
        return [*options, *prompt_options]
    if not is_omitted:
        draft.refuse(
            f"{key}.type",
            f"{row_type}: Axolotl writes prompts of its own around such rows, and a run renders "
            "them by the chat template",
            f"--omit {key}.type renders them by the template",
        )
    options_by_type = {
        "alpaca": ["--format", "alpaca"],
        "gpteacher": ["--format", "alpaca", *_KEY_OPTIONS["gpteacher"]],
        "oasst": ["--format", "alpaca", *_KEY_OPTIONS["oasst"]],
        "sharegpt": ["--format", "sharegpt"],
    }
    base_type = re.split(r"[:.]", str(row_type))[0]
    return [*options, *options_by_type.get(base_type, [])]


def _prompt_options(entry: Mapping[str, Any]) -> list[str] | None:
    """Return the options of `tokenize` that write Axolotl's prompts around the rows of a dataset;
    None for rows without a prompt, and for a prompt that no format of `tokenize` writes."""
    row_type = entry.get("type")
    if not isinstance(row_type, str):
        return None
    base, _, style = row_type.partition(":")
    if row_type in _OPTIONS_BY_TYPE:
        return ["--format", *_OPTIONS_BY_TYPE[row_type]]
    # Only the type alpaca_chat reads the dataset's key `conversation`.
    if row_type in ("alpaca_chat", "alpaca_chat.load"):
        base, style = "alpaca", str(entry.get("conversation") or "chat")
    elif row_type in ("alpaca_instruct", "alpaca_instruct.load"):
        base, style = "alpaca", "instruct"
    if base not in _KEY_OPTIONS or (style or "instruct") not in _PROMPT_STYLES:
        return None
    # These prompts contain control tokens.
    token_options = ["--parse-special-tokens"] if style in ("chatml", "phi") else []
    return ["--format", f"alpaca-{style or 'instruct'}", *_KEY_OPTIONS[base], *token_options]


def _chat_options(draft: Draft, key: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the options of `tokenize` for conversations; a problem for messages whose keys no
    format of `tokenize` reads."""
    # The keys of a row's messages, and of the role and content of a message.
    messages_key = entry.get("field_messages", "messages")
    names = entry.get("message_property_mappings") or {}
    role_key = names.get("role", entry.get("message_field_role", "role"))
    content_key = names.get("content", entry.get("message_field_content", "content"))
    role_options = []
    for role, sources in (entry.get("roles") or {}).items():
        source_names = sources if isinstance(sources, list) else [sources]
        for source in source_names:
            if source != role:
                role_options += ["--role", f"{source}={role}"]
    format_name, format_key = "messages", "messages"
    if (role_key, content_key) == ("from", "value"):
        format_name, format_key = "sharegpt", "conversations"
    elif (role_key, content_key) != ("role", "content"):
        draft.refuse(
            f"{key}.message_property_mappings",
            f"messages with {role_key} and {content_key}: `tokenize` reads role and content, or "
            "from and value",
            "rename them in the data",
        )
    key_options = [] if messages_key == format_key else ["--key", f"{format_key}={messages_key}"]
    return ["--format", format_name, *key_options, *role_options]
