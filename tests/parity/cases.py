"""Cases of one file: a model, ranks and an engine that train it, compared with the plain loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bigtrain.engine.checkpoint.lazy import open_tensors
from tests.parity.conftest import SavedModels, TrainedCases, run_config
from tests.parity.plain import Spread, Training, plain_training, root_mean_square
from tests.support.comparison import assert_same_steps, assert_same_weights
from tests.support.worlds import ROOT

LOSS = {"float32": 1e-5, "bfloat16": 2e-3}
"""In nats, at every step."""
NORM = {"float32": 1e-4, "bfloat16": 1e-2}
"""Of the gradient norm before clipping, at every step."""
WEIGHTS = 1e-5
"""Of every weight at the end, float32."""
SPREADS = 3.0
"""bfloat16: how many times as far from the mean of the plain runs as the farthest of them."""
EPS: dict[str, dict[str, Any]] = {"optimizer": {"eps": 1e-6}}
"""With the usual eps of 1e-8, AdamW makes updates of full size from the rounding errors of
gradients that are nearly zero: other orders of addition part a single weight by 1e-5 then."""
RECOMPUTE: dict[str, dict[str, Any]] = {"model": {"gradient_checkpointing": "full"}}
CHUNKS: dict[str, dict[str, Any]] = {"model": {"loss": "chunked", "loss_chunk_tokens": 5}}
ISOLATED: dict[str, dict[str, Any]] = {"data": {"document_boundaries": "isolate"}}
_CPU = {"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 100_000}
ENGINES: dict[str, dict[str, Any]] = {
    "zero1_offload": {"zero_optimization": _CPU},
    "zero3_hpz": {"zero_optimization": {"zero_hpz_partition_size": 2}},
}
"""DeepSpeed JSON that ds_configs/ has not; keys of ZeRO 3 are added to its file."""


@dataclass(frozen=True)
class Case:
    """So many ranks under an engine. `sections`: of the run, on top of `run_config`."""

    world_size: int
    engine: str
    model: str = "llama"
    accumulation: int = 2
    degrees: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dtype: str = "float32"
    slow: bool = True

    @property
    def name(self) -> str:
        degrees = "-".join(f"{axis}{size}" for axis, size in self.degrees.items()) or "data"
        changed = [entry for section in self.sections.values() for entry in section.items()]
        changes = "".join(f"-{k}={len(v) if isinstance(v, list) else v}" for k, v in changed)
        name = f"{self.model}-{self.engine}-of-{self.world_size}-{degrees}"
        name += f"-accumulation{self.accumulation}-{self.dtype}{changes}"
        return "".join(c for c in name if c.isalnum() or c in "-=._")

    @property
    def num_replicas(self) -> int:
        """Ranks that train on different samples."""
        inner = [
            prod(size.values()) if isinstance(size, Mapping) else size
            for axis, size in self.degrees.items()
            if axis != "expert"
        ]
        return self.world_size // prod(inner)

    def micro_batch_size(self, samples: int = 8) -> int:
        return samples // (self.accumulation * self.num_replicas)

    def config(self, data: Path, model: Mapping[str, Any], samples: int = 8) -> dict[str, Any]:
        """Return the run; `model`: its section, on top of which come the case's own keys."""
        micro_batch_size = self.micro_batch_size(samples)
        config: dict[str, Any] = run_config(
            data,
            dict(model),
            micro_batch_size=micro_batch_size,
            precision={"dtype": self.dtype},
            parallel=dict(self.degrees),
        )
        for name, section in self.sections.items():
            config[name] = config.get(name, {}) | dict(section)
        if "data" in self.sections:  # ends of documents are inputs then
            config["data"].pop("mask_end_of_document", None)
        return config


KEPT_APART, CONCATENATED = "isolated", "concatenated"
"""What `document_config` reads in ``data.path`` of a case: whether documents of a sample are kept
apart."""


def document_config(
    case: Case, model: Mapping[str, Any], data: Path, *, num_samples: int, num_tokens: int
) -> dict[str, Any]:
    """Return the run of `case` from shards `data`, in steps of `num_samples` samples of
    `num_tokens` tokens that documents share."""
    config = case.config(data, model, num_samples)
    config["batch"] |= {"sequence_length": num_tokens, "global_batch_size": num_samples}
    is_concatenated = config["data"]["path"] == CONCATENATED
    config["data"] = {"path": str(data)}
    if is_concatenated:
        config["data"]["mask_end_of_document"] = True
    else:
        config["data"]["document_boundaries"] = "isolate"
    return config


class PlainRuns:
    """A file's cases, trained when they are asked for, and the plain loop of each."""

    def __init__(
        self,
        directory: Path,
        data: Path,
        models: Mapping[str, dict[str, Any]],
        cases: Iterable[Case],
        *,
        directories: dict[str, Path] | None = None,
        from_files: bool = False,
        config_of: Callable[[Case, Mapping[str, Any]], dict[str, Any]] | None = None,
        plain_of: Callable[[Case], dict[str, Any]] = lambda _: {},
        job_of: Callable[[Case], dict[str, Any]] = lambda _: {},
        relative: float = 0.0,
        **job: Any,
    ) -> None:
        """`directories`: of the saved models; from_files: cases begin with these, and not with the
        same random weights. plain_of: options of the plain loop; job_of, `job`: of the worker.
        relative: what weights may differ by besides, of their value."""
        self._models, self._data = models, data
        if directories is None:
            directories = SavedModels(models, _made(directory / "hf"))
        self.directories = directories
        self._from_files, self._directory = from_files, directory
        self._config_of = config_of or (lambda case, model: case.config(data, model))
        self._plain_of, self._own_job_of, self._job = plain_of, job_of, job
        self._relative = relative
        self._plain: dict[str, Training] = {}
        self._trained = TrainedCases(directory, cases, self.config_of, self._job_of)

    def config_of(self, case: Case) -> dict[str, Any]:
        model: dict[str, Any] = {"config": self._models[case.model]}
        if self._from_files:
            model = {"path": str(self.directories[case.model])}
        return self._config_of(case, model)

    def _job_of(self, case: Case) -> dict[str, Any]:
        own = {**self._job, **self._own_job_of(case)}
        return {**own, "deepspeed_config": self.engine_of(case.engine)}

    def engine_of(self, engine: str) -> str:
        if engine not in ENGINES:
            return engine
        tree = {key: dict(block) for key, block in ENGINES[engine].items()}
        if engine.startswith("zero3"):
            shipped = json.loads((ROOT / "ds_configs/zero3.json").read_text())
            own = shipped["zero_optimization"] | tree["zero_optimization"]
            tree = {**shipped, "zero_optimization": own}
        file = self._directory / f"{engine}.json"
        file.write_text(json.dumps(tree))
        return str(file)

    def trained(self, case: Case) -> tuple[dict[str, Any], Path]:
        """Return the result of a case and the directory of its saved state."""
        return self._trained.of(case)

    def plain(self, case: Case, **options: Any) -> Training:
        """Return the plain training, which is remembered without more `options`."""
        config, own = self.config_of(case), self._plain_of(case)
        batch = [config["batch"][key] for key in ("sequence_length", "global_batch_size")]
        parts = [config[name] for name in ("data", "train", "optimizer", "schedule", "seed")]
        sizes = [len(part) for part in own["chunks"](0)] if "chunks" in own else []
        rest = sorted((key, repr(value)) for key, value in own.items() if not callable(value))
        key = json.dumps([case.model, batch, parts, sizes, rest])
        if options or key not in self._plain:
            made = plain_training(
                self._data_of(config), self.directories[case.model], config, **{**own, **options}
            )
            if options:
                return made
            self._plain[key] = made
        return self._plain[key]

    @staticmethod
    def _data_of(config: dict[str, Any]) -> Path:
        return Path(config["data"]["path"])

    def check(self, case: Case, **options: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Compare a case with the plain loop, by its dtype; return its result and weights."""
        expected, (result, place) = self.plain(case, **options), self.trained(case)
        assert result["accumulation"] == case.accumulation
        assert_same_steps(result, expected, loss=LOSS[case.dtype], norm=NORM[case.dtype])
        if case.dtype != "float32":
            return result, {}
        weights = expected.weights
        if "frozen" in case.sections.get("model", {}):  # what is not trained stays as in the files
            directory = self.directories[case.model]
            read = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            weights = {**{n: p.detach() for n, p in read.named_parameters()}, **weights}
        if "pipeline" in case.degrees:  # a stage has no copy of weights that only others read
            saved = read_names(place)
            weights = {name: weight for name, weight in weights.items() if name in saved}
            assert sum(weight.numel() for weight in weights.values()) > 10_000
        return result, assert_same_weights(
            place,
            weights,
            limit=WEIGHTS,
            relative=self._relative,
            buffers="e_score_correction_bias",
        )


def assert_among(
    result: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    spread: Spread,
    *,
    spreads: float = SPREADS,
    largest_norm: float = 0.1,
) -> None:
    """Compare a run with plain runs that only add up in other orders: in 16 bit these are apart."""
    losses = [abs(a - b) for a, b in zip(result["losses"], spread.losses, strict=True)]
    norms = [abs(a - b) / b for a, b in zip(result["norms"], spread.norms, strict=True)]
    assert max(losses) <= spreads * spread.loss
    assert max(norms) <= spreads * spread.norm < largest_norm
    assert root_mean_square(dict(weights), spread.weights) <= spreads * spread.weight


def read_names(place: Path) -> set[str]:
    """Return the names of the masters saved in `place`."""
    return {key.removeprefix("master/") for key in open_tensors(place / "tensors")}


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
