"""The chat template of the page on conversations."""

from __future__ import annotations

import re

from bigtrain.data.chat.encoder import ChatEncoder, ChatRules
from bigtrain.data.documents.conversations import conversation_bytes
from bigtrain.data.tokenizers.tokenizer import from_huggingface
from tests.support.chats import chat_tokenizer
from tests.support.pages import page_text


def test_the_template_with_tools_and_reasoning() -> None:
    """Nothing of a conversation is dropped, and every answer is learned through its end."""
    page = page_text("docs/howto/chat.md")
    _, source = re.findall(r"^```jinja\n(.*?)^```", page, flags=re.M | re.S)
    wrapped = chat_tokenizer(source.removesuffix("\n"))
    wrapped.eos_token = "<|endoftext|>"
    tokenizer = from_huggingface("of the page", wrapped)
    reference = tokenizer.encoder(True, ends=False)
    rules = ChatRules(tuple(tokenizer.generation_ends().values()))
    encoder = ChatEncoder(reference, reference, tokenizer.chat_template(), False, rules=rules)
    call = {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}
    tool = {"name": "get_weather", "description": "The weather.", "parameters": {}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I have to look.",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": {"sky": "grey"}},
        {"role": "assistant", "content": "It rains.", "reasoning_content": "Grey."},
    ]
    tools = [{"type": "function", "function": tool}]
    chats = encoder.encode([conversation_bytes(messages, tools)])
    assert not chats.problems
    assert not chats.unrendered
    assert chats.ends == {"<|im_end|>"}
    text = tokenizer.decode(chats.tokens)
    assert text.count("Be brief.") == text.count('{"sky": "grey"}') == 1
    assert tokenizer.decode(chats.tokens[chats.mask]) == (
        '<think>\nI have to look.\n</think>\n\n<tool_call>{"name": "get_weather", "arguments": '
        '{"city": "Paris", "days": 3}}</tool_call><|im_end|>'
        "<think>\nGrey.\n</think>\nIt rains.<|im_end|>"
    )
    plain = encoder.encode([conversation_bytes([messages[0], *messages[1:2], messages[4]])])
    assert tokenizer.decode(plain.tokens).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
