"""Sampling from a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from bigtrain.errors import ModelError, one_line
from bigtrain.models.layers.adapters import quiet_bitsandbytes
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.models.text_ids import stop_ids
from bigtrain.models.transformers_patches import without_progress
from bigtrain.models.weights.weight_paths import refuse_pickles
from bigtrain.system.storage.local_path import local_path
from bigtrain.system.text_record import TextRecord, read_record


@dataclass(frozen=True)
class Sampling:
    """Choice of generated tokens. `temperature` 0 is greedy."""

    temperature: float
    top_p: float
    seed: int

    def options(self) -> dict[str, Any]:
        """Return options of transformers' `generate`."""
        if self.temperature <= 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p}


@torch.no_grad()
def generate(
    model: str, prompt: str, *, max_new_tokens: int, sampling: Sampling, tokenizer: Any = None
) -> str:
    """Return `prompt` and its continuation.

    The prompt begins like the model's training texts, by the record of the export, or, without a
    record, as the tokenizer begins a text. `tokenizer`: transformers' tokenizer; loaded if it is
    None. Raises ModelError for a model or tokenizer that cannot be loaded, or an empty prompt.
    """
    tokenizer = tokenizer or load_part(AutoTokenizer, model)
    ids = prompt_ids(tokenizer, prompt, read_record(Path(local_path(model))))
    if not ids:
        raise ModelError("--prompt: is empty; give at least one token to continue")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = load_network(model).to(device)
    inputs = torch.tensor([ids], device=device)
    torch.manual_seed(sampling.seed)
    output = network.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_new_tokens,
        eos_token_id=_ends(network, tokenizer, model),
        pad_token_id=tokenizer.eos_token_id,
        **sampling.options(),
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def prompt_ids(tokenizer: Any, prompt: str, record: TextRecord | None) -> list[int]:
    """Return the beginning tokens of texts and the tokens of `prompt`; empty for an empty
    prompt."""
    ids = list(tokenizer(prompt, add_special_tokens=False).input_ids)
    if not ids:
        return []
    if record is None:
        with_special = list(tokenizer(prompt).input_ids)
        begin = next(
            (n for n in range(len(with_special)) if with_special[n : n + len(ids)] == ids), 0
        )
        record = TextRecord(tuple(with_special[:begin]), -1, ())
    return record.begin(ids)


def _ends(network: Any, tokenizer: Any, model: str) -> list[int] | None:
    """Return the tokens at which generation from the directory or hub name `model` stops, or None.
    With adapters, a record names these tokens; `network` has the base's settings."""
    record = read_record(Path(local_path(model)))
    return stop_ids(record, tokenizer, network.generation_config.eos_token_id) or None


class Conversation:
    """A conversation with a model that streams its answers."""

    def __init__(
        self, model: str, *, max_new_tokens: int, sampling: Sampling, tokenizer: Any = None
    ) -> None:
        """Load `model` (directory or hub name). `tokenizer`: as for `generate`. Raises ModelError
        if they cannot be loaded, or the tokenizer has no chat template."""
        self._tokenizer = tokenizer or load_part(AutoTokenizer, model)
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"--model = {model!r}: its tokenizer has no chat template -> --prompt without "
                "--chat, or tokenize with --chat-template"
            )
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._network = load_network(model).to(self._device)
        self._max_new_tokens, self._sampling = max_new_tokens, sampling
        self._endings = _ends(self._network, self._tokenizer, model)
        torch.manual_seed(sampling.seed)

    @torch.no_grad()
    def answer(
        self, messages: list[dict[str, Any]], write: Callable[[str], object] = lambda text: None
    ) -> str:
        """Return the answer to `messages`; `write` gets its text as it is generated. Raises
        ModelError if the chat template refuses the messages."""
        try:
            inputs = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            ).to(self._device)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ModelError(f"the chat template refuses the messages: {error}") from error
        output = self._network.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=self._max_new_tokens,
            eos_token_id=self._endings,
            pad_token_id=self._tokenizer.eos_token_id,
            streamer=_Written(self._tokenizer, write),
            **self._sampling.options(),
        )
        new = output[0, inputs.input_ids.shape[1] :]
        return str(self._tokenizer.decode(new, skip_special_tokens=True))


class _Written(TextStreamer):  # type: ignore[misc]
    """Streams text to a function instead of standard output."""

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def load_network(model: str) -> Any:
    """Return the causal LM of the directory or hub name `model`, with its adapters, in the dtype of
    its files. Raises ModelError if it cannot be loaded."""
    try:
        refuse_pickles(local_path(model))
    except ValueError as error:
        raise ModelError(f"--model = {model!r}: {error}") from error
    network = load_part(AutoModelForCausalLM, model, dtype="auto", use_safetensors=True)
    fit_experts(network)  # grouped products do not take every width
    return network


def load_part(factory: Any, model: str, **options: Any) -> Any:
    """Return what transformers' `factory` loads of the directory or hub name `model`. Raises
    ModelError with the reason if it cannot."""
    try:
        # Adapters: transformers loads them by peft.
        with without_progress(), quiet_bitsandbytes():
            return factory.from_pretrained(local_path(model), trust_remote_code=False, **options)
    except (OSError, ValueError, SafetensorError) as error:
        directory = Path(model)
        if not directory.is_dir():
            reason = (
                "neither a directory here nor a model that could be reached on the Hugging Face hub"
            )
            if model.startswith((".", "/", "~")) or model.count("/") > 1:
                reason = "no such directory"
        elif (directory / "hf" / "config.json").is_file():
            reason = f"it is a run, whose model is {directory / 'hf'}"
        elif (directory / "checkpoints").is_dir():
            reason = (
                "it is a run that has not been exported -> bigtrain export --run "
                f"{directory} --output DIR"
            )
        elif (directory / "config.json").is_file():
            reason = one_line(error, None)
        else:
            reason = "it has no config.json, so it is not a Hugging Face directory"
        fix = "" if " -> " in reason else " -> an export's directory (RUN/hf), or a Hub name"
        raise ModelError(f"--model = {model!r}: cannot be loaded: {reason}{fix}") from error
