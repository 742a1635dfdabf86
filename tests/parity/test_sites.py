"""Sites: worlds side by side with a rare outer step, against plain copies in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from math import prod
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full
from bigtrain.sites.codecs import sent_bytes
from tests.parity.conftest import llama, run_config, train_cases
from tests.parity.plain import Step, adamw, read_steps, root_mean_square, train
from tests.support.lives import run_script
from tests.support.outer_servers import outer_server
from tests.support.tiers import FULL
from tests.support.worlds import held_ports

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

WORKER = Path(__file__).with_name("sites_worker.py")
SAMPLES = 8
INNER_STEPS = 2
OUTER_STEPS = 10 if FULL else 4
WEIGHTS = 1e-6
LOSS = 1e-5
FAR = {"int8": 1e-4, "int4": 1e-3}
"""Root mean square of what integers may change, where steps change 1e-2."""
LIMIT_SECONDS = 300.0
"""For what takes seconds where nothing else runs: sites wait so long for each other."""
NESTEROV: dict[str, Any] = {"type": "nesterov", "lr": 0.6, "momentum": 0.9}


@dataclass(frozen=True)
class Layout:
    """Ranks of a site, their degrees and DeepSpeed JSON; `sections` of the run beside."""

    ranks: int
    engine: str
    degrees: dict[str, int] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)

    @property
    def data_size(self) -> int:
        return self.ranks // prod(self.degrees.values())


LAYOUTS = {
    "zero0": Layout(2, "zero0"),
    "zero1": Layout(2, "zero1"),
    "zero2": Layout(2, "zero2"),
    "zero3": Layout(2, "zero3"),
    "tensor 2": Layout(2, "zero1", {"tensor": 2}),
    "pipeline 2": Layout(2, "pipeline_zero1", {"pipeline": 2}),
    "sequence 2": Layout(2, "zero2", {"sequence": 2}),
    "zero2 offload": Layout(2, "zero2_offload"),
}
ONE_RANK = Layout(1, "zero1")


def config_of(
    data: Path, layout: Layout, sites: dict[str, Any] | None, *, steps: int, **sections: Any
) -> dict[str, Any]:
    """A run of `steps` steps of `SAMPLES` samples of all sites, or as many as they divide."""
    num_sites = 1 if sites is None else sites["count"]
    samples = SAMPLES if SAMPLES % num_sites == 0 else 3 * num_sites
    micro = max(1, samples // (num_sites * layout.data_size * 2))
    return run_config(
        data,
        {"config": llama()},
        **{
            "micro_batch_size": micro,
            "batch": {
                "sequence_length": 16,
                "global_batch_size": samples,
                "micro_batch_size": micro,
            },
            "train": {"steps": steps},
            "parallel": layout.degrees,
            **({} if sites is None else {"sites": sites}),
            **layout.sections,
            **sections,
        },
    )


def by_site(
    case: dict[str, Any], directory: Path, name: str, meeting: dict[str, Any]
) -> list[dict[str, Any]]:
    """A case for each site, with the settings `meeting`; it keeps its weights, and what it names of
    a checkpoint, apart. `of_sites`: what some of them have otherwise."""
    sites = case["config"]["sites"]
    cases_of_sites = []
    for index in range(sites["count"]):
        section = sites | meeting | {"index": index, "timeout_seconds": LIMIT_SECONDS}
        other = case.get("of_sites", {}).get(index, {})
        config = other.get("config", case["config"])
        own: dict[str, Any] = {**other, "config": config | {"sites": section}}
        for key in ("save_to", "save_again_to", "restore_from"):
            if key in case:
                own[key] = f"{case[key]}-site-{index}"
        weights = {str(n): f"{directory}/{name}-{n}-{index}.pt" for n in case.get("keep", ())}
        cases_of_sites.append({**case, **own, "weights": weights})
    return cases_of_sites


def train_sites(
    ranks: Sequence[int], cases: dict[str, dict[str, Any]], directory: Path
) -> dict[str, list[dict[str, Any]]]:
    """Results of each case by site, with the weights that it keeps; `ranks`: of each site."""
    outputs = [directory / f"results-{index}.json" for index in range(len(ranks))]
    with held_ports(len(ranks)) as ports, ExitStack() as stack:
        request: dict[str, Any] = {"ports": ports, "ranks": list(ranks), "cases": {}}
        for name, case in cases.items():
            server = outer_server(directory / f"server of {name}", window_seconds=LIMIT_SECONDS / 2)
            meeting = {"exchange": "direct"} | stack.enter_context(server)
            meeting |= case["config"]["sites"]
            request["cases"][name] = by_site(case, directory, name, meeting)
        (directory / "request.json").write_text(json.dumps(request))
        run_script(sum(ranks), WORKER, directory / "request.json", *outputs)
    results_of_sites = [json.loads(output.read_text()) for output in outputs]
    for name, of_sites in request["cases"].items():
        for results, case in zip(results_of_sites, of_sites, strict=True):
            if "error" not in results[name]:
                files = case["weights"].items()
                results[name]["weights"] = {int(n): torch.load(file) for n, file in files}
    return {name: [results[name] for results in results_of_sites] for name in cases}


def samples_of_site(step: Step, config: dict[str, Any], site: int) -> Step:
    """What one site reads of a step: a block by its share."""
    sites = config["sites"]
    shares = sites.get("shares", [1] * sites["count"])
    each = len(step.inputs) // sum(shares)
    rows = slice(each * sum(shares[:site]), each * sum(shares[: site + 1]))
    return replace(step, inputs=step.inputs[rows], labels=step.labels[rows])


class PlainSites:
    """So many plain trainings, each in a thread, and `torch.optim.SGD` on what they have changed.

    Of bigtrain there is nothing but which sample comes when.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        self.count = config["sites"]["count"]
        self.inner_steps = config["sites"]["inner_steps"]
        self.num_steps = config["train"]["steps"]
        self.weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
        outer = config["sites"]["outer"]
        is_average = outer["type"] == "average"
        self.optimizer = torch.optim.SGD(
            self.weights.values(),
            lr=outer.get("lr", 1.0),
            momentum=0.0 if is_average else outer["momentum"],
            nesterov=outer["type"] == "nesterov",
        )
        self.dtype = torch.bfloat16 if config["sites"].get("codec") == "bfloat16" else None
        self.shares = config["sites"].get("shares", [1] * self.count)
        self.fragments = config["sites"].get("fragments", 1)
        self.overlap = config["sites"].get("overlap_steps", 0)
        self.mixing = config["sites"].get("mixing", 0.0)
        self.under_way: tuple[int, int] | None = None  # the fragment, and when it was sent
        self.masters: list[dict[str, torch.Tensor]] = [{} for _ in range(self.count)]
        self.models: list[Any] = [None] * self.count
        self.barrier = Barrier(self.count, self.step_is_done, timeout=LIMIT_SECONDS)
        self.num_done = 0
        self.loading = Lock()  # transformers can load one model at a time

    def change(self, weight: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """What a site has changed, as it travels."""
        return weight - local if self.dtype is None else (weight - local).to(self.dtype).float()

    @torch.no_grad()
    def step_is_done(self) -> None:
        """Of all sites: every so many steps an outer one, of one fragment after the other."""
        self.num_done += 1
        is_last = self.num_done == self.num_steps
        if self.under_way is not None:
            fragment, sent = self.under_way
            if is_last or self.num_done == sent + self.overlap:
                self.merge(fragment, 0.0 if is_last else self.mixing)
                self.under_way = None
        number, rest = divmod(self.num_done, self.inner_steps // self.fragments)
        if is_last:
            for fragment in range(self.fragments):
                self.exchange(fragment)
                self.merge(fragment, 0.0)
        elif not rest:
            fragment = (number - 1) % self.fragments
            self.exchange(fragment)
            if self.overlap:
                self.under_way = fragment, self.num_done
            else:
                self.merge(fragment, self.mixing)

    def names(self, fragment: int) -> list[str]:
        """Layers in turn; what is in none is of the first fragment."""

        def layer(name: str) -> int:
            _, _, rest = name.partition(".layers.")
            return int(rest.split(".")[0]) if rest else 0

        return [name for name in self.weights if layer(name) % self.fragments == fragment]

    def exchange(self, fragment: int) -> None:
        for weight in self.weights.values():
            weight.grad = None
        for name in self.names(fragment):
            weight = self.weights[name]
            changes = [self.change(weight, masters[name]) for masters in self.masters]
            weighted = [n * one for n, one in zip(self.shares, changes, strict=True)]
            mean = torch.stack(weighted).sum(0) / sum(self.shares)
            weight.grad = mean if self.dtype is None else mean.to(self.dtype).float()
        self.optimizer.step()

    def merge(self, fragment: int, mixing: float) -> None:
        for masters, model in zip(self.masters, self.models, strict=True):
            parameters = dict(model.named_parameters())
            for name in self.names(fragment):
                merged = mixing * masters[name] + (1 - mixing) * self.weights[name]
                masters[name].copy_(merged)
                parameters[name].copy_(merged)

    def watch(self, site: int, model: Any) -> None:
        self.models[site] = model
        self.loading.release()

    def optimizer_of(self, site: int, masters: dict[str, torch.Tensor], section: Any) -> Any:
        self.masters[site] = masters
        return adamw(list(masters.values()), section)

    def wait(self) -> None:
        self.barrier.wait()


def plain_sites(
    data: Path, hf_directory: Path, config: dict[str, Any], layout: Layout
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses by site and step, and the global weights at the end."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_directory, dtype=torch.float32)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sites = PlainSites(config, start)
    steps = read_steps(data, config)
    dtype = getattr(torch, config["precision"]["dtype"])

    def of_site(site: int) -> list[float]:
        own = [samples_of_site(step, config, site) for step in steps]
        sites.loading.acquire()
        return train(
            hf_directory,
            own,
            config,
            dtype=dtype,
            watch=partial(sites.watch, site),
            optimizer_of=partial(sites.optimizer_of, site),
            after_step=sites.wait,
        ).losses

    with ThreadPoolExecutor(sites.count) as threads:
        losses = list(threads.map(of_site, range(sites.count)))
    return losses, {name: weight.detach() for name, weight in sites.weights.items()}


@dataclass(frozen=True)
class Compared:
    """Cases that were trained by sites, and what plain copies came to; `unrounded`: their weights
    where a codec rounds, and they do not."""

    results_by_case: dict[str, list[dict[str, Any]]]
    plain: dict[str, tuple[list[list[float]], dict[str, torch.Tensor]]]
    unrounded: dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """What is compared with plain copies. others: layouts of the sites after the first, if not as
    the first."""

    layout: Layout
    count: int = 2
    others: tuple[Layout, ...] = ()
    outer: dict[str, Any] = field(default_factory=lambda: NESTEROV)
    codec: str = "float32"
    inner_steps: int = INNER_STEPS
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """By site."""
        return (self.layout, *(self.others or (self.layout,) * (self.count - 1)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """By site."""
        return tuple(layout.ranks for layout in self.layouts)


def between(*names: str, **more: Any) -> Case:
    """Sites with these layouts."""
    layouts = LAYOUTS | {"one rank": ONE_RANK}
    first, *others = (layouts[name] for name in names)
    return Case(first, others=tuple(others), **more)


STEPS = INNER_STEPS * OUTER_STEPS
THROUGH_SERVER = {"exchange": "server"}
STREAMING = {"fragments": 2, "overlap_steps": 2, "mixing": 0.25}
CASES = {
    **{name: Case(LAYOUTS[name]) for name in LAYOUTS},
    "momentum": Case(ONE_RANK, outer={"type": "momentum", "lr": 0.5, "momentum": 0.8}),
    "part of the average": Case(ONE_RANK, outer={"type": "average", "lr": 0.4}),
    "short last window": Case(ONE_RANK, inner_steps=6),
    "bfloat16 zero3": Case(LAYOUTS["zero3"], codec="bfloat16"),
    "three sites": Case(ONE_RANK, count=3),
    "one site": Case(ONE_RANK, count=1),
    "shares": Case(ONE_RANK, more={"shares": [3, 1]}),
    "fragments": Case(ONE_RANK, inner_steps=4, more={"fragments": 2, "mixing": 0.25}),
    **{
        f"streaming {name}": Case(LAYOUTS[name], inner_steps=6, more=STREAMING)
        for name in ("zero3", "pipeline 2")
    },
    **{
        f"{codec} {name}": Case(LAYOUTS[name], codec=codec)
        for codec, name in (("int8", "zero3"), ("int8", "tensor 2"), ("int4", "zero0"))
    },
    **{
        " and ".join(names): between(*names)
        for names in (("zero2", "tensor 2"), ("tensor 2", "zero3"), ("zero0", "pipeline 2"))
    },
    "three layouts": between("tensor 2", "one rank", "pipeline 2", count=3),
    "bfloat16 between": between("zero3", "tensor 2", codec="bfloat16"),
    "int4 between": between("one rank", "pipeline 2", codec="int4"),
    "shares between": between("zero2", "one rank", more={"shares": [3, 1]}),
    "streaming int8 between": between(
        "zero3", "one rank", codec="int8", inner_steps=6, more=STREAMING
    ),
    "server pipeline 2": Case(
        LAYOUTS["pipeline 2"], outer={"type": "average"}, more=THROUGH_SERVER
    ),
    "server between": between("tensor 2", "one rank", more=THROUGH_SERVER),
    "server int8 between": between("zero3", "tensor 2", codec="int8", more=THROUGH_SERVER),
}
NORMAL = ["zero2 and tensor 2", "server int8 between"]
BETWEEN = [
    name
    for name, case in CASES.items()
    if case.others and not case.more.keys() & {"fragments", "exchange"}
]
BY_SHARDS = [
    name
    for name, case in CASES.items()
    if case.ranks == (2, 2) and not case.more and not case.others
]


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Return a decorator that runs a test with names of `CASES`; most are slow."""
    return pytest.mark.parametrize(
        "name",
        [pytest.param(n, marks=() if n in NORMAL else pytest.mark.slow) for n in names],
    )


def compare(names: Sequence[str], data: Path, hf_directory: Path, directory: Path) -> Compared:
    results_by_case: dict[str, list[dict[str, Any]]] = {}
    plain, unrounded = {}, {}
    worlds: dict[tuple[int, ...], dict[str, Any]] = {}
    references: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        sites = {
            "count": case.count,
            "inner_steps": case.inner_steps,
            "outer": case.outer,
            "codec": case.codec,
            **case.more,
        }
        config = config_of(data, case.layout, sites, steps=STEPS)
        config["model"] = {"path": str(hf_directory)}
        of_sites: dict[int, Any] = {}
        for site, layout in enumerate(case.others, 1):
            own = config_of(data, layout, sites, steps=STEPS) | {"model": config["model"]}
            of_sites[site] = {"config": own, "deepspeed_config": layout.engine}
        world = worlds.setdefault(case.ranks, {})
        world[name] = {
            "config": config,
            "deepspeed_config": case.layout.engine,
            "keep": [STEPS],
            "of_sites": of_sites,
        }
        # Samples of a site do not depend on how its ranks divide them but for their order.
        key = repr((sites, config["batch"], case.layout.data_size))
        if key not in references:
            references[key] = plain_sites(data, hf_directory, config, case.layout)
        plain[name] = references[key]
        if case.codec != "float32":
            exact = config | {"sites": sites | {"codec": "float32"}}
            unrounded[name] = plain_sites(data, hf_directory, exact, case.layout)[1]
    for ranks, cases in worlds.items():
        place = directory / "-".join(map(str, ranks))
        place.mkdir()
        results_by_case |= train_sites(ranks, cases, place)
    return Compared(results_by_case, plain, unrounded)


Inputs = tuple[Path, Path]


@pytest.fixture(scope="module")
def inputs(dataset: Path, hf_directories: dict[str, Path]) -> Inputs:
    return dataset, hf_directories["llama"]


@pytest.fixture(scope="module")
def compared_of(
    inputs: Inputs, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Compared]:
    """Return the cases of the tier of a name, trained when one of them is first asked for."""

    @cache
    def of_tier(is_normal: bool) -> Compared:
        names = [name for name in CASES if (name in NORMAL) == is_normal]
        return compare(names, *inputs, tmp_path_factory.mktemp("sites"))

    return lambda name: of_tier(name in NORMAL)


@each(CASES)
def test_outer_steps_are_those_of_plain_copies(
    name: str, compared_of: Callable[[str], Compared]
) -> None:
    compared = compared_of(name)
    results_of_sites, (losses, weights) = compared.results_by_case[name], compared.plain[name]
    parts = CASES[name].more.get("fragments", 1)
    num_outer = (STEPS - 1) // (CASES[name].inner_steps // parts) + parts
    assert not [site["error"] for site in results_of_sites if "error" in site]
    first = results_of_sites[0]["weights"][STEPS]
    is_integer = CASES[name].codec.startswith("int")
    for site, expected in zip(results_of_sites, losses, strict=True):
        if not is_integer:
            assert site["losses"] == pytest.approx(expected, abs=LOSS)
        assert [step["number"] for step in site["outer_steps"]] == list(range(1, num_outer + 1))
        for key, weight in site["weights"][STEPS].items():
            assert torch.equal(weight, first[key]), key
    difference = root_mean_square(first, weights)
    print(f"{name}: root mean square {difference:.2e}")
    if is_integer:
        # Blocks of plain copies would be others; `test_exchange` has the arithmetic, bit for bit.
        away = root_mean_square(first, compared.unrounded[name])
        assert 0 < away <= FAR[CASES[name].codec]
    elif name in compared.unrounded:
        # A last bit that differs before may round to another code.
        rounding = root_mean_square(weights, compared.unrounded[name])
        print(f"{name}: rounding alone {rounding:.2e}")
        assert difference <= rounding / 4
    else:
        assert difference <= WEIGHTS


def replicated_names(layout: Layout, weights: dict[str, torch.Tensor]) -> int:
    """Elements that two ranks of a site hold beside ZeRO's replicas: each exchanges its own."""
    words = {"tensor": "norm", "pipeline": "embed_tokens"}  # the head is tied to the embedding
    names = [words[axis] for axis in layout.degrees if axis in words]
    return sum(w.numel() for name, w in weights.items() for word in names if word in name)


@each(BY_SHARDS)
def test_links_carry_shards_by_the_formula(
    name: str, compared_of: Callable[[str], Compared]
) -> None:
    """The ranks of a site divide the model, in ZeRO 0 too; each sends half of its part to its
    counterpart, and the mean of the other half."""
    case, first = CASES[name], compared_of(name).results_by_case[name][0]
    ranks, weights = case.layout.ranks, first["weights"][STEPS]
    full, twice = (
        sum(weight.numel() for weight in weights.values()),
        replicated_names(case.layout, weights),
    )
    own = (full - twice) // ranks
    # Those alone do not travel in blocks, of which each rank would have others.
    codec = "float32" if case.codec.startswith("int") else case.codec
    expected = sent_bytes(own, 2, case.codec) + sent_bytes(twice, 2, codec)
    for step in first["outer_steps"]:
        assert step["sent_bytes"] == pytest.approx(ranks * expected, rel=2e-3)
        if "pipeline" not in case.layout.degrees:  # whose stages have other sizes
            assert step["link_bytes"] == pytest.approx(expected, rel=2e-3)
        assert step["link_bytes"] < 0.7 * step["sent_bytes"]


@each(BETWEEN)
def test_sites_with_other_layouts_send_each_element_once(
    name: str, compared_of: Callable[[str], Compared]
) -> None:
    """But those that the ranks of one site hold twice: then as often as these need it."""
    case, results_of_sites = CASES[name], compared_of(name).results_by_case[name]
    weights, count = results_of_sites[0]["weights"][STEPS], len(case.layouts)
    full = sum(weight.numel() for weight in weights.values())
    twice = sum(replicated_names(layout, weights) for layout in case.layouts)
    codec = "float32" if case.codec.startswith("int") else case.codec
    expected = sent_bytes(full - twice, count, case.codec) + sent_bytes(2 * twice, count, codec)
    for site in results_of_sites:
        for step in site["outer_steps"]:
            assert step["sent_bytes"] == pytest.approx(expected, rel=5e-3)


IDENTITIES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero0": ("zero0", {}),
    "zero2": ("zero2", {}),
    "zero1 bfloat16": ("zero1", {"precision": {"dtype": "bfloat16"}}),
    "zero3 bfloat16": ("zero3", {"precision": {"dtype": "bfloat16"}}),
    "pipeline bfloat16": (
        "pipeline_zero1",
        {"precision": {"dtype": "bfloat16"}, "parallel": {"pipeline": 2}},
    ),
    "muon": ("zero2", {"optimizer": {"type": "muon", "lr": 3e-3}}),
    "adafactor": ("zero3", {"optimizer": {"type": "adafactor", "lr": 3e-3}}),
    "bfloat16 states": ("zero2", {"optimizer": {"lr": 3e-3, "state_dtype": "bfloat16"}}),
}
FEW_STEPS = 5


@pytest.mark.slow
def test_one_site_that_averages_at_each_step_is_ordinary_training(
    dataset: Path, tmp_path: Path
) -> None:
    """One site, an outer step after each one, and a rate of 1."""
    sites = {"count": 1, "inner_steps": 1, "outer": {"type": "average"}}
    cases = {}
    for name, (engine, sections) in IDENTITIES.items():
        for kind, section in (("ordinary", None), ("site", sites)):
            config = config_of(dataset, Layout(2, engine), section, steps=FEW_STEPS, **sections)
            config["batch"]["micro_batch_size"] = 2
            file = str(tmp_path / f"{name}-{kind}.pt")
            cases[f"{name}-{kind}"] = {
                "config": config,
                "deepspeed_config": engine,
                "weights": {str(FEW_STEPS): file},
            }
    results_by_case = train_cases(2, cases, tmp_path)
    for name in IDENTITIES:
        ordinary, site = results_by_case[f"{name}-ordinary"], results_by_case[f"{name}-site"]
        assert len(site["outer_steps"]) == FEW_STEPS
        assert site["losses"] == ordinary["losses"], name
        assert site["norms"] == ordinary["norms"], name
        expected = torch.load(tmp_path / f"{name}-ordinary.pt")
        for key, weight in torch.load(tmp_path / f"{name}-site.pt").items():
            assert torch.equal(weight, expected[key]), (name, key)


@pytest.mark.slow
def test_sites_that_average_each_step_of_sgd_are_data_parallel(
    dataset: Path, tmp_path: Path
) -> None:
    """No run has SGD inside: this one is DeepSpeed's, put there by the test."""
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    sites = {"count": 2, "inner_steps": 1, "outer": {"type": "average"}}
    file = tmp_path / "ordinary.pt"

    def case(layout: Layout, section: dict[str, Any] | None) -> dict[str, Any]:
        optimizer = {"lr": 0.1, "clip_norm": 0.0}
        config = config_of(dataset, layout, section, steps=FEW_STEPS, optimizer=optimizer)
        # Every token is a target, so that sites weigh the same.
        config["data"] = {"path": str(dataset)}
        return {"config": config, "deepspeed_config": "zero1", "optimizer": sgd}

    by_sites = train_sites(
        (1, 1), {"sgd": {**case(ONE_RANK, sites), "keep": [FEW_STEPS]}}, tmp_path
    )
    ordinary_case = {**case(Layout(2, "zero1"), None), "weights": {str(FEW_STEPS): str(file)}}
    ordinary = train_cases(2, {"sgd": ordinary_case}, tmp_path)["sgd"]
    losses = [site["losses"] for site in by_sites["sgd"]]
    assert [sum(step) / 2 for step in zip(*losses, strict=True)] == pytest.approx(
        ordinary["losses"], abs=LOSS
    )
    expected = torch.load(file)
    assert root_mean_square(by_sites["sgd"][0]["weights"][FEW_STEPS], expected) <= WEIGHTS


STOP = 5
"""In the middle of a window."""
READERS = {
    "zero1": ["zero1", "tensor 2"],
    "zero3": ["zero3", "pipeline 2"],
    "zero0": ["zero0"],
}
UNDER_WAY = {"inner_steps": 8, **STREAMING}
"""The first fragment is sent after step 4, and takes effect after step 6."""
SITES_OF = {"zero1": UNDER_WAY, "zero3": {"codec": "int8"}, "zero0": {"codec": "int4", **UNDER_WAY}}


@pytest.mark.slow
def test_goes_on_in_a_window_on_any_layout(dataset: Path, tmp_path: Path) -> None:
    """Bit by bit on the same one; on others with what the checkpoint holds."""

    def case(name: str, writer: str, **more: Any) -> dict[str, Any]:
        layout = LAYOUTS[name]
        sites = {"count": 2, "inner_steps": INNER_STEPS, "outer": NESTEROV} | SITES_OF[writer]
        config = config_of(dataset, layout, sites, steps=2 * STOP)
        return {"config": config, "deepspeed_config": layout.engine, "keep": [2 * STOP], **more}

    (tmp_path / "write").mkdir()
    (tmp_path / "read").mkdir()
    writers = {n: case(n, n, save_at=STOP, save_to=str(tmp_path / f"saved-{n}")) for n in READERS}
    wrote = train_sites((2, 2), writers, tmp_path / "write")
    readers = {
        f"{writer} to {name}": case(
            name,
            writer,
            first_step=STOP,
            restore_from=str(tmp_path / f"saved-{writer}"),
            save_again_to=str(tmp_path / f"again-{writer}-{name}"),
        )
        for writer, names in READERS.items()
        for name in names
    }
    read = train_sites((2, 2), readers, tmp_path / "read")
    for writer, names in READERS.items():
        for name, site in product(names, range(2)):
            saved = read_full(tmp_path / f"saved-{writer}-site-{site}" / "tensors")
            again = read_full(tmp_path / f"again-{writer}-{name}-site-{site}" / "tensors")
            assert saved.keys() == again.keys()
            kinds = {"outer_global", "outer_momentum"}
            if "codec" in SITES_OF[writer]:
                kinds.add("outer_error")
                assert any(saved[key].any() for key in saved if key.startswith("outer_error/"))
            assert {key.partition("/")[0] for key in saved} >= kinds
            for key, tensor in saved.items():
                assert torch.equal(tensor, again[key]), key
            if name == writer:
                result = read[f"{writer} to {name}"][site]
                expected = wrote[writer][site]
                assert result["losses"] == expected["losses"][STOP:]
                for key, weight in expected["weights"][2 * STOP].items():
                    assert torch.equal(weight, result["weights"][2 * STOP][key]), key
