"""A model that is imported and exported without a step is the same model, file by file."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.errors import ModelError
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.base_record import _set_nested_dtypes, record_base
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.models.generation import Sampling, generate
from bigtrain.models.left_overs import drop_quantization
from bigtrain.models.weights.checksums import CHECKSUMS, corrupt_weights
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.models.weights.older_readers import legacy_rope, rewrite_config
from bigtrain.settings.hf_config_keys import inspect_configuration, key_table
from bigtrain.settings.run_config import ModelSection
from tests.support.tiny_bases import (
    BASES,
    assert_same_tensors,
    exported_again,
    files_of,
    tensors_of,
)

WRITTEN = {"README.md", CHECKSUMS}
"""Files that every export has."""

RoundTrip = Callable[..., tuple[Path, list[str]]]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([["def read(self): return 0", "naive text 12"]], 300).save(directory)
    return directory


@pytest.fixture
def round_trip(tokenizer: Path, tmp_path: Path) -> RoundTrip:
    """Import a base, change nothing, export; returns the export and its notes."""
    return partial(exported_again, tokenizer=tokenizer, place=tmp_path)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a tiny Llama."""
    BASES["llama"](tmp_path / "base")
    return tmp_path / "base"


def configured(base: Path, **more: Any) -> dict[str, Any]:
    """Add keys to the configuration of `base`; return it."""
    config = json.loads((base / "config.json").read_text()) | more
    (base / "config.json").write_text(json.dumps(config))
    return config


def bare_names(stored: Tensors) -> Tensors:
    bare = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    return bare | {"h.0.attn.bias": torch.ones(24, 24).tril().view(1, 1, 24, 24)}


STORED: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "tensors that are not loaded": (
        "deepseek_v3",
        lambda t: t | {"model.layers.61.norm.weight": torch.randn(3, 5).bfloat16()},
    ),
    "a copy of tied weights": (
        "llama-tied",
        lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()},
    ),
    "several dtypes": (
        "llama",
        lambda t: {n: x.bfloat16() if "mlp" in n else x.half() if "norm" in n else x
                   for n, x in t.items()},
    ),
    "names without the prefix of the class": ("gpt2", bare_names),
}  # fmt: skip


@pytest.mark.parametrize("kind", STORED)
def test_tensors_are_stored_as_the_base_stores_them(
    kind: str, round_trip: RoundTrip, tmp_path: Path
) -> None:
    name, change = STORED[kind]
    BASES[name](tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    output, notes = round_trip(tmp_path / "base")
    assert_same_tensors(tmp_path / "base", output)
    assert any("model.layers.61.norm.weight" in note for note in notes) == (name == "deepseek_v3")


def added_keys(written: dict[str, Any], config: dict[str, Any], prefix: str = "") -> set[str]:
    """Keys that only `written` has, nested ones too; all others are equal."""
    added = {prefix + key for key in written.keys() - config.keys()}
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            added |= added_keys(written[key], value, f"{prefix}{key}.")
        else:
            assert written[key] == value, prefix + key
    return added


FAST = ("llama-tied", "gpt2", "mixtral", "gpt_oss", "gemma3-vision")
"""One of each kind: tied, transposed, stacked experts, their biases, several models in one."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in BASES],
)
def test_every_tensor_file_and_key_comes_out_as_it_went_in(
    name: str, round_trip: RoundTrip, tmp_path: Path, tokenizer: Path
) -> None:
    base = tmp_path / "base"
    BASES[name](base)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(base)
    extra = {
        "preprocessor_config.json": '{"do_resize":true}',
        "LICENSE": "Licence",
        "assets/notes.txt": "Notes.",
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": '{"eos_token_id": [7, 9], "_from_model_config": false}',
    }
    for place, text in extra.items():
        (base / place).parent.mkdir(exist_ok=True)
        (base / place).write_text(text)
    config = configured(
        base, a_key_of_nobody={"x": [1]}, use_cache=False, transformers_version="4.40.0"
    )
    output, notes = round_trip(base)
    assert_same_tensors(base, output)
    before, after = files_of(base), files_of(output)
    changed = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)} - WRITTEN
    listed = {name for name in changed if any(name in note for note in notes)}
    assert changed == listed
    # The base's tokenizer names a class that only transformers 5 has.
    assert changed <= {"config.json", "tokenizer_config.json"}
    written = json.loads(after["config.json"])
    added = added_keys(written, config)
    assert all(any(key in note for note in notes) for key in added)
    assert all(note in after["README.md"].decode() for note in notes)
    # Both loaded by transformers: the same logits, to the bit.
    ids = torch.arange(24).reshape(1, 24)
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)(input_ids=ids).logits
            for place in (output, base)
        )
    assert torch.equal(ours, theirs)


def test_what_must_change_is_listed(round_trip: RoundTrip, base: Path) -> None:
    auto_map = {
        "AutoConfig": "configuration_own.Own",
        "AutoModel": "hub/name--modeling.Own",
        "AutoModelForCausalLM": "modeling_absent.Own",
    }
    configured(base, quantization_config={"quant_method": "fp8"}, auto_map=auto_map)
    (base / "configuration_own.py").write_text("raise SystemExit('never run')\n")
    (base / "README.md").write_text("The base's card.\n")
    (base / "pytorch_model.bin").write_bytes(b"x")
    output, notes = round_trip(base, dtype="bfloat16", rms_norm_eps=1e-3)
    written = json.loads((output / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["rms_norm_eps"] == 1e-3
    assert written["dtype"] == "bfloat16"
    assert set(written["auto_map"]) == {"AutoConfig", "AutoModel"}
    assert (output / "configuration_own.py").is_file()
    assert (output / "BASE_README.md").read_text() == "The base's card.\n"
    expected = "quantization_config rms_norm_eps dtype AutoModelForCausalLM BASE_READ pytorch_model"
    for part in expected.split():
        assert any(part in note for note in notes), part
    assert {tensor.dtype for tensor in tensors_of(output).values()} == {torch.bfloat16}


PACKED = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "pack-quantized"}


@pytest.mark.parametrize(
    "keys",
    [
        ("quantization_config", "compression_config"),
        pytest.param(("quantization",), marks=pytest.mark.slow),
        pytest.param(("quant_config", "sparsity_config"), marks=pytest.mark.slow),
    ],
)
def test_keys_on_quantized_tensors_are_not_exported(
    keys: tuple[str, ...], round_trip: RoundTrip, base: Path
) -> None:
    configured(base, **dict.fromkeys(keys, PACKED))
    output, notes = round_trip(base)
    written = json.loads((output / "config.json").read_text())
    assert written.keys().isdisjoint(keys)
    [note] = [note for note in notes if "removed" in note]
    assert all(key in note for key in keys)
    assert_same_tensors(base, output)


def test_keys_on_quantized_tensors_of_a_part_are_not_exported() -> None:
    values = {
        "text_config": {"quantization_config": PACKED, "inner": {"compression_config": PACKED}},
        "compression_config": PACKED,
        "hidden_size": 64,
    }
    names = ["compression_config", "text_config.quantization_config"]
    assert drop_quantization(values) == [*names, "text_config.inner.compression_config"]
    assert values == {"text_config": {"inner": {}}, "hidden_size": 64}


def test_a_new_model_has_no_keys_on_quantized_tensors(base: Path) -> None:
    """As where `model.config` is the folder of a quantized model."""
    configured(base, compression_config=PACKED, quantization={"bits": 4})
    hf_config = load_hf_config(ModelSection(config=str(base)))
    assert hf_config.to_dict().keys().isdisjoint(("compression_config", "quantization"))
    notes = rewrite_config(base / "config.json")
    written = json.loads((base / "config.json").read_text())
    assert written.keys().isdisjoint(("compression_config", "quantization"))
    assert "compression_config, quantization removed" in notes[0]


def test_files_on_other_tensors_are_not_exported(round_trip: RoundTrip, base: Path) -> None:
    named = (
        *("hf_quant_config.json", "quantize_config.json", "original/params.json"),
        *("adapter_config.json", "consolidated.00.pth", "original/consolidated.00.pth"),
        "coreml/model.mlpackage/Manifest.json",
    )
    silent = (
        *("model.safetensors.index.fp8.json", "pytorch_model.bin.index.json"),
        "flax_model.msgpack.index.json",
    )
    for name in (*named, *silent, "special_settings.json"):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text("{}")
    output, notes = round_trip(base)
    assert (output / "special_settings.json").is_file()
    assert not any((output / name).exists() for name in (*named, *silent))
    assert {note.partition(": not copied: ")[0] for note in notes if ": not copied: " in note} == {
        *named
    }


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"tokenizer_class": "TokenizersBackend", "backend": "tokenizers"}, "backend, tokenizer_c"),
        ({"extra_special_tokens": ["<pad>"]}, "additional_special_tokens, extra_special_tokens"),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "unknown": 1}, None),
    ],
)
def test_a_base_tokenizer_that_transformers_4_refuses_is_rewritten(
    fields: dict[str, Any], changed: str | None, round_trip: RoundTrip, tokenizer: Path, base: Path
) -> None:
    for file in tokenizer.glob("*.json"):
        (base / file.name).write_bytes(file.read_bytes())
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids"]}
    (base / "tokenizer_config.json").write_text(json.dumps(own | fields))
    output, notes = round_trip(base, tokenizer=base)
    written = json.loads((output / "tokenizer_config.json").read_text())
    if changed is None:
        assert written == own | fields
        return
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(written.get("extra_special_tokens"), list)
    [note] = [note for note in notes if note.startswith("tokenizer_config.json")]
    assert f"written for transformers 4: {changed}" in note


def test_dtypes_of_parts_are_those_of_the_export() -> None:
    values = {"dtype": "float32", "text_config": {"model_type": "llama", "dtype": "float16"}}
    assert _set_nested_dtypes(values, "bfloat16", "") == [
        "text_config.dtype = 'bfloat16' (base: 'float16')"
    ]
    assert values["text_config"] == {"model_type": "llama", "dtype": "bfloat16"}


def test_changed_rotary_parameters_are_written_in_both_forms(
    round_trip: RoundTrip, base: Path
) -> None:
    scaling = {"rope_type": "linear", "factor": 3.0, "rope_theta": 31.0}
    output, _ = round_trip(base, rope_parameters=scaling)
    written = json.loads((output / "config.json").read_text())
    assert written["rope_theta"] == 31.0
    assert written["rope_scaling"] == {"rope_type": "linear", "factor": 3.0}
    assert load_hf_config(ModelSection(path=str(output))).rope_parameters == scaling


def test_checksums_cover_every_file_that_decides_the_numbers(
    round_trip: RoundTrip, base: Path
) -> None:
    output, _ = round_trip(base)
    listed = json.loads((output / CHECKSUMS).read_text())
    assert listed.keys() == files_of(output).keys() - WRITTEN | {"model.safetensors"}
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        if not (output / name).is_file():
            continue
        whole = (output / name).read_bytes()
        (output / name).write_bytes(whole.replace(b"1", b"2", 1))
        assert name in "".join(corrupt_weights(output)[1])
        (output / name).write_bytes(whole)
    assert corrupt_weights(output)[1] == []


def test_numbers_that_are_not_finite_are_refused_by_name(base: Path) -> None:
    stored = load_file(base / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.weight"][3, 2] = float("nan")
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    section = ModelSection(path=str(base))
    with pytest.raises(
        ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers that are not"
    ):
        build_model(section, load_hf_config(section), seed=0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_scaling": None, "rope_theta": 5e5},
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
                },
            },
            {
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_theta": 2e6,
                "rope_local_base_freq": 3e4,
            },
        ),
        (
            {
                "model_type": "gpt_neox",
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 7e3, "partial_rotary_factor": 0.5,
                },
            },
            {"rope_scaling": None, "rotary_emb_base": 7e3, "rotary_pct": 0.5},
        ),
        # transformers 5 writes infinity so, and its classes do not read it.
        (
            {
                "model_type": "bamba",
                "time_step_limit": [0.0, {"__float__": "Infinity"}],
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 7e3, "partial_rotary_factor": 0.5,
                },
            },
            {"rope_scaling": None, "rope_theta": 7e3},  # the share is a constant of Bamba
        ),
        # Both of its kinds of layers have one base there, so two have no older form.
        (
            {
                "model_type": "olmo3",
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            None,
        ),
    ],
)  # fmt: skip
def test_rotary_keys_of_transformers_4(values: dict[str, Any], expected: object) -> None:
    assert legacy_rope(values) == expected


def test_expert_widths_that_grouped_products_do_not_take_are_exported(
    tokenizer: Path, tmp_path: Path
) -> None:
    """Plain transformers multiplies them as groups of 16 bytes, and fails."""
    section = ModelSection(
        config={
            "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 32, "head_dim": 8,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 13,
        }
    )  # fmt: skip
    hf_config = load_hf_config(section)
    model = build_model(section, hf_config, seed=0).eval()
    ids = Probe.make_input(512, 16)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    export_model(
        weights, hf_config, Destination(tmp_path / "hf", tokenizer, "float32"),
        probe=Probe(ids, logits, "float32"),
    )  # fmt: skip
    sampling = Sampling(temperature=0, top_p=1.0, seed=0)
    text = generate(str(tmp_path / "hf"), "def", max_new_tokens=2, sampling=sampling)
    assert text.startswith("def")


@pytest.mark.parametrize("model_type", ["llava", "t5"])
def test_models_without_a_causal_class_are_refused_in_one_sentence(
    model_type: str, tmp_path: Path
) -> None:
    """By the settings alone, as `check` does, and where the configuration is loaded."""
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path))
    problems = inspect_configuration(section)[1]
    # The settings have a table of one release, and leave others to where the model is loaded.
    if transformers.__version__ == key_table()["transformers_version"]:
        (problem,) = problems
        assert problem.key == "model.path"
        assert f"model_type {model_type!r}" in problem.rule
        assert "AutoModelForCausalLM has no class for it" in problem.rule
    with pytest.raises(ModelError, match="has no class for it"):
        load_hf_config(section)


def test_weights_that_are_quantized_are_refused_with_the_method(base: Path) -> None:
    stored = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    stored[name] = stored[name].to(torch.float8_e4m3fn)
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    configured(base, quantization_config={"quant_method": "fp8"})
    hf_config = load_hf_config(ModelSection(path=str(base)))
    with pytest.raises(ModelError, match=r"quant_method = 'fp8': quantized weights are not"):
        find_weights(str(base), hf_config)


def test_a_base_of_the_hub_is_recorded_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of a snapshot is a link there, and there is no network."""
    made, cache = tmp_path / "made", tmp_path / "hub" / "models--someone--tiny"
    BASES["llama"](made)
    (made / "processor_config.json").write_text("{}")
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = cache / "snapshots" / revision
    for folder in (cache / "blobs", cache / "refs", snapshot):
        folder.mkdir(parents=True)
    (cache / "refs" / "main").write_text(revision)
    for path in made.iterdir():
        path.rename(cache / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    for module in (huggingface_hub.constants, transformers.utils.hub.constants):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "hub"))
    weights = find_weights("someone/tiny", load_hf_config(ModelSection(path="someone/tiny")))
    record_base("someone/tiny", weights, tmp_path / "record")
    names = {path.name for path in (tmp_path / "record" / "files").iterdir()}
    assert names == {"config.json", "generation_config.json", "processor_config.json"}
    assert not any(path.is_symlink() for path in (tmp_path / "record" / "files").iterdir())
