"""Under templates that TRL ships nothing of a conversation is lost in silence, and answers stop.

The oracle knows nothing of how bigtrain looks for parts: the strings of these conversations are
words that no template writes, so whether a part was rendered is whether its words are in the text
of the tokens.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from bigtrain.data.chat.encoder import ChatEncoder, ChatRules, EncodedChats
from bigtrain.data.documents.conversations import conversation_bytes
from bigtrain.data.tokenizers.tokenizer import Tokenizer, from_huggingface
from tests.support.chats import CHATML, trained_tokenizer, unmarked

TEMPLATES = Path(__file__).parents[3] / "data" / "chat_templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "qfetch",
            "description": "Zarbles the gonk.",
            "parameters": {
                "type": "object",
                "properties": {
                    "qtown": {"type": "string", "description": "Wherever vlim is."},
                    "qunit": {"type": "string", "enum": ["qelsius", "qelvin"]},
                },
                "required": ["qtown"],
            },
        },
    }
]


def calling(content: str, *arguments: dict[str, Any]) -> dict[str, Any]:
    """Return an answer with calls of these arguments."""
    calls = [
        {
            "id": f"call_abc{number}",
            "type": "function",
            "function": {"name": "qfetch", "arguments": json.dumps(given)},
        }
        for number, given in enumerate(arguments, 1)
    ]
    return said("assistant", content, tool_calls=calls)


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def result(content: Any, number: int = 1) -> dict[str, Any]:
    return said("tool", content, name="qfetch", tool_call_id=f"call_abc{number}")


TWO = [said("user", "wem?"), said("assistant", "wam")]
ASKED, ANSWERED = said("user", "wum?"), said("assistant", "wim")
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "turns": ([ASKED, ANSWERED, *TWO], None),
    "system": ([said("system", "Bleed kindly."), ASKED, ANSWERED], None),
    "system in the middle": ([ASKED, ANSWERED, said("system", "Drool."), *TWO], None),
    "parts": (
        [
            said("user", [{"type": "text", "text": "wum "}, {"type": "text", "text": "wom?"}]),
            said("assistant", [{"type": "text", "text": "wim"}]),
        ],
        None,
    ),
    "tools": ([ASKED, ANSWERED], TOOLS),
    "a call": (
        [ASKED, calling("", {"qtown": "Vzix", "qdays": 317}), result("wret"), ANSWERED],
        TOOLS,
    ),
    "two calls and content": (
        [
            ASKED,
            calling("wlook", {"qtown": "Vzix"}, {"qtown": "Vzox"}),
            *(result("wret"), result("wrot", 2), ANSWERED),
        ],
        TOOLS,
    ),
    "reasoning": ([ASKED, said("assistant", "wim", reasoning_content="Whemm.")], None),
    "reasoning of two turns": (
        [
            *(ASKED, said("assistant", "wim", reasoning_content="Whemm.")),
            *(TWO[0], said("assistant", "wam", reasoning_content="Whomm.")),
        ],
        None,
    ),
    "thoughts in content": (
        [
            *(ASKED, said("assistant", "<think>\nWhemm.\n</think>\n\nwim")),
            *(TWO[0], said("assistant", "<think>Whomm.</think>wam")),
        ],
        None,
    ),
    "escapes": (
        [
            said("user", 'wum "quo\\ted"\n\twöm?'),
            calling("", {"qtown": 'Vzüx"\n'}),
            *(result('{"qsky": "wret"}'), said("assistant", "wïm")),
        ],
        TOOLS,
    ),
}


@cache
def tokenizer_of(source: str) -> Tokenizer:
    """A tokenizer with the control tokens that a template writes."""
    wrapped: Any = trained_tokenizer()
    names = sorted(
        set(
            re.findall(
                r"<[|\uff5c][^<>\s'\"{}]{1,40}[|\uff5c]>|<(?:start|end)_of_turn>|\[gMASK\]"
                r"|<end_of_utterance>|<\|?[a-z_]+\|?>(?<=[|]>)|<\|[a-z_]+>",
                source,
            )
        )
    )
    special = [
        AddedToken(name, special=True, normalized=False) for name in [*names, "<bos>", "<eos>"]
    ]
    wrapped.add_tokens(special)
    thoughts = ("<think>", "</think>")
    wrapped.add_tokens([AddedToken(name, special=False, normalized=False) for name in thoughts])
    ends: tuple[str, ...] = ("<|return|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")
    ends = (*ends, "<\uff5cend▁of▁sentence\uff5c>", "<|end|>", "<|END_OF_TURN_TOKEN|>")
    wrapped.eos_token = next((name for name in ends if name in names), "<|endoftext|>")
    if "{{ eos_token }}" in source:
        wrapped.eos_token = "<eos>"
    wrapped.bos_token = "<bos>"
    wrapped.chat_template = source
    return from_huggingface("test", wrapped)


@cache
def encoder_of(source: str, allow_unrendered: bool = False) -> ChatEncoder:
    tokenizer = tokenizer_of(source)
    reference = tokenizer.encoder(True, ends=False)
    rules = ChatRules(tuple(tokenizer.generation_ends().values()), allow_unrendered)
    return ChatEncoder(reference, reference, tokenizer.chat_template(), False, rules=rules)


def encode(source: str, name: str, allow_unrendered: bool = False) -> EncodedChats:
    messages, tools = CONVERSATIONS[name]
    return encoder_of(source, allow_unrendered).encode([conversation_bytes(messages, tools)])


INVENTED = re.compile(
    r"\b(?:w[a-zöï]{1,2}m|wlook|wr[eo]t|q[a-z]+|V[a-zü]+x|Wh[eo]mm|Bleed|Drool|317|[zZ]arbles|vlim)\b"
)


def words_of(value: Any) -> set[str]:
    """The test's own words in a JSON value or a text: no template and no JSON schema has them."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = re.sub(r"\\u([0-9a-f]{4})", lambda match: chr(int(match[1], 16)), text)
    return set(INVENTED.findall(re.sub(r'\\+[nt"\\]', " ", text)))


def lost_parts(messages: list[dict[str, Any]], tools: Any, text: str) -> dict[str, int]:
    """How many parts have a word that is not in `text`, by kind."""
    lost_by_kind = {"content": 0, "tool_calls": 0, "tools": 0, "any_reasoning": 0}

    def look(kind: str, value: Any) -> None:
        lost_by_kind[kind] += not words_of(value) <= words_of(text)

    for message in messages:
        content = message["content"]
        thought, closed, rest = (
            content.partition("</think>") if isinstance(content, str) else ("", "", content)
        )
        look("content", rest if closed else content)
        look("any_reasoning", [thought if closed else "", message.get("reasoning_content", "")])
        for one in message.get("tool_calls", []):
            function = one["function"]
            look("tool_calls", [function["name"], json.loads(function["arguments"])])
    for tool in tools or []:
        look("tools", tool["function"])
    return {kind: count for kind, count in lost_by_kind.items() if count}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_lost_in_silence(name: str) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer = tokenizer_of(source)
    num_encoded = 0
    for title, (messages, tools) in CONVERSATIONS.items():
        allowed, strict = encode(source, title, True), encode(source, title)
        if allowed.problems:
            assert strict.problems, title
            continue
        num_encoded += 1
        lost = lost_parts(messages, tools, tokenizer.decode(allowed.tokens))
        counted = dict(allowed.unrendered)
        counted.pop("message_keys.name", None)  # the name of a tool is in its call as well
        stripped = counted.pop("stripped_reasoning", 0)
        reasoning = counted.pop("reasoning", 0)
        assert lost.pop("any_reasoning", 0) == stripped + reasoning, title
        assert lost == counted, title
        assert bool(strict.problems) == bool(counted or reasoning), title
        if not strict.problems:
            assert np.array_equal(strict.tokens, allowed.tokens), title
        ends_of_answers_are_learned(tokenizer, messages, allowed)
    assert num_encoded >= 4


def ends_of_answers_are_learned(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], chats: EncodedChats
) -> None:
    """Every run of learned tokens ends in control tokens one of which ends generation, and none of
    those before does."""
    ends = {*tokenizer.ids_of(chats.ends)}
    special = {*tokenizer.huggingface.all_special_ids, *tokenizer.huggingface.added_tokens_decoder}
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chats.mask.astype(int), [0]])))
    runs = [chats.tokens[low:high].tolist() for low, high in edges.reshape(-1, 2).tolist()]
    assert 1 <= len(runs) <= sum(message["role"] == "assistant" for message in messages)
    for run in runs:
        behind: list[int] = []  # white space, and all control tokens of the answer's end
        while run and (run[-1] in special or not tokenizer.decode(run[-1:]).strip()):
            behind.append(run.pop())
        assert ends & {*behind}
        assert not ends & {*run}


CLOSED_EARLY = CHATML.replace(
    "+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}"
)
NO_END = unmarked(CHATML).replace("message['content'] + '<|im_end|>'", "message['content']")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (CLOSED_EARLY, r"write {% endgeneration %} after <\|im_end\|>"),
        (NO_END.replace("<|im_start|>", "# "), "write {{ eos_token }}"),
        (CLOSED_EARLY.replace("{{ '<|im_end|>' }}", ""), "block of message 2 before <.im_start.>"),
    ],
)  # fmt: skip
def test_an_answer_without_an_end_is_refused(source: str, words: str) -> None:
    assert source != CHATML
    ((_, why),) = encode(source, "turns").problems[:1]
    assert re.search(words, why), why


def test_an_end_that_is_also_inside_of_answers_is_refused() -> None:
    """As gpt-oss's ``<|end|>``, behind reasoning and behind the answers before the last."""
    source = (
        "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' }}"
        "{% if m.role == 'user' %}{{ m.content + '<|end|>' }}{% else %}{% generation %}"
        "{% if m.thinking %}{{ m.thinking + '<|end|><|start|>assistant<|message|>' }}{% endif %}"
        "{{ m.content + ('<|return|>' if loop.last else '<|end|>') }}"
        "{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif %}"
    )
    encoder = encoder_of(source)
    messages, _ = CONVERSATIONS["turns"]
    ((_, why),) = encoder.encode([conversation_bytes(messages)]).problems
    assert "ends an answer in <|end|>" in why
    assert "--learn last" in why
    chats = encoder.encode([conversation_bytes(messages, last_only=True)])
    assert chats.ends == {"<|return|>"}


def test_short_strings_are_not_found_in_others() -> None:
    """The content "4" is in "24" and in the template's own text."""
    source = CHATML.replace(
        "message['content'] + '<|im_end|>' }}{% end",
        "(message.content if loop.last else 'no 24') + '<|im_end|>' }}{% end",
    )
    messages = [said("user", "24?"), said("assistant", "4"), said("user", "4x"), ANSWERED]
    chats = encoder_of(source).encode([conversation_bytes(messages)])
    assert "does not write the content of message 2" in chats.problems[0][1]


@pytest.mark.parametrize("dropped", ["b", "7", "你", "é", "🎉"])
def test_a_letter_that_is_dropped_inside_of_a_text_is_missed(dropped: str) -> None:
    source = CHATML.replace("message['content']", f"message['content'] | replace('{dropped}', '')")
    assert source != CHATML
    messages = [ASKED, said("assistant", "a b 7 你 é 🎉 c")]
    chats = encoder_of(source, True).encode([conversation_bytes(messages)])
    assert chats.unrendered == {"content": 1}
    escaped = CHATML.replace("message['content']", "message['content'] | tojson(ensure_ascii=true)")
    assert not encoder_of(escaped, True).encode([conversation_bytes(messages)]).unrendered


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ("", False),
        ("| tojson", False),
        ("| e", False),
        ("| trim", False),
        (r"| replace('\n', ' ')", True),
        ("| replace('  ', ' ')", True),
        ("| replace('.', '')", True),
        ("| replace('()', '( )')", True),
        ("| replace('\"', \"'\")", True),
    ],
)
def test_spaces_and_punctuation_inside_a_text_are_part_of_it(change: str, lost: bool) -> None:
    """Escapes of JSON and HTML are not: what is read back is the same."""
    source = CHATML.replace("+ message['content'] +", f"+ (message['content'] {change}) +")
    assert source != CHATML or not change
    text = 'def f():\n    return "a.b" < 1  # é \U0001f600'
    chats = encoder_of(source, True).encode([conversation_bytes([said("user", text), ANSWERED])])
    assert chats.unrendered == ({"content": 1} if lost else {})


@pytest.mark.parametrize("is_read", [True, False])
def test_keys_of_a_message_that_the_template_ignores_are_counted(is_read: bool) -> None:
    """They are said, and refuse nothing."""
    messages = [said("user", "wem?", name="Zorblat", id=""), ANSWERED]
    role = "message['role'] + (' ' + message['name'] if message['name'] else '')"
    source = CHATML.replace("message['role'] + '\n'", f"{role} + '\n'") if is_read else CHATML
    for allowed in (True, False):
        chats = encoder_of(source, allowed).encode([conversation_bytes(messages)])
        assert chats.unrendered == ({} if is_read else {"message_keys.name": 1})


@pytest.mark.parametrize("is_read", [True, False])
def test_keys_of_a_message_whose_values_are_no_text_are_counted_by_key(is_read: bool) -> None:
    """Numbers, booleans and objects, unless the template writes other text because of them."""
    keys = {"redacted": False, "turn": 2, "header": {"a": "b"}, "empty": [], "weight": 0}
    messages = [said("user", "wem?", **keys), {**ANSWERED, "turn": 3, "train": True}]
    role = "message['role'] + ('!' if message['turn'] == 2 else '')"
    source = CHATML.replace("message['role'] + '\n'", f"{role} + '\n'") if is_read else CHATML
    chats = encoder_of(source).encode([conversation_bytes(messages)])
    expected = {"message_keys.redacted": 1, "message_keys.header": 1}
    assert chats.unrendered == (expected if is_read else {**expected, "message_keys.turn": 2})


RESULT_CONTENTS: list[Any] = [{"success": True}, {"value": 317}, {}, [317], [], 317, 0, False]


@pytest.mark.parametrize("content", RESULT_CONTENTS, ids=json.dumps)
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5"])
def test_a_result_without_text_is_written_or_refused(name: str, content: Any) -> None:
    """Qwen 3 writes no result that is not text, Qwen 2.5 all. The number is in the call, too."""
    source = (TEMPLATES / f"{name}.jinja").read_text()
    call = calling("", {"qtown": "Vzix", "qdays": 317, "qnights": 0})
    document = conversation_bytes([ASKED, call, result(content), ANSWERED], TOOLS)
    chats = encoder_of(source, True).encode([document])
    is_lost = name == "qwen3"
    assert chats.unrendered == {"message_keys.name": 1, **({"content": 1} if is_lost else {})}
    problems = encoder_of(source).encode([document]).problems
    assert ("does not write the content of message 3" in str(problems)) == is_lost


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_in_a_message_that_the_template_ignores_are_refused(tools: Any) -> None:
    messages = [said("system", "Bleed kindly.", tools=tools), ASKED, ANSWERED]
    chats = encoder_of(CHATML).encode([conversation_bytes(messages)])
    assert "does not write the key tools of message 1 (tools are a key of the row" in str(
        chats.problems
    )
    allowed = encoder_of(CHATML, True).encode([conversation_bytes(messages)])
    assert allowed.unrendered == {"tools": 1}


def test_an_answer_that_is_dropped_is_not_learned() -> None:
    """Llama 3's template writes nothing of a call: its end alone would be learned."""
    source = (TEMPLATES / "llama3.jinja").read_text()
    chats = encode(source, "a call", True)
    learned = tokenizer_of(source).decode(chats.tokens[chats.mask])
    assert learned == "wim<|eot_id|>"
    assert chats.unrendered == {"tool_calls": 1, "tools": 1, "message_keys.name": 1}


@pytest.mark.parametrize("title", ["reasoning of two turns", "thoughts in content"])
def test_reasoning_of_earlier_turns_is_dropped_by_design(title: str) -> None:
    """It is counted, and no error: the last turn's is written."""
    chats = encode((TEMPLATES / "qwen3.jinja").read_text(), title)
    assert not chats.problems
    assert chats.unrendered == {"stripped_reasoning": 1}


def test_reasoning_that_is_never_written_is_an_error() -> None:
    """DeepSeek's template for R1 removes thoughts from every answer, the last one too."""
    source = (TEMPLATES / "deepseek_r1_distill.jinja").read_text()
    ((_, why),) = encode(source, "thoughts in content").problems
    assert "does not write the reasoning in the content of message 2" in why
    assert encode(source, "thoughts in content", True).unrendered == {"reasoning": 2}


@pytest.mark.parametrize(
    ("written", "lost"),
    [
        ("{{ call.name }}{% for v in call.arguments.values() %} {{ v }}{% endfor %}", True),
        ("{{ call.name }}{% for k in call.arguments %} {{ k }}{% endfor %}", True),
        ("{{ call.arguments | tojson }}", True),
        ("{{ call.name }}{{ call.arguments }}", False),
        ("{{ call.name }}{{ call.arguments | tojson(ensure_ascii=true) | tojson }}", False),
        (
            "{{ call.name }}{% for k, v in call.arguments | dictsort %} {{ k }}={{ v }}"
            "{% endfor %}",
            False,
        ),
    ],
)
def test_names_keys_and_values_of_a_call(written: str, lost: bool) -> None:
    source = CHATML.replace(
        "message['content'] +",
        "(message.content or '') }}{% for one in message.tool_calls or [] %}"
        f"{{% set call = one.function %}}{written}{{% endfor %}}{{{{ ''+",
    )
    arguments = {"qtown": 'Vzü"x\n', "a": 7, "qa": ["x", {"qb": "7"}]}
    chats = encoder_of(source, True).encode([conversation_bytes([ASKED, calling("", arguments)])])
    assert chats.unrendered == ({"tool_calls": 1} if lost else {})
    assert not chats.problems


@pytest.mark.parametrize("title", ["two calls and content", "reasoning of two turns"])
def test_ends_are_those_of_trl_s_training_template(title: str) -> None:
    """TRL changes GLM-4.5's template so that the next role's token is written and learned."""
    ours = encode((TEMPLATES / "glm4moe.jinja").read_text(), title)
    theirs = encode((TEMPLATES / "glm4moe_training.jinja").read_text(), title)
    assert not ours.problems
    assert not theirs.problems
    assert np.array_equal(ours.tokens, theirs.tokens)
    assert np.array_equal(ours.mask, theirs.mask)
    assert ours.ends == theirs.ends
