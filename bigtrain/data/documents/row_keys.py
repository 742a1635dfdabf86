"""Table of the keys of rows: which are used, refused, or named as not read. Pure.

`ROW_KEYS` is the table of the keys that TRL, Axolotl, LLaMA-Factory, ms-swift and transformers
read in a row. A key that changes what is learned there is used or refused here. Any other key is
counted, and named once with what it may have meant (`bigtrain.data.documents.key_rules`);
``--ignore-key`` accepts a refused one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from bigtrain.data.documents.alpaca_prompts import ALPACA_KEYS, PROMPTS
from bigtrain.data.documents.conversations import FLAGS, from_text
from bigtrain.objectives.section import ROWS

Values = Mapping[str, Any]
Matters = Callable[[Any, Values], bool]
"""Predicate of a value, and of the values of the format's keys: whether it changes anything."""
Action = Literal["used", "refused", "not read"]


def is_given(value: object, values: Values) -> bool:
    """Return whether a key has a value."""
    return value is not None and value not in ("", [], {})


def _number(value: object) -> float | None:
    """Return the number in a value, also in text; None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _is_speaker(value: object, values: Values) -> bool:
    """Return whether the value is the role of a message."""
    return isinstance(value, str) and value.lower() in SPEAKERS


def _may_be_prompt(value: object, values: Values) -> bool:
    """Return whether the value may be the prompt of a pair that has no prompt elsewhere."""
    chosen = values.get("chosen")
    is_conversation = isinstance(chosen, list) and len(chosen) > 1
    return is_given(value, values) and values.get("prompt") is None and not is_conversation


def _has_other_number(value: Any, values: Values, usual: float) -> bool:
    """Return whether a list has a number other than `usual`."""
    numbers = from_text(value)
    is_usual = isinstance(numbers, list) and all(number == usual for number in numbers)
    return is_given(value, values) and not is_usual


def _has_several_documents(value: Any, values: Values) -> bool:
    """Return whether a row consists of several documents by their lengths, or by the position of
    each token in its document."""
    tokens = from_text(values.get("input_ids"))
    count = len(tokens) if isinstance(tokens, list) else 0
    lengths_of_one, positions_of_one = [count], list(range(count))
    return is_given(value, values) and from_text(value) not in (lengths_of_one, positions_of_one)


@dataclass(frozen=True)
class RowKey:
    """Keys of rows of some formats, the tools that read them, and what is done with them. text: of
    a used key, its meaning; of a refused key, the reason and the fix; of a key that is not read,
    what it may mean. matters: whether a row with this value of a refused key is refused. is_named:
    whether rows with other values are counted, and the key named as not read."""

    names: tuple[str, ...]
    formats: tuple[str, ...]
    tools: str
    action: Action
    text: str
    matters: Matters = is_given
    is_named: bool = False


# Names of formats: instructions in a prompt of plain text; supervised fine-tuning; rows of an
# objective; pairs and answers; all but plain text and tokens.
PROMPTED = tuple(PROMPTS)
SFT = ("messages", "sharegpt", "alpaca", "prompt-completion", *PROMPTED)
OBJECTIVE_ROWS = tuple(rows.name for rows in ROWS.values())
ANSWERS = tuple(rows.name for rows in ROWS.values() if not rows.has_classes)
CHATS = (*SFT, *OBJECTIVE_ROWS)
_SYSTEM_PROMPTED = tuple(name for name in PROMPTED if "system" in PROMPTS[name].keys)
_ORCA = tuple(name for name in PROMPTED if "system_prompt" in PROMPTS[name].keys)
_OTHER_SYSTEM = ("system_prompt", "system_message")
SPEAKERS = ("user", "human", "prompter", "assistant", "gpt", "bot", "system")
"""Values of the key `role` of a row that is one message."""
MEDIA_KEYS = (
    *("image", "images", "video", "videos", "audio", "audios", "objects"),
    *("rejected_images", "rejected_videos", "rejected_audios"),
)
"""Keys of a row that mark a conversation as not text-only."""
WEIGHT_KEYS = ("weight", "token_weights", "loss_weights")
"""Keys of a row for weights of its loss."""
_ALL = "TRL, Axolotl, LLaMA-Factory, ms-swift"

ROW_KEYS: tuple[RowKey, ...] = (
    RowKey(("text",), ("text", "classification"), f"{_ALL}, transformers", "used", "the document"),
    RowKey(("messages",), ("messages", "classification"), _ALL, "used", "the conversation"),
    RowKey(("conversations",), ("sharegpt",), _ALL, "used", "the conversation"),
    RowKey(
        ("instruction", "input", "output", "history"),
        ("alpaca",),
        "Axolotl, LLaMA-Factory, ms-swift",
        "used",
        "question, its context, answer, and earlier pairs of both",
    ),
    RowKey(
        ALPACA_KEYS,
        tuple(name for name in PROMPTED if name not in _ORCA),
        "Axolotl",
        "used",
        "question, its context and answer, in a prompt of plain text",
    ),
    RowKey(
        ("system",),
        _SYSTEM_PROMPTED,
        "Axolotl",
        "used",
        "the system prompt, before the question",
    ),
    RowKey(
        ("question", "input", "response", "system_prompt"),
        _ORCA,
        "Axolotl",
        "used",
        "question, its context, answer and system prompt, in a prompt of plain text",
    ),
    RowKey(
        ("system",),
        tuple(name for name in PROMPTED if name not in _SYSTEM_PROMPTED),
        "Axolotl, LLaMA-Factory, ms-swift",
        "refused",
        "its {name} would not be read -> --format alpaca; or --ignore-key {name}",
    ),
    RowKey(
        ("history",),
        PROMPTED,
        "Axolotl, LLaMA-Factory, ms-swift",
        "refused",
        "its {name} would not be read -> --format alpaca; or --ignore-key {name}",
    ),
    RowKey(
        ("context",),
        ("alpaca", *PROMPTED),
        "Dolly's rows",
        "refused",
        "its {name} would not be read -> --key input={name}, or --ignore-key {name}",
    ),
    RowKey(
        ("system",),
        ("messages", "sharegpt", "alpaca"),
        "Axolotl, LLaMA-Factory, ms-swift",
        "used",
        "the system prompt; refused if the conversation has another one",
    ),
    RowKey(
        ("tools",),
        ("messages", "sharegpt", "prompt-completion", *OBJECTIVE_ROWS),
        f"{_ALL}, transformers",
        "used",
        "the tools that the chat template is given",
    ),
    RowKey(("functions",), ("messages",), "OpenAI's former format", "used", "tools"),
    RowKey(
        ("prompt", "completion"),
        ("prompt-completion", "kto"),
        "TRL, Axolotl, ms-swift",
        "used",
        "what is not learned, and what is",
    ),
    RowKey(
        ("chosen", "rejected", "prompt"),
        ("preference",),
        "TRL, Axolotl, LLaMA-Factory",
        "used",
        "the pair of answers, and what both answer",
    ),
    RowKey(
        ("label",),
        ("kto", "classification"),
        "TRL, Axolotl, ms-swift, transformers",
        "used",
        "whether the answer is desirable; the class of the sample",
    ),
    RowKey(
        ("input_ids", "labels", "attention_mask"),
        ("tokens",),
        "TRL, Axolotl, transformers",
        "used",
        "tokens, those that are learned (-100: not), and padding, which is removed",
    ),
    RowKey(
        ("completion_mask", "assistant_masks"),
        ("tokens",),
        "TRL",
        "used",
        "1 where a token is learned; of both masks, where both have 1",
    ),
    RowKey(
        ("loss_mask", *WEIGHT_KEYS),
        ("tokens",),
        "bigtrain",
        "used",
        "1 where a token is learned, and factors of the loss of each token and of the row",
    ),
    RowKey(
        MEDIA_KEYS,
        CHATS,
        _ALL,
        "refused",
        "it has a value under {name!r}: only text is supported",
    ),
    RowKey(
        ("weight",),
        ("text", *CHATS),
        "bigtrain",
        "refused",
        "its weight is 0, so nothing of it would be learned -> remove the row",
        lambda value, _: _number(value) == 0,
    ),
    RowKey(
        ("weight",),
        ("text", *CHATS),
        "bigtrain",
        "refused",
        "its weight is {value}, which only rows with input_ids may have -> 1; to read it more "
        "often, write its rows into a dataset of their own, with a larger weight in data.sources",
        lambda value, _: _number(value) not in (None, 1),
    ),
    RowKey(
        ("token_weights", "loss_weights"),
        ("text", *CHATS),
        "bigtrain",
        "refused",
        "it has {name}, which only rows with input_ids may have: --format tokens",
    ),
    RowKey(
        ("input_ids",),
        ("text", *CHATS),
        "TRL, Axolotl, transformers",
        "refused",
        "it also has {name}, and TRL would learn these tokens -> --format tokens, or "
        "--ignore-key {name}",
    ),
    RowKey(
        ("chat_template_kwargs",),
        CHATS,
        "TRL, Axolotl, ms-swift",
        "refused",
        "its {name} ({value}) are not given to the chat template -> a template that sets them, "
        "--chat-template FILE with a line such as {{%- set enable_thinking = false %}} at its "
        "start, and --ignore-key {name}; or only --ignore-key {name}",
    ),
    RowKey(
        ("system",),
        ("prompt-completion", *OBJECTIVE_ROWS),
        "Axolotl, LLaMA-Factory, ms-swift",
        "refused",
        "its {name} would not be read -> write it as the first message of the prompt; or "
        "--ignore-key {name}",
    ),
    RowKey(
        _OTHER_SYSTEM,
        ("messages",),
        "ms-swift; system_message: other rows",
        "refused",
        "its {name} would not be read -> --format sharegpt --key conversations={first} "
        "--key system={name}; or --ignore-key {name}",
    ),
    RowKey(
        _OTHER_SYSTEM,
        ("sharegpt", "alpaca", *_SYSTEM_PROMPTED),
        "ms-swift; system_message: other rows",
        "refused",
        "its {name} would not be read -> --key system={name}; or --ignore-key {name}",
    ),
    RowKey(
        ("system_message",),
        _ORCA,
        "other rows",
        "refused",
        "its {name} would not be read -> --key system_prompt={name}; or --ignore-key {name}",
    ),
    RowKey(
        _OTHER_SYSTEM,
        tuple(name for name in PROMPTED if name not in (*_SYSTEM_PROMPTED, *_ORCA)),
        "ms-swift; system_message: other rows",
        "refused",
        "its {name} would not be read -> --format alpaca --key system={name}; or "
        "--ignore-key {name}",
    ),
    RowKey(
        _OTHER_SYSTEM,
        ("prompt-completion", *OBJECTIVE_ROWS),
        "ms-swift; system_message: other rows",
        "refused",
        "its {name} would not be read -> write it as the first message of the prompt; or "
        "--ignore-key {name}",
    ),
    RowKey(
        ("tools",),
        ("alpaca", *PROMPTED),
        "LLaMA-Factory, ms-swift",
        "refused",
        "its {name} would not be read -> messages with tools: --format messages; or "
        "--ignore-key {name}",
    ),
    RowKey(
        ("functions",),
        ("sharegpt", "alpaca", "prompt-completion", *PROMPTED, *OBJECTIVE_ROWS),
        "OpenAI's former format",
        "refused",
        "its {name} would not be read -> tools; or --ignore-key {name}",
    ),
    RowKey(
        ("history",),
        ("messages", "sharegpt", "prompt-completion", *OBJECTIVE_ROWS),
        "LLaMA-Factory, ms-swift",
        "refused",
        "its {name} would not be read -> messages before the prompt; or --ignore-key {name}",
    ),
    RowKey(
        ("rejected_response", "rejected_messages"),
        ("messages", "sharegpt"),
        "ms-swift",
        "refused",
        "it has {name}, the worse answer of a pair, which would not be read -> "
        "--format preference --key chosen={first} --key rejected={name}; or --ignore-key {name}",
    ),
    RowKey(
        ("rejected_response", "rejected_messages", "rejected_tools"),
        ("alpaca", "prompt-completion", *PROMPTED, *OBJECTIVE_ROWS),
        "ms-swift",
        "refused",
        "it has {name}, the worse answer of a pair, which would not be read -> a key rejected "
        "next to chosen; or --ignore-key {name}",
    ),
    RowKey(
        ("positive_messages", "negative_messages", "teacher_prompt", "segments"),
        CHATS,
        "ms-swift; segments: Axolotl",
        "refused",
        "it has {name}, of a training that bigtrain does not have -> --ignore-key {name}",
    ),
    RowKey(
        ("kto_tag",),
        ("messages", "sharegpt"),
        "LLaMA-Factory",
        "refused",
        "it has {name}, a rating of the answer, which would not be read -> --format kto "
        "--key prompt={first} --key label={name}; or --ignore-key {name}",
    ),
    RowKey(
        ("kto_tag",),
        ("alpaca", "prompt-completion", *PROMPTED, *OBJECTIVE_ROWS),
        "LLaMA-Factory",
        "refused",
        "it has {name}, a rating of the answer, which would not be read -> --format kto "
        "--key label={name}, with prompt and completion; or --ignore-key {name}",
    ),
    RowKey(
        ("label",),
        ("messages", "sharegpt"),
        "ms-swift (KTO)",
        "refused",
        "its {name} is {value}, a rating of the answer (KTO), which would not be read -> "
        "--format kto --key prompt={first}; or --ignore-key {name}",
        lambda value, _: isinstance(value, bool),
        is_named=True,
    ),
    RowKey(
        ("conversations", "messages"),
        ANSWERS,
        "LLaMA-Factory, ms-swift",
        "refused",
        "its {name} would not be read -> --key prompt={name}; or --ignore-key {name}",
        _may_be_prompt,
        is_named=True,
    ),
    RowKey(
        ("instruction", "question", "query"),
        ANSWERS,
        "Axolotl, LLaMA-Factory, ms-swift",
        "refused",
        "its {name} would not be read -> --key prompt={name}; or --ignore-key {name}",
        _may_be_prompt,
        is_named=True,
    ),
    RowKey(
        ("input", "context"),
        ANSWERS,
        "Axolotl, LLaMA-Factory; context: other rows",
        "refused",
        "its {name} would not be read -> --key prompt={name}; or --ignore-key {name}",
        _may_be_prompt,
    ),
    RowKey(
        ("context",),
        ("prompt-completion", *ANSWERS),
        "other rows",
        "refused",
        "its {name} would not be read -> one text under prompt; or --ignore-key {name}",
    ),
    RowKey(
        ("input",),
        ("prompt-completion", *ANSWERS),
        "Axolotl, LLaMA-Factory",
        "refused",
        "its {name} would not be read, which LLaMA-Factory joins to the instruction -> one text "
        "under prompt; or --ignore-key {name}",
    ),
    RowKey(
        FLAGS,
        ("text", *CHATS),
        "other rows",
        "refused",
        "its {name} is {value}, which is read in messages only -> remove the row; or "
        "--ignore-key {name}",
        lambda value, _: value is False,
        is_named=True,
    ),
    RowKey(
        ("role",),
        ("text",),
        "rows of oasst1 and oasst2",
        "refused",
        "its {name} is {value}, so it is one message of a conversation, which would be a document "
        "of its own -> a row of messages for each conversation; or --ignore-key {name}",
        _is_speaker,
        is_named=True,
    ),
    RowKey(
        ("margin",),
        ("preference",),
        "TRL, ms-swift",
        "refused",
        "its {name} is {value}, which no objective reads -> --ignore-key {name}",
    ),
    RowKey(
        (
            *("ref_chosen_logps", "ref_rejected_logps", "reference_chosen_logps"),
            *("reference_rejected_logps", "reference_logps", "reference_KL_logps"),
        ),
        ANSWERS,
        "TRL",
        "refused",
        "its {name} would not be read -> objective.reference with the scores of `bigtrain score`; "
        "and --ignore-key {name}",
    ),
    RowKey(
        ("logprobs", "top_logprobs", "target_logprobs", "target_token_ids", "target_mask"),
        (*CHATS, "tokens"),
        "Axolotl (distillation)",
        "refused",
        "its {name} would not be read -> objective.teacher with the scores of `bigtrain score`; "
        "and --ignore-key {name}",
    ),
    RowKey(
        ("position_ids", "seq_lengths"),
        ("tokens",),
        "TRL, Axolotl, transformers",
        "refused",
        "its {name} are of several documents in one row, which would be one -> one row for each "
        "document: data.packing=best_fit packs them",
        _has_several_documents,
    ),
    RowKey(
        ("token_type_ids", "mm_token_type_ids"),
        ("tokens",),
        "TRL, transformers",
        "refused",
        "its {name} are not all 0, and the model is not given them -> --ignore-key {name}",
        partial(_has_other_number, usual=0),
    ),
    RowKey(
        ("loss_scale",),
        ("tokens",),
        "ms-swift",
        "refused",
        "its {name} would not be read -> --key loss_weights={name}: the loss is then divided by "
        "the sum of these weights; or --ignore-key {name}",
        partial(_has_other_number, usual=1),
    ),
    RowKey(
        ("decoder_input_ids", "inputs_embeds", "pixel_values", "image_grid_thw"),
        ("tokens",),
        "TRL, transformers",
        "refused",
        "it has {name}, which a model of text is not given -> --ignore-key {name}",
    ),
    RowKey(
        ("length", "special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping"),
        ("tokens",),
        "transformers",
        "not read",
        "nothing is learned from it",
    ),
    RowKey(("channel",), CHATS, "ms-swift", "not read", "a name in its log"),
    RowKey(
        ("label",),
        ("text", *SFT),
        "TRL, Axolotl, ms-swift, transformers",
        "not read",
        "--format classification or kto",
    ),
    RowKey(
        ("labels", "attention_mask", "loss_mask", "completion_mask", "assistant_masks"),
        ("text", *CHATS),
        "TRL, Axolotl, transformers",
        "not read",
        "--format tokens, next to input_ids",
    ),
    RowKey(("chosen", "rejected"), SFT, _ALL, "not read", "--format preference"),
    RowKey(
        ("messages", "conversations", "text"),
        ("text", *CHATS, "tokens"),
        _ALL,
        "not read",
        "another form of the row, or --format",
    ),
    RowKey(
        ("prompt", "completion", "instruction", "output", "question", "query"),
        ("text", *CHATS, "tokens"),
        _ALL,
        "not read",
        "another form of the row, or --format",
    ),
    RowKey(
        ("solution", "ground_truth"),
        CHATS,
        "TRL, ms-swift",
        "not read",
        "of rewards in online training",
    ),
)
"""The first entry of a name and format holds where its value matters, else the next one."""
