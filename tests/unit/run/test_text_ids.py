"""Texts begin and end with the tokens of the shards, for every reader of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from bigtrain.cli import main
from bigtrain.errors import ConfigError
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config, vocabulary_size
from bigtrain.models.export.adapters import export_adapter
from bigtrain.models.export.base_record import BASE, record_base
from bigtrain.models.export.verified import Destination, Probe
from bigtrain.models.generation import _stop_ids, prompt_ids
from bigtrain.models.layers.adapters import add_adapters
from bigtrain.models.lm_eval_tasks import harness_model
from bigtrain.models.text_ids import ShardTextIds, model_text_ids
from bigtrain.models.weights import untrained_rows
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.run import frozen_rows
from bigtrain.run.checkpointing.export import write_export
from bigtrain.run.live_model import Prompts
from bigtrain.run.preflight import Inputs, inspect_inputs
from bigtrain.run.run_directory import MODEL_CONFIG, write_run_directory
from bigtrain.settings.hf_config_keys import listed_ids
from bigtrain.settings.resolve import ResolvedRun, resolve_run
from bigtrain.settings.run_config import ModelSection, RunConfig
from bigtrain.system.text_record import TextRecord, read_record
from tests.support.chats import CHATML, chat_tokenizer, turns, unmarked
from tests.support.datasets import open_verified

BOS, EOS, TURN = "<|begin_of_text|>", "<|endoftext|>", "<|im_end|>"
SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


class Recorder:
    """Model of lm-eval's tasks and of prompts that records what it is asked, and where each text
    would end."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids, self.prompts, self.stops = num_ids, [], set()  # type: ignore[var-annotated]

    def score(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        self.prompts += [[*context, *continuation] for context, continuation in requests]
        return [(0.0, True)] * len(requests)

    def continue_texts(self, prompts: Any, drawing: object, is_finished: Any) -> list[list[int]]:
        self.prompts += [list(prompt) for prompt in prompts]
        self.stops |= {number for number in range(self.num_ids) if is_finished(0, [number])}
        return [[5] for _ in prompts]


class Place:
    """Tokenizers, shards of texts and of conversations, and a base, for all runs here."""

    def __init__(self, root: Path) -> None:
        self.root = root
        plain, chat = chat_tokenizer(None), chat_tokenizer(unmarked(CHATML))
        self.num_tokens = len(chat)
        self.bos, self.turn, self.eos = (
            chat.convert_tokens_to_ids(token) for token in (BOS, TURN, EOS)
        )
        for name, tokenizer in (("plain", plain), ("chat", chat)):
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{BOS} $A", special_tokens=[(BOS, self.bos)]
            )
            tokenizer.save_pretrained(root / f"tokenizer-{name}")
        texts = [{"text": f"text {number} " * 9} for number in range(60)]
        chats = [{"messages": turns(f"{n}?", f"{n + 1}.")} for n in range(60)]
        for name, rows in (("plain", texts), ("chat", chats)):
            source = root / f"{name}.jsonl"
            source.write_text("".join(json.dumps(row) + "\n" for row in rows))
            words = ["tokenize", "--input", source, "--tokenizer", root / f"tokenizer-{name}"]
            words += ["--output", root / f"shards-{name}", "--workers", 1]
            words += ["--chat-key", "messages"] if name == "chat" else []
            assert main([*map(str, words)]) == 0
        self.make_base("base", self.num_tokens)
        self.make_base("small", 400, bos_token_id=None)  # without control tokens

    def make_base(self, name: str, num_rows: int, **changes: Any) -> Path:
        """Write a base with random weights, whose texts end with another token than answers do."""
        values = {"bos_token_id": self.bos, "eos_token_id": self.eos, **changes}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=num_rows, **SIZES, **values))
        model.generation_config.max_length = 77  # of its own
        model.save_pretrained(self.root / name)
        return self.root / name

    def run(self, model: dict[str, Any], shards: str, **sections: Any) -> ResolvedRun:
        tree = {
            "model": model,
            "data": {"path": str(self.root / f"shards-{shards}"), "packing": "best_fit"},
            "batch": {"sequence_length": 32, "global_batch_size": 1},
            "train": {"steps": 1},
            "optimizer": {"lr": 1e-3},
            "precision": {"dtype": "float32"},
            "evaluation": {"every_steps": 1, "prompts": ["Hi", f"{BOS}Hi"], "max_new_tokens": 2},
            "output": {"directory": str(self.root / "run")},
            **sections,
        }
        return resolve_run(RunConfig.model_validate(tree), 1)

    def named(self, name: str) -> ResolvedRun:
        """Return one of the runs of the matrix."""
        inline = {"model_type": "llama", "vocab_size": self.num_tokens, **SIZES}
        if name == "pretraining":
            return self.run({"config": inline}, "plain")
        if name == "chat":
            return self.run({"config": inline}, "chat")
        if name == "lora":
            return self.run({"path": str(self.root / "base")}, "chat", adapters={"rank": 2})
        return self.run({"path": str(self.root / "small"), "vocabulary": {}}, "chat")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("texts"))


def export(
    run: ResolvedRun, inputs: Inputs, directory: Path, notes: list[str] | None = None
) -> Path:
    """Write the run directory and an export of the run's initial model; return the export."""
    notes = [] if notes is None else notes
    section, config = run.config.model, run.config
    write_run_directory(
        directory, run, inputs, hosts=["here"], device=torch.device("cpu"), base_model=None
    )
    saved = load_hf_config(ModelSection(config=str(directory / MODEL_CONFIG)))
    ids = Probe.make_input(vocabulary_size(saved), 16)
    new = ModelSection(config=str(directory / MODEL_CONFIG))
    if config.adapters is None:
        model = build_model(new, saved, seed=0).eval()
    else:
        model = build_model(section, saved, seed=0).eval()
        add_adapters(model, config.adapters, lambda name: 0)
    with torch.no_grad():
        probe = Probe(ids, model(input_ids=ids).logits, "float32")
    weights, output = dict(model.named_parameters()), directory / "hf"
    settings = directory / MODEL_CONFIG / "generation_config.json"
    if config.adapters is not None:
        notes += export_adapter(
            weights, config.adapters, str(section.path), saved,
            Destination(output, directory / "tokenizer", None, settings), probe,
        )  # fmt: skip
        return output
    if section.path is not None:
        base = find_weights(section.path, load_hf_config(ModelSection(path=section.path)))
        record_base(section.path, base, directory / BASE)
    destination = Destination(output, directory / "tokenizer", None, settings)
    for note in write_export(
        directory, destination, weights, saved, config, as_stored=(), probe=probe
    ):
        notes.append(f"{output}: {note}")
    return output


def of_file(path: Path) -> set[int]:
    listed = json.loads(path.read_text())["eos_token_id"]
    return {*listed} if isinstance(listed, list) else {listed}


def harness_requests(harness: Any) -> None:
    """Ask the model of lm-eval one request of each type, with and without a spelled beginning."""
    from lm_eval.api.instance import Instance

    for text in ("Hi there", f"{BOS}Hi there"):
        arguments: dict[str, tuple[Any, ...]] = {
            "loglikelihood": (text, " you"),
            "loglikelihood_rolling": (text,),
            "generate_until": (text, {"until": [], "max_gen_toks": 2}),
        }
        for kind, values in arguments.items():
            getattr(harness, kind)([Instance(kind, {}, values, 0)], disable_tqdm=True)  # type: ignore[arg-type]
    both = [Instance("generate_until", {}, (t, {"max_gen_toks": 2}), 0) for t in (f"{BOS}A", "A")]
    harness.generate_until(both, disable_tqdm=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(
    "name", ["pretraining", pytest.param("chat", marks=pytest.mark.slow), "lora", "grown"]
)
def test_every_reader_begins_and_ends_texts_like_the_shards(
    name: str, place: Place, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    run = place.named(name)
    inputs = inspect_inputs(run)
    stops = {place.eos} if name == "pretraining" else {place.eos, place.turn}
    hf = export(run, inputs, tmp_path / "run")
    tokenizer: Any = AutoTokenizer.from_pretrained(hf)
    readers: dict[str, set[int]] = {
        "generation_config.json": of_file(hf / "generation_config.json")
    }
    readers["bigtrain_text.json"] = {*read_record(hf).stop_ids}  # type: ignore[union-attr]
    # From an adapter's folder, transformers reads the settings of the base.
    network = AutoModelForCausalLM.from_pretrained(hf)
    tokenizer.chat_template = None  # by the record, not by the template
    readers["bigtrain generate"] = {*(_stop_ids(network, tokenizer, str(hf)) or ())}
    prompts = [prompt_ids(tokenizer, text, read_record(hf)) for text in ("Hi", f"{BOS}Hi")]
    if name != "lora":
        readers["config.json"] = of_file(hf / "config.json")
        assert json.loads((hf / "config.json").read_text())["bos_token_id"] == place.bos
        listed = network.generation_config.eos_token_id
        readers["transformers"] = {*listed} if isinstance(listed, list) else {listed}
    # While training: samples, and requests of lm-eval.
    sampling, harness = Recorder(place.num_tokens), Recorder(place.num_tokens)
    long_work = SimpleNamespace(on_main_rank=lambda work: work())
    log = SimpleNamespace(metrics=SimpleNamespace(log_samples=lambda *_: None))
    context: Any = SimpleNamespace(config=run.config, long_work=long_work, log=log, inputs=inputs)
    Prompts(context, sampling).log(1)  # type: ignore[arg-type]
    data_tokenizer = AutoTokenizer.from_pretrained(inputs.tokenizer_path)
    harness_requests(harness_model(harness, data_tokenizer, inputs.hf_config, inputs.text_record))
    readers["samples"], readers["lm-eval"] = sampling.stops, harness.stops
    assert readers == dict.fromkeys(readers, stops)
    for ids in (*prompts, *sampling.prompts, *harness.prompts):
        assert ids[0] == place.bos
        assert ids.count(place.bos) == 1


LLAMA = {"model_type": "llama", **SIZES}
GEMMA = {"model_type": "gemma3_text", **SIZES, "num_key_value_heads": 1, "head_dim": 16}
# What the run sets, and the ids that its model gets: (beginning, ends). {bos}, {turn}: of `Place`.
SET: dict[str, tuple[dict[str, Any], str, tuple[str | None, list[str]]]] = {
    "class defaults": ({}, "plain", ("bos", ["eos"])),
    "null": ({"bos_token_id": None, "eos_token_id": None}, "plain", ("bos", ["eos"])),
    "a list with others": ({"eos_token_id": ["turn", "eos"]}, "plain", ("bos", ["turn", "eos"])),
    "one of two ends": ({"eos_token_id": "turn"}, "chat", ("bos", ["turn", "eos"])),
}


def with_ids(place: Place, values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with the ids of tokens for their names."""

    def of_name(value: Any) -> Any:
        return getattr(place, value) if value in ("bos", "eos", "turn") else value

    return {
        key: [*map(of_name, value)] if isinstance(value, list) else of_name(value)
        for key, value in values.items()
    }


@pytest.mark.parametrize(
    ("name", "architecture"),
    [*((name, LLAMA) for name in SET), ("class defaults", GEMMA)],
    ids=[*SET, "gemma3_text"],
)
def test_a_new_model_gets_the_ids_of_the_shards(
    name: str, architecture: dict[str, Any], place: Place
) -> None:
    values, shards, (begin, ends) = SET[name]
    config = {**architecture, "vocab_size": place.num_tokens, **with_ids(place, values)}
    inputs = inspect_inputs(place.run({"config": config}, shards))
    assert inputs.hf_config.bos_token_id == getattr(place, str(begin))
    assert listed_ids(inputs.hf_config.eos_token_id) == [getattr(place, end) for end in ends]
    assert inputs.text_record.stop_ids == tuple(getattr(place, end) for end in ends)
    # Ids that the run does not set are changed with a line that says so.
    assert any("instead of" in note for note in inputs.notes)


def test_a_composite_configuration_gets_the_ids_in_both_parts(place: Place) -> None:
    part = {**GEMMA, "vocab_size": place.num_tokens}
    section = ModelSection(config={"model_type": "gemma3", "text_config": part})
    shards = ShardTextIds(
        TextRecord((place.bos,), place.eos, (place.eos, place.turn)),
        "shards", place.num_tokens, lambda: True, lambda: None,
    )  # fmt: skip
    for has_key in (False, True):
        hf_config = load_hf_config(section)
        if has_key:  # as files of Gemma 3 have it
            hf_config.eos_token_id = [1, 106]
        changed = model_text_ids(section, hf_config, shards, same_tokenizer=True).hf_config
        text, ends = changed.get_text_config(), [place.eos, place.turn]
        assert (text.bos_token_id, text.eos_token_id) == (place.bos, ends)
        assert getattr(changed, "eos_token_id", None) == (ends if has_key else None)
        assert GenerationConfig.from_model_config(changed).eos_token_id == ends


REFUSED = {
    "end of other texts": ({"eos_token_id": 7}, "texts of", "eos_token_id=0"),
    "list of other ends": ({"eos_token_id": [7, 9]}, "texts of", "eos_token_id=0"),
    "other beginning": ({"bos_token_id": 9}, "begin with token", "bos_token_id=402"),
    "end outside": ({"eos_token_id": [0, 99999]}, "99999 is outside the vocabulary of 412", "null"),
    "beginning outside": ({"bos_token_id": -1}, "-1 is outside the vocabulary of 412", "null"),
    "padding outside": ({"pad_token_id": 412}, "412 is outside the vocabulary of 412", "null"),
}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, "config") for name in REFUSED if name != "padding outside"),
        *(("end of other texts", "overrides"), ("padding outside", "overrides")),
    ],
)
def test_ids_of_the_run_that_contradict_the_shards_are_refused(
    name: str, key: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outside the vocabulary by `bigtrain check` without the data, too."""
    values, rule, remedy = REFUSED[name]
    config = {**LLAMA, "vocab_size": place.num_tokens}
    section: dict[str, Any] = {"config": {**config, **values}}
    if key == "overrides":
        section = {"config": config, "overrides": values}
    plain = place.run({"config": config}, "plain").config.model_dump(mode="json")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**plain, "model": section}))
    is_outside = "outside" in rule
    assert main(["check", "--config", str(path)]) == (2 if is_outside else 0)
    said = capsys.readouterr().err
    assert main(["check", "--config", str(path), "--inputs"]) == 2
    said = said if is_outside else capsys.readouterr().err
    (name_of_key,) = values
    line = next(line for line in said.splitlines() if f"model.{key}.{name_of_key} = " in line)
    assert rule in line
    assert remedy in line


def test_tokenized_rows_end_as_their_author_likes(place: Place, tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7] * 9} for _ in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["tokenize", "--input", tmp_path / "rows.jsonl", "--format", "tokens", "--tokenizer"]
    words += [place.root / "tokenizer-plain", "--output", place.root / "shards-rows"]
    assert main([*map(str, words)]) == 0
    config = {**LLAMA, "vocab_size": place.num_tokens, "eos_token_id": 7}
    inputs = inspect_inputs(place.run({"config": config}, "rows"))
    assert listed_ids(inputs.hf_config.eos_token_id) == [7, place.eos]


def test_a_base_keeps_its_ids_in_the_vocabulary(place: Place, tmp_path: Path) -> None:
    """Also without generation settings, where transformers reads config.json: a file with the
    ends of answers would otherwise hide the others."""
    base = place.make_base("foreign", place.num_tokens, eos_token_id=9, bos_token_id=5000)
    settings = base / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [8, 5001], "bos_token_id": 5000, "top_k": 3}))
    for name in ("settings", "no settings"):
        if name == "no settings":
            settings.unlink()
        run = place.run({"path": str(base)}, "chat")
        inputs = inspect_inputs(run)
        hf = export(run, inputs, tmp_path / name)
        own = [9, 8] if name == "settings" else [9]
        expected = {*own, place.eos, place.turn}
        assert of_file(hf / "config.json") == expected
        assert {*inputs.text_record.stop_ids} == expected
        network: Any = AutoModelForCausalLM.from_pretrained(hf)
        assert {*network.generation_config.eos_token_id} == expected
        assert network.generation_config.bos_token_id in (None, place.bos)
        assert inputs.hf_config.bos_token_id == place.bos
        assert any("instead of 5000" in note for note in inputs.notes)


@pytest.mark.parametrize("name", ["other", "default of the class", "equal"])
def test_a_base_that_begins_texts_otherwise_is_noted(name: str, place: Place) -> None:
    """With an override that ends the note; also if the base names no beginning at all."""
    ids = {"other": 9, "default of the class": 9, "equal": place.bos}
    base = place.make_base(f"begins {name}", place.num_tokens, bos_token_id=ids[name])
    if name == "default of the class":
        tree = json.loads((base / "config.json").read_text())
        del tree["bos_token_id"]
        (base / "config.json").write_text(json.dumps(tree))
    inputs = inspect_inputs(place.run({"path": str(base)}, "plain"))
    own = 9 if name == "other" else inputs.hf_config.bos_token_id
    found = [note for note in inputs.notes if f"bos_token_id = {own} stays as in" in note]
    assert len(found) == (name != "equal")
    for note in found:
        assert note.endswith(f"model.overrides={{bos_token_id: {place.bos}}}")
    section = {"path": str(base), "overrides": {"bos_token_id": place.bos}}
    inputs = inspect_inputs(place.run(section, "plain"))
    assert not [note for note in inputs.notes if "stays as in" in note]
    assert inputs.hf_config.bos_token_id == place.bos


# The padding token, the shards, and whether texts of the shards begin or end with the token.
PADDED = [("turn", "chat", True), ("turn", "plain", False), ("eos", "plain", True)]


@pytest.mark.parametrize(("padding", "shards", "is_noted"), PADDED)
def test_padding_that_ends_texts_is_noted(
    padding: str, shards: str, is_noted: bool, place: Place
) -> None:
    """Where the row has no gradient: as a base has it, and not after the override of the note."""
    number = getattr(place, padding)
    base = place.make_base(f"padded {padding} {shards}", place.num_tokens, pad_token_id=number)
    rule = f"pad_token_id = {number} is also a token that begins or ends texts"
    for overrides in ({}, {"pad_token_id": None}):
        section = {"path": str(base), "overrides": overrides}
        inputs = inspect_inputs(place.run(section, shards))
        found = [note for note in inputs.notes if rule in note]
        model = build_model(ModelSection.model_validate(section), inputs.hf_config, seed=0)
        assert len(found) == (is_noted and not overrides)
        token: Any = torch.tensor([[number, 5]])
        model(input_ids=token).logits.sum().backward()
        row = model.get_input_embeddings().weight.grad[number]
        assert bool(row.any()) == bool(overrides)
    with_adapters = place.run({"path": str(base)}, shards, adapters={"rank": 2})
    assert not [note for note in inspect_inputs(with_adapters).notes if rule in note]


def test_ids_of_a_base_with_another_tokenizer_are_of_other_tokens(place: Place) -> None:
    base = place.make_base("relabelled", place.num_tokens, eos_token_id=9)
    data = {"path": str(place.root / "shards-plain"), "packing": "best_fit"}
    for other, ends in ((False, [9, place.eos]), (True, [place.eos])):
        section = {**data, "allow_other_tokenizer": other}
        inputs = inspect_inputs(place.run({"path": str(base)}, "plain", data=section))
        assert listed_ids(inputs.hf_config.eos_token_id) == ends


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_folder_has_settings_for_a_call_that_names_them(
    place: Place, tmp_path: Path
) -> None:
    """transformers and peft read the settings of the base otherwise, as the export says."""
    from peft import AutoPeftModelForCausalLM

    run = place.named("lora")
    inputs = inspect_inputs(run)
    notes: list[str] = []
    hf = export(run, inputs, tmp_path / "run", notes)
    (*_, note) = notes
    assert f"do not stop at token {place.turn}, where training texts end -> " in note
    plain = AutoPeftModelForCausalLM.from_pretrained(str(hf))
    assert plain.generation_config.eos_token_id == place.eos
    settings = GenerationConfig.from_pretrained(hf)
    assert settings.max_length == 77  # the base's own
    named = AutoPeftModelForCausalLM.from_pretrained(str(hf), generation_config=settings)
    assert named.generation_config.eos_token_id == [place.eos, place.turn]


TEXTS = ("Hi", f"{BOS}Hi", f"Hi{EOS}", f"{BOS}Hi{EOS}", f"{BOS}{BOS}Hi", f"a{BOS}b{EOS}c")
ROWS: dict[str, tuple[list[str], list[dict[str, Any]]]] = {
    "text": ([], [{"text": text} for text in TEXTS]),
    "prompt-completion": (
        ["--format", "prompt-completion"],
        [{"prompt": f"{b}Q", "completion": f"A{e}"} for b in ("", BOS) for e in ("", EOS)],
    ),
    "preference": (
        ["--format", "preference"],
        [
            {"prompt": f"{b}Q", "chosen": f"A{e}", "rejected": f"B{e}"}
            for b in ("", BOS)
            for e in ("", EOS)
        ],
    ),
    "kto": (
        ["--format", "kto"],
        [
            {"prompt": f"{b}Q", "completion": f"A{e}", "label": True}
            for b in ("", BOS)
            for e in ("", EOS)
        ],
    ),
    "fill-in-the-middle": (
        ["--fim-rate", "1", "--fim-tokens", "<|im_start|>", "<|im_end|>", "<|eot_id|>"],
        [{"text": f"{b}some text {n}{e}"} for n in range(9) for b in ("", BOS) for e in ("", EOS)],
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("text", "preference")))
        for name in ROWS
    ],
)
def test_a_text_that_spells_its_ends_has_them_once(name: str, place: Place, tmp_path: Path) -> None:
    """With --parse-special-tokens; without, they are letters. In training and held-out texts."""
    options, rows = ROWS[name]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["tokenize", "--input", source, "--tokenizer", place.root / "tokenizer-plain"]
    words += [*options, "--held-out", "0.3", "--workers", 1]
    inside: list[tuple[int, int]] = []  # beginnings and ends that stand inside of a text
    for trusts in (True, False):
        output = tmp_path / str(trusts)
        more = ["--parse-special-tokens"] if trusts else []
        assert main([*map(str, [*words, *more, "--output", output])]) == 0
        dataset = open_verified(output)
        for split in dataset.splits:
            for document in dataset.documents(split):
                ids = document["input_ids"].tolist()
                assert (ids[0], ids[-1]) == (place.bos, place.eos)
                inside.append((ids.count(place.bos) - 1, ids.count(place.eos) - 1))
    spelled = [(1, 0), (1, 1)] if name == "text" else []
    assert len(inside) >= 2 * len(rows)
    assert sorted(inside) == [*[(0, 0)] * (len(inside) - len(spelled)), *spelled]


ROWS_OF_TURN = {
    "zeros": lambda table, turn: table[turn].zero_(),
    "a copy": lambda table, turn: table[turn].copy_(table[turn - 1]),
    "the mean": lambda table, turn: table[turn].copy_(table[: turn - 1].mean(0)),
}


@pytest.mark.parametrize(
    ("table", "what", "dtype"),
    [
        pytest.param("embed_tokens", "zeros", torch.float32, marks=pytest.mark.slow),
        pytest.param("embed_tokens", "the mean", torch.bfloat16, marks=pytest.mark.slow),
        ("lm_head", "a copy", torch.bfloat16),
        ("tied", "the mean", torch.float32),
    ],
)
def test_adapters_do_not_teach_tokens_with_untrained_rows(
    table: str, what: str, dtype: torch.dtype, place: Place, tmp_path: Path
) -> None:
    values = {"bos_token_id": place.bos, "eos_token_id": place.eos}
    is_tied = table == "tied"
    sizes = {**SIZES, "vocab_size": place.num_tokens, "tie_word_embeddings": is_tied}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **values)).to(dtype)
    weight = model.lm_head.weight if table == "lm_head" else model.model.embed_tokens.weight
    with torch.no_grad():
        ROWS_OF_TURN[what](weight, place.turn)
    model.save_pretrained(tmp_path / "base")
    base = {"path": str(tmp_path / "base")}
    with pytest.raises(ConfigError) as caught:
        inspect_inputs(place.run(base, "chat", adapters={"rank": 2}))
    (problem,) = caught.value.problems
    assert f"teaches token {TURN} ({place.turn})" in problem.rule
    assert problem.key == "adapters.modules_to_save"
    # The remedy that it names, and full training, are accepted.
    inspect_inputs(place.run(base, "chat"))
    inspect_inputs(place.run(base, "plain", adapters={"rank": 2}))  # which does not teach it
    if not is_tied:
        assert "adapters.modules_to_save=[embed_tokens, lm_head]" in problem.remedy
        saved = {"rank": 2, "modules_to_save": ["embed_tokens", "lm_head"]}
        inspect_inputs(place.run(base, "chat", adapters=saved))
    with pytest.raises(ConfigError, match=r"model\.frozen"):
        inspect_inputs(place.run({**base, "frozen": ["*embed_tokens*", "*lm_head*"]}, "chat"))


def test_untrained_rows_and_shards_are_read_once(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "cache"))
    num_reads = {"table": 0, "tokens": 0}
    allocate, bincount = untrained_rows.allocate, np.bincount

    def allocate_block(*args: Any) -> Any:
        num_reads["table"] += 1
        return allocate(*args)

    def count_tokens(*args: Any, **kwargs: Any) -> Any:
        num_reads["tokens"] += 1
        return bincount(*args, **kwargs)

    monkeypatch.setattr(untrained_rows, "allocate", allocate_block)
    monkeypatch.setattr(frozen_rows.np, "bincount", count_tokens)
    values = {"bos_token_id": place.bos, "eos_token_id": place.eos}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=place.num_tokens, **values))

    def check(has_zeros: bool, expected: dict[str, int]) -> None:
        num_reads.update(dict.fromkeys(num_reads, 0))
        run = place.run({"path": str(tmp_path / "base")}, "chat", adapters={"rank": 2})
        with pytest.raises(ConfigError) if has_zeros else nullcontext():
            inspect_inputs(run)
        assert num_reads == expected

    model.save_pretrained(tmp_path / "base")
    check(False, {"table": 2, "tokens": 0})  # no untrained row: no token is looked at
    check(False, {"table": 0, "tokens": 0})
    with torch.no_grad():
        model.lm_head.weight[place.turn].zero_()
    model.save_pretrained(tmp_path / "base")
    check(True, {"table": 2, "tokens": 1})
    check(True, {"table": 0, "tokens": 0})
