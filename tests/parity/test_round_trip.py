"""From a Hugging Face directory to a checkpoint at step 0 and back: the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.engine.checkpoint.lazy import open_weights
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import ARCHITECTURES, SEED, llama, run_config, train_cases

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

# Model, dtype of its files, largest file, dtype of the run, parallel degrees, DeepSpeed JSON.
TRIPS: dict[str, tuple[dict[str, Any], str, str, str, dict[str, int], str]] = {
    "tied": (ARCHITECTURES["llama"], "float32", "5GB", "float32", {}, "zero3"),
    "untied": (llama(tie_word_embeddings=False), "float32", "20KB", "bfloat16", {}, "zero1"),
    "gpt2": (ARCHITECTURES["gpt2"], "bfloat16", "5GB", "float32", {}, "zero3"),
    "experts": (ARCHITECTURES["qwen3_moe"], "bfloat16", "20KB", "bfloat16", {}, "zero3"),
    "divided": (ARCHITECTURES["qwen3_moe"], "bfloat16", "5GB", "float32", {"expert": 2}, "zero3"),
    "tensor": (ARCHITECTURES["qwen3_moe"], "float32", "5GB", "float32", {"tensor": 2}, "zero1"),
    "stages": (llama(num_hidden_layers=4), "float16", "20KB", "float32", {"pipeline": 2}, "zero0"),
}


SLOW = ["untied", "gpt2", "experts"]


@pytest.fixture(scope="module")
def trips(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [name for name in TRIPS if name not in SLOW]
    return begin(names, dataset, tmp_path_factory.mktemp("trips"))


@pytest.fixture(scope="module")
def slow_trips(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin(SLOW, dataset, tmp_path_factory.mktemp("slow_trips"))


def begin(names: list[str], dataset: Path, root: Path) -> Path:
    """Write below `root` the models, and the checkpoints of runs that have just begun."""
    cases = {}
    for name in names:
        model, stored, size, dtype, degrees, engine = TRIPS[name]
        section = ModelSection(config=model)
        built = build_model(section, load_hf_config(section), seed=SEED)
        built.config.use_cache = True  # as every export has it
        built.to(getattr(torch, stored)).save_pretrained(root / name, max_shard_size=size)
        config = run_config(
            dataset,
            {"path": str(root / name)},
            micro_batch_size=4,
            precision={"dtype": dtype},
            parallel=degrees,
        )
        cases[name] = {
            "config": config,
            "deepspeed_config": engine,
            "last_step": 0,
            "save_at": 0,
            "save_to": str(root / f"{name}-checkpoint"),
        }
    train_cases(2, cases, root)
    return root


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TRIPS]
)
def test_the_files_are_the_same(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    trips: Path = request.getfixturevalue("slow_trips" if name in SLOW else "trips")
    _, stored, size, *_ = TRIPS[name]
    source, output = trips / name, tmp_path / "again"
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(tmp_path / "tokenizer")
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = Probe.make_input(97, 16)
    with torch.no_grad():
        probe = Probe(ids, plain(input_ids=ids).logits, "float32")
    export_model(
        open_weights(trips / f"{name}-checkpoint" / "tensors"),
        load_hf_config(ModelSection(path=str(source))),
        Destination(output, tmp_path / "tokenizer", stored, max_shard_size=size),
        probe=probe,
    )
    files = sorted(path.name for path in source.glob("*.safetensors*"))
    assert len(files) == 1 if size == "5GB" else len(files) > 3
    assert tensors_of(output) == tensors_of(source)
    if name == "experts":
        # transformers keeps all experts of a layer in one file, as large as it gets.
        return
    assert files == sorted(path.name for path in output.glob("*.safetensors*"))
    for file in files:
        assert (output / file).read_bytes() == (source / file).read_bytes(), file
    # Without a record of the base, what readers of transformers 4 need is added.
    written, base = (json.loads((d / "config.json").read_text()) for d in (output, source))
    assert {key: written[key] for key in base} == base


def tensors_of(directory: Path) -> dict[str, tuple[str, torch.Size, bytes]]:
    """Dtype, shape and bytes of every tensor, by name."""
    tensors_by_name = {}
    for path in directory.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
            tensors_by_name[name] = (str(tensor.dtype), tensor.shape, data)
    return tensors_by_name
