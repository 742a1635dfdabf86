"""Documents in rows and JSON objects: text, and the common formats of conversations. Pure.

A `ChatFormat` (messages, ShareGPT, Alpaca, ...) defines the keys of a row, and converts their
values to messages for transformers' ``apply_chat_template``. `nearest` detects the format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from bigtrain.data.documents.conversations import ConversationError, from_text
from bigtrain.data.documents.preferences import (
    CLASSIFIED_KEYS,
    LABELED_KEYS,
    PAIR_KEYS,
    classified,
    labeled,
    pair,
)
from bigtrain.data.documents.row_format import (
    FUNCTION_CALL,
    ROLES,
    TOKEN_KEYS,
    Chat,
    ChatFormat,
    Completion,
    Messages,
    Roles,
    RowDocument,
    Values,
    with_role,
    with_roles,
)

ONE_FORMAT = (
    "rows of several formats must be tokenized one format at a time, each into its own --output, "
    "and mixed in the run: data.sources"
)

TOOLS_KEY = "tools"
"""Key of a conversation's tools, next to its messages."""
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
"""Keys of a row that mark a conversation as not text-only."""
WEIGHT_KEYS = ("weight", "token_weights", "loss_weights")
"""Keys of a row for weights of its loss."""


def _messages(values: Values, roles: Roles) -> Chat:
    given, tools, system, functions = values
    messages = with_roles(given, roles)
    if functions and not tools:  # OpenAI's former tools
        listed = from_text(functions)
        if not isinstance(listed, list):
            raise ConversationError(f"its functions are not a list but {type(listed).__name__}")
        tools = [{"type": "function", "function": function} for function in listed]
    if _text(system, "system") and isinstance(messages, list):
        first = messages[0] if messages and isinstance(messages[0], dict) else {}
        if first.get("role") != "system":
            messages = [{"role": "system", "content": system}, *messages]
        elif first.get("content") != system:
            raise ConversationError("message 1 and the key system are two system prompts -> one")
    return Chat(messages, tools)


def _sharegpt(values: Values, roles: Roles) -> Chat:
    turns, system, tools = values
    turns = from_text(turns)
    if not isinstance(turns, list):
        return Chat(turns, tools)
    messages: Messages = []
    if _text(system, "system"):
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(turns, 1):
        if isinstance(turn, dict) and "role" in turn and "from" not in turn:
            messages.append(with_role(turn, roles))  # in OpenAI's format, under ShareGPT's key
            continue
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            shown, fix = type(turn).__name__, ""
            if isinstance(turn, dict):
                shown = f"an object with the keys {', '.join(sorted(turn)) or 'none'}"
                fix = " -> name its keys: --key from=KEY --key value=KEY"
            raise ConversationError(
                f"turn {number} is not an object with from and value but {shown}{fix}"
            )
        messages.append(_turn(number, turn, roles))
    return Chat(messages, tools)


def _turn(number: int, turn: Mapping[str, Any], roles: Roles) -> dict[str, Any]:
    name = str(turn["from"])
    role = roles.get(name) or ROLES.get(name.lower())
    if role is None:
        raise ConversationError(
            f"turn {number} is from {name!r}, which is not one of {', '.join(ROLES)} -> map it: "
            f"--role '{name}=user'"
        )
    rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
    if name.lower() == FUNCTION_CALL and name not in roles:
        return {"role": role, "tool_calls": _calls(number, turn.get("value")), **rest}
    return {"role": role, "content": turn.get("value"), **rest}


def _calls(number: int, value: object) -> list[dict[str, Any]]:
    """Parse the tool calls in the JSON value of a `FUNCTION_CALL` turn."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError as error:
            raise ConversationError(
                f"turn {number} is from {FUNCTION_CALL} and not JSON ({error}) -> to treat it as "
                f"plain text: --role {FUNCTION_CALL}=assistant"
            ) from error
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(
        isinstance(c, dict) and {"name", "arguments"} <= c.keys() for c in calls
    ):
        raise ConversationError(
            f"turn {number} is from {FUNCTION_CALL} and not the JSON of an object with name and "
            f"arguments -> to treat it as plain text: --role {FUNCTION_CALL}=assistant"
        )
    return [{"type": "function", "function": call} for call in calls]


def _alpaca(values: Values, roles: Roles) -> Chat:
    instruction, given, output, system, history = values
    history = from_text(history)
    messages: Messages = []
    if _text(system, "system"):
        messages.append({"role": "system", "content": system})
    pairs = history or ()
    if not isinstance(pairs, (list, tuple)):
        raise ConversationError(f"its history is not a list but {type(history).__name__}")
    for number, turn in enumerate(pairs, 1):
        if not (isinstance(turn, (list, tuple)) and len(turn) == 2 and all(map(_is_text, turn))):
            raise ConversationError(f"history {number} is not a pair of instruction and output")
        messages += [
            {"role": "user", "content": turn[0]},
            {"role": "assistant", "content": turn[1]},
        ]
    if not _is_text(instruction) or not _is_text(output):
        wrong = "instruction" if not _is_text(instruction) else "output"
        raise ConversationError(f"its {wrong} is not text")
    # Joined as in LLaMA-Factory and Alpaca.
    asked = f"{instruction}\n{given}" if _text(given, "input") else instruction
    answered = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    return Chat([*messages, *answered])


def _prompt_completion(values: Values, roles: Roles) -> Chat | Completion:
    prompt, completion, tools = values
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = (with_roles(part, roles) for part in (prompt, completion))
        assert isinstance(before, list)
        assert isinstance(after, list)
        # The prompt has no loss, as in TRL.
        before = [
            {**m, "train": False} if isinstance(m, dict) and m.get("role") == "assistant" else m
            for m in before
        ]
        return Chat([*before, *after], tools)
    if not _is_text(prompt) or not _is_text(completion):
        kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise ConversationError(f"its prompt and completion are not both text or messages: {kinds}")
    return Completion(prompt, completion)


def _tokens(values: Values, roles: Roles) -> RowDocument:
    from bigtrain.data.documents.token_rows import token_row  # numpy

    return token_row(values)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _text(value: object, name: str) -> bool:
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
        ),
        ChatFormat(
            "sharegpt",
            ("conversations", "system", TOOLS_KEY),
            frozenset({"conversations"}),
            _sharegpt,
            ("from", "value"),
        ),
        ChatFormat(
            "alpaca",
            ("instruction", "input", "output", "system", "history"),
            frozenset({"instruction", "output"}),
            _alpaca,
            (),
        ),
        ChatFormat(
            "preference",
            PAIR_KEYS,
            frozenset({"chosen", "rejected"}),
            pair,
            noun="a preference pair",
        ),
        ChatFormat(
            "kto",
            LABELED_KEYS,
            frozenset({"prompt", "completion", "label"}),
            labeled,
            noun="an answer with a label",
        ),
        ChatFormat(
            "classification",
            CLASSIFIED_KEYS,
            frozenset({"label"}),
            classified,
            noun="a sample with a label",
            is_detected=False,
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
            (),
            noun="a row of tokens",
        ),
    )
}


OTHER_NAMES: Sequence[tuple[str, Mapping[str, Sequence[str]]]] = (
    ("sharegpt", {"conversations": ("conversation", "dialogue", "dialog", "turns", "chat")}),
    (
        "alpaca",
        {
            "instruction": ("instruction", "question", "query"),
            "output": ("output", "response", "answer", "answers", "completion", "target"),
        },
    ),
    ("prompt-completion", {"prompt": ("prompt",), "completion": ("response", "answer", "output")}),
)
"""Per format, alternative names of its keys that no other format uses. The keys of turns
distinguish messages from ShareGPT, and both are accepted under the key of either."""


def _detected(keys: Collection[str]) -> Iterator[ChatFormat]:
    return (
        entry for entry in FORMATS.values() if entry.is_detected and entry.identifying <= set(keys)
    )


def nearest(keys: Collection[str]) -> ChatFormat | None:
    """Return the format of a row with these keys; None if unknown, and for tokens
    with their text: which one is meant is ambiguous."""
    near = next(_detected(keys), None)
    return None if near is not None and near.name == "tokens" and "text" in keys else near


def also_preferences(keys: Collection[str]) -> list[str]:
    """Return the formats of a row with these keys if it is a preference pair and a conversation at
    once: which one is meant is the user's choice. Empty otherwise."""
    names = [entry.name for entry in _detected(keys)]
    names = [name for name in names if name != "tokens"]
    return names if "preference" in names and len(names) > 1 else []


def remedy_for(keys: Collection[str]) -> str:
    """Return the options that read rows with these keys, to end an error; empty if unknown."""
    match = nearest(keys)
    if match is not None:
        return f" -> --format {match.name}"
    for name, others in OTHER_NAMES:
        met = {own: next((n for n in names if n in keys), None) for own, names in others.items()}
        if all(met.values()):
            named = [f" --key {own}={other}" for own, other in met.items() if own != other]
            return f" -> --format {name}{''.join(named)}"
    return ""


def remedy_for_row(keys: Collection[str]) -> str:
    """Return `remedy_for` for a row among others, which may have another format."""
    near = remedy_for(keys)
    return near and f"{near} if all rows are like this one; {ONE_FORMAT}"


JOINED_WITH = "\n"


def text_of(values: Sequence[Any], keys: Sequence[str]) -> tuple[bytes | None, str]:
    """Return the document in the `values` of `keys`, or None and the reason."""
    given = [value for value in values if value is not None]
    wrong = next((value for value in given if not isinstance(value, str)), None)
    if wrong is not None or not given:
        kind = "nothing" if wrong is None else type(wrong).__name__
        return None, f"{' or '.join(map(repr, keys))} is not text but {kind}"
    text = given[0] if len(given) == 1 else JOINED_WITH.join(filter(None, given))
    try:
        return text.encode("utf-8"), ""
    except UnicodeEncodeError as error:
        if "\udc80" <= text[error.start] <= "\udcff":  # from csv: a byte that is not UTF-8
            return None, "not UTF-8, or half of a surrogate pair"
        return None, "the text contains half of a surrogate pair"


@dataclass(frozen=True)
class Conversations:
    """Rows as conversations: format, its keys in a row, whether only the last answer has loss,
    roles of names in the data, and keys of a turn if they differ from the format's."""

    format: ChatFormat
    keys: tuple[str, ...]
    last_only: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    turn_keys: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys to read from a row: the format's, and those for which it may be refused."""
        others = (*self.format.extra_keys, *MEDIA_KEYS, *WEIGHT_KEYS)
        return (*self.keys, *(key for key in others if key not in self.keys))

    def with_known_turns(self, value: object) -> object:
        """Return the `value` of a row, with the format's keys in its turns."""
        if self.turn_keys in ((), self.format.turn_keys):
            return value
        turns = from_text(value)
        if not isinstance(turns, list):
            return value
        known = dict(zip(self.turn_keys, self.format.turn_keys, strict=True))
        return [
            {known.get(key, key): item for key, item in turn.items()}
            if isinstance(turn, dict)
            else turn
            for turn in turns
        ]


def _why_weighted(key: str, value: object) -> str:
    """Return why a row with this weight is refused; empty if it is learned as any other."""
    if key != "weight" and value is not None:
        return f"it has {key}, which only rows with input_ids may have: --format tokens"
    if isinstance(value, bool) or not isinstance(value, int | float) or value == 1:
        return ""
    if value == 0:
        return "its weight is 0, so nothing of it would be learned -> remove the row"
    return (
        f"its weight is {value}, which only rows with input_ids may have -> 1; to read it more "
        "often, write its rows into a dataset of their own, with a larger weight in data.sources"
    )


def conversation_of(values: Sequence[Any], rules: Conversations) -> tuple[bytes | None, str]:
    """Return the document in the `values` of `rules.columns`, or None and the reason."""
    extra = dict(zip(rules.columns[len(rules.keys) :], values[len(rules.keys) :], strict=False))
    for key, value in extra.items():
        if key in MEDIA_KEYS and value is not None and value not in ("", [], {}):
            return None, (f"it has a value under {key!r}: only text is supported")
        if key in WEIGHT_KEYS and (why := _why_weighted(key, value)):
            return None, why
    try:
        given = [rules.with_known_turns(value) for value in values[: len(rules.keys)]]
        given += [extra.get(key) for key in rules.format.extra_keys]
        row = rules.format.make(given, rules.roles)
        return row.document(last_only=rules.last_only), ""
    except ConversationError as error:
        return None, f"{rules.keys[0]!r} is not {rules.format.noun}: {error}"
    except TypeError as error:  # halves of surrogate pairs, in a prompt
        return None, f"{rules.keys[0]!r} cannot be written as JSON: {error}"


def value_at(tree: Any, key: str) -> Any:
    """Return the value under `key`, or under `key` as a dotted path; None if there is none."""
    if isinstance(tree, dict) and (key in tree or "." not in key):
        return tree.get(key)
    value = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def text_in(document: Any, keys: Sequence[str]) -> bytes:
    """Return the document of a JSON object. Raise LookupError, TypeError or ValueError."""
    content, why = text_of([value_at(document, key) for key in keys], keys)
    if content is None:
        raise LookupError(why)
    return content


def document_in(
    tree: Any, keys: Sequence[str], chat: Conversations | None
) -> tuple[bytes | None, str]:
    """Return the document of any JSON value, or None and the reason. `chat`: for conversations."""
    if not isinstance(tree, dict):
        return None, f"not a JSON object but {type(tree).__name__}"
    wanted = keys if chat is None else chat.keys[:1]
    present = [key for key in wanted if key in tree or value_at(tree, key) is not None]
    if not present:
        there = ", ".join(sorted(tree)[:20]) or "none"
        missing = f"no key {' or '.join(map(repr, wanted))}; keys here: {there}"
        return None, missing + remedy_for(tree)
    if chat is not None:
        return conversation_of([value_at(tree, key) for key in chat.columns], chat)
    return text_of([value_at(tree, key) for key in present], present)
