"""Building, initializing and exporting Hugging Face models of several architectures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from bigtrain.cli import main as bigtrain
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.errors import ModelError
from bigtrain.models import build as huggingface
from bigtrain.models.build import Partitioning, build_model, empty_model
from bigtrain.models.configuration import (
    load_hf_config,
    save_configuration,
    text_config,
    vocabulary_size,
)
from bigtrain.models.export.verified import Destination, Probe, export_model, relative_difference
from bigtrain.models.generation import Sampling, generate
from bigtrain.models.layers.parameter_roles import split_by_decay
from bigtrain.models.layers.parameters import check_frozen
from bigtrain.settings.run_config import ModelSection
from tools.tiny_models import tiny_config

VOCAB_SIZE = 270
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**GROUPED, "head_dim": 8},
    "gpt2": {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": None,
        "eos_token_id": 0,
    },
    "opt": {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
    },
}


FAST = ("qwen2", "mixtral", "gpt2")
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in ARCHITECTURES]
"""Tied, with experts, and of another kind of matrices; all others in the slow tier."""


def section_of(name: str, **changes: Any) -> ModelSection:
    config = {"model_type": name, **ARCHITECTURES[name], **changes}
    return ModelSection(config=config)


def build(name: str, seed: int = 1, **changes: Any) -> PreTrainedModel:
    section = section_of(name, **changes)
    return build_model(section, load_hf_config(section), seed=seed)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer") / "bpe"
    directory.mkdir()
    train_tokenizer(iter([["the theme of the thesis is that these themes matter"]]), 270).save(
        directory
    )
    return directory


# -- initialization ---------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["minimax", "kimi_linear", "deepseek_v3"])
def test_stored_buffers_keep_what_files_hold(model_type: str, tmp_path: Path) -> None:
    """Also where the model is constructed in 16 bit, as ZeRO 3 does."""
    torch.manual_seed(0)
    plain: Any = AutoModelForCausalLM.from_config(tiny_config(model_type))
    stored = {
        name: buffer.add_(torch.rand_like(buffer))
        for name, buffer in plain.named_buffers()
        if name in plain.state_dict() and buffer.is_floating_point()
    }
    assert stored
    plain.save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path))
    model = build_model(section, load_hf_config(section), seed=0, dtype=torch.bfloat16)
    buffers = dict(model.named_buffers())
    for name, buffer in stored.items():
        assert torch.equal(buffers[name], buffer), name
        assert buffers[name].dtype == torch.float32, name


@pytest.mark.parametrize("name", EACH)
def test_weights_are_a_function_of_seed_and_name(name: str) -> None:
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    first = build(name).state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(7)
    second = build(name).state_dict()
    other = build(name, seed=2).state_dict()
    assert first.keys() == second.keys() == other.keys()
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    drawn = [key for key, value in first.items() if float(value.float().std()) > 0]
    assert len(drawn) >= 10
    for key in drawn:
        if other[key].is_floating_point() and float(other[key].std()) > 0 and "rotary" not in key:
            assert not torch.equal(first[key], other[key]), key


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_bfloat16_weights_are_the_rounded_float32_ones(name: str) -> None:
    section = section_of(name)
    hf_config = load_hf_config(section)
    exact = dict(build_model(section, hf_config, seed=5).named_parameters())
    low = build_model(section, load_hf_config(section), seed=5, dtype=torch.bfloat16)
    for key, parameter in low.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, exact[key].to(torch.bfloat16)), key


def test_more_layers_leave_the_weights_of_the_others_alone() -> None:
    short, deep = build("llama"), build("llama", num_hidden_layers=3)
    longer = dict(deep.named_parameters())
    for key, parameter in short.named_parameters():
        assert torch.equal(parameter, longer[key]), key


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied_and_others_apart(name: str, tied: bool) -> None:
    model = build(name, tie_word_embeddings=tied)
    head = model.get_output_embeddings()
    assert (model.get_input_embeddings().weight is head.weight) == tied
    assert torch.equal(model.get_input_embeddings().weight, head.weight) == tied


@pytest.mark.parametrize("name", EACH)
def test_statistics_are_those_of_the_architecture(name: str) -> None:
    """Mean and spread of every parameter are what transformers' own initialization makes."""
    ours = build(name)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(ours.config)
    expected = dict(theirs.named_parameters())
    assert expected.keys() == dict(ours.named_parameters()).keys()
    for key, tensor in ours.named_parameters():
        parameter, reference = tensor.detach(), expected[key].detach()
        assert parameter.shape == reference.shape
        spread = float(reference.std())
        # Six standard errors of a standard deviation and of a mean.
        error = 6 * spread / (2 * reference.numel()) ** 0.5
        assert float(parameter.std()) == pytest.approx(spread, abs=2 * error), key
        assert float(parameter.mean()) == pytest.approx(float(reference.mean()), abs=3 * error), key


def test_what_a_constructor_sets_is_kept() -> None:
    """Mamba's constructor computes A_log; its rule then draws only what is random."""
    section = ModelSection(
        config={"model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1},
        attention="eager",
    )
    ours = dict(build_model(section, load_hf_config(section), seed=1).named_parameters())
    theirs = dict(AutoModelForCausalLM.from_config(load_hf_config(section)).named_parameters())
    for key in ("backbone.layers.0.mixer.A_log", "backbone.layers.0.mixer.D"):
        assert torch.equal(ours[key], theirs[key]), key
        assert float(ours[key].detach().abs().sum()) > 0


def test_partitioned_building_gathers_every_parameter_once_per_unit() -> None:
    """Parameters are gathered a layer at a time, and give the weights of a whole model."""
    reference = dict(build("llama").named_parameters())
    names_of: list[list[int]] = []

    class Gathered:
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            names_of.append([id(parameter) for parameter in parameters])

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    section = section_of("llama")
    for writes in (True, False):
        names_of.clear()
        partitioning = Partitioning(huggingface.nullcontext, Gathered, writes_weights=writes)
        hf_config = load_hf_config(section)
        model = build_model(section, hf_config, seed=1, partitioning=partitioning)
        gathered = [identity for ids in names_of for identity in ids]
        assert sorted(gathered) == sorted(id(p) for p in model.parameters())
        layers = [[id(p) for p in layer.parameters()] for layer in model.model.layers]
        assert all(layer in names_of for layer in layers)
        same = [torch.equal(p, reference[key]) for key, p in model.named_parameters()]
        assert all(same) == writes  # only one process writes


# -- configuration ----------------------------------------------------------------------------


def test_overrides_are_applied_over_a_directory_and_checked(tmp_path: Path) -> None:
    load_hf_config(section_of("llama")).save_pretrained(tmp_path)
    section = ModelSection(config=str(tmp_path), overrides={"num_hidden_layers": 7})
    config = load_hf_config(section)
    assert config.num_hidden_layers == 7
    assert config.hidden_size == 32
    assert vocabulary_size(config) == VOCAB_SIZE
    assert text_config(config) is config
    section = ModelSection(path=str(tmp_path), overrides={"rope_tetha": 1e4})
    with pytest.raises(ModelError, match=r"model\.overrides\.rope_tetha: LlamaConfig has no such"):
        load_hf_config(section)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"the directory holds no usable config\.json"):
        load_hf_config(ModelSection(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            ModelSection(config={"model_type": "lama"}),
            r"model\.config\.model_type = 'lama': transformers knows no such type; did you mean .*"
            r"llama",
        ),
        (
            ModelSection(config={"model_type": "llama", "hiden_size": 32}),
            r"model\.config\.hiden_size: LlamaConfig has no such key; did you mean "
            r"model\.config\.hidden_size\?",
        ),
        (
            ModelSection(config={"model_type": "llama", "hidden_size": "wide"}),
            r"model\.config: LlamaConfig refuses these values: .*hidden_size",
        ),
        (
            ModelSection(path="./no/such/model"),
            r"model\.path = './no/such/model': no such directory",
        ),
        (
            ModelSection(config="nobody/has-this-model"),
            r"model\.config = 'nobody/has-this-model': is neither a directory here nor a model "
            r"that could be reached",
        ),
    ],
    ids=["type", "key", "value", "directory", "hub"],
)
def test_refusals_of_configurations(section: ModelSection, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_hf_config(section)
    assert "\n" not in str(caught.value)


def test_attention_that_an_architecture_lacks_is_refused_with_the_remedy() -> None:
    config = {"model_type": "gemma2", **ARCHITECTURES["gemma2"]}
    section = ModelSection(config=config, attention="sdpa")
    message = r"model\.attention = 'sdpa': Gemma2ForCausalLM .* -> set model\.attention=eager$"
    with pytest.raises(ModelError, match=message):
        build_model(section, load_hf_config(section), seed=1)


# -- trained weights --------------------------------------------------------------------------


# -- parameter groups and recomputation -------------------------------------------------------


def names(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    by_id = {id(parameter): key for key, parameter in model.named_parameters()}
    return {by_id[id(parameter)] for parameter in parameters}


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_matrices_decay_and_vectors_do_not(decay_embeddings: bool) -> None:
    model = build("gpt2")
    groups = split_by_decay(model, decay_embeddings=decay_embeddings)
    decay, no_decay = names(model, groups.decay), names(model, groups.no_decay)
    assert decay | no_decay == {key for key, _ in model.named_parameters()}
    assert not decay & no_decay
    assert {key for key in no_decay if not key.endswith(".bias")} - {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    } == {key for key in no_decay if "ln_" in key and key.endswith(".weight")}
    assert "transformer.h.0.attn.c_attn.weight" in decay
    assert ({"transformer.wte.weight", "transformer.wpe.weight"} <= decay) == decay_embeddings
    order = [key for key, _ in model.named_parameters()]
    by_id = {id(parameter): key for key, parameter in model.named_parameters()}
    positions = [order.index(by_id[id(parameter)]) for parameter in groups.decay]
    assert positions == sorted(positions)


def test_partitioned_parameters_are_judged_by_their_full_shape() -> None:
    model = build("llama")
    expected = names(model, split_by_decay(model, decay_embeddings=True).decay)
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.data = parameter.data.flatten()[:3]
    assert names(model, split_by_decay(model, decay_embeddings=True).decay) == expected


def test_frozen_parameters_are_in_no_group() -> None:
    model = build("llama")
    model.model.embed_tokens.requires_grad_(False)
    groups = split_by_decay(model, decay_embeddings=True)
    assert "model.embed_tokens.weight" not in names(model, [*groups.decay, *groups.no_decay])


def test_frozen_patterns_are_whole_names() -> None:
    section = section_of("llama").model_copy(update={"frozen": ("model.layers.0.*", "lm_head.*")})
    model = build_model(section, load_hf_config(section), seed=1)
    frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
    assert "model.layers.0.mlp.up_proj.weight" in frozen
    assert all(key.startswith(("model.layers.0.", "lm_head.", "model.embed")) for key in frozen)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert ("model.embed_tokens.weight" in frozen) == tied


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["model.layers.0.*", "layers.1.*"], "model.frozen = 'layers.1.*': matches the name of no"),
        (["*"], "leaves nothing to train"),
    ],
)
def test_frozen_patterns_that_cannot_be_meant_are_refused(patterns: list[str], said: str) -> None:
    [problem] = check_frozen(empty_model(load_hf_config(section_of("llama"))), patterns)
    assert said in str(problem)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("none", [False] * 5), ("full", [True] * 5), (2, [True, False, True, False, True])],
)
def test_every_nth_layer_is_recomputed(setting: Any, expected: list[bool]) -> None:
    section = section_of("llama", num_hidden_layers=5)
    section = section.model_copy(update={"gradient_checkpointing": setting})
    model = build_model(section, load_hf_config(section), seed=1)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == expected


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_recomputation_does_not_change_gradients(name: str) -> None:
    gradients = []
    without_dropout = (
        {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if name == "gpt2" else {}
    )
    ids = torch.arange(32).view(2, 16) % VOCAB_SIZE
    for setting in ("none", "full", 2):
        section = section_of(name, **without_dropout)
        section = section.model_copy(update={"gradient_checkpointing": setting})
        model = build_model(section, load_hf_config(section), seed=1).train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({key: p.grad for key, p in model.named_parameters()})
    for other in gradients[1:]:
        for key, gradient in gradients[0].items():
            torch.testing.assert_close(other[key], gradient)


# -- export -----------------------------------------------------------------------------------


def probe_of(model: PreTrainedModel, dtype: str = "float32") -> Probe:
    ids = Probe.make_input(VOCAB_SIZE, 48)
    model.eval()
    with torch.no_grad():
        return Probe(ids, model(input_ids=ids, use_cache=False).logits.float(), dtype)


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {key: parameter.detach().clone() for key, parameter in model.named_parameters()}


@pytest.fixture
def run_export(tokenizer: Path, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    def run(model: PreTrainedModel, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
        output = tmp_path / "out" / "hf"
        output.parent.mkdir(exist_ok=True)
        probe = changes.pop("probe", None) or probe_of(model)
        hf_config = changes.pop("hf_config", model.config)
        files = {"tokenizer": tokenizer, "dtype": "float32", **changes}
        export_model(weights, hf_config, Destination(output, **files), probe=probe)
        return output

    yield run
    left = [path.name for path in (tmp_path / "out").iterdir()]
    assert left in ([], ["hf"])  # no unfinished directory, whatever happened


@pytest.mark.parametrize("name", EACH)
def test_export_is_the_trained_model(name: str, run_export: Callable[..., Path]) -> None:
    model = build(name)
    output = run_export(model, weights_of(model))
    loaded, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    again = dict(loaded.named_parameters())
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, again[key]), key
    assert json.loads((output / "config.json").read_text())["model_type"] == name
    # transformers caches keys and values again when it generates from it.
    text = generate(
        str(output), "the th", max_new_tokens=3, sampling=Sampling(temperature=0, top_p=1.0, seed=0)
    )
    assert text.startswith("the th")


def test_tokenizer_that_would_be_read_as_another_is_not_written(
    run_export: Callable[..., Path], tmp_path: Path
) -> None:
    """transformers reads any tokenizer beside a Qwen2 as Qwen2's byte-level BPE."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    directory = tmp_path / "words"
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(directory)
    model = build("qwen2")
    with pytest.raises(ModelError, match="not written: transformers reads the run's tokenizer"):
        run_export(model, weights_of(model), tokenizer=directory)


MAY_DIFFER = {
    "dtype", "torch_dtype", "transformers_version", "architectures", "rope_theta", "rope_scaling",
}  # fmt: skip
"""Of `config.json`: how it is stored, who wrote it, the class, which a base may not name, and what
readers of transformers 4 need."""

GENERATION = {
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
    "do_sample": False,
    "temperature": 0.6,  # transformers would not write it without do_sample
    "max_new_tokens": 99,
    "transformers_version": "4.40.0",
}


@pytest.mark.parametrize("key", ["path", "config", "inline"])
def test_export_keeps_the_settings_of_the_base(
    key: str, run_export: Callable[..., Path], tmp_path: Path
) -> None:
    """As a run does it: found, built and trained, written down, and exported from there."""
    base, kept = tmp_path / "base", tmp_path / "run" / "model_config"
    section = ModelSection(config={"model_type": "llama", **ARCHITECTURES["llama"]})
    build_model(section, load_hf_config(section), seed=0).save_pretrained(base)
    tree = json.loads((base / "config.json").read_text()) | {"use_cache": True}
    (base / "config.json").write_text(json.dumps(tree))
    (base / "generation_config.json").write_text(json.dumps(GENERATION))
    if key != "inline":
        section = ModelSection(**{key: str(base)})
    section = section.model_copy(update={"gradient_checkpointing": "full"})
    hf_config = load_hf_config(section)
    model = build_model(section, hf_config, seed=1)
    assert model.config.use_cache is False  # training needs none
    save_configuration(section, hf_config, kept)
    output = run_export(
        model,
        weights_of(model),
        hf_config=load_hf_config(ModelSection(config=str(kept))),
        generation_config=kept / "generation_config.json",
        dtype="bfloat16",
    )
    written = json.loads((output / "config.json").read_text())
    assert written["use_cache"] is True
    assert written["dtype"] == "bfloat16"
    differ = {name for name in tree.keys() | written.keys() if tree.get(name) != written.get(name)}
    assert differ <= MAY_DIFFER
    settings = json.loads((output / "generation_config.json").read_text())
    if key == "inline":
        assert settings.get("use_cache", True) is True
    elif key == "path":
        assert settings == GENERATION
    else:  # random weights: other settings stay, and ids are those of the run's texts
        of_source = {name: value for name, value in GENERATION.items() if "token_id" not in name}
        assert settings == {**of_source, "eos_token_id": 0}


@pytest.mark.parametrize("name", ["mixtral", "gpt2"])
def test_wrong_weights_are_not_written(
    name: str, run_export: Callable[..., Path], tmp_path: Path
) -> None:
    model = build(name)
    weights = weights_of(model)
    key = next(k for k in weights if k.endswith(("down_proj.weight", "down_proj", "c_proj.weight")))
    weights[key] = weights[key] + 0.05 * torch.randn(weights[key].shape)
    with pytest.raises(ModelError, match=r"hf: not written: reloaded, its logits differ from"):
        run_export(model, weights)
    weights[key].view(-1)[0] = float("nan")
    with pytest.raises(ModelError, match="differ from the trained model's by inf"):
        run_export(model, weights)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_export_lists_the_checksums_of_its_weights(
    run_export: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = build("llama")
    output = run_export(model, weights_of(model), max_shard_size="20KB")
    files = sorted(output.glob("*.safetensors"))
    assert len(files) > 1
    num_files = len(list(output.iterdir())) - 1  # all but the list itself
    assert bigtrain(["verify", "--model", str(output)]) == 0
    assert f"{num_files} files, all checksums match" in capsys.readouterr().out
    content = bytearray(files[1].read_bytes())
    content[-9] ^= 1
    files[1].write_bytes(content)
    assert bigtrain(["verify", "--model", str(output)]) == 2
    assert f"{output} is corrupt: {files[1].name} has" in capsys.readouterr().err
    (output / "checksums.json").unlink()
    assert bigtrain(["verify", "--model", str(output)]) == 2
    assert "has no checksums.json, which `bigtrain export` writes" in capsys.readouterr().err


def test_missing_and_foreign_weights_are_not_written(run_export: Callable[..., Path]) -> None:
    model = build("llama")
    weights = weights_of(model)
    del weights["model.norm.weight"]
    weights["model.norm.bias"] = torch.zeros(32)
    with pytest.raises(ModelError, match=r"only one of .*: model\.norm\.weight, model\.norm\.bias"):
        run_export(model, weights)


def test_existing_output_is_left_alone(run_export: Callable[..., Path], tmp_path: Path) -> None:
    model = build("llama")
    output = run_export(model, weights_of(model))
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    with pytest.raises(ModelError, match=r"hf: exists already; choose another --output"):
        run_export(model, weights_of(model))
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    shutil.rmtree(output)


def test_probe_survives_its_file(tmp_path: Path) -> None:
    probe = probe_of(build("llama"))
    probe.save(tmp_path / "probe.safetensors")
    again = Probe.load(tmp_path / "probe.safetensors", "float32")
    assert torch.equal(again.input_ids, probe.input_ids)
    assert torch.equal(again.logits, probe.logits)
    assert probe.input_ids.shape == (1, 32)
    assert torch.equal(Probe.make_input(VOCAB_SIZE, 48), probe.input_ids)
    assert Probe.make_input(VOCAB_SIZE, 5).shape == (1, 5)


def test_relative_difference() -> None:
    reference = torch.tensor([1.0, 3.0])
    assert relative_difference(reference + 0.5, reference) == pytest.approx(0.5)
    assert relative_difference(torch.full((2,), float("nan")), reference) == float("inf")
    assert relative_difference(torch.ones(3), reference) == float("inf")
