"""Trained weights are read into each process's part: nobody ever holds the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Probe
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import ARCHITECTURES, SEED, llama, run_config
from tests.support.worlds import run_world

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]

WORKER = Path(__file__).with_name("import_worker.py")
EXPORTER = Path(__file__).with_name("export_worker.py")
CASES: dict[str, tuple[dict[str, int], str]] = {
    "zero3-dp2": ({}, "zero3"),
    "tp2": ({"tensor": 2}, "zero0"),
    "pp2": ({"pipeline": 2}, "zero0"),
}


@pytest.fixture(autouse=True)
def freed_memory_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let malloc keep no blocks that were freed, so that a process has what it holds."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))


def test_memory_is_a_shard_and_less_than_two_tensors(dataset: Path, tmp_path: Path) -> None:
    """94 million parameters: 374 MB in float32, of which the embedding has 65 MB."""
    config = llama(
        vocab_size=16000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    section = ModelSection(config=config)
    model = build_model(section, load_hf_config(section), seed=SEED)
    model.save_pretrained(tmp_path / "hf", max_shard_size="150MB")
    largest = max(p.numel() for p in model.parameters()) * 4
    whole = sum(p.numel() for p in model.parameters()) * 4
    ids = Probe.make_input(16000, 16)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
    Probe(ids, logits, "float32").save(tmp_path / "probe.safetensors")
    del model
    cases = {
        name: {
            "config": run_config(
                dataset, {"path": str(tmp_path / "hf")}, micro_batch_size=1, parallel=degrees
            ),
            "deepspeed_config": engine,
            **({"save_to": str(tmp_path / "checkpoint")} if name == "zero3-dp2" else {}),
        }
        for name, (degrees, engine) in CASES.items()
    }
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run_world(2, [str(WORKER), str(tmp_path / "cases.json"), str(tmp_path / "seen")])
    for rank in range(2):
        for name, seen in json.loads((tmp_path / f"seen.{rank}").read_text()).items():
            mb = {key: round(value / 1e6) for key, value in seen.items()}
            print(f"{name} rank {rank} MB: {mb}, largest {largest / 1e6:.0f}")
            assert seen["shard"] < 0.8 * whole, name  # both stages have a tied embedding
            assert seen["built"] <= seen["shard"] + 1.2 * largest, (name, mb)
            if "zero3" in name:
                # The masters are there by now, and so is what computes with them.
                assert seen["read"] <= 1.2 * largest, (name, mb)
            else:
                assert seen["built"] + seen["read"] <= seen["shard"] + 1.2 * largest, (name, mb)
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(tmp_path / "tokenizer")
    run_world(1, [str(EXPORTER), str(tmp_path), "150MB"])
    risen = json.loads((tmp_path / "risen").read_text())
    print(f"export MB: {risen / 1e6:.0f}")
    assert risen <= 150e6 + largest
    for path in (tmp_path / "hf").glob("*.safetensors*"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


EXPERTS: list[tuple[int, dict[str, int], str]] = [
    (2, {}, "zero3"),
    (4, {"tensor": 2}, "zero1"),
    (4, {"pipeline": 2}, "pipeline_zero1"),
]
"""Processes, degrees beside 2 for experts, DeepSpeed's JSON."""


def test_no_process_holds_more_than_its_experts_and_a_layer(dataset: Path, tmp_path: Path) -> None:
    """Separate experts in the files, which transformers makes stacks of: 254 MB in float32, of
    which a layer has 63 MB."""
    config = ARCHITECTURES["qwen3_moe"] | {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_experts": 16,
        "moe_intermediate_size": 640,
    }
    section = ModelSection(config=config)
    model = build_model(section, load_hf_config(section), seed=SEED)
    model.save_pretrained(tmp_path / "hf", max_shard_size="50MB")
    layer = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    whole = sum(p.numel() for p in model.parameters()) * 4
    del model
    cases: dict[int, dict[str, Any]] = {}
    for size, degrees, engine in EXPERTS:
        name = "-".join([*(f"{axis}{n}" for axis, n in degrees.items()), engine])
        run = run_config(
            dataset,
            {"path": str(tmp_path / "hf")},
            micro_batch_size=1,
            parallel={"expert": 2, **degrees},
        )
        cases.setdefault(size, {})[name] = {"config": run, "deepspeed_config": engine}
    for size, of_size in cases.items():
        file = tmp_path / f"cases{size}.json"
        file.write_text(json.dumps(of_size))
        run_world(size, [str(WORKER), str(file), str(tmp_path / f"seen{size}")])
        for rank in range(size):
            sizes_by_case = json.loads((tmp_path / f"seen{size}.{rank}").read_text())
            assert sizes_by_case.keys() == of_size.keys()
            for name, seen in sizes_by_case.items():
                mb = {key: round(value / 1e6) for key, value in seen.items()}
                print(f"{name} rank {rank} MB: {mb}, a layer {layer / 1e6:.0f}")
                # A stage has half of the layers.
                assert seen["shard"] < (0.3 if "pipeline" in name else 0.51) * whole, (name, mb)
                assert seen["built"] <= seen["shard"] + 1.2 * layer, (name, mb)
                assert seen["read"] <= layer, (name, mb)
