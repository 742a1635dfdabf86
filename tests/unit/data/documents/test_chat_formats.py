"""One set of conversations in every format that people keep them in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from bigtrain.data.documents.chat_formats import (
    FORMATS,
    Conversations,
    document_in,
    nearest,
    remedy_for,
)
from bigtrain.data.documents.conversations import conversation_bytes
from bigtrain.data.tokenizers.chat_template import ConversationError
from tests.support.chats import turns

TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {}}}]
MESSAGES = turns("Who are you?", "A model.", "Add them.\n1 2", "3", system="Be short.")
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


def document(name: str, row: Any, **options: Any) -> Any:
    known = FORMATS[name]
    content, why = document_in(row, known.keys[:1], Conversations(known, known.keys, **options))
    if content is None:
        raise ConversationError(why)
    return orjson.loads(content)


@pytest.mark.parametrize("name", ROWS)
def test_all_formats_give_the_same_conversation(name: str) -> None:
    assert document(name, ROWS[name]) == {"messages": MESSAGES}
    near = nearest(ROWS[name])
    assert near is not None
    assert near.name == name


TASK = "Below is an instruction that describes a task"
REQUEST = "appropriately completes the request."
PAIRED = f"{TASK}, paired with an input that provides further context. Write a response that "
ALONE = f"{TASK}. Write a response that "
# As `AlpacaPrompter` and `UnpromptedPrompter` of Axolotl write them, with and without an input.
ALPACA_PROMPTS = {
    "alpaca-instruct": (
        f"{PAIRED}{REQUEST}\n\n### Instruction:\nAdd {{}}.\n\n### Input:\n1 2\n\n### Response:\n",
        f"{ALONE}{REQUEST}\n\n### Instruction:\nAdd {{}}.\n\n### Response:\n",
    ),
    "alpaca-chat": (
        f"SYSTEM: {PAIRED}{REQUEST}\nUSER: Add {{}}.\n1 2\nASSISTANT:",
        f"SYSTEM: {ALONE}{REQUEST}\nUSER: Add {{}}.\nASSISTANT:",
    ),
    "alpaca-chatml": (
        f"<|im_start|>system\n{PAIRED}{REQUEST}<|im_end|>\n"
        "<|im_start|>user\nAdd {}.\n1 2<|im_end|>\n<|im_start|>assistant\n",
        f"<|im_start|>system\n{ALONE}{REQUEST}<|im_end|>\n"
        "<|im_start|>user\nAdd {}.<|im_end|>\n<|im_start|>assistant\n",
    ),
    "alpaca-phi": (
        f"<|system|>\n{PAIRED}{REQUEST}<|end|>\n<|user|>\nAdd {{}}.<|end|>1 2<|assistant|>",
        f"<|system|>\n{ALONE}{REQUEST}<|end|>\n<|user|>\nAdd {{}}.<|end|>\n<|assistant|>\n",
    ),
    "alpaca-instruct-bare": (
        "### Instruction:\nAdd {}.\n\n### Input:\n1 2\n\n### Response:\n",
        "### Instruction:\nAdd {}.\n\n### Response:\n",
    ),
    "alpaca-chat-bare": ("USER: Add {}.\n1 2\nASSISTANT:", "USER: Add {}.\nASSISTANT:"),
}

ORCA = ("question", "response", "system_prompt")
# As `SystemDataPrompter` and `OpenOrcaSystemDataPrompter` write them: keys, system prompt, prompt.
SYSTEM_PROMPTS = {
    "alpaca-instruct-system": (
        ("instruction", "output", "system"),
        "Be {short}.\n\n",
        "### Instruction:\nAdd {}.\n\n### Response:\n",
    ),
    "alpaca-chat-system": (
        ("instruction", "output", "system"),
        "SYSTEM: Be {short}.\n",
        "USER: Add {}.\nASSISTANT:",
    ),
    "open-orca": (
        ORCA,
        "### System:\nBe {short}.\n",
        "### Human:\nAdd {}.\n### Assistant:\n",
    ),
    "open-orca-chatml": (
        ORCA,
        "<|im_start|>system\nBe {short}.<|im_end|>\n",
        "<|im_start|>user\nAdd {}.<|im_end|>\n<|im_start|>assistant\n",
    ),
}


@pytest.mark.parametrize("name", SYSTEM_PROMPTS)
def test_system_prompts_of_axolotl(name: str) -> None:
    (question, answer, system), system_text, prompt = SYSTEM_PROMPTS[name]
    row = {question: "Add {}.", answer: "3"}
    given = {**row, system: "Be {short}."}
    assert document(name, given) == {"prompt": system_text + prompt, "completion": "3"}
    for none in ({}, {system: ""}, {system: None}):
        assert document(name, {**row, **none}) == {"prompt": prompt, "completion": "3"}
    with_input = document(name, {**given, "input": "1 2"})
    assert "\n1 2" in with_input["prompt"]
    for wrong, words in (
        ({system: 1}, f"its {system} is not text"),
        ({answer: ""}, f"its {answer} is empty"),
        ({"history": [["a", "b"]]}, "history would not be read -> --format alpaca"),
    ):
        with pytest.raises(ConversationError, match=words):
            document(name, {**given, **wrong})


@pytest.mark.parametrize("name", ALPACA_PROMPTS)
def test_prompts_of_axolotl(name: str) -> None:
    row = {"instruction": "Add {}.", "output": "3"}
    for prompt, more in zip(ALPACA_PROMPTS[name], ({"input": "1 2"}, {"input": ""}), strict=True):
        assert document(name, {**row, **more}) == {"prompt": prompt, "completion": "3"}
    assert document(name, row) == document(name, {**row, "input": ""})
    for wrong, words in (
        ({"input": 1}, "its input is not text"),
        ({"output": ""}, "its output is empty"),
        ({"system": "Be short."}, "system would not be read -> --format alpaca"),
        ({"history": [["a", "b"]]}, "history would not be read -> --format alpaca"),
    ):
        with pytest.raises(ConversationError, match=words):
            document(name, {**row, **wrong})


def test_prompts_and_completions() -> None:
    strings = {"prompt": "2 + 2", "completion": "4"}
    assert document("prompt-completion", strings) == strings
    conversation = document(
        "prompt-completion", {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}
    )
    learned = [m.get("train", True) for m in conversation["messages"] if m["role"] == "assistant"]
    assert learned == [False, True]


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("messages", {"conversations": TURNS}, "no key 'messages'.*-> --format sharegpt"),
        ("sharegpt", {"messages": MESSAGES}, "no key 'conversations'.*-> --format messages"),
        ("messages", {"instruction": "a", "output": "b"}, "-> --format alpaca"),
        (
            "messages",
            {"messages": TURNS},
            "message 1 has no role.*-> --format sharegpt \\(--key co",
        ),
        ("messages", {"conversation": TURNS}, "-> --format sharegpt --key conversations=conversat"),
        ("messages", {"question": "a", "answer": "b"}, "--format alpaca --key instruction=que"),
        ("messages", {"instruction": "a", "response": "b"}, "-> --format alpaca --key output=resp"),
        ("messages", {"prompt": "a", "response": "b"}, "-> --format prompt-.* --key completion=re"),
        (
            "sharegpt",
            {"conversations": [{"from": "alien", "value": "x"}]},
            "from 'alien', which.*--role 'alien=user'",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": "f(x)"}]},
            "turn 1 is from function_call and not JSON.*--role function_call=assistant",
        ),
        ("alpaca", {"instruction": "a", "output": "b", "history": 7}, "its history is not a list"),
        ("messages", {"messages": MESSAGES, "images": ["a.png"]}, "value under 'images': only tex"),
        ("sharegpt", {"conversations": TURNS, "system": 7}, "its system is not text but int"),
        ("sharegpt", {"conversations": [{"said": "a"}]}, "keys said -> name its keys: --key from="),
        ("messages", {"messages": [{"role": "user", "value": "a"}]}, "no content; .*--key con"),
        ("messages", {"messages": [{"role": "user", "content": 7}]}, "neither text nor .* but int"),
        ("messages", {"messages": MESSAGES, "system": "L"}, "and the key system are two system pr"),
        ("alpaca", {"instruction": "a", "output": 7}, "its output is not text"),
        ("alpaca", {"instruction": "a", "output": "b", "history": ["x"]}, "1 is not a pair"),
        ("prompt-completion", {"prompt": "a", "completion": []}, "not both text or messages"),
        ("messages", {"messages": MESSAGES, "tools": "{"}, "its tools are text that is not JSON"),
        ("messages", {"messages": MESSAGES, "tools": 7}, "its tools are not a list of objects"),
        ("messages", {"text": "x"}, "no key 'messages'; keys here: text -> --format text$"),
    ],
)
def test_wrong_shapes_name_the_nearest_format(name: str, row: Any, words: str) -> None:
    with pytest.raises(ConversationError, match=words):
        document(name, row)


def test_parts_that_are_no_text_are_refused_by_name() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    parts = [{"type": "text", "text": "What is this?"}, image]
    with pytest.raises(ConversationError, match="message 1 has a part of type 'image_url'"):
        conversation_bytes([{"role": "user", "content": parts}])
    for part, words in (("a", "with type and text but str"), ({"url": "x"}, "with the keys url")):
        with pytest.raises(ConversationError, match=f"1 has a part that is not .*{words}"):
            conversation_bytes([{"role": "user", "content": [part]}])


def test_parts_of_text_are_text() -> None:
    """Templates of models of text would write a list of parts out as Python writes lists."""
    parts = [{"type": "text", "text": "Who are"}, {"text": " you?"}]
    for role in ("user", "tool"):
        given = parts[:1] if role == "tool" else parts
        [message] = orjson.loads(conversation_bytes([{"role": role, "content": given}]))["messages"]
        assert message == {"role": role, "content": "".join(part["text"] for part in given)}
    result = [{"role": "tool", "content": {"rows": [1, 2]}}, {"role": "tool", "content": None}]
    assert orjson.loads(conversation_bytes(result))["messages"] == [result[0], {"role": "tool"}]


def test_what_stands_beside_messages() -> None:
    """A system prompt, as Anthropic and ms-swift have it, and OpenAI's functions of before."""
    for row in (
        {"system": "Be short.", "messages": MESSAGES[1:]},
        {"system": "Be short."} | ROWS["messages"],
    ):
        assert document("messages", row) == {"messages": MESSAGES}
    call = {"name": "time", "arguments": "{}"}
    old = [*MESSAGES[:2], {"role": "assistant", "content": None, "function_call": call}]
    new = [*MESSAGES[:2], calling("{}")]
    new[2]["tool_calls"][0]["function"]["name"] = "time"
    row = {"messages": old, "functions": [TOOLS[0]["function"]]}
    assert document("messages", row) == document("messages", {"messages": new, "tools": TOOLS})
    with pytest.raises(
        ConversationError, match="the function_call of message 3 has no function name"
    ):
        document(
            "messages", {"messages": [*old[:2], {"role": "assistant", "function_call": "auto"}]}
        )


def test_roles_and_keys_of_the_other_format() -> None:
    """OpenAI's turns under ShareGPT's key, and ShareGPT's names as OpenAI's roles."""
    assert document("sharegpt", {"conversations": MESSAGES}) == {"messages": MESSAGES}
    names = {"user": "human", "assistant": "gpt"}
    named = [{**m, "role": names.get(m["role"], m["role"])} for m in MESSAGES]
    assert document("sharegpt", {"conversations": named}) == {"messages": MESSAGES}
    assert document("messages", {"messages": named}) == {"messages": MESSAGES}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": "no"}, "message 1 has train 'no' -> true, false"),
        ({"train": False, "weight": 1}, "contradict each other"),
        ({"role": "user", "train": True}, "only messages of the assistant have loss -> false"),
        ({"loss": 0.5}, "message 1 has loss 0.5 -> true, false, or no loss"),
        ({"loss": True, "train": False}, "train False and loss True, which contradict each other"),
        ({"weight": -0.5}, "message 1 has weight -0.5: a weight is a factor of the loss"),
        ({"weight": 0.5, "train": False}, "weight 0.5 and train False, which contradict each"),
        ({"weight": "1"}, "message 1 has weight '1'"),
        ({"train_detail": [{"begin_offset": 0}]}, "has train_detail: .* or not as a unit"),
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
    assert not is_learned({**answer, "loss": False})


def calling(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"a": [1, null]}', {"a": [1, None]}), ({"a": 1}, {"a": 1}), ("", {}), (" {} ", {})],
)
def test_arguments_of_tool_calls_are_objects(arguments: Any, parsed: Any) -> None:
    """OpenAI has them as JSON text; a template would write that out as a string in quotes."""
    message = document("messages", {"messages": [*MESSAGES[:2], calling(arguments)]})["messages"][2]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": parsed}
    assert "content" not in message
    as_text = {**calling(arguments), "tool_calls": json.dumps(calling(arguments)["tool_calls"])}
    assert document("messages", {"messages": json.dumps([as_text])})["messages"] == [message]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("{", "message 1 calls 'f' with arguments that are text but not JSON"), ("[1]", "but list")],
)
def test_arguments_that_are_none(arguments: str, words: str) -> None:
    with pytest.raises(ConversationError, match=words):
        conversation_bytes([calling(arguments)])
    with pytest.raises(ConversationError, match="tool_calls of message 1 are not a list of obj"):
        conversation_bytes([{"role": "assistant", "tool_calls": "f(x)"}])


def test_roles_by_other_names() -> None:
    said = [{"from": "Customer", "value": "a"}, {"from": "function_call", "value": "b"}]
    roles = {"Customer": "user", "function_call": "assistant"}
    expected = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert document("sharegpt", {"conversations": said}, roles=roles)["messages"] == expected
    messages = [{"role": "Customer", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert document("messages", {"messages": messages}, roles=roles)["messages"] == expected
    row = {"prompt": messages[:1], "completion": messages[1:]}
    assert document("prompt-completion", row, roles=roles)["messages"] == expected


@pytest.mark.parametrize("role_format", ["messages", "prompt-completion"])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("asistant", "assistant"),
        ("assistent", "assistant"),
        ("usr", "user"),
        ("sytem", "system"),
        ("tol", "tool"),
        ("User", "user"),
    ],
)
def test_a_misspelt_role_is_refused(role_format: str, name: str, meant: str) -> None:
    messages = [MESSAGES[1], {"role": name, "content": "b"}, MESSAGES[2]]
    row: dict[str, Any] = {"messages": messages}
    if role_format == "prompt-completion":
        row = {"prompt": messages[:2], "completion": messages[2:]}
    with pytest.raises(ConversationError, match=rf"has the role '{name}' -> did you mean {meant}"):
        document(role_format, row)
    # Both fixes of the text: the meaning, or a role that the template has.
    for role in (meant, name):
        read = document(role_format, row, roles={name: role})["messages"]
        assert read[1]["role"] == role


def test_a_misspelt_turn_of_sharegpt_names_the_nearest_role() -> None:
    with pytest.raises(ConversationError, match=r"from 'humen', which.*--role 'humen=human'"):
        document("sharegpt", {"conversations": [{"from": "humen", "value": "x"}]})


@pytest.mark.parametrize("name", ["ipython", "critic", "user_2", "user2", "tool-result", "context"])
def test_roles_of_templates_pass(name: str) -> None:
    messages = [MESSAGES[1], {"role": name, "content": "b"}]
    assert document("messages", {"messages": messages})["messages"] == messages


def test_turns_with_other_keys() -> None:
    talk = [{"speaker": t["from"], "said": t["value"], "train": None} for t in TURNS]
    for given in (talk, json.dumps(talk)):
        row = {"conversations": given, "system": "Be short."}
        conversation = document("sharegpt", row, turn_keys=("speaker", "said"))
        assert conversation == {"messages": MESSAGES}
    messages = [{"author": m["role"], "content": m["content"]} for m in MESSAGES]
    conversation = document("messages", {"messages": messages}, turn_keys=("author", "content"))
    assert conversation == {"messages": MESSAGES}


def test_lists_as_text_of_csv() -> None:
    row = {**ROWS["alpaca"], "history": json.dumps(ROWS["alpaca"]["history"])}
    assert document("alpaca", row) == {"messages": MESSAGES}
    row = {"conversations": json.dumps(TURNS), "system": "Be short."}
    assert document("sharegpt", row) == {"messages": MESSAGES}
    empty: dict[str, Any] = {"images": [], "audio": None, "tools": ""}
    assert document("messages", {"messages": MESSAGES, **empty}) == {"messages": MESSAGES}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"weight": 0.5}, "its weight is 0.5, which only rows with input_ids may have"),
        ({"weight": 0}, "its weight is 0, so nothing of it would be learned"),
        ({"token_weights": [1, 1]}, "only rows with input_ids may have"),
        ({"weight": 1}, None),
        ({"weight": 1.0}, None),
        ({"weight": "light"}, None),
    ],
)
def test_the_weight_of_a_row_is_not_dropped(more: dict[str, Any], why: str | None) -> None:
    for name, row in ROWS.items():
        if why is None:
            assert document(name, {**row, **more}) == {"messages": MESSAGES}
            continue
        with pytest.raises(ConversationError, match=why):
            document(name, {**row, **more})


ASKED = {"question": "q", "response": "a"}
PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        (ASKED, "alpaca --key instruction=question --key output=response"),
        (
            ASKED | {"system_prompt": "s", "id": 1},
            "alpaca --key instruction=question --key output=response --key system=system_prompt",
        ),
        (
            {"instruction": "q", "context": "c", "response": "a", "category": "open"},
            "alpaca --key output=response --key input=context",
        ),
        # Answers that are objects, and turns without a speaker, are no conversation of a format.
        ({"question": "q", "answer": {"text": ["a"]}, "context": "c"}, ""),
        ({"conversation": [{"input": "q", "output": "a"}]}, ""),
        ({"dialogue": ["q", "a"]}, ""),
        (
            {"dialogue": PAIR, "system_prompt": "s"},
            "sharegpt --key conversations=dialogue --key system=system_prompt",
        ),
        (
            {"question": "q", "response_j": "a", "response_k": "b", "score": 1},
            "preference --key chosen=response_j --key rejected=response_k --key prompt=question",
        ),
        (
            {"chosen_response": PAIR, "rejected_response": [*PAIR[:1], PAIR[1] | {"content": "b"}]},
            "preference --key chosen=chosen_response --key rejected=rejected_response",
        ),
        # Text under the key of a conversation is none, and JSON text of one is.
        ({"chat": "USER: a ASSISTANT: b", "system": "s"}, ""),
        ({"chat": json.dumps(PAIR)}, "sharegpt --key conversations=chat"),
        ({"data": PAIR}, "sharegpt --key conversations=data"),
        (
            {
                "input": {"messages": PAIR[:1], "tools": []},
                "preferred_output": PAIR[1:],
                "non_preferred_output": [PAIR[1] | {"content": "b"}],
            },
            "preference --key chosen=preferred_output --key rejected=non_preferred_output "
            "--key prompt=input.messages --key tools=input.tools",
        ),
        (
            {"Instruction": "q", "Input": "i", "Output": "a"},
            "alpaca --key instruction=Instruction --key output=Output --key input=Input",
        ),
        ({"input": "q", "output": "a"}, "alpaca --key instruction=input"),
        ({"inputs": "q", "targets": "a"}, "alpaca --key instruction=inputs --key output=targets"),
        (
            {"problem": "q", "solution": "a"},
            "alpaca --key instruction=problem --key output=solution",
        ),
    ],
)
def test_suggested_options_read_the_row_that_they_are_suggested_for(
    row: dict[str, Any], options: str
) -> None:
    """With all of its texts, and not at all if no options do."""
    assert remedy_for(row) == (f" -> --format {options}" if options else "")
    if not options:
        return
    name, *words = options.split()
    names = dict(word.split("=") for word in words if word != "--key")
    known = FORMATS[name]
    keys = tuple(names.get(key, key) for key in known.keys)
    content, why = document_in(row, keys[:1], Conversations(known, keys))
    assert content is not None, why
    for text in row.values():
        if isinstance(text, str) and len(text) == 1:
            assert text in re.findall(r"\b[a-z]\b", content.decode().replace("\\n", " "))


@pytest.mark.parametrize(
    ("more", "unread"),
    [
        ({"reasoning": "r"}, "reasoning"),
        ({"solution": "s", "Explanation": "e"}, "solution, Explanation"),
        ({"hint": "two words"}, "hint"),
        ({"reasoning": None, "cot": "", "level": "hard", "steps": ["a b"]}, ""),
    ],
)
def test_a_suggestion_names_the_texts_that_its_options_do_not_read(
    more: dict[str, Any], unread: str
) -> None:
    remedy = remedy_for({"question": "q", "answer": "a", **more})
    options = " -> --format alpaca --key instruction=question --key output=answer"
    assert remedy == options + (f" (not read: {unread})" if unread else "")


def test_a_list_that_is_not_of_rows_is_not_taken_out() -> None:
    assert remedy_for({"id": "0", "data": ["q", "a"]}) == ""
    _, why = document_in({"id": "0", "data": ["q", "a"]}, ("text",), None)
    assert why.endswith(
        "name its key: --text-key KEY; or a format and its keys: --format FORMAT --key NAME=KEY"
    )
    chat = Conversations(FORMATS["kto"], FORMATS["kto"].keys)
    assert document_in({"id": 1}, ("prompt",), chat)[1].endswith("name its key: --key prompt=KEY")


@pytest.mark.parametrize(
    ("name", "messages", "why"),
    [
        ("messages", [{"role": "assistant", "content": None}], "message 1 has the content null"),
        ("sharegpt", [{"from": "gpt", "value": None}], "message 1 has the content null"),
        ("messages", [{"role": "assistant"}], "name its key: --key content=KEY"),
        (
            "messages",
            [{"author": "user", "text": "a"}],
            "keys here: author, text -> name its keys: --key role=KEY --key content=KEY",
        ),
        *(
            (
                "messages",
                [{"role": "assistant", "content": "a", name: 0}],
                f"message 1 has {name}: whether",
            )
            for name in ("mask", "masked", "loss_mask", "trainable", "train_on_turn")
        ),
    ],
)
def test_a_message_that_cannot_be_read_has_a_remedy(
    name: str, messages: list[dict[str, Any]], why: str
) -> None:
    with pytest.raises(ConversationError) as caught:
        document(name, {FORMATS[name].keys[0]: messages})
    assert why in str(caught.value)


def test_rows_within_a_list_have_a_command_that_takes_them_out() -> None:
    remedy = " -> a file of the rows under 'data': jq -c '.data[]' FILE > rows.jsonl"
    assert remedy_for({"data": [{"text": "a"}], "version": "1.1"}) == remedy
    _, why = document_in([PAIR[0], PAIR[1]], ("text",), None)
    assert why.endswith(
        "-> an object for each conversation: " + "jq -c '.[] | {messages: .}' FILE > rows.jsonl"
    )


def test_the_context_of_a_question_is_not_left_out() -> None:
    row = {"instruction": "q", "output": "a", "context": "c"}
    with pytest.raises(ConversationError, match="context would not be read -> --key input=context"):
        document("alpaca", row)
    assert document("alpaca", row, ignored=("context",))["messages"][0]["content"] == "q"


def test_two_kinds_of_tools_or_calls_are_refused() -> None:
    """One of both would be lost otherwise. An empty list is none."""
    tool = {"type": "function", "function": {"name": "f"}}
    row = {"messages": PAIR, "tools": [tool], "functions": [{"name": "g"}]}
    with pytest.raises(ConversationError, match=r"tools and functions -> .*--ignore-key functions"):
        document("messages", row)
    for empty in ([], "[]", None, ""):
        for key, name in (("tools", "g"), ("functions", "f")):
            assert f'"name":"{name}"' in json.dumps(
                document("messages", {**row, key: empty}), separators=(",", ":")
            )
    known = FORMATS["messages"]
    content, why = document_in(
        row, ("messages",), Conversations(known, known.keys, ignored=("functions",))
    )
    assert content is not None, why
    call = {"name": "f", "arguments": "{}"}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    with pytest.raises(ConversationError, match="message 1 has tool_calls and function_call"):
        conversation_bytes([{**answer, "function_call": call}])
    conversation_bytes([{**answer, "function_call": None}])
    conversation_bytes([{**answer, "tool_calls": [], "function_call": call}])


def test_other_keys_of_parts_are_kept_for_the_count_of_unread_keys() -> None:
    parts = [
        {"type": "text", "text": "a", "image_url": None},
        {"type": "text", "text": "b", "citations": [1], "cache": {"x": 1}},
    ]
    for role in ("user", "tool"):
        (message,) = json.loads(conversation_bytes([{"role": role, "content": parts}]))["messages"]
        expected = {"content.citations": [1], "content.cache": {"x": 1}}
        assert message == {"role": role, "content": "ab", **expected}
    (message,) = json.loads(conversation_bytes([{"role": "tool", "content": []}]))["messages"]
    assert message["content"] == []
