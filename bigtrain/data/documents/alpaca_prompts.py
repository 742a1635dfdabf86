"""Prompts that Axolotl writes around rows of an instruction (prompters.py, `AlpacaPrompter` and
`UnpromptedPrompter`; prompt_strategies/alpaca_w_system.py; of July 2026, commit
067b021c8b87a9e5e380b9173c704cf7340e30f5). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bigtrain.data.documents.row_format import Completion, Values
from bigtrain.data.documents.turns import Roles
from bigtrain.data.tokenizers.chat_template import ConversationError

ALPACA_KEYS = ("instruction", "input", "output")
_ORCA_KEYS = ("question", "input", "response", "system_prompt")
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
    """Prompt of an instruction. with_input, without_input: format string of `instruction` and
    `input`. keys: of a row, for instruction, input, output and, if a row may have it, the system
    prompt. system: format string of `system`, before the prompt of a row with a system prompt."""

    with_input: str
    without_input: str
    keys: tuple[str, ...] = ALPACA_KEYS
    system: str = ""

    def completion_of(self, values: Values, roles: Roles) -> Completion:
        """Return the prompt and the answer of a row, the values of `keys`. Raise ConversationError
        for a value that is not text."""
        texts = ["" if value is None else value for value in values]
        for name, text in zip(self.keys, texts, strict=True):
            if not isinstance(text, str):
                raise ConversationError(f"its {name} is not text but {type(text).__name__}")
        instruction, input_text, output, *system = texts
        if not output:
            raise ConversationError(f"its {self.keys[2]} is empty")
        prompt_form = self.with_input if input_text else self.without_input
        prompt = prompt_form.format(instruction=instruction, input=input_text)
        if system and system[0]:
            prompt = self.system.format(system=system[0]) + prompt
        return Completion(prompt, output)


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
# No line breaks around an input, as in Axolotl.
_PHI = AlpacaPrompt(
    "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
    "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
)
_SYSTEM_KEYS = (*ALPACA_KEYS, "system")
_CHATML_SYSTEM = "<|im_start|>system\n{system}<|im_end|>\n"
PROMPTS: Mapping[str, AlpacaPrompt] = {
    "alpaca-instruct": AlpacaPrompt(
        f"{_WITH_INPUT}\n\n{_INSTRUCT.with_input}",
        f"{_WITHOUT_INPUT}\n\n{_INSTRUCT.without_input}",
    ),
    "alpaca-chat": AlpacaPrompt(
        f"SYSTEM: {_WITH_INPUT}\n{_CHAT.with_input}",
        f"SYSTEM: {_WITHOUT_INPUT}\n{_CHAT.without_input}",
    ),
    "alpaca-chatml": AlpacaPrompt(
        f"<|im_start|>system\n{_WITH_INPUT}<|im_end|>\n{_CHATML.with_input}",
        f"<|im_start|>system\n{_WITHOUT_INPUT}<|im_end|>\n{_CHATML.without_input}",
    ),
    "alpaca-phi": AlpacaPrompt(
        f"<|system|>\n{_WITH_INPUT}<|end|>\n{_PHI.with_input}",
        f"<|system|>\n{_WITHOUT_INPUT}<|end|>\n{_PHI.without_input}",
    ),
    "alpaca-instruct-bare": _INSTRUCT,
    "alpaca-chat-bare": _CHAT,
    "alpaca-instruct-system": replace(_INSTRUCT, keys=_SYSTEM_KEYS, system="{system}\n\n"),
    "alpaca-chat-system": replace(_CHAT, keys=_SYSTEM_KEYS, system="SYSTEM: {system}\n"),
    "open-orca": AlpacaPrompt(
        "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
        "### Human:\n{instruction}\n### Assistant:\n",
        _ORCA_KEYS,
        "### System:\n{system}\n",
    ),
    "open-orca-chatml": replace(_CHATML, keys=_ORCA_KEYS, system=_CHATML_SYSTEM),
}
"""Prompts by ``--format``; bare: without the sentence about the task; system: with the system
prompt of the row instead of it."""
