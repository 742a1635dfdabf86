"""Prompts that Axolotl writes around rows of an instruction (prompters.py, `AlpacaPrompter` and
`UnpromptedPrompter`, of July 2026, commit 067b021c8b87a9e5e380b9173c704cf7340e30f5). Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bigtrain.data.documents.row_format import Completion, Values
from bigtrain.data.documents.turns import Roles
from bigtrain.data.tokenizers.chat_template import ConversationError

ALPACA_KEYS = ("instruction", "input", "output")
_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request."
)


@dataclass(frozen=True)
class AlpacaPrompt:
    """Prompt of an instruction. with_input, without_input: its text, with places for `instruction`
    and `input`."""

    with_input: str
    without_input: str

    def completion_of(self, values: Values, roles: Roles) -> Completion:
        """Return the prompt and the answer of a row, the values of `ALPACA_KEYS`. Raise
        ConversationError for a value that is not text."""
        texts = ["" if value is None else value for value in values]
        for name, text in zip(ALPACA_KEYS, texts, strict=True):
            if not isinstance(text, str):
                raise ConversationError(f"its {name} is not text but {type(text).__name__}")
        instruction, input_text, output = texts
        if not output:
            raise ConversationError("its output is empty")
        form = self.with_input if input_text else self.without_input
        return Completion(form.format(instruction=instruction, input=input_text), output)


_INSTRUCT = AlpacaPrompt(
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "### Instruction:\n{instruction}\n\n### Response:\n",
)
_CHAT = AlpacaPrompt(
    "USER: {instruction}\n{input}\nASSISTANT:",
    "USER: {instruction}\nASSISTANT:",
)
_CHATML_ANSWER = "<|im_end|>\n<|im_start|>assistant\n"
_CHATML = AlpacaPrompt(
    f"<|im_start|>user\n{{instruction}}\n{{input}}{_CHATML_ANSWER}",
    f"<|im_start|>user\n{{instruction}}{_CHATML_ANSWER}",
)
# No line breaks around an input, as there.
_PHI = AlpacaPrompt(
    "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
    "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
)
PROMPTS: Mapping[str, Callable[[Values, Roles], Completion]] = {
    "alpaca-instruct": AlpacaPrompt(
        f"{_WITH_INPUT}\n\n{_INSTRUCT.with_input}",
        f"{_WITHOUT_INPUT}\n\n{_INSTRUCT.without_input}",
    ).completion_of,
    "alpaca-chat": AlpacaPrompt(
        f"SYSTEM: {_WITH_INPUT}\n{_CHAT.with_input}",
        f"SYSTEM: {_WITHOUT_INPUT}\n{_CHAT.without_input}",
    ).completion_of,
    "alpaca-chatml": AlpacaPrompt(
        f"<|im_start|>system\n{_WITH_INPUT}<|im_end|>\n{_CHATML.with_input}",
        f"<|im_start|>system\n{_WITHOUT_INPUT}<|im_end|>\n{_CHATML.without_input}",
    ).completion_of,
    "alpaca-phi": AlpacaPrompt(
        f"<|system|>\n{_WITH_INPUT}<|end|>\n{_PHI.with_input}",
        f"<|system|>\n{_WITHOUT_INPUT}<|end|>\n{_PHI.without_input}",
    ).completion_of,
    "alpaca-instruct-bare": _INSTRUCT.completion_of,
    "alpaca-chat-bare": _CHAT.completion_of,
}
"""Prompts by ``--format``; bare: without the sentence about the task."""
