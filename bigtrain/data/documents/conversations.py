"""Conversations as documents. No transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigtrain.data.documents.exact_json import DuplicateKeyError, dumps, loads
from bigtrain.data.tokenizers.chat_template import ConversationError

FLAGS = ("train", "loss")
"""Keys of a message that enable or disable its loss, of Axolotl and of ms-swift."""
OTHER_LEARNING = {
    "train_detail": "a message has loss or not as a unit -> train",
    "training": "it is read under Axolotl's other name only -> train",
    "loss_scale": "ms-swift's factor of the loss is not read -> weight",
    **dict.fromkeys(
        ("mask", "masked", "loss_mask", "trainable", "train_on_turn"),
        "whether it has loss is not read under this name -> train: true or false, instead of it",
    ),
}
"""Keys of a message that change its loss in other tools, or whose names suggest it: a message with
such a key is refused. The value is the reason and the fix."""
RESULTS = ("tool", "function", "ipython", "observation", "environment")
"""Roles of tool responses, whose content may be any JSON, or empty."""
WORDLESS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys that a message may have instead of content."""
SMALLEST_WEIGHT, LARGEST_WEIGHT = 2.0**-126, 3.4028234663852886e38
"""Smallest normal and largest float32: bounds of the weights of losses other than 0."""
FACTOR = "a weight is a factor of the loss -> a finite number, 0 or more"
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of text parts in OpenAI's messages; the latter two in its responses."""


def conversation_bytes(messages: object, tools: object = None, *, last_only: bool = False) -> bytes:
    """Return a conversation as the document that is tokenized: deterministic JSON. last_only: only
    the assistant's last message has loss. Raises ConversationError for an invalid conversation."""
    messages = from_text(messages)
    if not isinstance(messages, list) or not messages:
        type_name = "an empty list" if messages == [] else type(messages).__name__
        raise ConversationError(f"not a list of messages but {type_name}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ConversationError(
                f"message {number} is not an object but {type(message).__name__}"
            )
        if not isinstance(message.get("role"), str):
            keys = ", ".join(sorted(map(str, message))) or "none"
            fix = ""
            if {"from", "value"} <= message.keys():
                fix = " -> --format sharegpt (--key conversations=KEY for another key)"
            elif "role" not in message:
                fix = " -> name its keys: --key role=KEY --key content=KEY"
            raise ConversationError(
                f"message {number} has no role that is text; keys here: {keys}{fix}"
            )
        _check_learning(number, message)

    # Tools may be JSON strings, each or together.
    if isinstance(tools, str):
        tools = _parsed_tools(tools)
    if isinstance(tools, list):
        tools = [_parsed_tools(tool) if isinstance(tool, str) else tool for tool in tools]
    are_tools = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not are_tools:
        raise ConversationError("its tools are not a list of objects, nor JSON of one")

    # As in transformers, a key with value None counts as absent.
    cleaned = []
    for number, message in enumerate(messages, 1):
        given_values = {key: value for key, value in message.items() if value is not None}
        is_null = "content" in message and message["content"] is None
        parsed = _with_parsed_calls(number, given_values)
        cleaned.append(_with_text(number, parsed, is_null=is_null))
    # Answers before the last one get a weight of 0, which every reader of the document knows.
    if last_only:
        learned = [index for index, message in enumerate(cleaned) if is_learned(message)]
        for index in learned[:-1]:
            cleaned[index] = {**cleaned[index], "weight": 0}
    tree = {"messages": cleaned, "tools": tools} if tools else {"messages": cleaned}
    try:
        return dumps(tree)
    except TypeError as error:
        raise ConversationError(f"it cannot be written as JSON: {error}") from error


def is_learned(message: Mapping[str, Any]) -> bool:
    """Return whether a message has loss: the assistant's, except with ``weight: 0`` (OpenAI's
    format) and ``train: false`` or ``loss: false`` (`FLAGS`)."""
    has_loss = message.get("weight", 1) and all(message.get(flag, True) for flag in FLAGS)
    return bool(message["role"] == "assistant" and has_loss)


def weight_of(message: Mapping[str, Any]) -> float:
    """Return the factor of the losses of a message that has loss."""
    weight = message.get("weight")
    return 1.0 if weight is None else float(weight)


def has_fraction(message: Mapping[str, Any]) -> bool:
    """Return whether the weight of a message is a number other than 0 and 1."""
    weight = message.get("weight")
    return isinstance(weight, int | float) and weight not in (0, 1)


def from_text(value: object) -> object:
    """Return `value`, or the list or object in its JSON text, as stored in columns of csv and some
    parquet files. Text that is not JSON is returned unchanged. Raises ConversationError for an
    object with two equal keys."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return loads(value)
    except DuplicateKeyError as error:
        raise ConversationError(f"in its JSON text, {error}") from error
    except ValueError:
        return value


def _check_learning(number: int, message: Mapping[str, Any]) -> None:
    """Raise ConversationError for a message whose loss is ambiguous, or not supported."""
    weight, role = message.get("weight"), message["role"]
    for key, fix in OTHER_LEARNING.items():
        if message.get(key) is not None and message[key] != []:
            raise ConversationError(f"message {number} has {key}: {fix}")
    # A weight is stored in float32, which has neither larger nor smaller ones.
    is_number = isinstance(weight, int | float)
    if weight is not None and not (is_number and 0 <= weight <= LARGEST_WEIGHT):
        raise ConversationError(f"message {number} has weight {weight!r}: {FACTOR}")
    if weight and weight < SMALLEST_WEIGHT:
        rule = f"weights are stored in float32 -> 0, or at least {SMALLEST_WEIGHT:.3g}"
        raise ConversationError(f"message {number} has weight {weight!r}: {rule}")
    # Weight and flags must agree on whether the message has loss.
    switches = {} if weight is None else {"weight": weight}
    for key in FLAGS:
        flag = message.get(key)
        if flag is not None and not isinstance(flag, bool):
            raise ConversationError(
                f"message {number} has {key} {flag!r} -> true, false, or no {key}"
            )
        if flag is not None:
            switches[key] = flag
    for key, value in switches.items():
        if value and role != "assistant":
            raise ConversationError(
                f"message {number} has {key} {value!r} and role {role}: only messages of the "
                f"assistant have loss -> {'0' if key == 'weight' else 'false'}, or no {key}"
            )
    if len({bool(value) for value in switches.values()}) > 1:
        contradiction = " and ".join(f"{key} {value!r}" for key, value in switches.items())
        raise ConversationError(
            f"message {number} has {contradiction}, which contradict each other -> keep one of them"
        )


def _with_text(number: int, message: dict[str, Any], *, is_null: bool) -> dict[str, Any]:
    """Return `message` with its text parts joined: most templates print a list of parts as a Python
    list. is_null: its content in the row is null. Raise ConversationError for missing or non-text
    content."""
    content, is_result = message.get("content"), message["role"] in RESULTS
    # The result of a tool may be a list of anything.
    if isinstance(content, list) and (not is_result or _are_parts(content)):
        text = "".join(_part_text(number, part) for part in content)
        return {**message, **_other_keys_of_parts(content), "content": text}
    if is_result or isinstance(content, str):
        return message
    if content is not None:
        raise ConversationError(
            f"message {number} has content that is neither text nor a list of parts of text but "
            f"{type(content).__name__}"
        )
    if any(message.get(key) for key in WORDLESS):
        return message
    if is_null:
        raise ConversationError(f"message {number} has the content null -> a text, or remove it")
    keys = ", ".join(sorted(map(str, message)))
    raise ConversationError(
        f"message {number} has no content; keys here: {keys} -> name its key: --key content=KEY"
    )


def _are_parts(content: list[Any]) -> bool:
    """Return whether the result of a tool is a list of parts; an empty list is not."""
    have_type = [isinstance(part, dict) and isinstance(part.get("type"), str) for part in content]
    return bool(have_type) and all(have_type)


def _other_keys_of_parts(content: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values that parts of text have under other keys (``citations``), by names that no
    template reads, so that they are counted among the keys of messages."""
    return {
        f"content.{key}": value
        for part in content
        for key, value in part.items()
        if key not in ("type", "text") and value is not None
    }


def _part_text(number: int, part: object) -> str:
    """Return the text of a part of message `number`."""
    fields = part if isinstance(part, dict) else {}
    part_type, text = fields.get("type", "text"), fields.get("text")
    if isinstance(part_type, str) and part_type not in TEXT_PARTS:
        raise ConversationError(
            f"message {number} has a part of type {part_type!r}: only text is supported"
        )
    if not isinstance(text, str):
        keys = ", ".join(sorted(map(str, part))) if isinstance(part, dict) else ""
        raise ConversationError(
            f"message {number} has a part that is not an object with type and text but "
            + (f"one with the keys {keys}" if keys else type(part).__name__)
        )
    return text


def _with_parsed_calls(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with the arguments of tool calls as objects, as templates expect; OpenAI
    stores arguments as JSON text. OpenAI's former single `function_call` becomes a tool call."""
    calls = from_text(message.get("tool_calls"))
    if "function_call" in message:
        if calls:
            raise ConversationError(
                f"message {number} has tool_calls and function_call -> one of both, or null under "
                "the other key"
            )
        call = from_text(message["function_call"])
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ConversationError(f"the function_call of message {number} has no function name")
        message = {key: value for key, value in message.items() if key != "function_call"}
        calls = [{"type": "function", "function": call}]
    if calls is None:
        return message
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConversationError(f"the tool_calls of message {number} are not a list of objects")
    parsed = []
    for call in calls:
        if isinstance(call.get("function"), dict):
            call = {**call, "function": _with_parsed_arguments(number, call["function"])}
        elif "arguments" in call:  # transformers also accepts them without an enclosing "function"
            call = _with_parsed_arguments(number, call)
        parsed.append(call)
    return {**message, "tool_calls": parsed}


def _with_parsed_arguments(number: int, function: dict[str, Any]) -> dict[str, Any]:
    """Return the function call with its arguments, which may be JSON text, as an object."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        parsed = loads(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise ConversationError(
            f"message {number} calls {function.get('name')!r} with arguments that are text but not "
            f"JSON ({error})"
        ) from error
    if not isinstance(parsed, dict):
        raise ConversationError(
            f"message {number} calls {function.get('name')!r} with arguments that are not a JSON "
            f"object but {type(parsed).__name__}"
        )
    return {**function, "arguments": parsed}


def _parsed_tools(text: str) -> object:
    """Parse tools that are JSON text; None if it is blank."""
    try:
        return loads(text) if text.strip() else None
    except ValueError as error:
        raise ConversationError(f"its tools are text that is not JSON ({error})") from error
