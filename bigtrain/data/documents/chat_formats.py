"""Documents in rows and JSON objects: text, and the common formats of conversations. Pure.

A `ChatFormat` (messages, ShareGPT, Alpaca, ...) defines the keys of a row, and converts their
values to messages for transformers' ``apply_chat_template``. `nearest` detects the format.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bigtrain.data.documents.alpaca_prompts import PROMPTS
from bigtrain.data.documents.conversations import from_text
from bigtrain.data.documents.key_rules import KeyRules, text_rules
from bigtrain.data.documents.other_names import (
    OTHER_NAMES,
    Suggestion,
    has_speaker,
    list_of_rows,
)
from bigtrain.data.documents.row_format import (
    MESSAGE_KEYS,
    TOKEN_KEYS,
    Chat,
    ChatFormat,
    Completion,
    Extracted,
    RowDocument,
    Values,
)
from bigtrain.data.documents.turns import Messages, Roles, is_turn, messages_in, with_roles
from bigtrain.data.tokenizers.chat_template import ConversationError
from bigtrain.objectives.preference import PAIRS
from bigtrain.objectives.section import ROWS

ONE_FORMAT = (
    "rows of several formats must be tokenized one format at a time, each into its own --output, "
    "and mixed in the run: data.sources"
)

TOOLS_KEY = "tools"
"""Key of a conversation's tools, next to its messages."""


# Conversions of the formats: `values` are of `ChatFormat.keys`, then of `extra_keys`, in `FORMATS`.


def _messages(values: Values, roles: Roles) -> Chat:
    """Return a conversation of messages in OpenAI's format."""
    row_messages, tools, system, functions = values
    messages = with_roles(row_messages, roles, may_be_turns=False)
    function_list, tool_list = from_text(functions), from_text(tools)
    if function_list and tool_list:
        raise ConversationError("it has tools and functions -> one of both: --ignore-key functions")
    if function_list:  # OpenAI's former tools
        if not isinstance(function_list, list):
            raise ConversationError(
                f"its functions are not a list but {type(function_list).__name__}"
            )
        tools = [{"type": "function", "function": function} for function in function_list]
    return Chat(_with_system(messages, system), tools)


def _with_system(messages: object, system: object) -> object:
    """Return `messages` with the system prompt of the row. Raise ConversationError for two."""
    if not _has_text(system, "system") or not isinstance(messages, list):
        return messages
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise ConversationError("message 1 and the key system are two system prompts -> one")
    return messages


def _sharegpt(values: Values, roles: Roles) -> Chat:
    """Return a conversation of turns with a speaker and a text."""
    turns, system, tools = values
    turns = from_text(turns)
    if not isinstance(turns, list):
        return Chat(turns, tools)
    for number, turn in enumerate(turns, 1):
        # ShareGPT's key may hold messages in OpenAI's format.
        if is_turn(turn) or (isinstance(turn, dict) and "role" in turn):
            continue
        description, fix = type(turn).__name__, ""
        if isinstance(turn, dict):
            description = f"an object with the keys {', '.join(sorted(turn)) or 'none'}"
            fix = " -> name its keys: --key from=KEY --key value=KEY"
        raise ConversationError(
            f"turn {number} is not an object with from and value but {description}{fix}"
        )
    return Chat(_with_system(with_roles(turns, roles), system), tools)


def _alpaca(values: Values, roles: Roles) -> Chat:
    """Return a conversation of an instruction, its output, and earlier pairs of both."""
    instruction, input_text, output, system, history = values
    history = from_text(history)
    messages: Messages = []
    if _has_text(system, "system"):
        messages.append({"role": "system", "content": system})
    earlier_pairs = history or ()
    if not isinstance(earlier_pairs, (list, tuple)):
        raise ConversationError(f"its history is not a list but {type(history).__name__}")
    for number, pair in enumerate(earlier_pairs, 1):
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise ConversationError(f"history {number} is not a pair of instruction and output")
        messages += [
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        ]
    for key, value in (("instruction", instruction), ("output", output)):
        if not isinstance(value, str):
            raise ConversationError(f"its {key} is not text")
    # Joined as in LLaMA-Factory and Alpaca.
    question = f"{instruction}\n{input_text}" if _has_text(input_text, "input") else instruction
    last_pair = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    return Chat([*messages, *last_pair])


def _prompt_completion(values: Values, roles: Roles) -> Chat | Completion:
    """Return prompt and completion, both text or both messages."""
    row_prompt, row_completion, tools = values
    prompt, completion = messages_in(row_prompt), messages_in(row_completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        prompt_messages, answer_messages = (
            with_roles(part, roles) for part in (prompt, completion)
        )
        assert isinstance(prompt_messages, list)
        assert isinstance(answer_messages, list)
        # The prompt has no loss, as in TRL.
        prompt_messages = [
            {**m, "train": False} if isinstance(m, dict) and m.get("role") == "assistant" else m
            for m in prompt_messages
        ]
        return Chat([*prompt_messages, *answer_messages], tools)
    if not isinstance(prompt, str) or not isinstance(completion, str):
        type_names = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise ConversationError(
            f"its prompt and completion are not both text or messages: {type_names}"
        )
    return Completion(prompt, completion)


def _tokens(values: Values, roles: Roles) -> RowDocument:
    from bigtrain.data.documents.token_rows import token_row  # numpy

    return token_row(values)


def _has_text(value: object, name: str) -> bool:
    """Return whether `value` is a non-empty text. Raise ConversationError unless text or None."""
    if value is not None and not isinstance(value, str):
        raise ConversationError(f"its {name} is not text but {type(value).__name__}")
    return bool(value)


FORMATS: Mapping[str, ChatFormat] = {
    entry.name: entry
    for entry in (
        ChatFormat(
            "messages",
            ("messages", TOOLS_KEY),
            frozenset({"messages"}),
            _messages,
            extra_keys=("system", "functions"),
            needs_template=True,
        ),
        ChatFormat(
            "sharegpt",
            ("conversations", "system", TOOLS_KEY),
            frozenset({"conversations"}),
            _sharegpt,
            turn_keys=("from", "value"),
            needs_template=True,
        ),
        ChatFormat(
            "alpaca",
            ("instruction", "input", "output", "system", "history"),
            frozenset({"instruction", "output"}),
            _alpaca,
            turn_keys=(),
            has_roles=False,
            needs_template=True,
        ),
        *(
            ChatFormat(
                name,
                prompt.keys,
                frozenset({prompt.keys[0], prompt.keys[2]}),
                prompt.completion_of,
                turn_keys=(),
                noun="an instruction",
                is_detected=False,
                has_roles=False,
            )
            for name, prompt in PROMPTS.items()
        ),
        *(
            ChatFormat(
                rows.name,
                rows.keys,
                rows.identifying,
                pkgutil.resolve_name(rows.parse),
                noun=rows.noun,
                is_detected=rows.is_detected,
            )
            for rows in ROWS.values()
        ),
        ChatFormat(
            "prompt-completion",
            ("prompt", "completion", TOOLS_KEY),
            frozenset({"prompt", "completion"}),
            _prompt_completion,
        ),
        ChatFormat(
            "tokens",
            TOKEN_KEYS,
            frozenset({"input_ids"}),
            _tokens,
            turn_keys=(),
            noun="a row of tokens",
            has_roles=False,
        ),
    )
}


def _detected(keys: Collection[str]) -> Iterator[ChatFormat]:
    """Yield the formats that rows with these keys may have, in the order of `FORMATS`."""
    return (
        entry for entry in FORMATS.values() if entry.is_detected and entry.identifying <= set(keys)
    )


def nearest(keys: Collection[str]) -> ChatFormat | None:
    """Return the first format of a row with these keys; None if unknown, and for a row with tokens
    and text, which may be either."""
    detected = next(_detected(keys), None)
    is_ambiguous = detected is not None and detected.name == "tokens" and "text" in keys
    return None if is_ambiguous else detected


def also_preferences(keys: Collection[str]) -> list[str]:
    """Return the options of every format of a row that is a preference pair and a conversation at
    once, among which the user must choose; empty for any other row."""
    formats = [entry for entry in _detected(keys) if entry.name != "tokens"]
    options = {entry.name: f"--format {entry.name}" for entry in formats}
    if PAIRS.name not in options or len(options) == 1:
        return []
    if "prompt" not in keys:  # as in LLaMA-Factory
        conversation = next(entry for entry in formats if entry.name != PAIRS.name)
        options[PAIRS.name] += f" --key prompt={conversation.keys[0]}"
    return [*options.values()]


def suggestion_for(row: Collection[str]) -> Suggestion | None:
    """Return the options that read rows like `row`, an object or its keys; None if unknown."""
    match = nearest(row)
    if match is not None:
        return Suggestion(f"--format {match.name}")
    return next(filter(None, (names.suggestion(row) for names in OTHER_NAMES)), None)


def remedy_for(row: Collection[str]) -> str:
    """Return how rows like `row`, an object or its keys, are read, to end an error; empty if
    unknown."""
    if suggestion := suggestion_for(row):
        return f" -> {suggestion}"
    key = list_of_rows(row) if isinstance(row, Mapping) else None
    if key is None:
        return ""
    return f" -> a file of the rows under {key!r}: jq -c '.{key}[]' FILE > rows.jsonl"


def remedy_for_row(row: Collection[str]) -> str:
    """Return `remedy_for` for a row among others, which may have another format."""
    remedy = remedy_for(row)
    return f"{remedy} if all rows are like this one; {ONE_FORMAT}" if remedy else ""


NAME_A_KEY = " -> name its key: "
"""Start of the remedy for a row whose format is unknown."""
JOINED_WITH = "\n"
"""Separator of the texts of several keys of a row."""


def text_of(values: Sequence[Any], keys: Sequence[str]) -> Extracted:
    """Return the document in the `values` of `keys`."""
    texts = [value for value in values if value is not None]
    wrong = next((value for value in texts if not isinstance(value, str)), None)
    if wrong is not None or not texts:
        type_name = "nothing" if wrong is None else type(wrong).__name__
        return Extracted(None, f"{' or '.join(map(repr, keys))} is not text but {type_name}")
    text = texts[0] if len(texts) == 1 else JOINED_WITH.join(filter(None, texts))
    try:
        return Extracted(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        if "\udc80" <= text[error.start] <= "\udcff":  # from csv: a byte that is not UTF-8
            return Extracted(None, "not UTF-8, or half of a surrogate pair")
        return Extracted(None, "the text contains half of a surrogate pair")


@dataclass(frozen=True)
class Conversations:
    """Conversion of rows to conversations. keys: names that the format's keys have in a row.
    last_only: only the last answer has loss. roles: of names in the data. turn_keys: names that the
    format's keys of a turn have, if they differ. ignored: keys of a row that are not to be read."""

    format: ChatFormat
    keys: tuple[str, ...]
    last_only: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    turn_keys: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @cached_property
    def key_rules(self) -> KeyRules:
        """Rules for the keys of a row."""
        return KeyRules(self.format.name, (*self.keys, *self.format.extra_keys), self.ignored)

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys to read from a row: the format's, and keys for which a row may be refused."""
        rules = self.key_rules
        return (*dict.fromkeys(rules.read_keys), *rules.refused)

    def with_known_turns(self, key: str, value: object) -> object:
        """Return the turns in `value` with keys by their names in the format, instead of
        `turn_keys`; the unchanged `value` if `key` holds no messages."""
        renames = bool(self.turn_keys) and self.turn_keys != self.format.turn_keys
        if not renames or key not in MESSAGE_KEYS:
            return value
        turns = from_text(value)  # a list or one turn, which may be JSON text
        format_names = dict(zip(self.turn_keys, self.format.turn_keys, strict=True))

        def renamed(turn: object) -> object:
            if not isinstance(turn, dict):
                return turn
            return {format_names.get(name, name): item for name, item in turn.items()}

        return [renamed(turn) for turn in turns] if isinstance(turns, list) else renamed(turns)


def conversation_of(row: Mapping[str, Any], rules: Conversations) -> Extracted:
    """Return the document in `row`, which has the values of `rules.columns`."""
    names = (*rules.format.keys, *rules.format.extra_keys)
    row_values = (
        None if key in rules.ignored else row.get(key) for key in rules.key_rules.read_keys
    )
    values = dict(zip(names, row_values, strict=True))
    if problem := rules.key_rules.problem(row, values):
        return Extracted(None, problem)
    try:
        format_values = [rules.with_known_turns(key, value) for key, value in values.items()]
        document = rules.format.make(format_values, rules.roles)
        return Extracted(document.document(last_only=rules.last_only))
    except ConversationError as error:
        return Extracted(None, f"{rules.keys[0]!r} is not {rules.format.noun}: {error}")
    except TypeError as error:  # of `dumps`, for half of a surrogate pair
        return Extracted(None, f"{rules.keys[0]!r} cannot be written as JSON: {error}")


def value_at(tree: Any, key: str) -> Any:
    """Return the value under `key`, or under `key` as a dotted path; None if there is none."""
    if isinstance(tree, dict) and (key in tree or "." not in key):
        return tree.get(key)
    value = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def document_in(
    tree: Any, keys: Sequence[str], chat: Conversations | None, ignored: tuple[str, ...] = ()
) -> Extracted:
    """Return the document of any JSON value. `chat`: for conversations; `ignored`: keys of text
    that are not to be read."""
    if not isinstance(tree, dict):
        is_table = isinstance(tree, list) and bool(tree) and isinstance(tree[0], dict)
        fix = " -> name a file that is one list .json" if is_table else ""
        if is_table and has_speaker(tree[0]):
            command = "jq -c '.[] | {messages: .}' FILE > rows.jsonl"
            fix = f" -> an object for each conversation: {command}"
        return Extracted(None, f"not a JSON object but {type(tree).__name__}{fix}")
    expected_keys = keys if chat is None else chat.keys[:1]
    present_keys = [key for key in expected_keys if key in tree or value_at(tree, key) is not None]
    if not present_keys:
        row_keys = ", ".join(sorted(tree)[:20]) or "none"
        missing = f"no key {' or '.join(map(repr, expected_keys))}; keys here: {row_keys}"
        if chat is None:
            name_a_key = "--text-key KEY; or a format and its keys: --format FORMAT --key NAME=KEY"
        else:
            name_a_key = f"--key {chat.format.keys[0]}=KEY"
        other_remedy = " -> --format text" if chat and "text" in tree else NAME_A_KEY + name_a_key
        return Extracted(None, missing + (remedy_for(tree) or other_remedy))
    if chat is not None:
        row = {key: value_at(tree, key) for key in chat.key_rules.read_keys}
        row |= {key: tree[key] for key in chat.key_rules.refused.keys() & tree.keys()}
        return conversation_of(row, chat)
    if problem := text_rules(tuple(keys), ignored).problem(tree, {}):
        return Extracted(None, problem)
    return text_of([value_at(tree, key) for key in present_keys], present_keys)
