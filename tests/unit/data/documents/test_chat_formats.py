"""One set of conversations in every format that people keep them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from bigtrain.data.documents.chat_formats import FORMATS, nearest
from bigtrain.data.documents.conversations import ConversationError, conversation_bytes
from bigtrain.data.documents.fields import Conversations, document_in

TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {}}}]
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A model."},
    {"role": "user", "content": "Add them.\n1 2"},
    {"role": "assistant", "content": "3"},
]
TURNS = [
    {"from": "human", "value": "Who are you?"},
    {"from": "gpt", "value": "A model."},
    {"from": "human", "value": "Add them.\n1 2"},
    {"from": "gpt", "value": "3"},
]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": MESSAGES},
    "sharegpt": {"conversations": TURNS, "system": "Be short."},
    "alpaca": {
        "instruction": "Add them.",
        "input": "1 2",
        "output": "3",
        "system": "Be short.",
        "history": [["Who are you?", "A model."]],
    },
}


def document(name: str, row: Any, **options: Any) -> dict[str, Any]:
    known = FORMATS[name]
    content, why = document_in(row, known.keys[:1], Conversations(known, known.keys, **options))
    if content is None:
        raise ConversationError(why)
    found: dict[str, Any] = orjson.loads(content)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_all_formats_give_the_same_conversation(name: str) -> None:
    assert document(name, ROWS[name]) == {"messages": MESSAGES}
    near = nearest(ROWS[name])
    assert near is not None
    assert near.name == name


def test_a_system_turn_and_tools_of_sharegpt() -> None:
    row = {
        "conversations": [{"from": "system", "value": "Be short."}, *TURNS],
        "tools": json.dumps(TOOLS),
    }
    assert document("sharegpt", row) == {"messages": MESSAGES, "tools": TOOLS}


def test_prompts_and_completions() -> None:
    strings = document("prompt-completion", {"prompt": "2 + 2", "completion": "4"})
    expected = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    assert strings == {"messages": expected}
    found = document("prompt-completion", {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]})
    learned = [m.get("train", True) for m in found["messages"] if m["role"] == "assistant"]
    assert learned == [False, True]


def test_only_the_last_answer_is_learned() -> None:
    found = document("sharegpt", ROWS["sharegpt"], last_only=True)["messages"]
    assert [m.get("weight") for m in found if m["role"] == "assistant"] == [0, None]


def test_tools_one_by_one_as_text() -> None:
    row = {"messages": MESSAGES, "tools": [json.dumps(tool) for tool in TOOLS]}
    assert document("messages", row)["tools"] == TOOLS
    assert "tools" not in document("messages", {"messages": MESSAGES, "tools": ""})


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("messages", {"conversations": TURNS}, "no key 'messages'.*-> --format sharegpt"),
        ("sharegpt", {"messages": MESSAGES}, "no key 'conversations'.*-> --format messages"),
        ("messages", {"instruction": "a", "output": "b"}, "-> --format alpaca"),
        ("messages", {"prompt": "a", "completion": "b"}, "-> --format prompt-completion"),
        ("messages", {"messages": TURNS}, "message 1 has no role"),
        ("sharegpt", {"conversations": MESSAGES}, "turn 1 .*keys content, role -> --format mess"),
        ("sharegpt", {"conversations": [{"from": "alien", "value": "x"}]}, "from 'alien', which"),
        ("sharegpt", {"conversations": TURNS, "system": 7}, "its system is not text but int"),
        ("alpaca", {"instruction": "a", "output": 7}, "its output is not text"),
        (
            "alpaca",
            {"instruction": "a", "output": "b", "history": ["x"]},
            "history 1 is not a pair",
        ),
        ("prompt-completion", {"prompt": "a", "completion": []}, "not both text or messages"),
        ("messages", {"messages": MESSAGES, "tools": "{"}, "its tools are text that is not JSON"),
        ("messages", {"messages": MESSAGES, "tools": 7}, "its tools are not a list of objects"),
        ("messages", {"text": "x"}, "no key 'messages'; keys here: text$"),
    ],
)
def test_wrong_shapes_name_the_nearest_format(name: str, row: Any, words: str) -> None:
    with pytest.raises(ConversationError, match=words):
        document(name, row)


def test_parts_that_are_no_text_are_refused_by_name() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    parts = [{"type": "text", "text": "What is this?"}, image]
    with pytest.raises(ConversationError, match="message 1 holds a part of type 'image_url'"):
        conversation_bytes([{"role": "user", "content": parts}])
    conversation_bytes([{"role": "user", "content": parts[:1]}])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": "no"}, "message 1 has train 'no' -> true, false"),
        ({"train": False, "weight": 1}, "contradict each other"),
        ({"role": "user", "train": True}, "only messages of the assistant are learned -> false"),
    ],
)
def test_train_is_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConversationError, match=words):
        conversation_bytes([{"role": "assistant", "content": "a", **changes}])


def test_paths_with_points() -> None:
    known = FORMATS["messages"]
    how = Conversations(known, ("meta.chat", "tools"))
    content, _ = document_in({"meta": {"chat": MESSAGES}}, ("meta.chat",), how)
    assert content == conversation_bytes(MESSAGES)
    assert document_in({"meta": {"text": "a"}}, ("meta.text",), None) == (b"a", "")
    content, why = document_in({"meta": {"words": "a"}}, ("meta.text",), None)
    assert content is None
    assert why.startswith("no key 'meta.text'")


def test_train_false_is_not_learned(tmp_path: Path) -> None:
    """The mask of an encoder; see tests/unit/data/chat/test_encoder.py for weights."""
    from bigtrain.data.documents.conversations import is_learned

    answer = {"role": "assistant", "content": "a"}
    assert is_learned(answer)
    assert not is_learned({**answer, "train": False})
    assert not is_learned({**answer, "weight": 0})
