"""Exports that differ between devices, those that differ everywhere, and those that transformers
cannot read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.errors import ModelError, OutputError
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export import verified
from bigtrain.models.export.verified import (
    Destination,
    Probe,
    compare_logits,
    export_model,
    why_not_reloaded,
    writing_directory,
)
from bigtrain.models.weights.older_readers import rewrite_config
from bigtrain.settings.run_config import ModelSection
from tests.unit.models.equivalence.test_thresholds import deepseek_v4
from tools.tiny_models import tiny_config

OTHER_DEVICE = "meta"
"""Takes the place of a GPU: the model below does not look at its inputs."""


class Model:
    """A model that chooses among equal scores: it returns `by_device`'s logits."""

    def __init__(self, by_device: dict[str, torch.Tensor]) -> None:
        self._by_device, self._device = by_device, "cpu"

    def eval(self) -> Model:
        return self

    def to(self, device: str) -> Model:
        self._device = device
        return self

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert input_ids.device.type == self._device
        return SimpleNamespace(logits=self._by_device[self._device])


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    monkeypatch.setattr(verified, "_GPU", OTHER_DEVICE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    logits = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    return Probe(torch.arange(8)[None], logits, "float32")


def test_agreement_on_the_cpu_needs_no_note(probe: Probe) -> None:
    model = Model({"cpu": probe.logits + 1e-6})
    assert compare_logits(model, probe, Path("out"), "float32") == []


def test_agreement_on_the_gpu_alone_is_noted(probe: Probe) -> None:
    model = Model({"cpu": probe.logits.flip(1), OTHER_DEVICE: probe.logits})
    (note,) = compare_logits(model, probe, Path("out"), "float32")
    assert "on a CPU, logits differ from the trained model's on its GPU by 1." in note


@pytest.mark.parametrize("has_gpu", [True, False])
def test_disagreement_is_refused(
    has_gpu: bool, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    model = Model({"cpu": probe.logits.flip(1), OTHER_DEVICE: probe.logits.flip(1)})
    with pytest.raises(ModelError, match="out: not written: reloaded, its logits differ"):
        compare_logits(model, probe, Path("out"), "float32")


def test_a_model_read_in_turn_stays_on_the_cpu(probe: Probe) -> None:
    model = Model({"cpu": probe.logits.flip(1), OTHER_DEVICE: probe.logits})
    with pytest.raises(ModelError, match="not written"):
        compare_logits(model, probe, Path("out"), "float32", on_gpu=False)


@pytest.mark.parametrize("name", ["llama", "llama4", "gemma3"])
def test_an_export_that_transformers_reads(name: str) -> None:
    assert why_not_reloaded(tiny_config(name)) is None


def test_a_language_model_whose_configuration_is_no_model_of_its_own() -> None:
    error = why_not_reloaded(tiny_config("mllama"))
    assert error is not None
    assert "Unrecognized configuration class" in error


def test_the_part_that_is_a_language_model_is_completed_by_its_own_keys(tmp_path: Path) -> None:
    config = tiny_config("llama4")
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    rewrite_config(tmp_path / "config.json")
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "llama4_text"


def test_several_language_models_are_refused(tmp_path: Path) -> None:
    tiny_config("musicgen").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds several language models"):
        load_hf_config(ModelSection(config=str(tmp_path)))


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_runs_own_export_is_replaced_whole(tmp_path: Path) -> None:
    """And what an export that was killed has left goes; that of another directory stays."""
    output = tmp_path / "hf"
    for name in ("hf", ".hf.unfinished-1", ".hf2.unfinished-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").touch()
    with writing_directory(output, replace=True) as directory:
        directory.mkdir()
        (directory / "new").touch()
        assert names_in(output) == ["old"]
    assert "new" in names_in(output)
    assert "old" not in names_in(output)
    assert names_in(tmp_path) == [".hf2.unfinished-1", "hf"]
    with pytest.raises(ModelError, match="exists already"):
        with writing_directory(output, replace=False):
            pass


def test_an_export_that_cannot_get_its_name_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "hf"
    output.mkdir()
    (output / "old").touch()
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if (self / "new").exists():
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)

    def export() -> None:
        with writing_directory(output, replace=True) as directory:
            directory.mkdir()
            (directory / "new").touch()

    with pytest.raises(OutputError, match="No space left"):
        export()
    assert names_in(tmp_path) == ["hf"]
    assert names_in(output) == ["old"]


def test_weights_that_no_probe_reaches_are_compared(tmp_path: Path) -> None:
    """DeepSeek-V4's heavy compressor begins at 64 tokens, and a probe has 32."""
    config = deepseek_v4(4, 64, 512, 128)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(tokenizer)
    ids = Probe.make_input(128, 64)
    with torch.no_grad():
        probe = Probe(ids, model(input_ids=ids, use_cache=False).logits, "float32")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights |= {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    name = "model.layers.1.self_attn.compressor.kv_proj.weight"

    def export(output: Path) -> None:
        export_model(weights, config, Destination(output, tokenizer, dtype=None), probe=probe)

    export(tmp_path / "right")
    write = verified.write_model

    def write_another(tensors: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return write({**tensors, name: tensors[name] + 1}, *args, **kwargs)

    with (
        patch.object(verified, "write_model", write_another),
        pytest.raises(ModelError, match=f"not written: reloaded, {name} differs"),
    ):
        export(tmp_path / "wrong")


def test_a_model_that_cannot_be_built_is_for_the_plan_to_report() -> None:
    assert why_not_reloaded(LlamaConfig(hidden_act="none")) is None
