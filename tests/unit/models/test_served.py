"""`bigtrain generate --compare-with`: small servers that answer like vLLM, llama.cpp and others."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bigtrain.cli import main
from tests.support.chats import CHATML, save_chat_tokenizer

PROMPT = "Hi there, what comes next?"


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in bfloat16, with a tokenizer."""
    directory = save_chat_tokenizer(tmp_path_factory.mktemp("served") / "export", CHATML)
    sizes = {"vocab_size": len(AutoTokenizer.from_pretrained(directory)), "hidden_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, **heads, eos_token_id=None, bos_token_id=None)
    network = LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        network.lm_head.weight.normal_(0.0, 0.3)
    network.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def adapters(export: Path) -> Path:
    network: Any = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of peft's calls
        tuned = get_peft_model(network, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    directory = export.with_name("adapters")
    tuned.save_pretrained(directory)
    AutoTokenizer.from_pretrained(export).save_pretrained(directory)
    return directory


@dataclass
class Server:
    """Answers with a model. echoes, names_ids, gives_objects: as vLLM and llama.cpp do; begin:
    tokens that it puts before every prompt."""

    network: Any
    tokenizer: Any
    names: tuple[str, ...] = ("only",)
    echoes: bool = True
    names_ids: bool = True
    gives_objects: bool = False
    refuses_fields: bool = False
    begin: tuple[int, ...] = ()
    asked: list[dict[str, Any]] | None = None

    @torch.no_grad()
    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = [*self.begin, *body["prompt"]]
        num_prompt = len(ids)
        for _ in range(body["max_tokens"]):
            logits = self.network(input_ids=torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
        logits = self.network(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        logps = [None, *(float(logits[n, ids[n + 1]]) for n in range(len(ids) - 1))]
        start = 0 if self.echoes and body.get("echo") else num_prompt
        shown = ids[start:]
        texts = [self.tokenizer.decode([token]) for token in shown]
        if self.gives_objects:
            content = [
                {"id": token, "token": text, "logprob": logp}
                for token, text, logp in zip(shown, texts, logps[start:], strict=True)
            ]
            logprobs: dict[str, Any] = {"content": content}
        else:
            names = texts
            if self.names_ids and body.get("return_tokens_as_token_ids"):
                names = [f"token_id:{token}" for token in shown]
            logprobs = {"tokens": names, "token_logprobs": logps[start:]}
        usage = {"prompt_tokens": num_prompt}
        return {"choices": [{"logprobs": logprobs, "text": "".join(texts)}], "usage": usage}


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": name} for name in server.names]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if server.refuses_fields and {"echo", "return_tokens_as_token_ids"} & body.keys():
                self._send(400, {"error": "unknown field"})
            elif body["model"] not in server.names:
                self._send(404, {"error": f"no model {body['model']}"})
            else:
                self._send(200, server.answer(body))

        def _send(self, status: int, tree: Any) -> None:
            data = json.dumps(tree).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}/v1"
    finally:
        listener.shutdown()
        listener.server_close()


def server_of(path: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Server:
    network = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return Server(network, AutoTokenizer.from_pretrained(path), **options)


def compare(path: Path, url: str, *options: str) -> int:
    words = ["generate", "--model", str(path), "--compare-with", url, "--prompt", PROMPT]
    return main([*words, "--max-new-tokens", "12", *options])


@pytest.mark.parametrize(
    ("options", "num_prompt"),
    [
        ({}, 25),
        ({"dtype": torch.float32}, 25),
        ({"echoes": False, "gives_objects": True}, 0),
        ({"refuses_fields": True, "gives_objects": True}, 0),
        ({"names": ("base", "tuned")}, 25),
    ],
    ids=["vllm", "float32", "llama.cpp", "strict", "several"],
)
def test_a_server_of_the_same_weights(
    export: Path, options: dict[str, Any], num_prompt: int, capsys: pytest.CaptureFixture[str]
) -> None:
    num_tokens = len(AutoTokenizer.from_pretrained(export)(PROMPT).input_ids)
    with serving(server_of(export, **options)) as url:
        named = ["--served-model", "tuned"] if "names" in options else []
        assert compare(export, url, *named) == 0
    printed = capsys.readouterr().out
    compared = (num_tokens - 1 if num_prompt else 0) + 12
    assert f"{compared} tokens compared, {compared - 12} of the prompt and 12 generated" in printed
    assert "the server has the weights of the export" in printed


def changed(network: Any) -> None:
    network.model.layers[1].mlp.down_proj.weight.mul_(0.5)


@pytest.mark.parametrize("echoes", [True, False])
@pytest.mark.parametrize("change", [changed, None], ids=["weight", "adapters"])
def test_a_server_of_other_weights_is_refused(
    export: Path,
    adapters: Path,
    change: Callable[[Any], None] | None,
    echoes: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A layer's weights, or adapters that the server never loaded."""
    server = server_of(export, echoes=echoes)
    if change is not None:
        with torch.no_grad():
            change(server.network)
    with serving(server) as url:
        assert compare(export if change else adapters, url) == 2
    assert "serves another model than" in capsys.readouterr().err


def test_adapters_that_the_server_loaded_pass(adapters: Path) -> None:
    with serving(server_of(adapters)) as url:
        assert compare(adapters, url) == 0


@pytest.mark.parametrize(
    ("options", "arguments", "text"),
    [
        ({"begin": (1,)}, [], "it reads other tokens than the export"),
        ({"begin": (1,), "echoes": False}, [], "tokens, and the prompt has"),
        ({"names": ("a", "b")}, [], "it has 2 models -> name one: --served-model a or b"),
        ({}, ["--served-model", "c"], "refuses the request: status 404"),
        ({}, ["--chat"], "compares a text -> --prompt TEXT, without --chat"),
    ],
    ids=["begin", "begin-without-echo", "names", "name", "chat"],
)
def test_what_cannot_be_compared_is_refused(
    export: Path,
    options: dict[str, Any],
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(server_of(export, **options)) as url:
        assert compare(export, url, *arguments) == 2
    assert text in capsys.readouterr().err


def test_without_a_server(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(export, "http://127.0.0.1:9") == 2
    assert "cannot be reached" in capsys.readouterr().err
    assert main(["generate", "--model", str(export), "--prompt", "x", "--served-model", "a"]) == 2
    assert "add --compare-with URL" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:9", "ftp://host:9/v1"])
def test_an_address_begins_with_http(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--model", "none", "--compare-with", url, "--prompt", PROMPT]
    assert main(words) == 2
    assert (
        "must begin with http:// or https:// -> --compare-with http://" in capsys.readouterr().err
    )
