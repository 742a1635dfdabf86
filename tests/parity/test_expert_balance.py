"""What keeps experts busy alike, against plain transformers and torch in one process.

The reference computes every term anew, from what transformers returns: counts by one-hot vectors of
its router logits, or of what its experts are given.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.models.transformers_patches import modules_of_experts
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import (
    ARCHITECTURES,
    STEPS,
    SavedModels,
    TrainedCases,
    each_case,
    llama,
    run_config,
    train_cases,
)
from tests.parity.expert_models import MODELS as EXPERT_MODELS
from tests.parity.expert_models import OPTIMIZER, WEIGHTS
from tests.parity.plain import Training, divided, plain_training
from tests.parity.test_zero_stages import LOSS, NORM
from tests.support.comparison import assert_same_steps, assert_same_tensors, assert_same_weights

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

AUXILIARY, Z_LOSS, RATE = 0.5, 0.05, 0.02  # so that they show
SKIPPED = 2
UNTIED = {**llama(), "tie_word_embeddings": False, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": llama(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    | {"output_router_logits": True, "router_aux_loss_coef": AUXILIARY},
    # Whose configuration asks for no router logits.
    "qwen3_moe": ARCHITECTURES["qwen3_moe"],
    "deepseek_v3": EXPERT_MODELS["deepseek_v3"],
    "glm4_moe": EXPERT_MODELS["glm4_moe"],
    # Which does not itself say that its biases are to stay in float32.
    "minimax_m2": llama(
        model_type="minimax_m2",
        head_dim=8,
        intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    # Biases with another name, and parameters without a gradient: of two dimensions, or one.
    "lfm2_moe": {
        **UNTIED,
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "ernie4_5_moe": {
        **UNTIED,
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
    },
    "afmoe": {
        **UNTIED,
        "model_type": "afmoe",
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8,
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 16,
    },
}
NAMES = {
    "lfm2_moe": "expert_bias",
    "afmoe": "expert_bias",
    "ernie4_5_moe": "gate.moe_statics.e_score_correction_bias",
}
"""Of biases in a block; of all others ``gate.e_score_correction_bias``."""
BIASES = r".*(e_score_correction|expert)_bias"
GLOBAL = {"auxiliary_loss": "global_batch"}
Z_ALONE = {"z_loss_coefficient": Z_LOSS}
BIAS = {"bias_update_rate": RATE}


STOP = 3


@dataclass(frozen=True)
class Case:
    """One point: so many ranks, of which `expert` divide the experts."""

    model: str
    moe: tuple[str, ...]
    world_size: int = 2
    expert: int = 1
    engine: str = "zero1"
    axis: str = "data"
    accumulation: int = 2
    checkpointing: str = "none"
    loss: str = "plain"
    slow: bool = False

    @property
    def name(self) -> str:
        parts = (self.model, *self.moe, f"ep{self.expert}-of-{self.world_size}", self.engine)
        return "-".join([*parts, self.axis, str(self.accumulation), self.checkpointing, self.loss])

    @property
    def inner(self) -> int:
        """Ranks that train on the same samples."""
        return 1 if self.axis == "data" else 2

    @property
    def micro_batch_size(self) -> int:
        return 8 // (self.accumulation * (self.world_size // self.inner))

    @property
    def section(self) -> dict[str, Any]:
        parts = {"global": GLOBAL, "z": Z_ALONE, "bias": BIAS}
        return {key: value for name in self.moe for key, value in parts[name].items()}


CASES = [
    Case("mixtral", ("global",), accumulation=1, slow=True),
    Case("mixtral", ("global", "z"), expert=2, engine="zero3", checkpointing="full"),
    Case("qwen3_moe", ("z",), expert=2, loss="chunked"),
    Case("deepseek_v3", ("bias",), engine="zero3", checkpointing="full", slow=True),
    Case("deepseek_v3", ("bias",), expert=2),
    Case(
        "deepseek_v3",
        ("bias",),
        engine="pipeline_zero1",
        axis="pipeline",
        accumulation=4,
        slow=True,
    ),
    Case(
        "mixtral",
        ("global", "z"),
        engine="pipeline_zero1",
        axis="pipeline",
        accumulation=4,
        slow=True,
    ),
    Case("lfm2_moe", ("bias",), slow=True),
    Case("ernie4_5_moe", ("bias",), engine="zero3", slow=True),
    *(
        Case(model, ("bias",), expert=expert, engine=engine, axis=axis, slow=True)
        for model in ("lfm2_moe", "ernie4_5_moe", "afmoe")
        for engine, expert, axis in (
            ("zero0", 1, "data"),
            ("zero2", 1, "data"),
            ("zero3", 2, "data"),
            ("pipeline_zero1", 1, "pipeline"),
            ("zero1", 1, "tensor"),
        )
        if (model, axis) != ("lfm2_moe", "tensor")
    ),
    Case("mixtral", ("global", "z"), world_size=1, accumulation=4, slow=True),
    Case("mixtral", ("global", "z"), 4, 1, "pipeline_zero1", "pipeline", 4, slow=True),
    Case("mixtral", ("global",), 4, 2, "pipeline_zero1", "pipeline", 2, slow=True),
    Case("qwen3_moe", ("z",), engine="pipeline_zero1", axis="pipeline", loss="chunked", slow=True),
    Case("mixtral", ("global", "z"), expert=2, axis="sequence", slow=True),
    Case("mixtral", ("global", "z"), axis="tensor", engine="zero2", slow=True),
    Case("mixtral", ("global",), 4, 2, axis="tensor", slow=True),
    Case("mixtral", ("global", "z"), 4, 4, "zero2", loss="chunked", slow=True),
    Case("glm4_moe", ("bias",), expert=2, engine="zero2", slow=True),
    Case("glm4_moe", ("bias",), axis="tensor", slow=True),
    Case("deepseek_v3", ("bias",), 4, 2, "pipeline_zero1", axis="pipeline", slow=True),
    Case("deepseek_v3", ("bias",), 4, 2, "zero1", axis="tensor", slow=True),
    Case("deepseek_v3", ("bias",), 4, 4, "zero3", axis="sequence", slow=True),
]


RESUMED = {
    model: Case(model, ("bias",), engine="zero3") for model in ("deepseek_v3", "ernie4_5_moe")
}
IN_16_BIT = {"minimax_m2": "zero3", "lfm2_moe": "zero1", "ernie4_5_moe": "zero3", "afmoe": "zero1"}
FAST = ["deepseek_v3"], ["minimax_m2"]
"""Of `RESUMED`, and of `IN_16_BIT`: what is trained with the fast cases."""


def config_of(case: Case, data: Path, directories: dict[str, Path]) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        {
            "path": str(directories[case.model]),
            "gradient_checkpointing": case.checkpointing,
            "loss": case.loss,
            "loss_chunk_tokens": 5,
        },
        micro_batch_size=case.micro_batch_size,
        parallel={"expert": case.expert} | ({} if case.axis == "data" else {case.axis: 2}),
        optimizer=OPTIMIZER,
        moe=case.section,
    )
    return config


def more_jobs(
    data: Path,
    directories: dict[str, Path],
    directory: Path,
    resumed: Collection[str],
    in_16_bit: Collection[str],
) -> dict[str, Any]:
    """Of `RESUMED` in two parts with other degrees, and in 16 bit."""
    jobs = {}
    for model in resumed:
        end = RESUMED[model]
        begin = replace(end, expert=2, engine="zero1")
        jobs[f"begin {model}"] = {
            "config": config_of(begin, data, directories),
            "deepspeed_config": begin.engine,
            "last_step": STOP,
            "save_at": STOP,
            "save_to": str(directory / f"begin {model}"),
            "skipped": [SKIPPED],
        }
        jobs[f"end {model}"] = {
            "config": config_of(end, data, directories),
            "deepspeed_config": end.engine,
            "first_step": STOP,
            "restore_from": str(directory / f"begin {model}"),
            "save_at": STEPS,
            "save_to": str(directory / f"end {model}"),
        }
    for model in in_16_bit:
        engine = IN_16_BIT[model]
        config = config_of(Case(model, ("bias",), engine=engine), data, directories)
        config["precision"] = {"dtype": "bfloat16"}
        jobs[f"16 bit {model}"] = {
            "config": config,
            "deepspeed_config": engine,
            # After an even number of updates up and down they may all be zero.
            "last_step": 3,
            "save_at": 3,
            "save_to": str(directory / f"16 bit {model}"),
        }
    return jobs


@pytest.fixture(scope="module")
def trained(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> TrainedCases[Case]:
    return TrainedCases(
        tmp_path_factory.mktemp("balance"),
        CASES,
        lambda case: config_of(case, dataset, directories),
        lambda _: {"skipped": [SKIPPED], "observe": True},
        lambda directory: {2: more_jobs(dataset, directories, directory, *FAST)},
    )


@pytest.fixture(scope="module")
def others(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """Results of the other ones, and the directory of their saved states."""
    place = tmp_path_factory.mktemp("others")
    resumed = sorted(RESUMED.keys() - {*FAST[0]})
    in_16_bit = sorted(IN_16_BIT.keys() - {*FAST[1]})
    jobs = more_jobs(dataset, directories, place, resumed, in_16_bit)
    return train_cases(2, jobs, place), place


def by_tier(models: Iterable[str], fast: Collection[str]) -> pytest.MarkDecorator:
    """Return a decorator that runs a test with each `model`; those not in `fast` are slow."""
    parameters = [pytest.param(m, marks=() if m in fast else pytest.mark.slow) for m in models]
    return pytest.mark.parametrize("model", parameters)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return SavedModels(MODELS, tmp_path_factory.mktemp("hf"))


class Reference:
    """The terms and biases of a plain model under training."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.imbalance: list[dict[str, float]] = []
        self.biases: dict[str, torch.Tensor] = {}
        self._counts: dict[str, torch.Tensor] = {}
        self._chosen: list[torch.Tensor] = []
        self._num_parts = 0

    def watch(self, model: Any) -> None:
        model.config.output_router_logits = "bias" not in self.case.moe
        names = {module: name for name, module in model.named_modules()}
        for module in modules_of_experts(model):
            self._count(module, names[module])

    def _count(self, module: Any, name: str) -> None:
        def note(_module: Any, inputs: Any) -> None:
            chosen = F.one_hot(inputs[1].flatten(), module.num_experts).sum(0)
            self._counts[name] = self._counts.get(name, 0) + chosen

        module.register_forward_pre_hook(note)

    def added(self, part: int, outputs: Any) -> torch.Tensor:
        """To the loss of all ranks' micro-batches of this number."""
        total = torch.zeros(())
        if part == 0:
            self._chosen.clear()
        if "bias" in self.case.moe:
            return total
        logits = torch.cat(outputs.router_logits)
        if "global" in self.case.moe:
            chosen = logits.topk(2, -1).indices
            self._chosen.append(F.one_hot(chosen, logits.shape[-1]).sum(1).float())
            fractions, means = torch.cat(self._chosen).mean(0), logits.softmax(-1).mean(0)
            total = total + AUXILIARY * logits.shape[-1] * (fractions * means).sum()
        if "z" in self.case.moe:
            total = total + Z_LOSS * logits.exp().sum(-1).log().pow(2).mean()
        return total

    @torch.no_grad()
    def after_update(self, model: Any) -> None:
        modules = dict(model.named_modules())
        for name, counts in self._counts.items() if "bias" in self.case.moe else ():
            block = name.rpartition(".")[0]
            path = f"{block}.{NAMES.get(self.case.model, 'gate.e_score_correction_bias')}"
            owner, _, leaf = path.rpartition(".")
            bias = getattr(modules[owner], leaf)
            bias += (RATE * (counts.float().mean() - counts).sign()).view_as(bias)
            self.biases[path] = bias

    def end_step(self) -> None:
        self.imbalance.append(
            {name: float(c.max() / c.float().mean()) for name, c in self._counts.items()}
        )
        self._counts.clear()


def reference_of(
    case: Case, dataset: Path, directories: dict[str, Path]
) -> tuple[Training, Reference]:
    config = run_config(dataset, {}, micro_batch_size=8, optimizer=OPTIMIZER)
    reference = Reference(case)
    replicas = case.world_size // case.inner
    trained = plain_training(
        dataset,
        directories[case.model],
        config,
        chunks=divided(case.micro_batch_size * replicas),
        watch=reference.watch,
        added=reference.added,
        skipped=[SKIPPED],
        after_update=reference.after_update,
        after_step=reference.end_step,
        frozen=BIASES,
    )
    return trained, reference


@each_case(CASES)
def test_equals_plain_training(
    case: Case, dataset: Path, directories: dict[str, Path], trained: TrainedCases[Case]
) -> None:
    expected, reference = reference_of(case, dataset, directories)
    result, place = trained.of(case)
    assert result["accumulation"] == case.accumulation
    assert_same_steps(result, expected, loss=LOSS["float32"], norm=NORM["float32"])
    for load, imbalance in zip(result["loads"], reference.imbalance, strict=True):
        assert load["imbalance"] == pytest.approx(imbalance, rel=1e-12)
        assert (load["sent_bytes"] is None) == (case.expert == 1)
        assert case.expert == 1 or (load["sent_bytes"] > 0 and load["seconds"] > 0)
    weights = assert_same_weights(
        place,
        {**expected.weights, **reference.biases},
        limit=WEIGHTS,
    )
    assert bool(reference.biases) == ("bias" in case.moe)
    if reference.biases:
        assert_same_tensors(weights, reference.biases, limit=1e-6)


@by_tier(RESUMED, FAST[0])
def test_biases_continue_at_another_degree(
    model: str, dataset: Path, directories: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    expected, reference = reference_of(RESUMED[model], dataset, directories)
    result, place = job_of(f"end {model}", model in FAST[0], request)
    assert result["losses"] == pytest.approx(expected.losses[STOP:], abs=LOSS["float32"])
    assert_same_tensors(read_full_masters(place / "tensors"), reference.biases, limit=1e-6)


def job_of(name: str, is_fast: bool, request: pytest.FixtureRequest) -> tuple[Any, Path]:
    """Return the result of one of `more_jobs` and the directory of its saved state."""
    if is_fast:
        result_and_directory: tuple[Any, Path] = request.getfixturevalue("trained").also(name)
        return result_and_directory
    results, place = request.getfixturevalue("others")
    return results[name], place / name


def biases_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: w for name, w in weights.items() if re.match(BIASES, name)}


@by_tier(IN_16_BIT, FAST[1])
def test_biases_are_float32_in_a_run_in_16_bit(model: str, request: pytest.FixtureRequest) -> None:
    _, place = job_of(f"16 bit {model}", model in FAST[1], request)
    biases = biases_of(read_full_masters(place / "tensors"))
    assert len(biases) == (3 if model == "minimax_m2" else 2)
    for bias in biases.values():
        updates = bias / RATE
        assert bias.dtype == torch.float32
        assert updates.any()
        assert float((updates - updates.round()).abs().max()) < 1e-4


def test_biases_are_exported_in_float32(
    directories: dict[str, Path], trained: TrainedCases[Case], tmp_path: Path
) -> None:
    _, place = trained.also("end deepseek_v3")
    weights = read_full_masters(place / "tensors")
    biases = biases_of(weights)
    hf_config = load_hf_config(ModelSection(path=str(directories["deepseek_v3"])))
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    ids = Probe.make_input(97, 16)
    with torch.no_grad():
        probe = Probe(ids, model.eval()(input_ids=ids).logits, "float32")
    tokenizer, output = tmp_path / "tokenizer", tmp_path / "hf"
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(tokenizer)
    export_model(weights, hf_config, Destination(output, tokenizer, "bfloat16"), probe=probe)
    exported = load_file(output / "model.safetensors")
    assert len(biases) == 2
    for name in biases:
        assert torch.equal(exported[name], weights[name]), name
