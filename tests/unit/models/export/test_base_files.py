"""Files of a base that would make its export another model, or none, are refused or named first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from bigtrain.cli import main
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.errors import ModelError
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.base_record import BaseRecord, record_base
from bigtrain.models.weights.checksums import unusable_files
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.settings.run_config import ModelSection
from tests.support.datasets import write_dataset
from tests.support.run_trees import run_tree
from tests.support.tiny_bases import BASES, exported_again

REFUSED = {
    "no JSON": ("{", "cannot be read as JSON"),
    "a byte order mark": ('\ufeff{"eos_token_id": 0}', "as JSON"),
    "a list": ("[]", "must be a JSON object"),
    "an end in letters": ('{"eos_token_id": "</s>"}', "must be the id of"),
    "ends in letters": ('{"eos_token_id": [0, "1"]}', "must be the id of"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "base"
    BASES["llama"](directory)
    return directory


def linked(base: Path, place: Path) -> Path:
    """The base as the hub's cache has it: every file is a link into another folder."""
    place.mkdir()
    for file in base.iterdir():
        (place / file.name).symlink_to(os.path.relpath(file, place))
    return place


def run_of(base: Path, place: Path) -> str:
    """The settings of a run from `base` that reads data without a tokenizer."""
    data = {"path": str(write_dataset(place / "shards", vocab_size=512))}
    output = {"directory": str(place / "run"), "export": False}
    tree = run_tree(model={"path": str(base)}, data=data, output=output)
    (place / "run.yaml").write_text(yaml.safe_dump(tree))
    return str(place / "run.yaml")


def replaced(base: Path, place: Path, name: str, content: str) -> Path:
    """Return a linked base with another file of that name."""
    changed = linked(base, place)
    (changed / name).unlink(missing_ok=True)
    (changed / name).write_text(content)
    return changed


def test_check_refuses_files_that_no_export_can_hold(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = replaced(base, tmp_path / "base", "adapter_config.json", '{"peft_type": "LORA"}')
    assert main(["check", "--inputs", "--config", run_of(changed, tmp_path)]) == 2
    refused = capsys.readouterr().err
    assert "loads the adapter's own base" in refused
    assert "Traceback" not in refused
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", REFUSED)
def test_generation_settings_that_cannot_be_meant_are_refused(
    name: str, base: Path, tmp_path: Path
) -> None:
    content, said = REFUSED[name]
    changed = replaced(base, tmp_path / "base", "generation_config.json", content)
    ((fault, _),) = unusable_files(changed)
    assert said in fault


@pytest.mark.parametrize("ends", [None, 0, [0, 1]])
def test_usual_generation_settings_are_taken(ends: Any, base: Path, tmp_path: Path) -> None:
    content = json.dumps({"eos_token_id": ends})
    changed = replaced(base, tmp_path / "base", "generation_config.json", content)
    assert list(unusable_files(changed)) == []


def test_check_refuses_weights_that_are_not_the_model_s(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = linked(base, tmp_path / "base")
    stored = load_file(base / "model.safetensors")
    stored["model.layers.0.attn.masked_bias"] = torch.tensor(-1e4)
    (changed / "model.safetensors").unlink()
    save_file(stored, changed / "model.safetensors", {"format": "pt"})
    assert main(["check", "--inputs", "--config", run_of(changed, tmp_path)]) == 2
    refused = capsys.readouterr().err
    assert "model.layers.0.attn.masked_bias: the model has none" in refused
    assert "write it again without them: python -c" in refused


def test_a_missing_output_layer_is_refused_with_the_key_that_ties_it(tmp_path: Path) -> None:
    base = tmp_path / "base"
    BASES["llama-tied"](base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"set tie_word_embeddings: true in config\.json"):
        find_weights(str(base), load_hf_config(ModelSection(path=str(base))))


def test_values_that_transformers_refuses_are_no_traceback(base: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text()) | {"hidden_act": None}
    changed = replaced(base, tmp_path / "base", "config.json", json.dumps(config))
    with pytest.raises(ModelError, match=r"refuses its config\.json: .*hidden_act"):
        load_hf_config(ModelSection(path=str(changed)))


def test_what_is_not_copied_or_rounded_is_named(base: Path, tmp_path: Path) -> None:
    changed = linked(base, tmp_path / "base")
    fine = {n: t.double() * (1 + 2**-40) for n, t in load_file(base / "model.safetensors").items()}
    (changed / "model.safetensors").unlink()
    save_file(fine, changed / "model.safetensors", {"format": "pt"})
    (tmp_path / "outer").mkdir()
    (changed / "folder").symlink_to("../outer")
    (changed / "notes.txt").symlink_to("nowhere")
    os.mkfifo(changed / "pipe")
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer([["def read(self): return 0"]], 300).save(tokenizer)
    output, notes = exported_again(changed, tokenizer=tokenizer, place=tmp_path)
    text = "\n".join(notes)
    assert "folder: not copied: a link to a directory" in text
    assert "notes.txt: not copied: a link to nothing" in text
    assert "pipe: not copied: no regular file" in text
    assert "tensors of float64 hold numbers of float32" in text
    assert {"folder", "notes.txt", "pipe"}.isdisjoint(path.name for path in output.iterdir())
    stored = load_file(output / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float64}


def test_frozen_weights_keep_the_base_s_dtype_whatever_is_asked(base: Path, tmp_path: Path) -> None:
    changed = linked(base, tmp_path / "base")
    stored = load_file(base / "model.safetensors")
    name, other = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    stored = {n: t.bfloat16() if n in (name, other) else t for n, t in stored.items()}
    (changed / "model.safetensors").unlink()
    save_file(stored, changed / "model.safetensors", {"format": "pt"})
    hf_config = load_hf_config(ModelSection(path=str(changed)))
    record_base(str(changed), find_weights(str(changed), hf_config), tmp_path / "record")
    masters = {n: t.float() for n, t in stored.items()}
    weights_by_name, _ = BaseRecord(tmp_path / "record").like_base(
        masters, masters, keep_dtypes=False, frozen=[name]
    )
    assert weights_by_name[name].dtype == torch.bfloat16
    assert weights_by_name[other].dtype == torch.float32
