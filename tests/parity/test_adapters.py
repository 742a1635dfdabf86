"""LoRA adapters at every topology, against plain peft and torch.optim.AdamW in one process."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from bigtrain.engine.checkpoint.lazy import open_weights
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.adapters import adapter_state, merged_weights
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.models.weights.lazy_tensors import LazyTensor
from bigtrain.run.context import step_seed
from bigtrain.settings.run_config import AdaptersSection, ModelSection
from bigtrain.settings.topology import Coordinates
from tests.parity.cases import (
    CHUNKS,
    EPS,
    ISOLATED,
    LOSS,
    NORM,
    RECOMPUTE,
    SPREADS,
    WEIGHTS,
    Case,
    assert_among,
)
from tests.parity.conftest import (
    ARCHITECTURES,
    COMPOSITE,
    SEED,
    SHARED_MOE,
    STEPS,
    SavedModels,
    each_case,
    is_deselected,
    llama,
    train_cases,
)
from tests.parity.plain import (
    NEVER_DECAYED,
    Spread,
    Training,
    decay_groups,
    orders,
    plain_training,
)
from tests.support.comparison import assert_same_steps
from tests.support.resumes import Layout, Pair, Resumes, each_pair, layout

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1200),
    # peft 0.21 asks transformers 5.23 by an old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

CUT_SPREADS = 2.0
"""The same with tensor parallelism, whose plain runs add up the halves of other divisions: runs
that add up other samples first round each sample alike, and are as near to each other as no other
division is to them. With 6 other seeds the engine was at most 1.3 times as far as the farthest."""
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
    "deep": {"rank": 4, "alpha": 16, "targets": "all-linear"},
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
PEFT |= {"odd": PEFT["llama"], "phi3": PEFT["llama"], "deep": PEFT["llama"]}
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
    # More layers than torch compiles one function for.
    "deep": llama(num_hidden_layers=10, attention_bias=True),
}
"""Beside those of `hf_directories`."""


TILES: dict[str, dict[str, Any]] = {"model": {"tiled_mlp": 5}}
TILES_ANEW = {"model": TILES["model"] | RECOMPUTE["model"]}
BFLOAT16: dict[str, dict[str, Any]] = {"precision": {"dtype": "bfloat16"}}
DOCUMENTS = EPS | ISOLATED
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
PLUS: dict[str, dict[str, Any]] = {
    "adapters": {"loraplus_lr_ratio": 8.0},
    "optimizer": {"lr": 2e-3, "weight_decay": 0.1},
}
TENSOR, STAGES, SEQUENCE = {"tensor": 2}, {"pipeline": 2}, {"sequence": 2}

CASES = [
    Case(2, "zero1", degrees=STAGES, slow=False),
    Case(2, "zero1", "odd", 1, TENSOR, ALL, slow=False),
    Case(2, "zero0", "llama", 1, TENSOR, DROPOUT | RECOMPUTE),
    Case(2, "zero3", "shared_moe", 2, TENSOR, slow=False),
    Case(2, "zero3", "odd", sections=SAVED | CHUNKS),
    # With another learning rate of B.
    Case(2, "zero1", "odd", sections=PLUS),
    Case(2, "zero0", sections=PLUS),
    Case(2, "zero2_offload", "gpt2", 4, sections=PLUS),
    Case(
        2, "zero3", "odd", 2, TENSOR, PLUS | {"adapters": {**PLUS["adapters"], **BOTH["adapters"]}}
    ),
    Case(2, "zero1", "qwen3_moe", 2, STAGES, PLUS),
    # Every kind of adapters with stages of ZeRO and offload.
    Case(1, "zero0"),
    Case(1, "zero3", accumulation=1, sections=DROPOUT | RECOMPUTE),
    Case(2, "zero3_offload", "llama", sections=CHUNKS),
    Case(2, "zero0", "llama", sections=DOCUMENTS),
    Case(2, "zero3", "gpt2", 4, sections=RECOMPUTE),
    Case(2, "zero2_offload", "gpt2", 4, sections=DORA | CHUNKS),
    Case(1, "zero3", "odd", 1, sections=ALL | RECOMPUTE),
    Case(2, "zero3", "odd", sections=DORA | RECOMPUTE),
    Case(2, "zero1", "odd", 4, sections=SAVED | CHUNKS),
    Case(2, "zero3_offload", "odd", sections=SAVED | CHUNKS),
    Case(2, "zero2", "qwen3_moe"),
    Case(2, "zero3", "qwen3_moe", sections=RECOMPUTE),
    Case(2, "zero2_offload", "qwen3_moe", 4, sections=CHUNKS),
    *(Case(2, engine, "mlp_of_moe") for engine in ("zero2", "zero3")),
    Case(2, "zero3", "dense_of_moe", sections=CHUNKS),
    *(Case(2, engine, "shared_moe") for engine in ("zero0", "zero3")),
    # With tiles.
    Case(2, "zero3", sections=TILES_ANEW),
    *(
        Case(2, engine, model, 2, degrees, kind | TILES)
        for engine, model, degrees, kind in (
            ("zero3", "gpt2", {}, {}),
            ("zero3_offload", "odd", {}, BOTH),
            ("zero1", "dense_of_moe", TENSOR, {}),
            ("zero1", "llama", SEQUENCE, {}),
            ("zero1", "llama", STAGES, {}),
            ("zero1", "odd", TENSOR, BOTH),
            ("zero3", "phi3", TENSOR, DORA),
        )
    ),
    # With divided matrices.
    Case(2, "zero3", "odd", 1, TENSOR, ALL),
    Case(2, "zero2_offload", "odd", 4, TENSOR, BOTH | CHUNKS),
    Case(2, "zero0", "phi3", 1, TENSOR, DORA | RECOMPUTE),
    Case(4, "zero3_offload", "phi3", 2, TENSOR, DORA),
    Case(2, "zero1", "phi3", 1, TENSOR, DROPOUT),
    Case(2, "zero1", "odd_moe", 2, TENSOR),
    Case(4, "zero3", "odd_moe", 2, TENSOR),
    Case(2, "zero2", "mlp_of_moe", 4, TENSOR, CHUNKS),
    Case(2, "zero3", "dense_of_moe", 2, TENSOR, CHUNKS),
    Case(2, "zero3", "attention", 2, TENSOR),
    Case(2, "zero2", "llama", 2, TENSOR, DOCUMENTS),
    Case(4, "zero1", "odd", 4, {"tensor": 4}, RECOMPUTE),
    Case(4, "zero3", "odd", 2, {"tensor": 4}, COPIED | CHUNKS),
    Case(4, "zero1", "odd_moe", 2, {"tensor": 4}, CHUNKS),
    # In stages.
    Case(2, "zero1", "first", 1, STAGES, CHUNKS),
    Case(2, "zero0", "gpt2", 4, STAGES),
    Case(2, "zero1", "llama", 2, STAGES, DOCUMENTS),
    Case(2, "zero1", "qwen3_moe", 2, STAGES, CHUNKS),
    Case(2, "zero1", "shared_moe", 2, STAGES),
    Case(2, "zero1", "odd", 2, STAGES, DORA | CHUNKS),
    Case(2, "zero1", "odd", 2, STAGES, SAVED | CHUNKS),
    Case(4, "zero0", "odd", 2, STAGES),
    Case(4, "zero1", "odd", 2, TENSOR | STAGES, COPIED | CHUNKS),
    Case(4, "zero0", "odd", 2, TENSOR | STAGES, RECOMPUTE),
    # With divided sequences.
    Case(2, "zero0", degrees=SEQUENCE),
    Case(2, "zero3", "llama", 2, SEQUENCE, DOCUMENTS),
    Case(2, "zero2_offload", "qwen3_moe", 1, SEQUENCE),
    Case(2, "zero3_offload", "gpt2", 2, SEQUENCE, DORA),
    Case(2, "zero3", "odd", 2, SEQUENCE, BOTH),
    Case(2, "zero1", "odd", 2, SEQUENCE, SAVED),
    Case(4, "zero3", "odd", 2, TENSOR | SEQUENCE, DORA | CHUNKS),
    Case(4, "zero3", "odd_moe", 2, TENSOR | SEQUENCE, CHUNKS),
]


def config_of(case: Case, data: Path, base: Path, **sections: Any) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "adapters": LORA[case.model],
        "optimizer": {"lr": 1e-2, "clip_norm": 0.2},
    }
    for name, section in (*case.sections.items(), *sections.items()):
        own[name] = own.get(name, {}) | dict(section)
    return replace(case, sections=own).config(data, {"path": str(base)})


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


RATIO = "loraplus_lr_ratio"


def plain_adamw(groups: list[dict[str, Any]], section: dict[str, Any]) -> Any:
    eps = section.get("eps", 1e-8)
    return torch.optim.AdamW(groups, lr=section["lr"], betas=(0.9, 0.95), eps=eps)


def loraplus(
    masters: dict[str, torch.Tensor],
    section: Any,
    ratio: float | None,
    make: Callable[[list[dict[str, Any]], dict[str, Any]], Any] = plain_adamw,
) -> Any:
    """The optimizer that `make` makes; with a ratio, with the learning rates of peft's LoRA+."""
    exempt = [master for name, master in masters.items() if re.search(NEVER_DECAYED, name)]
    groups = decay_groups(masters.values(), section, exempt)
    if ratio is None:
        return make(groups, section)
    is_fast = {id(m) for name, m in masters.items() if ".lora_B." in name or m.ndim == 1}
    groups = [
        {
            **group,
            "params": [p for p in group["params"] if (id(p) in is_fast) == (factor != 1.0)],
            "ratio": factor,
        }
        for group in groups
        for factor in (1.0, ratio)
    ]
    optimizer = make([group for group in groups if group["params"]], section)

    def multiply(stepped: Any, *_: object) -> None:
        for group in stepped.param_groups:
            group["lr"] *= group["ratio"]

    optimizer.register_step_pre_hook(multiply)
    return optimizer


def plain_run(case: Case, data: Path, base: Path, **options: Any) -> Training:
    training = plain_training(
        data,
        base,
        config_of(case, data, base),
        adapt=lambda model: adapted(model, case),
        frozen=r"(?!.*\.(lora_|modules_to_save\.))",
        optimizer_of=partial(loraplus, ratio=case.sections.get("adapters", {}).get(RATIO)),
        **options,
    )
    weights = {n.removeprefix("base_model.model."): w for n, w in training.weights.items()}
    return Training(training.losses, training.norms, weights)


Results = Callable[[Case], dict[str, Any]]


def results_of(
    cases: Sequence[Case], data: Path, bases: dict[str, Path], root: Path, **job: Any
) -> Results:
    """Of a case, when it is first asked for: then all of its tier that run train in one world for
    each number of processes. `job`: what the worker is told besides."""
    results_by_case: dict[str, dict[str, Any]] = {}

    def of(case: Case) -> dict[str, Any]:
        if case.name not in results_by_case:
            alike = [
                each
                for each in cases
                if (each.world_size, each.slow) == (case.world_size, case.slow)
                and (each is case or not is_deselected(each))
            ]
            results_by_case.update(run_cases(alike, data, bases, root, **job))
        return results_by_case[case.name]

    return of


def run_cases(
    cases: list[Case], data: Path, bases: dict[str, Path], root: Path, **job: Any
) -> dict[str, dict[str, Any]]:
    place = root / cases[0].name
    place.mkdir()
    asked = {
        case.name: {
            "config": config_of(case, data, bases[case.model]),
            "deepspeed_config": case.engine,
            "weights": {str(step): str(place / f"{case.name}-{step}.pt") for step in (0, STEPS)},
            **job,
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
    assert_same_steps(result, expected, loss=LOSS["float32"], norm=NORM["float32"])
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
    for engine, degrees in (("zero1", {}), ("zero3", {}), ("zero2", TENSOR))
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


def places_of(variant: str) -> list[Layout]:
    """Layouts of which each reads what the one before wrote, the first what the last wrote."""
    layouts = [
        layout(1, "zero0", variant),
        layout(2, "zero3", variant),
        layout(2, "zero3", variant, tensor=2),
        layout(2, "zero1", variant, pipeline=2),
    ]
    if variant == "llama":
        layouts.append(layout(4, "zero1", variant, tensor=2, pipeline=2))
    return layouts


KINDS = {"llama": {}, "odd": BOTH, "odd_moe": {}}
PAIRS = [
    Pair(wrote, read)
    for variant in KINDS
    for wrote, read in pairwise([places_of(variant)[-1], *places_of(variant)])
]


def case_of(place: Layout) -> Case:
    kind = KINDS[place.variant]
    return Case(place.world_size, place.engine, place.variant, 2, dict(place.degrees), kind)


@pytest.fixture(scope="module")
def resumes(
    dataset: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Resumes:
    def job_of(place: Layout) -> dict[str, Any]:
        config = config_of(case_of(place), dataset, bases[place.variant])
        return {"config": config, "deepspeed_config": place.engine}

    return Resumes(tmp_path_factory.mktemp("checkpoints"), PAIRS, job_of, stop=3, end=4)


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


@each_pair(PAIRS)
def test_goes_on_bit_for_bit(pair: Pair, resumes: Resumes, bases: dict[str, Path]) -> None:
    """Bit-identical states; files of peft's, and merged ones, with the same bytes."""
    saved = resumes.check(pair)
    places = [resumes.directory_of(pair, resumed=is_again) for is_again in (False, True)]
    assert {key.partition("/")[0] for key in saved} == {"master", "exp_avg", "exp_avg_sq"}
    assert all(".lora_" in key or ".modules_to_save." in key for key in saved)
    assert all(tensor.any() for tensor in saved.values())
    files = [save(adapter_state(open_weights(p / "tensors"), "float32")) for p in places]
    assert files[0] == files[1]
    base, case = bases[pair.wrote.variant], case_of(pair.read)
    assert merged(places[0], base, case) == merged(places[1], base, case)


IN_16_BIT = [
    Case(1, "zero0", sections=BFLOAT16),
    *(Case(2, engine, sections=BFLOAT16) for engine in ("zero1", "zero2", "zero3")),
    Case(2, "zero1", degrees=STAGES, sections=BFLOAT16),
    Case(2, "zero3", degrees=TENSOR, sections=BFLOAT16),
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
    spreads = CUT_SPREADS if is_cut else SPREADS
    assert_among(result, result["trained"], Spread.of(runs), spreads=spreads)


def test_reference_learns_and_clips(dataset: Path, hf_directories: dict[str, Path]) -> None:
    for case in (Case(1, "zero0"), Case(1, "zero0", "gpt2")):
        training = plain_run(case, dataset, hf_directories[case.model])
        assert training.losses[-1] < training.losses[0] - 0.03
        assert max(training.norms) > 0.2
        moved = [w.abs().max() for n, w in training.weights.items() if ".lora_B." in n]
        assert min(moved) > 1e-3
