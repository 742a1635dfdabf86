"""The whole matrix: every legal combination trains as plain transformers does in one process.

Points are the product of the axes. Which of them are legal is asked of
`bigtrain.settings.compatibility.check`; the others must be refused there. In `make test` trains a
set of legal points that has every value of an axis, on up to two processes and on four, where any
legal point has it; `make test-full` trains one that has every three values of three axes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache, reduce
from itertools import combinations, product
from operator import or_
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.errors import ConfigError
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.compatibility.check import RULES, check_compatibility
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.degrees import AXES as TOPOLOGY_AXES
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import ModelSection, ParallelSection, RunConfig
from bigtrain.settings.topology import derive_topology
from tests.parity.conftest import SEED, STEPS, VOCAB_SIZE, llama, run_config, train_cases
from tests.parity.plain import (
    Spread,
    Training,
    compute_in_halves,
    orders,
    read_steps,
    root_mean_square,
    train,
)
from tests.parity.routing import Choices, Routing, checksum, differing
from tests.support.datasets import write_dataset

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

LOSS = 1e-5
"""In nats, at every step, float32."""
NORM = 1e-4
"""Of the gradient norm before clipping, at every step, float32."""
WEIGHT = 1e-5
"""Of every weight at the end, float32."""
SPREADS = 3.0
"""bfloat16: how many times as far from the mean of the plain runs as the farthest of them."""
FEW_STEPS = 2
MOST_PROCESSES = 4
POINTS_OF_A_WORLD = 32


@dataclass(frozen=True)
class Point:
    """One value of every axis."""

    zero: int
    tensor: int
    pipeline: int
    sequence: int
    data: int
    accumulation: int
    recompute: str
    dtype: str
    tied: bool
    documents: str
    loss: str
    expert: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.sequence * self.data

    @property
    def name(self) -> str:
        return (
            f"zero{self.zero}-tp{self.tensor}-pp{self.pipeline}-sp{self.sequence}-dp{self.data}-"
            f"accumulation{self.accumulation}-{self.recompute}-{self.dtype}-"
            f"{'tied' if self.tied else 'untied'}-{self.documents}-{self.loss}-ep{self.expert}"
        )

    @property
    def has_experts(self) -> bool:
        return self.expert > 1

    @property
    def facts(self) -> Facts:
        return Facts(
            zero_stage=self.zero,
            world_size=self.world_size,
            tensor_size=self.tensor,
            pipeline_size=self.pipeline,
            sequence_size=self.sequence,
            expert_size=self.expert,
            sequence_length=16,
            dtype=self.dtype,
            device="cpu",
            loss=self.loss,
        )

    @property
    def engine(self) -> str:
        return "pipeline_zero1" if self.pipeline > 1 and self.zero == 1 else f"zero{self.zero}"


AXES: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "tensor": (1, 2),
    "pipeline": (1, 2, 4),
    "sequence": (1, 2),
    "data": (1, 2),
    "accumulation": (1, 4),
    "recompute": ("none", "full"),
    "dtype": ("float32", "bfloat16"),
    "tied": (True, False),
    "documents": ("masked", "packed"),
    "loss": ("plain", "chunked"),
    "expert": (1, 2, 4),  # of a mixture of experts; 1 is a model without
}
assert list(AXES) == [field.name for field in fields(Point)]
EIGHT = [  # what does not fit in four processes, once each
    Point(1, 2, 2, 1, 2, 4, "full", "float32", True, "packed", "chunked"),
    Point(1, 2, 2, 1, 2, 1, "none", "bfloat16", False, "masked", "plain"),
    Point(0, 2, 4, 1, 1, 4, "none", "float32", True, "masked", "chunked"),
    # Divided experts with every ZeRO stage and all other degrees that eight processes have.
    Point(0, 2, 2, 1, 2, 1, "none", "float32", False, "packed", "plain", 2),
    Point(1, 2, 2, 1, 2, 2, "full", "float32", True, "masked", "chunked", 2),
    Point(0, 1, 2, 1, 4, 2, "full", "float32", True, "packed", "plain", 4),
    Point(1, 1, 2, 1, 4, 1, "none", "float32", False, "masked", "chunked", 4),
    Point(0, 2, 1, 1, 4, 1, "full", "float32", False, "masked", "plain", 4),
    Point(1, 2, 1, 1, 4, 2, "none", "float32", True, "packed", "plain", 4),
    Point(2, 2, 1, 1, 4, 1, "none", "float32", True, "masked", "chunked", 4),
    Point(3, 2, 1, 1, 4, 2, "full", "float32", False, "packed", "chunked", 4),
    Point(0, 2, 1, 2, 2, 1, "none", "float32", True, "packed", "chunked", 4),
    Point(1, 2, 1, 2, 2, 4, "full", "float32", False, "masked", "plain", 4),
    Point(2, 2, 1, 2, 2, 4, "none", "float32", False, "packed", "plain", 4),
    Point(3, 2, 1, 2, 2, 1, "full", "float32", True, "masked", "chunked", 4),
]


@cache
def product_of_axes() -> tuple[Point, ...]:
    """Every combination, small worlds first."""
    points = [Point(*values) for values in product(*AXES.values())]
    return tuple(sorted(points, key=lambda point: point.world_size))


@cache
def legal_points() -> tuple[Point, ...]:
    """What runs on up to `MOST_PROCESSES`."""
    return tuple(
        point
        for point in product_of_axes()
        if point.world_size <= MOST_PROCESSES and not refusals(point) and not is_left_out(point)
    )


def refusals(point: Point) -> frozenset[str]:
    """Names of the rules that are violated."""
    return refusals_of_facts(
        replace(point, accumulation=1, recompute="none", tied=True, documents="masked")
    )


@cache
def refusals_of_facts(point: Point) -> frozenset[str]:
    """Of points with the same facts, which do not tell the other axes, one."""
    facts = point.facts
    return frozenset(name for name, rule in RULES.items() if rule.violated(facts))


def is_left_out(point: Point) -> bool:
    """In 16 bit a token's rounding may send it elsewhere: test_expert_parallel compares those."""
    return point.has_experts and point.dtype == "bfloat16"


def covering(
    points: Sequence[Point], strength: int = 2, exponents: Iterable[int] = range(4, 20)
) -> list[Point]:
    """Few and cheap ones of `points` that have all values of every `strength` axes that any of them
    has: of some greedy sets the cheapest."""
    numbers: dict[Any, int] = {}
    combined = [  # as bits
        reduce(
            lambda bits, values: bits | 1 << numbers.setdefault(values, len(numbers)),
            combinations(enumerate(astuple(point)), strength),
            0,
        )
        for point in points
    ]
    costs = [cost(point) for point in points]
    covers = [greedy(combined, costs, exponent / 20) for exponent in exponents]
    sets = [[points[number] for number in chosen] for chosen in covers]
    return min(sets, key=cost_of_all)


def cost_of_all(points: Sequence[Point]) -> float:
    """Of the points, and of the plain runs that show how far rounding takes them."""
    spreads = {spread_of(point) for point in points if point.dtype == "bfloat16"}
    return sum(map(cost, points)) + 4 * len(spreads)


def spread_of(point: Point) -> tuple[bool, str, torch.dtype, bool]:
    """Return what `Matrix.spread` is asked for."""
    # ZeRO 0 adds up in the dtype of the parameters, the others in float32.
    sum_dtype = torch.bfloat16 if point.zero == 0 else torch.float32
    return point.tied, point.documents, sum_dtype, point.tensor == 2


def cost(point: Point) -> float:
    """Of the seconds of all its processes a guess: to build the model and to train it."""
    recompute = 1.25 if point.recompute == "full" else 1.0
    zero3 = 1.3 if point.zero == 3 else 1.0
    return point.world_size * (0.45 + 0.27 * point.accumulation * recompute * zero3)


def greedy(pairs: list[int], costs: list[float], exponent: float) -> list[int]:
    """Numbers of points whose `pairs` are all: each time the one with the most that are still
    missing for its cost to the power of `exponent`; then without those that the others make
    unnecessary."""
    everything = reduce(or_, pairs)
    divisors = [each**exponent for each in costs]
    missing, chosen = everything, []
    while missing:
        shares = [
            (own & missing).bit_count() / divisor
            for own, divisor in zip(pairs, divisors, strict=True)
        ]
        best = shares.index(max(shares))
        missing &= ~pairs[best]
        chosen.append(best)
    for number in sorted(chosen, key=lambda each: -costs[each]):
        others = [pairs[other] for other in chosen if other != number]
        if reduce(or_, others, 0) == everything:
            chosen.remove(number)
    return chosen


SMALL = [point for point in legal_points() if point.world_size < MOST_PROCESSES]
LARGE = [point for point in legal_points() if point.world_size == MOST_PROCESSES]
COVERING = [*covering(SMALL, 1), *covering(LARGE, 1)]
EVERYTHING = [*covering(legal_points(), 3, [10]), *EIGHT]


def groups_of(points: Sequence[Point]) -> Iterator[tuple[Point, ...]]:
    """Points that train in one world of processes, one after the other."""
    for size in sorted({point.world_size for point in points}):
        same = [point for point in points if point.world_size == size]
        for start in range(0, len(same), POINTS_OF_A_WORLD):
            yield tuple(same[start : start + POINTS_OF_A_WORLD])


class Matrix:
    """Trains points where they are asked for, a whole group of them at once; and the references."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = {
            "masked": write_dataset(
                directory / "masked", vocab_size=VOCAB_SIZE, num_documents=90, masked=True
            ),
            "packed": write_dataset(directory / "packed", vocab_size=VOCAB_SIZE, num_documents=90),
        }
        self.initial: dict[tuple[bool, bool], dict[str, Any]] = {}
        self.hf_directories = {
            key: self._hf_directory(*key) for key in product((True, False), repeat=2)
        }
        self.figures: dict[Point, dict[str, Any]] = {}
        self.dropout: dict[str, Any] = {}

    def _hf_directory(self, tied: bool, experts: bool) -> Path:
        section = ModelSection(config=model_of(tied=tied, experts=experts))
        directory = self.directory / f"{'tied' if tied else 'untied'}-{experts}"
        model = build_model(section, load_hf_config(section), seed=SEED)
        model.save_pretrained(directory)
        self.initial[tied, experts] = dict(model.named_parameters())
        return directory

    def config_of(self, point: Point) -> dict[str, Any]:
        micro_batch_size = 8 // (point.data * point.accumulation)
        model = {
            "config": model_of(tied=point.tied, experts=point.has_experts),
            "gradient_checkpointing": point.recompute,
            "loss": point.loss,
            "loss_chunk_tokens": 5 * micro_batch_size,
        }
        config: dict[str, Any] = run_config(
            self.data[point.documents],
            model,
            micro_batch_size=micro_batch_size,
            precision={"dtype": point.dtype},
            parallel={
                "tensor": point.tensor,
                "pipeline": point.pipeline,
                "sequence": point.sequence,
                "expert": point.expert,
            },
            # With the usual eps of 1e-8, AdamW makes updates of full size from the rounding errors
            # of gradients that are nearly zero; sums in another order then part by 1e-5.
            optimizer={"lr": 3e-3, "clip_norm": 0.5, "eps": 1e-6},
        )
        config["data"] = {"path": str(self.data[point.documents])}
        if point.documents == "packed":
            config["data"]["document_boundaries"] = "isolate"
        return config

    def train_group_of(self, point: Point, points: Sequence[Point], num_steps: int) -> None:
        """Train those of `points` that share a world with `point`, unless it has been done."""
        if point not in self.figures:
            (group,) = [group for group in groups_of(points) if point in group]
            has_dropout = points is COVERING and point.world_size == MOST_PROCESSES
            self.train(group, num_steps, self.dropout_cases() if has_dropout else {})

    def dropout_cases(self) -> dict[str, Any]:
        """What dropout layers let through on every process, in two steps."""
        phi = llama(
            model_type="phi",
            num_key_value_heads=4,
            resid_pdrop=0.3,
            embd_pdrop=0.3,
            tie_word_embeddings=False,
        )
        return {
            name: {
                "config": run_config(
                    self.data["masked"],
                    {"config": phi},
                    micro_batch_size=4,
                    parallel=parallel.model_dump(),
                ),
                "deepspeed_config": f"zero{zero}",
                "last_step": 2,
                "watch_dropout": True,
            }
            for name, (zero, parallel) in DROPOUT.items()
        }

    def train(self, points: Sequence[Point], num_steps: int, dropout: dict[str, Any]) -> None:
        """All of `points`, which need the same number of processes, and in the same world the
        cases `dropout`."""
        (size,) = {point.world_size for point in points}
        place = self.directory / f"world{size}-{len(self.figures)}"
        place.mkdir()
        cases = {
            point.name: {
                "config": self.config_of(point),
                "deepspeed_config": point.engine,
                "last_step": num_steps,
                "watch_calls": True,
                "watch_routing": point.has_experts,
                "weights": {
                    str(step): str(place / f"{point.name}-{step}.pt") for step in (0, num_steps)
                },
            }
            for point in points
        }
        results = train_cases(size, cases | dropout, place)
        self.dropout |= {name: results[name] for name in dropout}
        for point in points:
            result = results[point.name]
            for step, file in cases[point.name]["weights"].items():  # type: ignore[attr-defined]
                result[f"weights{step}"] = torch.load(file)
                Path(file).unlink()
            self.figures[point] = result

    @cache  # noqa: B019 (lives as long as the session)
    def reference(
        self, tied: bool, experts: bool, documents: str, num_steps: int
    ) -> tuple[Training, Routing]:
        config = self.config_of(replace(COVERING[0], documents=documents))
        steps = read_steps(self.data[documents], config)[:num_steps]
        choices: list[Choices] = []
        training = train(
            self.hf_directories[tied, experts],
            steps,
            config,
            watch=lambda model: choices.append(Choices(model)),
        )
        samples = [[checksum(row) for row in step.inputs] for step in steps]
        return training, choices[0].of_one(samples)

    @cache  # noqa: B019
    def spread(
        self, tied: bool, documents: str, sum_dtype: torch.dtype, halves: bool, num_steps: int
    ) -> Spread:
        """Of plain runs that divide the samples otherwise. halves: what tensor-parallel processes
        add up is rounded before, which puts plain runs as well 3 such spreads away."""
        config = self.config_of(replace(COVERING[0], documents=documents))
        steps = read_steps(self.data[documents], config)
        runs = [
            train(
                self.hf_directories[tied, False],
                steps,
                config,
                num_steps=num_steps,
                chunks=chunks,
                dtype=torch.bfloat16,
                sum_dtype=sum_dtype,
                halves=halves,
            )
            for chunks in orders()
        ]
        return Spread.of(runs)


def model_of(*, tied: bool, experts: bool) -> dict[str, Any]:
    changes = {"num_hidden_layers": 4, "tie_word_embeddings": tied}
    if not experts:
        return llama(**changes)
    # Every second layer has experts: some stages have none.
    return {
        **llama(**changes, head_dim=8),
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 2,
    }


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


def compare(matrix: Matrix, point: Point, num_steps: int) -> None:
    """Assert that a trained point starts as its reference and equals it."""
    result = matrix.figures[point]
    assert result["accumulation"] == point.accumulation
    initial, final = result.pop("weights0"), result.pop(f"weights{num_steps}")
    assert_initial(matrix, point, initial)
    reference: Training | Spread
    if point.dtype == "float32":
        reference, chosen = matrix.reference(
            point.tied, point.has_experts, point.documents, num_steps
        )
        if point.has_experts:
            assert differing(result["choices"], chosen) == {}
            assert result["choices"]["times"] == point.tensor * (1 + (point.recompute == "full"))
        limits = {"loss": LOSS, "norm": NORM, "weight": WEIGHT}
        weight = max(float((final[n] - w).abs().max()) for n, w in reference.weights.items())
    else:
        reference = matrix.spread(*spread_of(point), num_steps)
        limits = {
            "loss": SPREADS * reference.loss,
            "norm": SPREADS * reference.norm,
            "weight": SPREADS * reference.weight,
        }
        weight = root_mean_square(final, reference.weights)
    assert min(reference.norms) > 0.5, "clipping does not bite"
    worst = {
        "loss": max(abs(a - b) for a, b in zip(result["losses"], reference.losses, strict=True)),
        "norm": max(abs(a - b) / b for a, b in zip(result["norms"], reference.norms, strict=True)),
        "weight": weight,
    }
    print(json.dumps({"point": point.name, "worst": worst, "limits": limits}))  # pytest -rP
    for kind, limit in limits.items():
        assert worst[kind] <= limit, (kind, worst, limits)


def assert_initial(matrix: Matrix, point: Point, initial: dict[str, torch.Tensor]) -> None:
    """Bit for bit the weights of one process, whatever the topology; rounded once in bfloat16."""
    expected = matrix.initial[point.tied, point.has_experts]
    assert initial.keys() == expected.keys()
    for name, weight in expected.items():
        if point.dtype == "bfloat16":
            weight = weight.bfloat16().float()
        assert torch.equal(initial[name], weight), name


EXPECTED_REFUSALS = {
    "ZeRO 2 and 3 with pipeline",
    "sequence parallelism with pipeline",
    "16-bit pipeline with ZeRO 0",
    "experts that do not divide data x sequence",
}


def test_no_two_points_train_the_same(matrix: Matrix) -> None:
    """An axis that `config_of`, `name` or `world_size` leaves out would never be trained."""
    points = {*legal_points(), *EIGHT}
    runs = {
        json.dumps([matrix.config_of(point), point.engine, point.world_size], sort_keys=True)
        for point in points
    }
    assert len(runs) == len({point.name for point in points}) == len(points)
    for point in (*COVERING, *EIGHT):
        config = RunConfig.model_validate(matrix.config_of(point))
        topology = resolve_run(config, point.world_size, point.engine).topology
        assert {axis: topology.size(axis) for axis in TOPOLOGY_AXES} == {
            axis: getattr(point, axis) for axis in TOPOLOGY_AXES
        }


def test_the_covering_set_covers() -> None:
    def sets_of(points: Iterable[Point], strength: int) -> set[Any]:
        return {each for p in points for each in combinations(enumerate(astuple(p)), strength)}

    for points in (SMALL, LARGE):
        assert sets_of({*COVERING} & {*points}, 1) == sets_of(points, 1)
    assert sets_of(EVERYTHING, 2) >= sets_of(legal_points(), 2)
    assert len(COVERING) <= 12
    for number, (name, values) in enumerate(AXES.items()):
        assert {astuple(point)[number] for point in COVERING} == set(values), name


def test_every_other_point_is_refused_by_name(matrix: Matrix) -> None:
    """No point is left out but for what the table says, or more processes than four."""
    counts: Counter[str] = Counter()
    legal = set(legal_points())
    for point in product_of_axes():
        if point in legal or is_left_out(point):
            continue
        names = refusals(point)
        assert names <= EXPECTED_REFUSALS
        assert names or point.world_size > MOST_PROCESSES
        counts.update(names or {"large"})
    assert counts.keys() == EXPECTED_REFUSALS | {"large"}
    # What resolves a run comes to the same end.
    degrees = {}
    for point in product_of_axes():
        key = (point.zero, point.tensor, point.pipeline, point.sequence, point.dtype, point.expert)
        degrees.setdefault(key, point)
    for point in degrees.values():
        config = RunConfig.model_validate(matrix.config_of(point))
        problems = {problem.rule for problem in check_compatibility(point.facts)}
        try:
            resolve_run(config, point.world_size, point.engine, "cpu")
            rules = set()
        except ConfigError as error:
            rules = {problem.rule for problem in error.problems}
        # Besides, the JSON of ZeRO 2 and 3 has overlap_comm, which is refused of its own.
        assert problems <= rules, point
        assert bool(problems) == bool(rules), point


def test_halves_differ_by_rounding_alone(matrix: Matrix) -> None:
    config = matrix.config_of(COVERING[0])
    steps = read_steps(matrix.data[COVERING[0].documents], config)
    training, expected = (
        train(matrix.hf_directories[True, False], steps, config, num_steps=FEW_STEPS, halves=halves)
        for halves in (True, False)
    )
    assert training.losses == pytest.approx(expected.losses, abs=LOSS)
    assert training.norms == pytest.approx(expected.norms, rel=NORM)


def test_halves_are_rounded_before_they_are_added() -> None:
    # bfloat16 holds 256 and 258, and rounds 257 to 256.
    columns = torch.tensor([[256.0, 1.0, 1.0, 0.0]], dtype=torch.bfloat16)
    whole, halves = (
        torch.nn.ModuleDict(
            {
                "o_proj": torch.nn.Linear(4, 1, bias=False),
                "q_proj": torch.nn.Linear(1, 4, bias=False),
            }
        ).to(torch.bfloat16)
        for _ in range(2)
    )
    compute_in_halves(halves)
    for model, expected in ((whole, 258.0), (halves, 256.0)):
        with torch.no_grad():
            model["o_proj"].weight.copy_(columns)
            model["q_proj"].weight.copy_(columns.T)
        assert model["o_proj"](torch.ones_like(columns)).item() == expected
        inputs = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
        model["q_proj"](inputs).sum().backward()
        assert inputs.grad is not None
        assert inputs.grad.item() == expected


@pytest.mark.parametrize("point", COVERING, ids=lambda point: point.name)
def test_equals_plain_training(matrix: Matrix, point: Point) -> None:
    matrix.train_group_of(point, COVERING, FEW_STEPS)
    compare(matrix, point, FEW_STEPS)


READ = "aten::_local_scalar_dense in "


@pytest.mark.parametrize("point", COVERING, ids=lambda point: point.name)
def test_a_step_reads_nothing_from_the_device(matrix: Matrix, point: Point) -> None:
    """Beside what DeepSpeed does, and two figures after one exchange for the guard. DeepSpeed has
    waited for the norm by then, so that they cost no wait; what is logged is the same two."""
    matrix.train_group_of(point, COVERING, FEW_STEPS)
    step, log = (matrix.figures[point]["calls"][part] for part in ("step", "log"))
    reads = {name: count for name, count in step.items() if name.startswith(READ)}
    waits = reads.pop(f"{READ}deepspeed", 0)
    assert waits or (point.zero == 0 and point.dtype == "float32")
    if point.zero == 0 and point.dtype == "bfloat16":
        assert waits == 4  # the norms of two groups of parameters, twice each: not every gradient
    assert step.get("c10d::allreduce_ in _measure", 0) == (point.world_size > 1)
    # Labels, which are on the host: how many targets there are, and whether all are.
    assert reads.pop(f"{READ}count") == point.accumulation
    assert set(reads) <= {f"{READ}_targets"}
    assert step["c10d::allreduce_ in _count_targets"] == 1
    assert log.pop(f"{READ}gradient_norm", 1) == 1  # some of DeepSpeed's optimizers have read it
    assert log == {}


DROPOUT = {  # ZeRO stage and degrees of what four processes train
    "data": (3, ParallelSection(tensor=2)),
    "sequence": (2, ParallelSection(tensor=2, sequence=2)),
    "pipeline": (1, ParallelSection(tensor=2, pipeline=2)),
}


@pytest.fixture(scope="module")
def dropout(matrix: Matrix) -> dict[str, Any]:
    """The results of `Matrix.dropout_cases`."""
    largest = next(point for point in COVERING if point.world_size == MOST_PROCESSES)
    matrix.train_group_of(largest, COVERING, FEW_STEPS)
    return matrix.dropout


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_streams(dropout: dict[str, Any], name: str) -> None:
    """Equal in a tensor-parallel group, different on every other process and in every step."""
    topology, _ = derive_topology(DROPOUT[name][1], 4)
    assert topology is not None
    masks = dropout[name]["masks"]
    assert all(masks)
    for first, second in combinations(range(4), 2):
        one, other = (replace(topology.coordinates(r), tensor_rank=0) for r in (first, second))
        if one == other:
            assert masks[first] == masks[second]
        else:
            assert not seen(masks[first]) & seen(masks[second])
    for masks_of_process in masks:
        assert len(seen(masks_of_process)) == sum(len(calls) for calls in masks_of_process.values())


def seen(masks: dict[str, list[int]]) -> set[int]:
    return {mask for calls in masks.values() for mask in calls}


@pytest.fixture(scope="module")
def all_of_it(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("everything"))


@pytest.mark.slow
@pytest.mark.parametrize("point", EVERYTHING, ids=lambda point: point.name)
def test_all_equal_plain_training(all_of_it: Matrix, point: Point) -> None:
    all_of_it.train_group_of(point, EVERYTHING, STEPS)
    compare(all_of_it, point, STEPS)
