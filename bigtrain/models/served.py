"""Comparison of a Hugging Face directory with the server that serves it: log-probabilities of the
same tokens, from the server by OpenAI's completions protocol and from transformers.

Weights that a server never received, another base, a second beginning-of-text token and another
tokenization of prompts change log-probabilities, while generated texts may still look alike.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from bigtrain.errors import ModelError
from bigtrain.models.generation import load_network, load_part, prompt_ids
from bigtrain.system.storage.local_path import local_path
from bigtrain.system.text_record import read_record

_TIMEOUT_SECONDS = 600.0
_ALLOWED_ROUNDINGS = 4.0
"""Difference that a server may have, in units of the export's own rounding to bfloat16: its kernels
add in another order, and its caches may be rounded once more."""
_LEAST_LIMIT_NATS = 0.02
"""Smallest limit, for exports that rounding hardly changes."""
_REQUESTS: tuple[Mapping[str, Any], ...] = (
    {"echo": True, "return_tokens_as_token_ids": True},
    {"echo": True},
    {"return_tokens_as_token_ids": True},
    {},
)
"""Further fields of a request; the first set that a server accepts is used. ``echo``: the answer
contains the prompt and its log-probabilities (vLLM, SGLang). ``return_tokens_as_token_ids``: ids
instead of texts of tokens (vLLM)."""


@dataclass(frozen=True)
class ComparedToken:
    """Token with its log-probabilities by the server (`served`) and by the export (`exported`), in
    nats. position: in the prompt followed by the continuation."""

    position: int
    text: str
    served: float
    exported: float

    @property
    def difference(self) -> float:
        """Absolute difference, in nats."""
        return abs(self.served - self.exported)


@dataclass(frozen=True)
class ServerComparison:
    """Comparison of a server with an export. num_prompt: compared tokens of the prompt. rounding:
    largest change of a log-probability when the export computes in bfloat16. limit: largest
    difference that a server of the same model may have. Both in nats."""

    served_model: str
    tokens: tuple[ComparedToken, ...]
    num_prompt: int
    rounding: float
    limit: float

    @property
    def largest(self) -> ComparedToken:
        """Token with the largest difference."""
        return max(self.tokens, key=lambda token: token.difference)

    @property
    def mean_difference(self) -> float:
        """Mean absolute difference, in nats."""
        return sum(token.difference for token in self.tokens) / len(self.tokens)

    @property
    def is_same(self) -> bool:
        """Whether no difference is above the limit."""
        return self.largest.difference <= self.limit

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        token, num_new = self.largest, len(self.tokens) - self.num_prompt
        return [
            f"{self.served_model}: {len(self.tokens)} tokens compared, {self.num_prompt} of the "
            f"prompt and {num_new} generated",
            f"largest difference: {token.difference:.4g} nats, of token {token.position} "
            f"{token.text!r}: {token.served:.4f} served, {token.exported:.4f} exported;",
            f"mean {self.mean_difference:.4g}",
            f"limit: {self.limit:.4g} nats; rounding the export to bfloat16 changes it by up to "
            f"{self.rounding:.4g}",
        ]


@dataclass(frozen=True)
class _ServedTokens:
    """Prompt and continuation of a server's answer. ids: of all tokens. logps: log-probabilities of
    all tokens, None where the server gives none. num_prompt: number of tokens of the prompt."""

    ids: list[int]
    logps: list[float | None]
    num_prompt: int


def compare_with_server(
    model: str, url: str, prompt: str, *, max_new_tokens: int, served_model: str | None = None
) -> ServerComparison:
    """Compare the Hugging Face directory (or hub name) `model` with the OpenAI-compatible server at
    `url`: the log-probabilities of the server's most probable continuation of `prompt`, and of the
    prompt if the server returns these. served_model: the model's name on the server, needed if the
    server has several models.

    Raises ModelError if the model or the server cannot be read, or if the server reads other tokens
    than the export.
    """
    if not url.startswith(("http://", "https://")):
        raise ModelError(
            f"--compare-with {url}: must begin with http:// or https:// -> --compare-with "
            f"http://{url.rpartition('://')[2]}"
        )
    tokenizer = load_part(AutoTokenizer, model)
    ids = prompt_ids(tokenizer, prompt, read_record(Path(local_path(model))))
    if not ids:
        raise ModelError("--prompt: is empty; give at least one token to continue")
    base_url = url.rstrip("/").removesuffix("/v1")
    name = served_model or _only_model(base_url)
    served = _completion(base_url, name, ids, max_new_tokens, tokenizer)

    # The export's log-probabilities of the same tokens, in float32 and rounded.
    network = load_network(model).to("cuda" if torch.cuda.is_available() else "cpu")
    if getattr(network, "is_quantized", False):  # it computes in its own dtype only
        exact = rounded = _log_probabilities(network, served.ids)
    else:
        exact = _log_probabilities(network.float(), served.ids)
        rounded = _log_probabilities(network.bfloat16(), served.ids)
    pairs = zip(served.ids[1:], served.logps[1:], exact, strict=True)
    tokens = tuple(
        ComparedToken(position, tokenizer.decode([token_id]), logp, exact_logp)
        for position, (token_id, logp, exact_logp) in enumerate(pairs, 1)
        if logp is not None
    )
    if not tokens:
        raise ModelError(f"{url}: returned no log-probabilities -> a server with logprobs")
    rounding = max(abs(exact[token.position - 1] - rounded[token.position - 1]) for token in tokens)
    num_prompt = sum(token.position < served.num_prompt for token in tokens)
    limit = max(_ALLOWED_ROUNDINGS * rounding, _LEAST_LIMIT_NATS)
    return ServerComparison(f"{base_url} ({name})", tokens, num_prompt, rounding, limit)


@torch.no_grad()
def _log_probabilities(network: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probability of every token of `ids` but the first, given the tokens before."""
    inputs = torch.tensor([ids], device=network.device)
    logps = network(input_ids=inputs).logits[0, :-1].float().log_softmax(-1)
    values: list[float] = logps.gather(-1, inputs[0, 1:, None])[:, 0].tolist()
    return values


def _only_model(base_url: str) -> str:
    """Return the name of a server's only model. Raises ModelError if the server has several."""
    listed = _request(f"{base_url}/v1/models")
    try:
        names = [str(entry["id"]) for entry in listed["data"]]
    except (TypeError, KeyError) as error:
        rule = "is no OpenAI-compatible server: /v1/models has no list of models"
        raise ModelError(f"--compare-with {base_url}: {rule}") from error
    if len(names) != 1:
        raise ModelError(
            f"--compare-with {base_url}: it has {len(names)} models -> name one: --served-model "
            f"{' or '.join(names) or 'NAME'}"
        )
    return names[0]


def _completion(
    base_url: str, name: str, ids: list[int], max_new_tokens: int, tokenizer: Any
) -> _ServedTokens:
    """Return the server's most probable continuation of `ids`, with log-probabilities. Raises
    ModelError if the server reads other tokens than `ids`, or gives no log-probabilities."""
    request = {
        "model": name,
        "prompt": ids,
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "logprobs": 1,
    }
    # Send the request with the first further fields that the server accepts.
    answer: Any = None
    refusals: list[str] = []
    for further_fields in _REQUESTS:
        try:
            answer = _request(f"{base_url}/v1/completions", {**request, **further_fields})
            break
        except _RefusedError as error:
            refusals.append(str(error))
    if answer is None:
        raise ModelError(f"--compare-with {base_url}: refuses the request: {refusals[-1]}")
    try:
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        logps: list[float | None]
        if "content" in logprobs:  # one list of objects, as in OpenAI's chats (llama.cpp)
            entries = logprobs["content"]
            tokens = [entry.get("id", entry["token"]) for entry in entries]
            logps = [float(entry["logprob"]) for entry in entries]
        else:  # two lists, as in OpenAI's completions
            tokens, logps = list(logprobs["tokens"]), list(logprobs["token_logprobs"])
    except (TypeError, KeyError, IndexError) as error:
        rule = "its completions have no log-probabilities of tokens (logprobs)"
        raise ModelError(f"--compare-with {base_url}: {rule}") from error
    answer_ids = [_id_of(token, tokenizer) for token in tokens]

    # With `echo` the answer begins with the prompt, as the server reads it; a server may ignore it.
    has_prompt = further_fields.get("echo", False) and len(answer_ids) > max_new_tokens
    if has_prompt and answer_ids[: len(ids)] != ids:
        raise ModelError(
            f"--compare-with {base_url}: it reads other tokens than the export: it begins with "
            f"{answer_ids[:6]}, and the prompt with {ids[:6]} -> a server that takes the tokens of "
            "a prompt as they are (a second beginning-of-text token?)"
        )
    usage = answer.get("usage") or {}
    num_read = usage.get("prompt_tokens", len(ids))
    if not has_prompt and num_read != len(ids):
        raise ModelError(
            f"--compare-with {base_url}: it reads {num_read} tokens, and the prompt has {len(ids)} "
            "-> a server that takes the tokens of a prompt as they are (a second "
            "beginning-of-text token?)"
        )
    if has_prompt:
        return _ServedTokens(answer_ids, logps, len(ids))
    return _ServedTokens([*ids, *answer_ids], [*(None for _ in ids), *logps], len(ids))


def _id_of(token: Any, tokenizer: Any) -> int:
    """Return the id of a token that a server names by id, as "token_id:ID", or by text. Raises
    ModelError for a text that is no single token."""
    if isinstance(token, int):
        return token
    if match := re.fullmatch(r"token_id:(\d+)", token):
        return int(match[1])
    ids = tokenizer(token, add_special_tokens=False).input_ids
    if len(ids) == 1 and tokenizer.decode(ids) == token:
        return int(ids[0])
    raise ModelError(
        f"the server names a token by its text, {token!r}, which is no single token of the "
        "export's tokenizer -> a server that returns ids (vLLM, llama.cpp), or another prompt"
    )


class _RefusedError(Exception):
    """A request that a server answers with a client error."""


def _request(address: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON answer of a POST of `body`, or without `body` of a GET; OPENAI_API_KEY, if
    set, authenticates. Raises _RefusedError for a POST with status 400 to 499; ModelError for other
    failures, and if the server cannot be reached."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(address, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        text = (
            f"status {error.code}: {' '.join(error.read().decode(errors='replace').split())[:300]}"
        )
        if 400 <= error.code < 500 and body is not None:
            raise _RefusedError(text) from error
        raise ModelError(f"--compare-with {address}: {text}") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"--compare-with {address}: cannot be reached: {error}") from error
