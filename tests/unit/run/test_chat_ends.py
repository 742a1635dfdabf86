"""A chat model stops where its template ends a turn: with another token than ``eos_token``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from bigtrain.cli import main
from bigtrain.run.preflight import inspect_inputs
from bigtrain.system.text_record import read_record
from tests.support.chats import CHATML, LLAMA3, QWEN3, chat_tokenizer, turns, unmarked
from tests.unit.run.test_text_ids import SIZES, Place, export, of_file

GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim }}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Ends answers only, after a space, and opens turns by letters.
ANSWERS = (
    "{% for m in messages %}{{ '[' + m.role + '] ' + m.content }}"
    "{{ ' <|over|>' if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
TEMPLATES = {
    "chatml": (unmarked(CHATML), "<|im_end|>"),
    "qwen": (unmarked(QWEN3), "<|im_end|>"),
    "llama": (unmarked(LLAMA3), "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "answers": (ANSWERS, "<|over|>"),
}
"""Templates, and the tokens that end a turn; texts of all their tokenizers end in <|endoftext|>."""


class Forced(LogitsProcessor):  # type: ignore[misc]
    """Lets a model write given tokens, after a prompt of a given length."""

    def __init__(self, tokens: Sequence[int], prompt_length: int) -> None:
        self.tokens, self.prompt_length = tokens, prompt_length

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self.tokens[ids.shape[1] - self.prompt_length]] = 0.0
        return forced


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("ends"))


@pytest.mark.parametrize(
    ("name", "base"), [*((name, "new") for name in TEMPLATES), ("chatml", "grown")]
)
def test_transformers_stops_at_the_end_of_a_turn(
    name: str, base: str, place: Place, tmp_path: Path
) -> None:
    template, end = TEMPLATES[name]
    tokenizer = chat_tokenizer(template)
    words = [word for word in ("<start_of_turn>", end) if word in template]
    tokenizer.add_tokens([AddedToken(word, special=True) for word in words])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    turn_id, eos_id = tokenizer.convert_tokens_to_ids([end, "<|endoftext|>"])
    assert tokenizer.eos_token_id == eos_id != turn_id
    rows = [{"messages": turns(f"{n}?", f"{n + 1}.")} for n in range(60)]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shards = place.root / f"shards-{name}-{base}"
    options = {"--input": source, "--tokenizer": tmp_path / "tokenizer", "--output": shards}
    typed = [str(word) for pair in options.items() for word in pair]
    assert main(["tokenize", *typed, "--chat-key", "messages", "--workers", "1"]) == 0
    # A new model, or one without rows of the control tokens.
    model: dict[str, Any] = {"path": str(place.root / "small"), "vocabulary": {}}
    if base == "new":
        config = {"model_type": "llama", "vocab_size": len(tokenizer), **SIZES}
        model = {"config": config}
    run = place.run(model, f"{name}-{base}")
    hf = export(run, inspect_inputs(run), tmp_path / "run")
    stops = {eos_id, turn_id}
    assert of_file(hf / "generation_config.json") == of_file(hf / "config.json") == stops
    assert {*read_record(hf).stop_ids} == stops  # type: ignore[union-attr]
    exported = AutoTokenizer.from_pretrained(hf)
    assert exported.convert_tokens_to_ids(end) == turn_id
    # What transformers' own call writes, without any settings of its caller.
    network: Any = AutoModelForCausalLM.from_pretrained(hf)
    prompt = exported.apply_chat_template(
        turns("1?"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = prompt["input_ids"].shape[1]
    for stop in stops:
        forced = LogitsProcessorList([Forced([5, 6, stop, 5, 6], length)])
        written = network.generate(**prompt, logits_processor=forced, max_new_tokens=5)
        assert written[0, length:].tolist() == [5, 6, stop]
