"""Cases train in one process group for each number of processes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import pytest

from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.run_config import ModelSection
from tests.support.datasets import write_dataset
from tests.support.lives import run_script
from tests.support.tiers import STEPS

pytest.register_assert_rewrite("tests.parity.objective_runs", "tests.support.resumes")

VOCAB_SIZE = 97
SEED = 7
WORKER = Path(__file__).with_name("worker.py")


def run_config(data: Path, model: dict[str, Any], *, micro_batch_size: int, **sections: Any) -> Any:
    """A run of `STEPS` steps of 8 samples of 16 tokens, with clipping that bites."""
    return {
        "model": model,
        "data": {"path": str(data), "mask_end_of_document": True},
        "batch": {
            "sequence_length": 16,
            "global_batch_size": 8,
            "micro_batch_size": micro_batch_size,
        },
        "train": {"steps": STEPS},
        "optimizer": {"lr": 3e-3, "clip_norm": 0.5},
        "schedule": {"type": "cosine", "warmup_steps": 4},
        "precision": {"dtype": "float32"},
        "output": {"directory": "unused"},
        "seed": SEED,
        **sections,
    }


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "shards", vocab_size=VOCAB_SIZE)


def llama(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        **changes,
    }


# A dense layer, and a shared expert beside each stack.
COMPOSITE: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {
        **{k: v for k, v in llama().items() if k != "tie_word_embeddings"},
        "model_type": "gemma3_text",
        "head_dim": 8,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "pad_token_id": 0,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 96,
    "boi_token_index": 94,
    "eoi_token_index": 95,
}
"""Text and images; text gives its vision tower no gradient."""
SHARED_MOE: dict[str, Any] = {
    **{name: value for name, value in llama().items() if name != "tie_word_embeddings"},
    "model_type": "glm4_moe",
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": None,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": llama(),
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "max_position_embeddings": 64,
    },
}


class SavedModels(dict[str, Path]):
    """Directories of models by name; each is made when it is first asked for."""

    def __init__(
        self,
        configs: Mapping[str, dict[str, Any]],
        directory: Path,
        change: Callable[[str, Any], None] = lambda _name, _model: None,
    ) -> None:
        """Of each model as the run's seed makes it, changed by `change`: ``directory / NAME``."""
        super().__init__()
        self._configs, self._directory, self._change = configs, directory, change

    def __missing__(self, name: str) -> Path:
        section = ModelSection(config=self._configs[name])
        model: Any = build_model(section, load_hf_config(section), seed=SEED)
        self._change(name, model)
        self[name] = self._directory / name
        model.save_pretrained(self[name])
        return self[name]


@pytest.fixture(scope="session")
def hf_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models that every case starts from, as Hugging Face directories."""
    return SavedModels(ARCHITECTURES, tmp_path_factory.mktemp("hf"))


def train_cases(
    world_size: int, cases: dict[str, Any], directory: Path, worker: Path = WORKER
) -> dict[str, Any]:
    """Train `cases` in a world of `world_size` processes of `worker`; results by case name."""
    (directory / "cases.json").write_text(json.dumps(cases))
    output = directory / "results.json"
    run_script(world_size, worker, directory / "cases.json", output)
    results: dict[str, Any] = json.loads(output.read_text())
    return results


class TieredCase(Protocol):
    """A case that so many processes train under a shipped engine, in `make test` or in the slow
    tests only."""

    @property
    def name(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def engine(self) -> str: ...
    @property
    def slow(self) -> bool: ...


AnyTiered = TypeVar("AnyTiered", bound=TieredCase)


_with_tests: set[int] = set()
_selected: set[int] = set()
"""Identities of the parameters of all tests, and of those that run."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _with_tests.update(map(id, parameters_of(items)))


def pytest_collection_finish(session: pytest.Session) -> None:
    _selected.update(map(id, parameters_of(session.items)))


def parameters_of(items: list[pytest.Item]) -> Iterator[Any]:
    """Yield the values of the parameters of tests."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            yield from item.callspec.params.values()


def is_deselected(case: object) -> bool:
    """Return whether there are tests with the parameter `case`, and none of them runs."""
    return id(case) in _with_tests and id(case) not in _selected


def each_case(cases: Iterable[TieredCase]) -> pytest.MarkDecorator:
    """Return a decorator that runs a test with each `case`; the slow ones are marked so."""
    parameters = [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else [])
        for case in cases
    ]
    return pytest.mark.parametrize("case", parameters)


class TrainedCases(Generic[AnyTiered]):
    """Results of a file's cases, each trained to its end and saved. The first test that asks for a
    fast case trains all of these, but those whose own tests are all deselected; the slow ones are
    trained likewise. job_of: what the worker is told of a case besides. also: other jobs of the
    fast tier, by number of processes."""

    def __init__(
        self,
        directory: Path,
        cases: Iterable[AnyTiered],
        config_of: Callable[[AnyTiered], dict[str, Any]],
        job_of: Callable[[AnyTiered], dict[str, Any]] = lambda _: {},
        also: Callable[[Path], Mapping[int, dict[str, Any]]] = lambda _: {},
    ) -> None:
        self._directory = directory
        self._cases = list(cases)
        self._config_of, self._job_of, self._also = config_of, job_of, also
        self._results: dict[bool, dict[str, Any]] = {}

    def of(self, case: AnyTiered) -> tuple[dict[str, Any], Path]:
        """Return the result of a case and the directory of its saved state."""
        results = self.results(slow=case.slow)
        if case.name not in results:
            results |= self._train([case], {}, self._place(case.slow))
        return results[case.name], self._place(case.slow) / case.name

    def also(self, name: str) -> tuple[dict[str, Any], Path]:
        """Return the result of another job, which is trained with the fast cases."""
        return self.results(slow=False)[name], self._place(False) / name

    def results(self, *, slow: bool) -> dict[str, Any]:
        """Return the results of a tier by name, trained on first use."""
        if slow not in self._results:
            place = self._place(slow)
            place.mkdir()
            cases = [case for case in self._cases if case.slow == slow and not is_deselected(case)]
            self._results[slow] = self._train(cases, {} if slow else self._also(place), place)
        return self._results[slow]

    def _train(
        self, cases: list[AnyTiered], more: Mapping[int, dict[str, Any]], place: Path
    ) -> dict[str, Any]:
        """Train all cases of one number of processes in one world."""
        jobs = {size: dict(others) for size, others in more.items()}
        for case in cases:
            jobs.setdefault(case.world_size, {})[case.name] = {
                "config": self._config_of(case),
                "deepspeed_config": case.engine,
                "save_at": STEPS,
                "save_to": str(place / case.name),
                **self._job_of(case),
            }
        results: dict[str, Any] = {}
        for world_size in sorted(jobs):
            world = Path(tempfile.mkdtemp(prefix=f"world{world_size}-", dir=place))
            results |= train_cases(world_size, jobs[world_size], world)
        return results

    def _place(self, slow: bool) -> Path:
        return self._directory / ("slow" if slow else "fast")
