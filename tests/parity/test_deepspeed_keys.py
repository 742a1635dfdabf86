"""Every DeepSpeed key that a run accepts trains, resumes and exports as plain PyTorch does.

The cases are made of `bigtrain.settings.deepspeed.accepted.ROWS`: each starts from trained weights
in two processes, saves, is resumed by one process with another engine, resumes what one process
without the key has saved, and its weights and logits are compared at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.errors import ConfigError
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.settings.deepspeed.accepted import ROWS, Row
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import ModelSection, RunConfig
from tests.parity import plain_optimizers
from tests.parity.conftest import ARCHITECTURES, VOCAB_SIZE, run_config, train_cases
from tests.parity.plain import Training, divided, plain_training

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

STOP, END = 3, 5
LOSS = {"float32": 1e-5, "bfloat16": 2e-3}
NORM = {"float32": 1e-4, "bfloat16": 1e-2}
WEIGHT = 1e-5
LOGITS = {"float32": 1e-4, "bfloat16": 5e-2}
PROBE = Probe.make_input(VOCAB_SIZE, 16)


@dataclass(frozen=True)
class Engine:
    """What keys are tried with: a ZeRO stage, and what else two processes do."""

    stage: int
    offload: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    architecture: str = "llama"
    parallel: dict[str, int] = field(default_factory=dict)
    optimizer: str = "adamw"
    """The run's; Muon in float32."""
    resumed_with: str = "zero1"


CPU = {"offload_optimizer": {"device": "cpu"}}
ALL_CPU = {**CPU, "offload_param": {"device": "cpu"}}
EXPERTS = {"architecture": "qwen3_moe", "parallel": {"expert": 2}}
ENGINES = {
    "zero0": Engine(0, resumed_with="zero3"),
    "zero1": Engine(1, resumed_with="zero3"),
    "zero2": Engine(2),
    "zero3": Engine(3, resumed_with="zero2"),
    "zero1_offload": Engine(1, CPU),
    "zero2_offload": Engine(2, CPU),
    "zero3_offload": Engine(3, ALL_CPU),
    "zero1_bf16": Engine(1, dtype="bfloat16", resumed_with="zero3"),
    "zero2_bf16": Engine(2, dtype="bfloat16"),
    "zero3_bf16": Engine(3, dtype="bfloat16"),
    "zero1_experts": Engine(1, **EXPERTS),
    "zero2_experts": Engine(2, **EXPERTS),
    "zero3_experts": Engine(3, **EXPERTS),
    "zero2_offload_experts": Engine(2, CPU, **EXPERTS),
    "pipeline": Engine(1, parallel={"pipeline": 2}, resumed_with="zero3"),
    "pipeline_bf16": Engine(1, dtype="bfloat16", parallel={"pipeline": 2}),
    "sequence": Engine(2, parallel={"sequence": 2}),
    "zero1_muon": Engine(1, optimizer="muon", resumed_with="zero3"),
    "zero2_muon": Engine(2, optimizer="muon"),
    "zero3_muon": Engine(3, optimizer="muon"),
    "zero1_adafactor": Engine(1, optimizer="adafactor", resumed_with="zero3"),
    "zero2_adafactor": Engine(2, optimizer="adafactor"),
    "zero3_adafactor": Engine(3, optimizer="adafactor"),
    "zero2_sequence_bf16": Engine(2, dtype="bfloat16", parallel={"sequence": 2}),
}


@dataclass(frozen=True)
class Case:
    """An engine with some keys."""

    engine: str
    keys: tuple[tuple[str, str], ...]  # dotted, with JSON
    alone: bool = False

    @property
    def name(self) -> str:
        changes = [f"{key.removeprefix('zero_optimization.')}={value}" for key, value in self.keys]
        return f"{self.engine}-{','.join(changes)}"

    @property
    def json(self) -> dict[str, Any]:
        """The DeepSpeed JSON."""
        engine = ENGINES[self.engine]
        tree: dict[str, Any] = {"zero_optimization": {"stage": engine.stage, **engine.offload}}
        for key, value in self.keys:
            *parents, name = key.split(".")
            block = tree
            for parent in parents:
                block[parent] = dict(block.get(parent, {}))
                block = block[parent]
            block[name] = json.loads(value)
        return tree

    @property
    def reduces_in_bfloat16(self) -> bool:
        return ("communication_data_type", '"bf16"') in self.keys


def keys_of(changes: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((key, json.dumps(value)) for key, value in changes.items())


def single_cases() -> Iterator[Case]:
    """The first example of each row with each of its engines, the others with one."""
    for row in ROWS:
        for number, value in enumerate(row.examples):
            for engine in row.engines[:1] if number else row.engines:
                yield Case(engine, keys_of({**row.beside, row.key: value}), row.alone)


def joint_cases() -> Iterator[Case]:
    """What needs no case of its own: for each engine the rows' first values, their second, ..."""
    for name in ENGINES:
        number = 0
        while True:
            changes = {
                row.key: row.together[number]
                for row in ROWS
                if name in row.engines and number < len(row.together)
            }
            if not changes:
                break
            yield Case(name, keys_of(changes))
            number += 1


def applies(row: Row, engine: Engine) -> bool:
    """Whether a row is tried with an engine that it does not name."""
    stages = {ENGINES[name].stage for name in row.engines if not ENGINES[name].parallel}
    needs_offload = bool(row.engines) and all(ENGINES[name].offload for name in row.engines)
    return engine.stage in stages and (not needs_offload or bool(engine.offload))


def packed_cases(name: str, data: Path) -> list[Case]:
    """So few cases that every example of a row, unless another key must go with it, is in one of
    those with engine `name` that the run accepts."""
    engine = ENGINES[name]
    values = [
        (row.key, value)
        for row in ROWS
        if applies(row, engine) and name not in row.engines and not row.alone
        for value in row.examples
        if '"bf16"' != json.dumps(value)
    ]
    cases = []
    while values:
        changes: dict[str, Any] = {}
        for key, value in values:
            if key not in changes and is_accepted(
                Case(name, keys_of(changes | {key: value})), data
            ):
                changes[key] = value
        if not changes:
            break  # the rest is refused with this engine
        cases.append(Case(name, keys_of(changes)))
        values = [(key, value) for key, value in values if changes.get(key, ...) is not value]
    return cases


def is_accepted(case: Case, data: Path) -> bool:
    file = data.with_name("tried.json")
    file.write_text(json.dumps(case.json))
    tree = config_of(case, data, {"config": ARCHITECTURES[ENGINES[case.engine].architecture]})
    try:
        resolve_run(RunConfig.model_validate(tree), 2, str(file), "cpu")
    except ConfigError:
        return False
    return True


def config_of(case: Case, data: Path, model: dict[str, Any]) -> Any:
    engine = ENGINES[case.engine]
    samples = engine.parallel.get("pipeline", 1) * engine.parallel.get("sequence", 1)
    config = run_config(
        data,
        model,
        micro_batch_size=2 * samples if case.engine == "pipeline" else 4 * samples,
        parallel=engine.parallel,
        precision={"dtype": engine.dtype},
        optimizer=section_of(engine.optimizer),
    )
    config["train"]["steps"] = END
    return config


def section_of(optimizer: str) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if optimizer == "muon":
        more = {"eps": 1e-6, "muon": {"ns_dtype": "float32"}}
    elif optimizer == "adafactor":
        more = {"adafactor": {"eps1": 1e-8}}
    return {"lr": 3e-3, "clip_norm": 0.5, "type": optimizer, **more}


SINGLE = list(dict.fromkeys(single_cases()))
JOINT = list(dict.fromkeys(joint_cases()))
_FIRST = {
    ("zero1", "zero_optimization.round_robin_gradients", "true"),
    ("zero3", "zero_optimization.sub_group_size", "1"),
}
FEW = [case for case in SINGLE if (case.engine, *case.keys[-1]) in _FIRST]
# Another process: DeepSpeed keeps what these change while the process lives.
ALONE = [case for case in SINGLE if case.alone]
OTHERS = [case for case in (*SINGLE, *JOINT) if case not in FEW and not case.alone]
PACKED = ["zero2_offload", "zero3_offload", "zero3_bf16", "pipeline", "zero1_experts", "zero3_muon"]


def start_of(engine: Engine) -> str:
    """The checkpoint, of one process without keys, that cases of an engine resume."""
    return f"{engine.architecture}-{engine.dtype}-{engine.optimizer}"


class Trainer:
    """Trains cases, and compares them."""

    def __init__(self, data: Path, directories: dict[str, Path], make: Any) -> None:
        self.data = data
        self._directories = directories
        self._make = make
        self._plain = cache(self._train_plain)

    def _train_plain(
        self, architecture: str, dtype: str, sum_dtype: str, optimizer: str
    ) -> Training:
        section = section_of(optimizer)
        config = run_config(self.data, {}, micro_batch_size=8, optimizer=section)
        config["train"]["steps"] = END
        is_bf16 = dtype == "bfloat16"
        options: dict[str, Any] = {"exact_masters": True} if is_bf16 else {}
        if sum_dtype == "bfloat16":
            options["chunks"] = divided(4)
        if optimizer != "adamw":
            options["optimizer_of"] = getattr(plain_optimizers, optimizer)
        return plain_training(
            self.data,
            self._directories[architecture],
            config,
            dtype=getattr(torch, dtype),
            sum_dtype=getattr(torch, sum_dtype),
            **options,
        )

    def plain(self, case: Case) -> Training:
        engine = ENGINES[case.engine]
        sum_dtype = "bfloat16" if case.reduces_in_bfloat16 else "float32"
        return self._plain(engine.architecture, engine.dtype, sum_dtype, engine.optimizer)

    def train(self, cases: list[Case]) -> dict[str, Any]:
        """What became of each case, by name: `begun` by two processes, `resumed` by one, and
        `taken` over by two from one."""
        root: Path = self._make("keys")
        starts = {}
        for case in cases:
            engine = ENGINES[case.engine]
            starts[start_of(engine)] = case
        first = {
            name: self._job(root, case, name, case.engine, micro=8, stage="zero1")
            | {"last_step": STOP, "save_at": STOP, "save_to": str(root / name)}
            for name, case in starts.items()
        }
        train_cases(1, first, self._make("start"))
        begun, taken, resumed = {}, {}, {}
        for number, case in enumerate(cases):
            engine = ENGINES[case.engine]
            file = root / f"{number}.json"
            file.write_text(json.dumps(case.json))
            job = self._job(root, case, case.name, case.engine, stage=str(file))
            saved = str(root / f"saved{number}")
            begun[f"begun-{number}"] = job | {
                "last_step": STOP,
                "save_at": STOP,
                "save_to": saved,
            }
            taken[f"taken-{number}"] = job | {
                "first_step": STOP,
                "restore_from": str(root / start_of(engine)),
                "save_at": END,
                "save_to": str(root / f"end{number}"),
                "probe": PROBE.tolist(),
            }
            resumed[f"resumed-{number}"] = self._job(
                root, case, case.name, case.engine, micro=8, stage=engine.resumed_with
            ) | {"first_step": STOP, "restore_from": saved}
        worlds = [{**begun, **taken}]
        if any(case.alone for case in cases):
            worlds = [{name: job} for name, job in worlds[0].items()]
        results_by_job = {}
        for jobs in worlds:
            results_by_job |= train_cases(2, jobs, self._make("two"))
        results_by_job |= train_cases(1, resumed, self._make("one"))
        return {
            case.name: {
                kind: results_by_job[f"{kind}-{number}"] for kind in ("begun", "taken", "resumed")
            }
            | {"end": root / f"end{number}"}
            for number, case in enumerate(cases)
        }

    def _job(
        self,
        root: Path,
        case: Case,
        name: str,
        engine: str,
        *,
        stage: str,
        micro: int | None = None,
    ) -> dict[str, Any]:
        model = {"path": str(self._directories[ENGINES[engine].architecture])}
        config = config_of(case, self.data, model)
        if micro is not None:
            config["parallel"] = {}
            config["batch"]["micro_batch_size"] = micro
        return {"config": config, "deepspeed_config": stage}

    def compare(self, case: Case, results_by_kind: dict[str, Any], directory: Path) -> None:
        engine, plain = ENGINES[case.engine], self.plain(case)
        loss, norm = LOSS[engine.dtype], NORM[engine.dtype]
        if case.reduces_in_bfloat16:
            exact = self._plain(engine.architecture, engine.dtype, "float32", "adamw")
            assert exact.norms != plain.norms
        assert results_by_kind["begun"]["losses"] == pytest.approx(plain.losses[:STOP], abs=loss)
        assert results_by_kind["begun"]["norms"] == pytest.approx(plain.norms[:STOP], rel=norm)
        if case.reduces_in_bfloat16:
            return  # what one process resumes adds up in float32
        for kind in ("taken", "resumed"):
            assert results_by_kind[kind]["losses"] == pytest.approx(
                plain.losses[STOP:], abs=loss
            ), kind
            assert results_by_kind[kind]["norms"] == pytest.approx(plain.norms[STOP:], rel=norm), (
                kind
            )
        weights = read_full_masters(results_by_kind["end"] / "tensors")
        if engine.dtype == "float32":
            for name, weight in plain.weights.items():
                torch.testing.assert_close(
                    weights[name], weight, atol=WEIGHT, rtol=WEIGHT, msg=name
                )
        self._export(case, weights, torch.tensor(results_by_kind["taken"]["logits"]), directory)

    def _export(
        self, case: Case, weights: dict[str, Any], logits: torch.Tensor, directory: Path
    ) -> None:
        """The exported model computes what the engine computed, and what plain PyTorch's does."""
        engine = ENGINES[case.engine]
        section = ModelSection(path=str(self._directories[engine.architecture]))
        tokenizer = directory / "tokenizer"
        train_tokenizer(iter([["the theme of the thesis"]]), 260).save(tokenizer)
        export_model(
            weights,
            load_hf_config(section),
            Destination(directory / "hf", tokenizer, engine.dtype),
            probe=Probe(PROBE, logits, engine.dtype),
        )
        model = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32).eval()
        plain = AutoModelForCausalLM.from_pretrained(
            self._directories[engine.architecture], dtype=torch.float32
        ).eval()
        plain.load_state_dict(self.plain(case).weights, strict=False)
        with torch.no_grad():
            exported, expected = (m(input_ids=PROBE).logits for m in (model, plain))
        assert float((exported - expected).abs().max()) <= LOGITS[engine.dtype]


@pytest.fixture(scope="module")
def trainer(
    dataset: Path, hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Trainer:
    return Trainer(dataset, hf_directories, tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def few(trainer: Trainer) -> dict[str, Any]:
    return trainer.train(FEW)


@pytest.fixture(scope="module")
def others(trainer: Trainer) -> dict[str, Any]:
    return trainer.train(OTHERS)


@pytest.fixture(scope="module")
def alone(trainer: Trainer) -> dict[str, Any]:
    return trainer.train(ALONE)


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_key(case: Case, trainer: Trainer, few: dict[str, Any], tmp_path: Path) -> None:
    trainer.compare(case, few[case.name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_other_key(case: Case, trainer: Trainer, others: dict[str, Any], tmp_path: Path) -> None:
    trainer.compare(case, others[case.name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_key_alone(case: Case, trainer: Trainer, alone: dict[str, Any], tmp_path: Path) -> None:
    trainer.compare(case, alone[case.name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_keys_with(name: str, trainer: Trainer, tmp_path: Path) -> None:
    cases = packed_cases(name, trainer.data)
    assert cases
    results_by_case = trainer.train(cases)
    for number, case in enumerate(cases):
        trainer.compare(case, results_by_case[case.name], tmp_path / str(number))
