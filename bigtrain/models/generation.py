"""Sampling from a Hugging Face directory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import CONFIG_NAME, find_adapter_config_file

from bigtrain.errors import ModelError, one_line
from bigtrain.models.configuration import max_positions
from bigtrain.models.layers.adapters import quiet_bitsandbytes
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.models.text_ids import stop_ids
from bigtrain.models.transformers_patches import only_errors, without_progress
from bigtrain.models.weights.weight_paths import refuse_pickles
from bigtrain.system.storage.local_path import local_path
from bigtrain.system.text_record import TextRecord, read_record

_SHOWN = 3
_LOAD_ERRORS = (OSError, ValueError, RuntimeError, SafetensorError)


@dataclass(frozen=True)
class Sampling:
    """Choice of generated tokens. `temperature` 0 is greedy."""

    temperature: float
    top_p: float
    seed: int

    def options(self) -> dict[str, Any]:
        """Return options of transformers' `generate`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p}


@torch.no_grad()
def generate(
    model: str, prompt: str, *, max_new_tokens: int, sampling: Sampling, tokenizer: Any = None
) -> str:
    """Return `prompt` and its continuation.

    The prompt begins like the model's training texts, by the record of the export, or, without a
    record, as the tokenizer begins a text. `tokenizer`: transformers' tokenizer; loaded if it is
    None. Raises ModelError for a model or tokenizer that cannot be loaded, for an empty prompt, and
    for a prompt that is longer than the model's positions.
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
        max_new_tokens=_fitting_tokens(network, len(ids), max_new_tokens),
        eos_token_id=_stop_ids(network, tokenizer, model),
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
        # The beginning is what the tokenizer puts before the tokens of the prompt; `begin` needs
        # no other values of the record.
        ids_with_special = list(tokenizer(prompt).input_ids)
        starts = range(len(ids_with_special))
        prompt_starts = [n for n in starts if ids_with_special[n : n + len(ids)] == ids]
        beginning_ids = ids_with_special[: prompt_starts[0]] if prompt_starts else []
        record = TextRecord(tuple(beginning_ids), -1, ())
    return record.begin(ids)


def _stop_ids(network: Any, tokenizer: Any, model: str) -> list[int] | None:
    """Return the token ids at which generation from the directory or hub name `model` stops; None
    if there are none. An export's record names the ids, which for adapters are not among the
    settings of `network`, the base's."""
    record = read_record(Path(local_path(model)))
    return stop_ids(record, tokenizer, network.generation_config.eos_token_id) or None


def _fitting_tokens(network: Any, num_prompt: int, max_new_tokens: int) -> int:
    """Return `max_new_tokens`, or if the model has too few positions, the number of positions after
    a prompt of `num_prompt` tokens, with a line on stderr. Raises ModelError for a prompt that
    leaves no positions."""
    num_positions = max_positions(network.config)
    if num_positions is None or num_prompt + max_new_tokens <= num_positions:
        return max_new_tokens
    num_left = num_positions - num_prompt
    if num_left < 1:
        raise ModelError(
            f"--prompt: has {num_prompt} tokens, and the model {num_positions} positions -> "
            f"at most {num_positions - 1} tokens, the messages of a conversation included"
        )
    print(
        f"note: at most {num_left} new tokens instead of {max_new_tokens}: the model has "
        f"{num_positions} positions, and the prompt {num_prompt} tokens",
        file=sys.stderr,
        flush=True,
    )
    return num_left


class Conversation:
    """A conversation with a model that streams its answers."""

    def __init__(
        self, model: str, *, max_new_tokens: int, sampling: Sampling, tokenizer: Any = None
    ) -> None:
        """Load `model` (directory or hub name). `tokenizer`: as for `generate`. Raises ModelError
        if model or tokenizer cannot be loaded, or the tokenizer has no chat template."""
        self._tokenizer = tokenizer or load_part(AutoTokenizer, model)
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"--model = {model!r}: its tokenizer has no chat template -> --prompt without "
                "--chat, or tokenize with --chat-template"
            )
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._network = load_network(model).to(self._device)
        self._max_new_tokens, self._sampling = max_new_tokens, sampling
        self._stop_ids = _stop_ids(self._network, self._tokenizer, model)
        torch.manual_seed(sampling.seed)

    @torch.no_grad()
    def answer(
        self, messages: list[dict[str, Any]], write: Callable[[str], object] = lambda text: None
    ) -> str:
        """Return the answer to `messages`; `write` gets the answer's text piece by piece during
        generation. Raises ModelError if the chat template refuses the messages, or the messages
        fill the model's positions."""
        try:
            inputs = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            ).to(self._device)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ModelError(f"the chat template refuses the messages: {error}") from error
        num_prompt = inputs.input_ids.shape[1]
        output = self._network.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=_fitting_tokens(self._network, num_prompt, self._max_new_tokens),
            eos_token_id=self._stop_ids,
            pad_token_id=self._tokenizer.eos_token_id,
            streamer=_StreamToFunction(self._tokenizer, write),
            **self._sampling.options(),
        )
        return str(self._tokenizer.decode(output[0, num_prompt:], skip_special_tokens=True))


class _StreamToFunction(TextStreamer):  # type: ignore[misc]
    """Streams text to a function instead of standard output."""

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def load_network(model: str) -> Any:
    """Return the causal LM of the directory or hub name `model`, with its adapters, in the dtype of
    its files. Raises ModelError if it cannot be loaded, and for files without all its weights."""
    directory = local_path(model)
    # Adapters are loaded into their base, whose own weights must be complete.
    adapter_config = find_adapter_config_file(directory)
    if adapter_config is not None and not Path(directory, CONFIG_NAME).is_file():
        base = json.loads(Path(adapter_config).read_text(encoding="utf-8"))
        network = _load_complete(base["base_model_name_or_path"])
        try:
            with without_progress(), quiet_bitsandbytes(), only_errors("transformers"):
                info = network.load_adapter(directory).to_dict()
        except _LOAD_ERRORS as error:
            raise _load_error(model, error) from error
        _refuse_incomplete(model, info)
    else:
        network = _load_complete(model)
    fit_experts(network)  # grouped products do not take every width
    return network


def _load_complete(model: str) -> Any:
    """Return the causal LM of a directory or hub name with a config.json. Raises ModelError as
    `load_network`."""
    try:
        refuse_pickles(local_path(model))
    except ValueError as error:
        raise ModelError(f"--model = {model!r}: {error}") from error
    # transformers initializes missing parameters randomly, and only prints a table of their names.
    with only_errors("transformers"):
        network, info = load_part(
            AutoModelForCausalLM,
            model,
            dtype="auto",
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _refuse_incomplete(model, info)
    return network


def _refuse_incomplete(model: str, info: Mapping[str, Any]) -> None:
    """Raise ModelError if transformers' loading `info` lists missing tensors, or tensors of another
    shape; print a line on unused tensors of the files."""
    problems = [
        f"{name} has shape {list(stored_shape)} there, and {list(model_shape)} by its config.json"
        for name, stored_shape, model_shape in sorted(info["mismatched_keys"])
    ]
    problems += [f"no tensor there is the model's {name}" for name in sorted(info["missing_keys"])]
    if problems:
        problem_text = "; ".join(problems[:_SHOWN])
        if len(problems) > _SHOWN:
            problem_text += f"; and {len(problems) - _SHOWN} more"
        raise ModelError(
            f"--model = {model!r}: its weights are not those of its config.json: {problem_text} "
            "-> the config.json that belongs to the weights, or complete weights"
        )
    if unused := sorted(info["unexpected_keys"]):
        text = f"note: {model}: {len(unused)} tensors of its files are not used, {unused[0]} first"
        print(text, file=sys.stderr, flush=True)


def load_part(factory: Any, model: str, **options: Any) -> Any:
    """Return the model or tokenizer that transformers' `factory` loads from the directory or hub
    name `model`. Raises ModelError with the reason if the factory fails."""
    try:
        with without_progress(), quiet_bitsandbytes():
            return factory.from_pretrained(local_path(model), trust_remote_code=False, **options)
    except _LOAD_ERRORS as error:
        raise _load_error(model, error) from error


def _load_error(model: str, error: Exception) -> ModelError:
    """Return the ModelError for the directory or hub name `model`, for which transformers or peft
    raised `error`."""
    directory = Path(model)
    if not directory.is_dir():
        reason = (
            "neither a directory here nor a model that could be reached on the Hugging Face hub"
        )
        # A name on the hub is "model" or "owner/model".
        if model.startswith((".", "/", "~")) or model.count("/") > 1:
            reason = "no such directory"
    elif (directory / "hf" / "config.json").is_file():
        reason = f"it is a run, whose model is {directory / 'hf'}"
    elif (directory / "checkpoints").is_dir():
        reason = (
            "it is a run that has not been exported -> bigtrain export --run "
            f"{directory} --output DIR"
        )
    elif (directory / "config.json").is_file() or (directory / "adapter_config.json").is_file():
        reason = one_line(error, None)
    else:
        reason = "it has no config.json, so it is not a Hugging Face directory"
    has_remedy = " -> " in reason
    remedy = "" if has_remedy else " -> an export's directory (RUN/hf), or a Hub name"
    return ModelError(f"--model = {model!r}: cannot be loaded: {reason}{remedy}")
