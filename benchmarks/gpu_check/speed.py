"""Parts on speed: each measures one contender of one subject, so that results are there after each.

The measuring is `benchmarks/gpu_step.py`'s: bigtrain as `train.py` runs it, a bare PyTorch loop, HF
Trainer + DeepSpeed, of the same model on the same batches. Weights are made up, so no network is
needed. `page.py` joins the parts to the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.results import Function, Part, Setup
from benchmarks.gpu_check.stand_ins import quick_compilation
from benchmarks.gpu_step import measure
from benchmarks.support.points import Point, llama
from bigtrain.planner.flops import peak_flops_per_second

TRACE = "profile.json.gz"
CONFIGS = Path(__file__).resolve().parents[2] / "bigtrain" / "recipes" / "configs"
PEERS = ("bare", "hf")
"""Contenders that need not fit into the device's memory."""
CONTENDERS: dict[str, dict[str, str]] = {
    "default": {"kernels": "auto", "compile": "auto"},
    "bare": {},
    "hf": {},
    "compiled": {"compile": "on"},
    "liger": {"kernels": "liger"},
    "float8": {"compile": "on", "float8": "tensorwise"},
}
"""What differs between the points of contenders; all but `PEERS` are bigtrain."""
_NEEDED = {"liger": "liger_kernel", "float8": "torchao"}
_TINY_MOE = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 512,
    "intermediate_size": 64, "num_hidden_layers": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A model and a batch that contenders train, and what others published of it.

    title: of its table. contenders: in the order in which they run. settings: of the point.
    config: a file of bigtrain/recipes/configs, with `changes`, instead of a size. published: a
    trainer's rate on one H100, by its unit.
    """

    title: str
    contenders: tuple[str, ...]
    settings: dict[str, Any]
    config: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)
    source: str = ""


_AUTOMODEL = "NeMo AutoModel, docs.nvidia.com/nemo/automodel/latest/performance-summary.html"
# zero3 with gradients in bfloat16 leaves most memory: 16 bytes a parameter. ZeRO 1 makes a float32
# copy of all gradients in its step.
_LEAST_MEMORY = {"checkpointing": "full", "engine": "zero3", "gradient_dtype": "bfloat16"}
SUBJECTS: dict[str, Subject] = {
    # The recipe llama3_1b on 8 GPUs: 2,097,152 tokens a step, in samples of 4,096.
    "1b": Subject(
        "Llama 3.2 1B, 262,144 tokens a step",
        ("default", "bare", "hf", "compiled", "liger", "float8"),
        {"size": "1b", "micro_batch_size": 4, "accumulation": 16},
    ),
    "lora": Subject(
        "LoRA of Llama 3.1 8B, rank 16 in all linear layers, 32,768 tokens a step",
        ("default", "bare", "hf"),
        {
            "size": "8b", "micro_batch_size": 2, "accumulation": 4, "sequence_length": 4096,
            "adapters": {"rank": 16, "alpha": 32, "targets": "all-linear"},
        },
        config="meta-llama--Llama-3.1-8B",
        published={"tokens_per_s": 12473, "tflops": 402},
        source=_AUTOMODEL,
    ),
    "moe": Subject(
        "6 of the 48 layers of Qwen3-30B-A3B, 32,768 tokens a step",
        ("default", "bare", "hf"),
        {"size": "8b", "micro_batch_size": 2, "accumulation": 4, "sequence_length": 4096,
         **_LEAST_MEMORY},
        config="Qwen--Qwen3-30B-A3B-Base",
        changes={"num_hidden_layers": 6},
        published={"tflops": 277},
        source=f"{_AUTOMODEL}, all layers on 8",
    ),
    "8b": Subject(
        "Llama 3.1 8B with tied embeddings, 4,096 tokens a step",
        ("default", "bare", "hf"),
        {"size": "8b", "micro_batch_size": 1, "accumulation": 1, **_LEAST_MEMORY},
    ),
}  # fmt: skip


def contend(subject_name: str, contender: str, setup: Setup, part: Part) -> None:
    """Measure tokens/s, TFLOP/s, utilization and peak memory of one contender. A peer that runs out
    of memory is skipped by that reason."""
    missing = _NEEDED.get(contender)
    if missing is not None and find_spec(missing) is None:
        part.skip(f"{missing} is not installed")
        return
    if contender == "liger" and not setup.on_gpu:
        part.skip("needs CUDA")
        return
    directory = setup.directory / "run"
    directory.mkdir()
    try:
        with quick_compilation(setup.tiny):
            row = measure(point_of(subject_name, contender, setup), directory)
    except torch.OutOfMemoryError:
        if contender not in PEERS:
            raise
        part.skip("out of memory")
        return
    finally:
        # Gigabytes of a run's data are of no use to the next.
        shutil.rmtree(directory, ignore_errors=True)
    part.figures |= {
        "subject": subject_name,
        "contender": contender,
        "tokens_per_s": row["tokens_per_second"],
        "tflops": _tflops(row, setup),
        "mfu": row["model_flops_utilization"],
        "peak_gib": row["peak_gib"],
        **beside(row),
    }


def trace(setup: Setup, part: Part) -> None:
    """Record the kernels of one pass and update of bigtrain's default at the first subject; the
    trace goes next to the results."""
    point = replace(point_of("1b", "default", setup), accumulation=1, profile=True)
    directory = setup.directory / "run"
    directory.mkdir()
    with quick_compilation(setup.tiny):
        row = measure(point, directory)
    part.check(bool(row["top_ops"]), "the trace has no operations")
    part.figures["top_ops"] = row["top_ops"]
    with (
        (directory / "trace.json").open("rb") as source,
        gzip.open(setup.directory / TRACE, "wb", compresslevel=6) as file,
    ):
        shutil.copyfileobj(source, file)
    shutil.rmtree(directory, ignore_errors=True)


def point_of(subject_name: str, contender: str, setup: Setup) -> Point:
    """Return what `contender` trains; a tiny model on few tokens in tests."""
    subject = SUBJECTS[subject_name]
    settings = {"rounds": 2, "steps_per_round": 1, **subject.settings}
    config = None
    if subject.config is not None:
        config = json.loads((CONFIGS / f"{subject.config}.json").read_text()) | subject.changes
        # The random tokens have no special ones.
        config |= {"bos_token_id": None, "eos_token_id": None}
    if setup.tiny:
        settings |= {"size": "tiny", "rounds": 1, "steps_per_round": 2, "sequence_length": 32}
        settings |= {"micro_batch_size": 2, "accumulation": min(2, settings["accumulation"])}
        if config is not None:
            config = _tiny(config)
    return Point(
        zero_stage=1,
        dtype="bf16",
        threads=torch.get_num_threads(),
        quick_weights=True,
        contenders=(contender if contender in PEERS else "bigtrain",),
        # The peers' loops compute the loss plainly; bigtrain chooses.
        loss="plain" if contender in PEERS else "auto",
        model_config=config,
        **{**settings, **CONTENDERS[contender]},
    )


def _tiny(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of the same architecture, as small as that of the tests."""
    if config["model_type"] == "llama":
        shape = {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        }  # fmt: skip
        return llama(shape, 32) | {"tie_word_embeddings": config["tie_word_embeddings"]}
    return config | _TINY_MOE


def _tflops(row: dict[str, Any], setup: Setup) -> float | None:
    """Return the model's TFLOP/s, whose formula the utilization has; None if it is not known."""
    utilization = row["model_flops_utilization"]
    if utilization is None or not setup.on_gpu:
        return None
    peak = peak_flops_per_second(torch.cuda.get_device_name(0), "bfloat16")
    return None if peak is None else float(utilization * peak / 1e12)


def beside(row: dict[str, Any]) -> dict[str, Any]:
    """Return the planner's predictions of bigtrain's own rows, and their ratios to the measured
    ones.

    On a CPU the peak is the process's, which does not depend on its tensors only.
    """
    if "not_predicted" in row:
        return {"not_predicted": row["not_predicted"]}
    predictions = {}
    for predicted, name, measured in (
        ("predicted_gib", "planner_gib", "peak_gib"),
        ("predicted_tokens_per_second", "planner_tokens_per_s", "tokens_per_second"),
    ):
        if predicted in row:
            predictions[name] = row[predicted]
            predictions[f"{name}_over_measured"] = row[predicted] / row[measured]
    return predictions


def parts_of(subject_name: str) -> dict[str, Function]:
    """Return the parts of a subject by name, in order."""
    return {
        f"speed-{subject_name}-{contender}": partial(contend, subject_name, contender)
        for contender in SUBJECTS[subject_name].contenders
    }
