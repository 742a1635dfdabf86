"""Numbers and keys of JSON survive exactly, or are refused."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from bigtrain.data.documents.chat_formats import FORMATS, Conversations, document_in
from bigtrain.data.documents.exact_json import dumps, joined_documents, loads, read_document

EXACT = [
    '{"a": 12345678901234567890123}',
    '{"a": -9223372036854775809, "b": 18446744073709551616}',
    '{"a": [18446744073709551615, 0.1, 1e22, 5e-324, 0.30000000000000004]}',
    '{"a" : "x\\": 1", "b":{"a":null}}',
    '{"a": "\\u0022:", "b": 1}',
]
REFUSED = ["0.12345678901234567890", "9007199254740993.0", "1e400", "NaN", "-Infinity"]


@pytest.mark.parametrize("text", EXACT)
def test_numbers_survive(text: str) -> None:
    tree = loads(text)
    assert tree == json.loads(text) == loads(text.encode())
    content = dumps(tree)
    assert read_document(content) == tree
    assert repr(read_document(content)) == repr(tree)
    both = joined_documents(chosen=content, rejected=dumps(1))
    assert read_document(both) == {"chosen": tree, "rejected": 1}


@pytest.mark.parametrize("number", REFUSED)
def test_a_number_that_a_float_does_not_hold_is_never_written(number: str) -> None:
    tree = loads(f'{{"n": {number}, "m": 1}}')
    assert tree["m"] == 1
    with pytest.raises(TypeError, match=f"the number {number} would be changed"):
        dumps(tree)


@pytest.mark.parametrize(
    "text", ['{"a":1,"a":2}', '[{"b":{"a":1, "a" : 1}}]', '{"\\u0061":1,"a":2}']
)
def test_equal_keys_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the key 'a' is there twice in one object"):
        loads(text)


def test_deep_and_broken_content() -> None:
    deep = "[" * 300 + "]" * 300
    assert loads(deep) == json.loads(deep) == read_document(dumps(json.loads(deep)))
    for wrong in ("[" * 100_000, b'{"a": "\xff"}', "{"):
        with pytest.raises(ValueError, match=r"."):
            loads(wrong)


def calling(arguments: str) -> bytes:
    call = f'{{"type": "function", "function": {{"name": "f", "arguments": {arguments}}}}}'
    return (
        '{"messages": [{"role": "user", "content": "q"}, '
        f'{{"role": "assistant", "content": "", "tool_calls": [{call}]}}]}}'
    ).encode()


def read(line: bytes) -> tuple[Any, str]:
    known = FORMATS["messages"]
    content, why = document_in(loads(line), known.keys[:1], Conversations(known, known.keys))
    return (None if content is None else read_document(content)), why


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("number", ["12345678901234567890123", "1.1"])
def test_arguments_of_calls_are_exact(number: str, as_text: bool) -> None:
    arguments = f'{{"id": {number}}}'
    tree, why = read(calling(json.dumps(arguments) if as_text else arguments))
    assert not why
    call = tree["messages"][1]["tool_calls"][0]["function"]
    assert json.dumps(call["arguments"]) == arguments


@pytest.mark.parametrize("number", REFUSED)
def test_arguments_of_calls_that_would_change_are_refused(number: str) -> None:
    tree, why = read(calling(f'{{"id": {number}}}'))
    assert tree is None
    assert f"the number {number} would be changed" in why
    assert orjson.loads(calling('{"id": 1}'))["messages"]
