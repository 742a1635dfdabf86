"""LoRA adapters at every topology, against plain peft and torch.optim.AdamW in one process."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from bigtrain.engine.checkpoint.io import read_full
from bigtrain.engine.checkpoint.lazy import open_weights
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.adapters import adapter_state, merged_weights
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.models.weights.lazy_tensors import LazyTensor
from bigtrain.run.context import step_seed
from bigtrain.settings.run_config import AdaptersSection, ModelSection
from bigtrain.settings.topology import Coordinates
from tests.parity.conftest import (
    ARCHITECTURES,
    COMPOSITE,
    SEED,
    SHARED_MOE,
    STEPS,
    SavedModels,
    each_case,
    grid,
    llama,
    run_config,
    train_cases,
)
from tests.parity.plain import Spread, Training, orders, plain_training, root_mean_square
from tests.support.comparison import assert_same_steps

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1200),
    # peft 0.21 asks transformers 5.23 by an old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

LOSS = 1e-5
NORM = 1e-4
WEIGHTS = 1e-5
SPREADS = 3.0
"""bfloat16: how many times as far from the mean of the plain runs as the farthest of them."""
CUT_SPREADS = 2.0
"""The same with tensor parallelism, whose plain runs add up the halves of other divisions: runs
that add up other samples first round each sample alike, and are as near to each other as no other
division is to them. With 6 other seeds the engine was at most 1.3 times as far as the farthest."""
WORLD = 32
"""Cases in one world of processes."""
LORA: dict[str, dict[str, Any]] = {
    "llama": {"rank": 4, "alpha": 16, "targets": "all-linear"},
    "gpt2": {"rank": 3, "alpha": 6, "targets": ["c_attn", "transformer.h.?.mlp.*"], "rslora": True},
    "odd": {"rank": 4, "alpha": 16, "targets": "all-linear"},
    "phi3": {"rank": 4, "alpha": 16, "targets": "all-linear"},
    "first": {"rank": 4, "alpha": 16, "targets": ["model.layers.0.*"]},
    "qwen3_moe": {
        "rank": 2,
        "alpha": 8,
        "targets": ["*_proj"],
        "target_parameters": ["gate_up_proj", "down_proj"],
    },
    "dense_of_moe": {"rank": 4, "alpha": 16, "targets": "all-linear"},
    "mlp_of_moe": {"rank": 2, "alpha": 8, "targets": "mlp"},
    "odd_moe": {
        "rank": 2,
        "alpha": 8,
        "targets": ["o_proj"],
        "target_parameters": ["gate_up_proj", "down_proj"],
    },
    "attention": {"rank": 4, "alpha": 16, "targets": "attention"},
    "shared_moe": {"rank": 2, "alpha": 8, "targets": ["attention", "mlp"]},
}
SINGLE = ("mlp", "mlp.shared_experts")
"""The modules whose layers are no experts' in a mixture of these: of a dense layer, and beside."""
PEFT: dict[str, LoraConfig] = {
    "llama": LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    "gpt2": LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["c_attn", "mlp.c_fc", "mlp.c_proj"],
        fan_in_fan_out=True,
        use_rslora=True,
        task_type="CAUSAL_LM",
    ),
}
PEFT["qwen3_moe"] = LoraConfig(
    r=2,
    lora_alpha=8,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    task_type="CAUSAL_LM",
)
PEFT["dense_of_moe"] = replace(PEFT["qwen3_moe"], r=4, lora_alpha=16, target_parameters=None)
PEFT["mlp_of_moe"] = replace(PEFT["qwen3_moe"], target_modules=[])
PEFT["odd_moe"] = replace(PEFT["qwen3_moe"], target_modules=["o_proj"])
PEFT["attention"] = replace(PEFT["llama"], target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
# Targets of these names are the stacks to peft, but not parameters.
PEFT["shared_moe"] = replace(
    PEFT["qwen3_moe"],
    target_parameters=[
        *(f"{owner}.{end}_proj.weight" for owner in SINGLE for end in ("gate", "up", "down")),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    ],
)
PEFT |= {"odd": PEFT["llama"], "phi3": PEFT["llama"]}
# Half of its adapters are in a vision tower, and get no gradient from text.
LORA["composite"] = {"rank": 4, "alpha": 16, "targets": ["*_proj"]}
PEFT["composite"] = replace(PEFT["llama"], target_modules=r".*_proj")
PEFT["first"] = replace(PEFT["llama"], target_modules=r"model\.layers\.0\..*_proj")
MODELS: dict[str, dict[str, Any]] = {
    # Nothing divides: uneven widths, biases, key-value heads that ranks share.
    "odd": llama(intermediate_size=63, attention_bias=True, tie_word_embeddings=False),
    # Queries, keys and values in one layer, and both halves of the MLP.
    "phi3": llama(model_type="phi3", pad_token_id=0, tie_word_embeddings=False),
    # One pipeline stage has nothing to train.
    "first": llama(),
    "dense_of_moe": ARCHITECTURES["qwen3_moe"],
    "mlp_of_moe": ARCHITECTURES["qwen3_moe"],
    # Parts of 16 and of 8 elements.
    "odd_moe": ARCHITECTURES["qwen3_moe"] | {"moe_intermediate_size": 24},
    "attention": llama(),
    "shared_moe": SHARED_MOE,
    "composite": COMPOSITE,
}
"""Beside those of `hf_directories`."""


@dataclass(frozen=True)
class Case:
    world_size: int
    engine: str
    model: str = "llama"
    accumulation: int = 2
    degrees: dict[str, int] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    slow: bool = False

    @property
    def name(self) -> str:
        degrees = "-".join(f"{axis}{size}" for axis, size in self.degrees.items())
        changed = [entry for section in self.sections.values() for entry in section.items()]
        changes = "-".join(f"{k}={len(v) if isinstance(v, list) else v}" for k, v in changed)
        return (
            f"{self.model}-{self.engine}-of-{self.world_size}-{degrees or 'data'}"
            f"-accumulation{self.accumulation}{changes and '-' + changes}"
        )

    @property
    def micro_batch_size(self) -> int:
        inner = 1
        for size in self.degrees.values():
            inner *= size
        return 8 // (self.accumulation * (self.world_size // inner))


RECOMPUTE: dict[str, dict[str, Any]] = {"model": {"gradient_checkpointing": "full"}}
CHUNKS: dict[str, dict[str, Any]] = {"model": {"loss": "chunked", "loss_chunk_tokens": 7}}
# With the usual eps of 1e-8, AdamW makes large updates from rounding errors where gradients are
# nearly zero: plain runs that add up a step's samples in other orders part by 1.3e-5 in a single
# weight then, by 1.8e-7 with this one.
DOCUMENTS: dict[str, dict[str, Any]] = {
    "data": {"document_boundaries": "isolate", "mask_end_of_document": False},
    "optimizer": {"eps": 1e-6},
}
TILES: dict[str, dict[str, Any]] = {"model": {"tiled_mlp": 5}}
TILES_ANEW = {"model": TILES["model"] | RECOMPUTE["model"]}
BFLOAT16: dict[str, dict[str, Any]] = {"precision": {"dtype": "bfloat16"}}

DROPOUT: dict[str, dict[str, Any]] = {"adapters": {"dropout": 0.3}}

DORA: dict[str, dict[str, Any]] = {"adapters": {"dora": True}}
SAVED: dict[str, dict[str, Any]] = {"adapters": {"modules_to_save": ["lm_head", "model.norm"]}}
# Copies that are cut by rows of the vocabulary, by inputs with a bias, by outputs, and not at all.
COPIES = ["model.embed_tokens", "lm_head", "model.layers.0.self_attn.o_proj"]
COPIES += ["model.layers.1.mlp.up_proj", "model.norm"]
LEFT = ["q_proj", "k_proj", "v_proj", "gate_proj", "down_proj"]
COPIED: dict[str, dict[str, Any]] = {"adapters": {"modules_to_save": COPIES, "targets": LEFT}}
BOTH: dict[str, dict[str, Any]] = {"adapters": {**COPIED["adapters"], "dora": True}}
ALL: dict[str, dict[str, Any]] = {"adapters": {**BOTH["adapters"], "dropout": 0.3}}

CASES = [
    Case(1, "zero3", accumulation=1, sections=DROPOUT | RECOMPUTE, slow=True),
    Case(1, "zero0", slow=True),
    Case(1, "zero2", accumulation=4, sections=RECOMPUTE, slow=True),
    Case(2, "zero3", slow=True),
    Case(2, "zero3", sections=TILES_ANEW, slow=True),
    *(
        Case(2, engine, model, 2, degrees, kind | TILES, slow=True)
        for engine, model, degrees, kind in (
            ("zero0", "llama", {}, {}),
            ("zero3", "gpt2", {}, {}),
            ("zero3", "odd", {}, DORA),
            ("zero3_offload", "odd", {}, BOTH),
            ("zero3", "dense_of_moe", {}, {}),
            ("zero1", "dense_of_moe", {"tensor": 2}, {}),
            ("zero1", "llama", {"sequence": 2}, {}),
            ("zero1", "llama", {"pipeline": 2}, {}),
            ("zero1", "odd", {"tensor": 2}, BOTH),
            ("zero3", "phi3", {"tensor": 2}, DORA),
        )
    ),
    Case(2, "zero3", "gpt2", accumulation=4, sections=RECOMPUTE, slow=True),
    Case(2, "zero0", degrees={"sequence": 2}, slow=True),
    Case(2, "zero1", degrees={"pipeline": 2}),
    Case(2, "zero1", "first", degrees={"pipeline": 2}, slow=True),
    Case(2, "zero1", "odd", accumulation=1, degrees={"tensor": 2}, sections=ALL),
    Case(2, "zero3", "odd", accumulation=1, degrees={"tensor": 2}, sections=ALL, slow=True),
    Case(1, "zero3", "odd", accumulation=1, sections=ALL | RECOMPUTE, slow=True),
    Case(2, "zero3", "phi3", degrees={"tensor": 2}, sections=DORA, slow=True),
    Case(2, "zero0", "llama", 1, {"tensor": 2}, DROPOUT | RECOMPUTE),
    Case(2, "zero2", "qwen3_moe", slow=True),
    Case(2, "zero1", "qwen3_moe", degrees={"pipeline": 2}, slow=True),
    Case(2, "zero3", "qwen3_moe", sections=RECOMPUTE, slow=True),
    Case(2, "zero1", "odd_moe", degrees={"tensor": 2}, slow=True),
    Case(2, "zero3", "mlp_of_moe", slow=True),
    Case(2, "zero3", "shared_moe", degrees={"tensor": 2}),
    *(
        Case(2, engine, "shared_moe", degrees=degrees, slow=True)
        for engine, degrees in (
            ("zero0", {}),
            ("zero1", {"tensor": 2}),
            ("zero1", {"pipeline": 2}),
            ("zero3", {}),
        )
    ),
    Case(2, "zero2", "mlp_of_moe", slow=True),
    Case(2, "zero3", "attention", degrees={"tensor": 2}, slow=True),
    *(
        Case(size, engine, "qwen3_moe", accumulation, degrees, sections, slow=True)
        for engine in ("zero0", "zero1", "zero2", "zero2_offload")
        for size, accumulation, degrees, sections in (
            (1, 1, {}, RECOMPUTE),
            (2, 4, {}, CHUNKS),
            (2, 1, {"sequence": 2}, {}),
        )
    ),
    *(
        Case(2, engine, model, 2, degrees, CHUNKS, slow=True)
        for engine, degrees, model in (
            ("zero1", {"pipeline": 2}, "qwen3_moe"),
            ("zero1", {"pipeline": 2}, "dense_of_moe"),
            ("zero1", {"tensor": 2}, "dense_of_moe"),
            ("zero3", {}, "dense_of_moe"),
            ("zero3", {"tensor": 2}, "dense_of_moe"),
        )
    ),
    Case(2, "zero3", "odd", sections=DORA | RECOMPUTE, slow=True),
    *(
        Case(size, engine, model, accumulation, degrees, kind | sections, slow=True)
        for engine in ("zero3", "zero3_offload")
        for kind, model in ((DORA, "gpt2"), (BOTH, "odd"), ({}, "qwen3_moe"), ({}, "mlp_of_moe"))
        for size, accumulation, degrees, sections in (
            (1, 1, {}, RECOMPUTE),
            (2, 4, {}, CHUNKS),
            (2, 2, {"sequence": 2}, {}),
        )
    ),
    *(
        Case(size, engine, model, accumulation, degrees, kind | sections, slow=True)
        for engine in ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
        for kind, model in ((DORA, "phi3"), (BOTH, "odd"), ({}, "odd_moe"), ({}, "mlp_of_moe"))
        for size, accumulation, degrees, sections in (
            (2, 1, {"tensor": 2}, RECOMPUTE),
            (2, 4, {"tensor": 2}, CHUNKS),
            (4, 2, {"tensor": 2}, {}),
        )
    ),
    *(
        Case(4, engine, model, 2, degrees, kind | CHUNKS, slow=True)
        for kind, model in ((DORA, "odd"), (COPIED, "odd"), ({}, "odd_moe"))
        for engine, degrees in (
            ("zero1", {"tensor": 4}),
            ("zero3", {"tensor": 4}),
            ("zero1", {"tensor": 2, "pipeline": 2}),
            ("zero3", {"tensor": 2, "sequence": 2}),
        )
    ),
    Case(2, "zero3", "odd", sections=SAVED | CHUNKS),
    *(
        Case(size, engine, model, accumulation, degrees, kind | sections, slow=True)
        for engine in ("zero0", "zero1", "zero2", "zero2_offload")
        for kind, model in ((DORA, "gpt2"), (DORA, "odd"), (SAVED, "odd"))
        for size, accumulation, degrees, sections in (
            (1, 1, {}, RECOMPUTE),
            (2, 4, {}, CHUNKS),
            (2, 2, {"sequence": 2}, {}),
        )
    ),
    *(
        Case(2, engine, "odd", 2, degrees, kind | CHUNKS, slow=True)
        for engine, degrees, kind in (
            ("zero1", {"pipeline": 2}, DORA),
            ("zero1", {"pipeline": 2}, SAVED),
            ("zero3_offload", {}, SAVED),
            ("zero3", {"sequence": 2}, SAVED),
        )
    ),
    *(
        Case(size, engine, model, accumulation, {"pipeline": 2}, sections, slow=True)
        for engine in ("zero0", "zero1")
        for size, model, accumulation, sections in (
            (2, "gpt2", 4, {}),
            (2, "first", 1, CHUNKS),
            (2, "llama", 4, RECOMPUTE),
            (2, "llama", 2, DOCUMENTS),
            (4, "odd", 2, {}),
        )
    ),
    *(
        Case(size, engine, model, accumulation, {"tensor": tensor}, sections, slow=True)
        for engine in ("zero0", "zero1", "zero2", "zero3")
        for size, tensor, model, accumulation, sections in (
            (2, 2, "llama", 1, CHUNKS),
            (2, 2, "odd", 1, DROPOUT),
            (2, 2, "phi3", 1, DROPOUT),
            (2, 2, "llama", 2, DOCUMENTS),
            (4, 4, "odd", 4, RECOMPUTE),
            (4, 2, "phi3", 2, {}),
        )
    ),
    *(
        Case(4, engine, "odd", 2, degrees, RECOMPUTE, slow=True)
        for engine, degrees in (
            ("zero0", {"tensor": 2, "pipeline": 2}),
            ("zero1", {"tensor": 2, "pipeline": 2}),
            ("zero3", {"tensor": 2, "sequence": 2}),
            ("zero2_offload", {"tensor": 2}),
        )
    ),
    *(
        Case(size, f"zero{stage}", model, accumulation, slow=True)
        for stage in range(4)
        for size, accumulation in ((1, 1), (1, 4), (2, 1), (2, 4))
        for model in ("llama", "gpt2")
    ),
    *(
        Case(2, engine, "llama", 2, degrees, sections, slow=True)
        for engine in ("zero0", "zero3", "zero2_offload", "zero3_offload")
        for degrees, sections in (
            ({}, CHUNKS),
            ({}, DOCUMENTS),
            ({"sequence": 2}, DOCUMENTS),
            ({"sequence": 2}, RECOMPUTE),
        )
    ),
]
CASES += [
    case
    for case in (Case(size, e, "odd", a, d, slow=True) for size, e, a, d in grid())
    if case.name not in {known.name for known in CASES}
]


def config_of(case: Case, data: Path, base: Path, **sections: Any) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        {"path": str(base)},
        micro_batch_size=case.micro_batch_size,
        adapters=LORA[case.model],
        optimizer={"lr": 1e-2, "clip_norm": 0.2},
    )
    if case.degrees:
        config["parallel"] = case.degrees
    for name, section in (case.sections | sections).items():
        config[name] = config.get(name, {}) | section
    return config


def seed_of(name: str) -> int:
    """Of a layer's initial values, as docs/howto/adapters.md gives it."""
    digest = hashlib.sha256(f"{SEED}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def adapted(model: Any, case: Case) -> Any:
    """Plain peft's model, with each layer's initial values from a stream of its own; with dropout,
    each pass is a step and has its stream."""
    asked = case.sections.get("adapters", {})
    dropout = asked.get("dropout", 0.0)
    config = replace(
        PEFT[case.model],
        target_modules=asked.get("targets", PEFT[case.model].target_modules),
        lora_dropout=dropout,
        use_dora=asked.get("dora", False),
        modules_to_save=asked.get("modules_to_save"),
    )
    made = get_peft_model(model, config, autocast_adapter_dtype=False)
    if dropout:
        steps = count()
        place = Coordinates(0, 0, 0, 0)

        def seed_step(*_: object) -> None:
            torch.manual_seed(step_seed(SEED, next(steps), place))

        made.register_forward_pre_hook(seed_step)
    for layer, module in made.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            torch.manual_seed(seed_of(layer))
            module.float().reset_lora_parameters("default", True)
    return made.to(next(model.parameters()).dtype)


def plain_run(case: Case, data: Path, base: Path, **options: Any) -> Training:
    training = plain_training(
        data,
        base,
        config_of(case, data, base),
        adapt=lambda model: adapted(model, case),
        frozen=r"(?!.*\.(lora_|modules_to_save\.))",
        **options,
    )
    weights = {n.removeprefix("base_model.model."): w for n, w in training.weights.items()}
    return Training(training.losses, training.norms, weights)


Results = Callable[[Case], dict[str, Any]]


def results_of(cases: list[Case], data: Path, bases: dict[str, Path], root: Path) -> Results:
    """Of a case, when it is first asked for: then `WORLD` of them train in one world of processes,
    so that what ends one of them ends no more than these, and one test waits for no others."""
    results_by_case: dict[str, dict[str, Any]] = {}

    def of(case: Case) -> dict[str, Any]:
        if case.name not in results_by_case:
            kind = case.world_size, case.slow
            alike = [each for each in cases if (each.world_size, each.slow) == kind]
            start = alike.index(case) // WORLD * WORLD
            results_by_case.update(run_cases(alike[start : start + WORLD], data, bases, root))
        return results_by_case[case.name]

    return of


def run_cases(
    cases: list[Case], data: Path, bases: dict[str, Path], root: Path
) -> dict[str, dict[str, Any]]:
    place = root / cases[0].name
    place.mkdir()
    asked = {
        case.name: {
            "config": config_of(case, data, bases[case.model]),
            "deepspeed_config": case.engine,
            "weights": {str(step): str(place / f"{case.name}-{step}.pt") for step in (0, STEPS)},
        }
        for case in cases
    }
    results_by_case = {}
    for name, result in train_cases(cases[0].world_size, asked, place).items():
        weights = [torch.load(asked[name]["weights"][str(step)]) for step in (0, STEPS)]
        results_by_case[name] = result | {"begun": weights[0], "trained": weights[1]}
    return results_by_case


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return SavedModels(ARCHITECTURES | MODELS, tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def results(
    dataset: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    return results_of(CASES, dataset, bases, tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def composite_results(
    dataset: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    return results_of(COMPOSITE_CASES, dataset, bases, tmp_path_factory.mktemp("composites"))


@each_case(CASES)
def test_equals_plain_peft(
    case: Case,
    dataset: Path,
    bases: dict[str, Path],
    results: Results,
) -> None:
    result = results(case)
    base = bases[case.model]
    expected = plain_run(case, dataset, base)
    initial = plain_run(case, dataset, base, num_steps=0)
    assert result["accumulation"] == case.accumulation
    assert_same_steps(result, expected, loss=LOSS, norm=NORM)
    files = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    for name, weight in result["begun"].items():
        if name in initial.weights:
            assert torch.equal(weight, initial.weights[name]), name
    for name, weight in result["trained"].items():
        if name in expected.weights:
            assert torch.allclose(weight, expected.weights[name], rtol=0, atol=WEIGHTS), name
        else:
            own = re.sub(r"(\.base_layer)+\.|\.original_module\.", ".", name)
            assert torch.equal(weight, files[own]), name
    assert expected.weights.keys() <= result["trained"].keys()


DECAYING = {"weight_decay": 0.3}
COMPOSITE_CASES = [
    Case(2, engine, "composite", 2, degrees, {"optimizer": DECAYING})
    for engine, degrees in (("zero0", {}), ("zero1", {}), ("zero3", {}), ("zero2", {"tensor": 2}))
]


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPOSITE_CASES, ids=lambda case: case.name)
def test_adapters_without_a_gradient_leave_as_they_came(
    case: Case, dataset: Path, bases: dict[str, Path], composite_results: Results
) -> None:
    """Equal to plain PyTorch, whose optimizers skip what has no gradient, decay included."""
    test_equals_plain_peft(case, dataset, bases, composite_results)
    result = composite_results(case)
    outside = [name for name in result["begun"] if "vision_tower" in name and "lora_" in name]
    assert len(outside) >= 8
    for name in outside:
        assert torch.equal(result["trained"][name], result["begun"][name]), name


POINTS = [
    Case(1, "zero0"),
    Case(2, "zero3"),
    Case(2, "zero1", degrees={"tensor": 2}),
    Case(2, "zero1", degrees={"pipeline": 2}),
]
OTHER_KINDS = [
    [
        Case(1, "zero0", model, sections=kind),
        Case(2, "zero3", model, sections=kind),
        Case(2, "zero3", model, degrees={"tensor": 2}, sections=kind),
        Case(2, "zero1", model, degrees={"pipeline": 2}, sections=kind),
    ]
    for model, kind in (("odd", BOTH), ("odd_moe", {}))
]
LARGE = [
    Case(4, "zero3", degrees={"tensor": 2}),
    Case(4, "zero1", degrees={"tensor": 2, "pipeline": 2}),
    Case(4, "zero2"),
]


def resumed(wrote: list[Case], read: list[Case], data: Path, base: Path, root: Path) -> None:
    """Below `root` the checkpoint of each of `wrote` after three steps, and what each of `read`
    saves as soon as it has restored that."""

    def train(asked: dict[str, tuple[Case, dict[str, Any]]]) -> None:
        for size in sorted({case.world_size for case, _ in asked.values()}):
            cases = {
                name: {
                    "config": config_of(case, data, base),
                    "deepspeed_config": case.engine,
                    "last_step": 3,
                    **steps,
                }
                for name, (case, steps) in asked.items()
                if case.world_size == size
            }
            train_cases(size, cases, root)

    train({w.name: (w, {"save_at": 3, "save_to": str(root / w.name)}) for w in wrote})
    train(
        {
            f"{w.name}-{r.name}": (
                r,
                {
                    "first_step": 3,
                    "restore_from": str(root / w.name),
                    "save_again_to": str(root / f"{w.name}-{r.name}"),
                },
            )
            for w in wrote
            for r in read
        }
    )


@pytest.fixture(scope="module")
def checkpoints(
    dataset: Path, hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    resumed(POINTS, POINTS, dataset, hf_directories["llama"], root)
    return root


@pytest.fixture(scope="module")
def large_checkpoints(
    dataset: Path, hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    root = tmp_path_factory.mktemp("large")
    resumed(POINTS, LARGE, dataset, hf_directories["llama"], root)
    resumed(LARGE, POINTS, dataset, hf_directories["llama"], root)
    return root


def merged(place: Path, base: Path, case: Case) -> bytes:
    """A file of the base's weights with the adapters of a checkpoint added."""
    config = load_hf_config(ModelSection(path=str(base)))
    asked = LORA[case.model] | case.sections.get("adapters", {})
    weights_by_name = merged_weights(
        open_weights(place / "tensors"),
        AdaptersSection.model_validate(asked),
        find_weights(str(base), config),
        config,
    )
    assert len(weights_by_name) > 2 * 7
    return save(
        {n: t.read() if isinstance(t, LazyTensor) else t for n, t in weights_by_name.items()}
    )


def compare_checkpoints(places: list[Path], base: Path, case: Case) -> None:
    """Bit-identical states; files of peft's, and merged ones, with the same bytes."""
    first, again = (read_full(place / "tensors") for place in places)
    assert first.keys() == again.keys()
    assert {key.partition("/")[0] for key in first} == {"master", "exp_avg", "exp_avg_sq"}
    assert all(".lora_" in key or ".modules_to_save." in key for key in first)
    for key, tensor in first.items():
        assert tensor.any(), key
        assert torch.equal(again[key], tensor), key
    files = [save(adapter_state(open_weights(p / "tensors"), "float32")) for p in places]
    assert files[0] == files[1]
    assert merged(places[0], base, case) == merged(places[1], base, case)


@pytest.mark.slow
@pytest.mark.parametrize("read", POINTS, ids=lambda case: case.name)
@pytest.mark.parametrize("wrote", POINTS, ids=lambda case: case.name)
def test_goes_on_bit_for_bit(
    wrote: Case, read: Case, checkpoints: Path, hf_directories: dict[str, Path]
) -> None:
    places = [checkpoints / wrote.name, checkpoints / f"{wrote.name}-{read.name}"]
    compare_checkpoints(places, hf_directories["llama"], read)


@pytest.mark.slow
@pytest.mark.parametrize("points", OTHER_KINDS, ids=lambda points: points[0].model)
def test_goes_on_bit_for_bit_with_other_kinds(
    points: list[Case], dataset: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[points[0].model]
    resumed(points, points, dataset, base, tmp_path)
    for wrote, read in product(points, points):
        places = [tmp_path / wrote.name, tmp_path / f"{wrote.name}-{read.name}"]
        compare_checkpoints(places, base, read)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrote", "read"),
    [*product(POINTS, LARGE), *product(LARGE, POINTS)],
    ids=lambda case: case.name,
)
def test_goes_on_bit_for_bit_in_larger_worlds(
    wrote: Case, read: Case, large_checkpoints: Path, hf_directories: dict[str, Path]
) -> None:
    places = [large_checkpoints / wrote.name, large_checkpoints / f"{wrote.name}-{read.name}"]
    compare_checkpoints(places, hf_directories["llama"], read)


IN_16_BIT = [
    Case(size, engine, sections=BFLOAT16)
    for engine, size in (("zero0", 1), ("zero1", 2), ("zero2", 2), ("zero3", 2))
]
IN_16_BIT += [
    Case(2, engine, degrees=degrees, sections=BFLOAT16)
    for engine, degrees in (
        ("zero1", {"pipeline": 2}),
        ("zero1", {"tensor": 2}),
        ("zero3", {"tensor": 2}),
    )
]


@pytest.fixture(scope="module")
def in_16_bit(
    dataset: Path, hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    return results_of(IN_16_BIT, dataset, hf_directories, tmp_path_factory.mktemp("16-bit"))


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_16_BIT, ids=lambda case: case.name)
def test_16_bit_is_among_plain_runs(
    case: Case,
    dataset: Path,
    hf_directories: dict[str, Path],
    in_16_bit: Results,
) -> None:
    result = in_16_bit(case)
    sum_dtype = torch.bfloat16 if case.engine == "zero0" else torch.float32
    is_cut = case.degrees.get("tensor") == 2
    runs = [
        plain_run(
            case,
            dataset,
            hf_directories["llama"],
            chunks=chunks,
            dtype=torch.bfloat16,
            sum_dtype=sum_dtype,
            halves=is_cut,
            halves_seed=seed or None,
        )
        for seed, chunks in enumerate(orders())
    ]
    spread, spreads = Spread.of(runs), CUT_SPREADS if is_cut else SPREADS
    losses = [abs(a - b) for a, b in zip(result["losses"], spread.losses, strict=True)]
    norms = [abs(a - b) / b for a, b in zip(result["norms"], spread.norms, strict=True)]
    assert max(losses) <= spreads * spread.loss
    assert max(norms) <= spreads * spread.norm < 0.1
    assert root_mean_square(result["trained"], spread.weights) <= spreads * spread.weight


def test_reference_learns_and_clips(dataset: Path, hf_directories: dict[str, Path]) -> None:
    for case in (Case(1, "zero0"), Case(1, "zero0", "gpt2")):
        training = plain_run(case, dataset, hf_directories[case.model])
        assert training.losses[-1] < training.losses[0] - 0.03
        assert max(training.norms) > 0.2
        moved = [w.abs().max() for n, w in training.weights.items() if ".lora_B." in n]
        assert min(moved) > 1e-3
