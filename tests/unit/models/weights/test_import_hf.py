"""Finding trained weights: as transformers loads them, or refused with file, tensor and shapes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from bigtrain.errors import ModelError
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.models.weights.lazy_tensors import narrowed
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import ARCHITECTURES, llama

MODELS: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    "untied": llama(tie_word_embeddings=False),
    "mixtral": {
        "model_type": "mixtral",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
    },
}


def save(name: str, directory: Path, **how: Any) -> PreTrainedModel:
    section = ModelSection(config=MODELS[name])
    model = build_model(section, load_hf_config(section), seed=5)
    model.save_pretrained(directory, **how)
    return model


def assert_equal_to_transformers(source: str, plain: PreTrainedModel) -> None:
    weights = find_weights(source, load_hf_config(ModelSection(path=source)))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(weights.tensors[name].read(), tensor), name
        if tensor.ndim:
            part = tuple(max(1, n // 3) for n in tensor.shape)
            corner = tuple(n - p for n, p in zip(tensor.shape, part, strict=True))
            out = torch.full(part, torch.nan, dtype=torch.float64)
            weights.fill(name, corner, out)
            assert torch.equal(out, narrowed(tensor, corner, part).double()), name


@pytest.mark.parametrize(
    ("name", "shard_size"), [("llama", "5GB"), *((name, "20KB") for name in MODELS)]
)
def test_weights_are_those_that_transformers_loads(
    name: str, shard_size: str, tmp_path: Path
) -> None:
    save(name, tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    assert_equal_to_transformers(str(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path))


def test_names_without_the_models_prefix_are_found(tmp_path: Path) -> None:
    """As in the files that openai-community/gpt2 has."""
    plain = save("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    bare = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    save_file(bare, file, metadata={"format": "pt"})
    assert_equal_to_transformers(str(tmp_path), plain)


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight", "both"])
def test_tied_weights_are_found_under_either_name(kept: str, tmp_path: Path) -> None:
    plain = save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    tied = weights.pop("model.embed_tokens.weight")
    names = ("lm_head.weight", "model.embed_tokens.weight") if kept == "both" else (kept,)
    save_file(weights | {name: tied.clone() for name in names}, file, metadata={"format": "pt"})
    assert_equal_to_transformers(str(tmp_path), plain)


def test_pickled_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    pickled = tmp_path / "pytorch_model.bin"
    torch.save(load_file(file), pickled)
    section = ModelSection(path=str(tmp_path))
    find_weights(str(tmp_path), load_hf_config(section))  # the safetensors beside it
    file.unlink()
    text = refusal(tmp_path)
    assert f"{pickled} is a pickle, which can run code when it is read -> convert it" in text
    # The command, as a user types it.
    [command] = [word for word in shlex.split(text) if word.startswith("from transformers ")]
    monkeypatch.chdir(tmp_path)
    exec(command)
    again = find_weights(str(tmp_path / "converted"), load_hf_config(section))
    assert_equal_to_transformers(str(tmp_path / "converted"), plain)
    assert again.tensors.keys() == plain.state_dict().keys()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt"])
def test_an_index_that_names_a_pickle_is_refused(name: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    torch.save({}, tmp_path / name)
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{tmp_path / name} is a pickle" in refusal(tmp_path)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n"
    (tmp_path / "mine.py").write_text(code)
    tree: dict[str, Any] = {
        "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "m.M"}
    }
    for model_type in ("mine", "vit"):
        (tmp_path / "config.json").write_text(json.dumps({**tree, "model_type": model_type}))
        with pytest.raises(ModelError, match=r"custom code|code of its own"):
            load_hf_config(ModelSection(path=str(tmp_path)))
    assert not (tmp_path / "ran").exists()


def test_a_name_is_found_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "0" * 40
    place = tmp_path / "models--somebody--tiny"
    plain = save("llama", place / "snapshots" / revision, max_shard_size="20KB")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    weights = find_weights("somebody/tiny", plain.config)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(weights.tensors[name].read(), tensor), name


def refusal(directory: Path, **overrides: Any) -> str:
    section = ModelSection(path=str(directory), overrides=overrides)
    with pytest.raises(ModelError) as raised:
        find_weights(str(directory), load_hf_config(section))
    assert str(raised.value).startswith(f"model.path = {str(directory)!r}: ")
    return str(raised.value)


def test_another_shape_is_refused_with_both(tmp_path: Path) -> None:
    save("llama", tmp_path)
    text = refusal(tmp_path, intermediate_size=48)
    name = "model.layers.0.mlp.down_proj.weight"
    file = tmp_path / "model.safetensors"
    assert f"{file}: {name} has shape [32, 64], the model's {name} [32, 48]" in text
    assert "and 4 more" in text


def test_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    text = refusal(tmp_path, moe_intermediate_size=24)
    assert re.search(
        r"experts\.gate_up_proj has shape \[4, 32, 32\], the model's .* \[4, 48, 32\]", text
    )


@pytest.mark.parametrize("change", ["missing", "unknown", "dtype", "tied"])
def test_other_tensors_are_refused_by_name(change: str, tmp_path: Path) -> None:
    save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.self_attn.q_proj.weight"
    if change == "missing":
        del weights[name]
        said = f"no tensor there is the model's {name} [32, 32]"
    elif change == "unknown":
        weights["model.extra.weight"] = torch.zeros(3)
        said = f"{file}: model.extra.weight: the model has none"
    elif change == "dtype":
        weights[name] = weights[name].to(torch.int8)
        said = f"{file}: {name} is int8, the model's {name} needs float64, float32"
    else:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
        said = (
            f"{file}: model.embed_tokens.weight are tied in this configuration and hold different"
        )
    save_file(weights, file, metadata={"format": "pt"})
    assert said in refusal(tmp_path)


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_tensor_in_two_shards_is_refused_with_both(tmp_path: Path, *, is_indexed: bool) -> None:
    """Transformers takes the one that it reads last, whichever the index names."""
    save("llama", tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    name = "model.norm.weight"
    right = tmp_path / tree["weight_map"][name]
    wrong = next(path for path in sorted(tmp_path.glob("*.safetensors")) if path != right)
    save_file(load_file(wrong) | {name: torch.zeros(32)}, wrong, metadata={"format": "pt"})
    if not is_indexed:
        tree["weight_map"][name] = wrong.name
        index.write_text(json.dumps(tree))
    text = refusal(tmp_path)
    assert f"two files hold the tensor {name}, " in text
    assert str(right) in text
    assert str(wrong) in text


def test_a_second_set_of_weights_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    save("llama", tmp_path / "sharded", max_shard_size="20KB")
    index = (tmp_path / "sharded" / "model.safetensors.index.json").read_text()
    for path in (tmp_path / "sharded").glob("model*"):
        shutil.copy(path, tmp_path)
    assert "-> remove model.safetensors, or the index and its files" in refusal(tmp_path)
    # An index that names that file only, as some libraries write it, says the same.
    names = dict.fromkeys(json.loads(index)["weight_map"], "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert find_weights(str(tmp_path), load_hf_config(ModelSection(path=str(tmp_path)))).tensors


def test_missing_and_corrupt_files_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path / "sharded", max_shard_size="20KB")
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    shard = sorted(set(index["weight_map"].values()))[1]
    shutil.copytree(tmp_path / "sharded", tmp_path / "short")
    (tmp_path / "sharded" / shard).unlink()
    assert f"names the file {shard}, which is missing" in refusal(tmp_path / "sharded")
    file = tmp_path / "short" / shard
    file.write_bytes(file.read_bytes()[:-10])
    assert f"{file}: cannot be read: " in refusal(tmp_path / "short")
    for path in (tmp_path / "short").glob("*.safetensors*"):
        path.unlink()
    assert "holds none of model.safetensors, " in refusal(tmp_path / "short")
