"""The page holds what it draws, escapes what comes from files, and asks nobody for anything."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.metrics.step_metrics import StepMetrics, entries, number
from bigtrain.report import run_files
from bigtrain.report.charts import CHARTS, own_charts, page_data
from bigtrain.report.marks import marks_of
from bigtrain.report.page import MARKER, page_html, write_page
from bigtrain.report.run_files import open_runs
from tests.support.run_directories import (
    evaluation_line,
    eventful_run,
    make_run,
    outer_line,
    step_line,
    write_lines,
)
from tests.support.tiers import FULL

EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)>\'&amp;{{data}}'


class Elements(HTMLParser):
    """What a browser would make of a page: tags with their attributes, scripts, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words += data


def page(*directories: Path) -> str:
    return page_html(open_runs(directories))


def data_of(html: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Elements(html).scripts[0])
    return data


def numbers(text: str, kind: str = "<f4") -> list[float]:
    values: list[float] = np.frombuffer(base64.b64decode(text), kind).tolist()
    return values


def test_curves_are_the_figures(tmp_path: Path) -> None:
    lines = [step_line(step, loss=None if step == 2 else 5.0 - step) for step in (1, 2, 4)]
    lines.append(evaluation_line(4, 2.0, code=1.5))
    [run] = data_of(page(make_run(tmp_path / "run", lines)))["runs"]
    assert numbers(run["steps"]["step"], "<f8") == [1, 2, 4]
    np.testing.assert_array_equal(
        numbers(run["steps"]["series"]["loss"]["mean"]), [4.0, np.nan, 1.0]
    )
    assert numbers(run["evaluations"]["series"]["held_out_sources/code"]["mean"]) == [1.5]
    assert "model_flops_utilization" not in run["steps"]["series"]  # known of no step
    tokens = run["knots"]["tokens"]
    assert numbers(tokens["value"], "<f8") == [4096, 4 * 4096]  # straight: its two ends


def test_tokens_bend_where_their_slope_changes(tmp_path: Path) -> None:
    """After a resume with another batch, say."""
    lines = [step_line(s, tokens=100 * s if s <= 10 else 1000 + 300 * (s - 10)) for s in range(20)]
    [run] = data_of(page(make_run(tmp_path / "run", lines)))["runs"]
    tokens = run["knots"]["tokens"]
    assert numbers(tokens["step"], "<f8") == [1, 10, 19]
    assert numbers(tokens["value"], "<f8") == [100, 1000, 3700]


def test_a_spike_among_ten_thousand_steps_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "MAX_BUCKETS", run_files.MAX_BUCKETS // 10)
    lines = [step_line(s, grad_norm=50.0 if s == 7_777 else 1.0) for s in range(1, 10_001)]
    [run] = data_of(page(make_run(tmp_path / "run", lines)))["runs"]
    assert run["steps"]["width"] == 4
    norm = run["steps"]["series"]["grad_norm"]
    highs = numbers(norm["high"])
    assert max(highs) == 50.0
    where = numbers(run["steps"]["step"], "<f8")[highs.index(50.0)]
    assert where - 4 < 7_777 <= where


def test_every_chart_is_in_the_page(tmp_path: Path) -> None:
    html = page(eventful_run(tmp_path / "run"))
    elements = Elements(html)
    ids = {attributes.get("id") for _, attributes in elements.tags}
    assert {f"chart-{chart.name}" for chart in CHARTS} <= ids
    for words in (
        "Topology",
        "Measured and predicted",
        "16 ranks = 2 data-parallel",
        "train.steps",
    ):
        assert words in elements.words
    assert "Not drawn" not in elements.words


def test_what_is_absent_is_said_in_sentences(tmp_path: Path) -> None:
    words = Elements(page(make_run(tmp_path / "run", [step_line(1)], environment=None))).words
    for sentence in (
        "environment.json is missing.",
        "This run has no prediction.json, and measured neither the parts of a step nor the memory "
        "of each phase.",
        "environment.json does not record the ranks.",
        "No restart, rollback, hang, skipped step or straggler.",
        "Not drawn, because the run has no values: held-out loss, "
        "model FLOPs utilization, step breakdown.",
    ):
        assert sentence in words, sentence
    assert "model_flops_utilization is null" not in words  # never known is no gap
    assert "No step has been logged yet." in Elements(page(make_run(tmp_path / "r", []))).words


def test_experts_of_many_layers_are_two_curves(tmp_path: Path) -> None:
    """And of few also each layer; bytes and seconds of the exchange are charts of their own."""

    def lines(num_layers: int) -> list[dict[str, Any]]:
        layers = {f"layers.{n}.mlp": 1.0 + n for n in range(num_layers)}
        exchange = {"sent_bytes": 4096.0, "seconds": 0.25}
        return [step_line(1, expert_imbalance=layers, expert_exchange=exchange), step_line(2)]

    few, many = make_run(tmp_path / "few", lines(2)), make_run(tmp_path / "many", lines(48))
    data = data_of(page(few, many))
    series = {chart["name"]: chart["series"] for chart in data["charts"]}
    own = ["busiest_layer", "mean_of_layers"]
    of_few = [*own, "expert_imbalance/layers.0.mlp", "expert_imbalance/layers.1.mlp"]
    assert series["experts"] == [of_few, own]
    assert series["expert-bytes"] == [["expert_exchange/sent_bytes"]] * 2
    values = {
        name: numbers(one["mean"])[0] for name, one in data["runs"][1]["steps"]["series"].items()
    }
    assert values["busiest_layer"] == 48.0
    assert values["mean_of_layers"] == 24.5
    assert values["expert_exchange/seconds"] == 0.25


def test_outer_steps_are_drawn_and_who_took_part_is_told(tmp_path: Path) -> None:
    """Two after one step, of two parts of the model; a site that misses one; and an older line."""
    steps = [step_line(step) for step in (1, 2, 3)]
    outer = [
        outer_line(2, 1, [0, 1, 2]),
        outer_line(2, 2, [0, 1, 2], distance=0.5, link_bytes=70),
        outer_line(3, 3, [0, 2]),
        outer_line(1, 4, [0]),
    ]
    html = page(make_run(tmp_path / "run", [*steps, *outer]))
    data = data_of(html)
    series = {chart["name"]: chart["series"][0] for chart in data["charts"]}
    assert series["site-bytes"] == ["sent_bytes", "link_bytes"]
    assert series["site-distance"] == ["distance", "change"]
    assert series["sites"] == ["sites"]
    table = data["runs"][0]["outer_steps"]
    assert numbers(table["step"], "<f8") == [2, 2, 3]
    assert numbers(table["series"]["sites"]["mean"]) == [3, 3, 2]
    assert numbers(table["series"]["distance"]["mean"]) == [0.25, 0.5, 0.25]
    np.testing.assert_array_equal(
        numbers(table["series"]["link_bytes"]["mean"]), [np.nan, 70, np.nan]
    )
    words = Elements(html).words
    for sentence in (
        "3 sites in 3 outer steps",
        "outer step 3 with sites 0, 2",
        "line 7 is an outer step before step 3",
        "the participating sites differ from those of the previous outer step",
    ):
        assert sentence in words, sentence
    [changed] = data["runs"][0]["marks"]
    assert (changed["kind"], changed["steps"], changed["total"]) == ("other sites", [3], 1)


def test_evaluations_of_tasks_and_what_the_model_wrote(tmp_path: Path) -> None:
    """Tasks have evaluations of their own; a sample of a step that was trained again counts once,
    and is text."""
    lines = [
        step_line(1),
        {**evaluation_line(1, 2.0), "held_out_bits_per_byte": 0.9},
        {"step": 2, "tasks": {"arc_easy/acc": 0.25}},
        {**evaluation_line(3, 1.5), "tasks": {"arc_easy/acc": 0.5}},
    ]
    run = make_run(tmp_path / "run", lines)
    samples = [(1, "Once", " first"), (3, "Once", " lost"), (3, "Once", f" upon {EVIL}")]
    write_lines(
        run / "samples.jsonl",
        [{"step": step, "prompt": prompt, "text": text} for step, prompt, text in samples]
        + ['{"step": 4, "prompt": "cut o'],
    )
    html = page(run)
    data = data_of(html)
    series = {chart["name"]: chart["series"][0] for chart in data["charts"]}
    assert series["tasks"] == ["tasks/arc_easy/acc"]
    assert series["bits-per-byte"] == ["held_out_bits_per_byte"]
    evaluations = data["runs"][0]["evaluations"]
    np.testing.assert_array_equal(
        numbers(evaluations["series"]["tasks/arc_easy/acc"]["mean"]), [np.nan, 0.25, 0.5]
    )
    np.testing.assert_array_equal(
        numbers(evaluations["series"]["held_out_loss"]["mean"]), [2.0, np.nan, 1.5]
    )
    elements = Elements(html)
    assert f"Once upon {EVIL}" in elements.words
    assert "1 earlier" in elements.words
    assert "lost" not in elements.words
    assert elements.words.index("upon") < elements.words.index("first")
    assert "img" not in {tag for tag, _ in elements.tags}


def test_unreadable_lines_and_gaps_are_named(tmp_path: Path) -> None:
    lines: list[Any] = [step_line(1), "broken <b>", step_line(2, lr=None), step_line(2)]
    words = Elements(page(make_run(tmp_path / "run", lines))).words
    assert (
        "metrics.jsonl: 2 lines were skipped: line 2 is not JSON; line 4 is of step 2, which is "
        "not later than before." in words
    )
    assert "lr is null in 1 of 2 logged steps, drawn as gaps." in words


def test_what_files_say_is_text(tmp_path: Path) -> None:
    """A name, a key, a value, a host, a reason, a report: none becomes an element."""
    lines = [
        step_line(1, breakdown={EVIL: 0.1}, peak_memory_gib_by_phase={EVIL: 1.0}),
        {"step": 1, "event": "skipped", "reason": EVIL},
        {"step": 1, "event": EVIL, EVIL: EVIL},
        {"step": 1, "event": "straggler", "rank": EVIL, "host": EVIL},
        evaluation_line(1, 2.0, **{EVIL: 2.0}),
        EVIL,
    ]
    plain = make_run(tmp_path / "plain", [step_line(1)])
    run = make_run(
        tmp_path / EVIL.replace("/", "_"),
        lines,
        config={"train": {"steps": 5}, EVIL: {EVIL: EVIL}},
        environment={
            EVIL: EVIL,
            "topology": {"world_size": 1, "data_size": 1},
            "hosts": {EVIL: [0]},
        },
        prediction={"terms": {EVIL: 1}, "memory_terms": {EVIL: 1}},
    )
    (run / "generations").mkdir()
    holder = json.dumps({"host": EVIL, "since": EVIL, "slurm_job_id": EVIL})
    for generation in (1, 2):
        (run / "generations" / f"{generation:08d}.json").write_text(holder)
    (run / "hangs" / "step-00000001-x").mkdir(parents=True)
    (run / "hangs" / "step-00000001-x" / "report.txt").write_text(f"  {EVIL}")
    for html in (page(run), page(run, plain)):
        elements = Elements(html)
        assert len(elements.scripts) == 3
        assert "img" not in {tag for tag, _ in elements.tags}
        assert elements.words.count(EVIL) >= 8
        assert data_of(html)["runs"][0]["name"] == EVIL.replace("/", "_")


def test_the_page_asks_nobody(tmp_path: Path) -> None:
    elements = Elements(page(eventful_run(tmp_path / "run")))
    for tag, attributes in elements.tags:
        assert not {"src", "href", "srcset", "action"} & set(attributes), (tag, attributes)
    assert "link" not in {tag for tag, _ in elements.tags}


def test_the_policy_lets_its_own_programs_run_alone(tmp_path: Path) -> None:
    html = page(make_run(tmp_path / "run", [step_line(1)]))
    elements = Elements(html)
    [policy] = [a["content"] for _, a in elements.tags if "http-equiv" in a]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    named = re.findall(r"'sha256-([^']+)'", policy)
    programs = [
        base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in elements.scripts
    ]
    assert named == programs[1:]
    assert MARKER in html[:1024]  # of its first bytes, by which it is known
    assert "Copyright (c) 2022 Leon Sorokin" in html  # of the library of its charts
    assert "Permission is hereby granted" in html


def test_what_differs_between_runs_is_listed(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, [step_line(1)], config={"a": {"b": value, "c": 1}})
        for name, value in (("one", 1), ("two", 2))
    ]
    html = page(*runs)
    part = html[
        html.index("<h3>Differences</h3>") : html.index("<details>", html.index("<h3>Differences"))
    ]
    assert re.findall(r'<th scope="row">(.*?)</th><td>(\w+)</td><td>(\w+)</td>', part) == [
        ("a.<wbr>b", "1", "2")
    ]
    one = page(runs[0])
    assert "<h3>Differences</h3>" not in one


def test_several_runs_are_columns(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / str(n), [step_line(n, loss=float(n))], config={"train": {"steps": n}})
        for n in (1, 2, 3)
    ]
    words = Elements(page(*runs)).words
    assert "1 of 12 of 23 of 3" in words
    data = data_of(page(*runs))
    assert [run["name"] for run in data["runs"]] == ["1", "2", "3"]


def test_figures_that_no_float32_holds_are_gaps_to_the_browser(tmp_path: Path) -> None:
    runs = open_runs([make_run(tmp_path / "run", [step_line(1, loss=1e300)])])
    data = page_data(runs, [marks_of(runs[0])])
    assert numbers(data["runs"][0]["steps"]["series"]["loss"]["mean"]) == [float("inf")]


def test_the_curves_are_a_table_too(tmp_path: Path) -> None:
    lines = [step_line(s, loss=value) for s, value in ((1, 5.0), (2, 9.0), (3, None), (4, 1.0))]
    lines += [evaluation_line(4, 2.0, code=1.5)]
    html = page(make_run(tmp_path / "run", lines))
    cells = "".join(f"<td>{figure}</td>" for figure in ("5", "1", "1", "9", "5"))
    assert f'<th scope="row">Training loss, nats per token</th>{cells}' in html
    assert '<th scope="row">Held-out loss: code, nats per token</th><td>1.5</td>' in html
    assert '<th scope="row">Throughput, tokens/s</th><td>8192</td>' in html


def test_what_only_a_part_of_the_runs_has(tmp_path: Path) -> None:
    """Eight runs are no eight times the same sentence."""
    eventful = eventful_run(tmp_path / "eventful")
    plain = [make_run(tmp_path / name, [step_line(1)]) for name in ("a", "b")]
    words = Elements(page(eventful, *plain)).words
    assert "No restart, rollback, hang, skipped step or straggler in a, b." in words
    assert "the memory of each phase measured: a, b." in words
    assert words.count("2 ranks = 2 data-parallel") == 1
    calm = Elements(page(*plain)).words
    assert "No restart, rollback, hang, skipped step or straggler." in calm


def test_a_prediction_without_measurements_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step_line(1)], prediction={"tokens_per_second": 9216.0})
    words = Elements(page(run)).words
    assert "The run did not measure the parts of a step." in words
    assert "The run did not measure the memory of each phase." in words
    assert "Throughput, tokens/s8,1929,216+12.5%" in words


def test_waiting_for_other_ranks_is_a_part_of_the_rest(tmp_path: Path) -> None:
    breakdown = {"data_seconds": 0.1, "engine_seconds": 0.3, "communication_seconds": 0.25}
    line = step_line(1, breakdown={**breakdown, "forward_seconds": None})
    run = make_run(tmp_path / "run", [line])
    words = Elements(page(run)).words
    assert "measured, mean, 0.4 s" in words
    assert "In 0.25 s of the measured time the main rank waited for other ranks." in words
    [chart] = [one for one in data_of(page(run))["charts"] if one["name"] == "breakdown"]
    names = ("data", "engine", "communication")
    assert chart["series"] == [[f"breakdown/{name}_seconds" for name in names]]


ODD = ["\ud800", "</script>", "\0", "step", "loss", "hosts"]
TEXTS = st.text(max_size=8) | st.sampled_from(ODD)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
FIGURES = ("step", "loss", "lr", "tokens", "step_seconds", "breakdown", "held_out_loss")
FIGURES += ("event", "held_out_sources", "first_sample", "num_samples", "to_step", "reason")
FILES = ("config", "environment", "deepspeed", "prediction")
KEYS = ("topology", "rank_order", "hosts", "train", "terms", "memory_terms", "world_size")
KEYS += ("data_size", "tensor_size", "steps", "tokens_per_second")
OBJECTS = st.dictionaries(st.sampled_from(KEYS) | TEXTS, JSON, max_size=5)


@given(
    lines=st.lists(st.dictionaries(st.sampled_from(FIGURES), JSON, max_size=6), max_size=6),
    files=st.fixed_dictionaries({name: OBJECTS | JSON for name in FILES}),
    starts=st.lists(OBJECTS, max_size=3),
)
@settings(max_examples=200 if FULL else 12)
def test_whatever_files_hold_there_is_a_page(
    lines: list[Any],
    files: dict[str, Any],
    starts: list[Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run = make_run(tmp_path_factory.mktemp("any") / "run", [step_line(1), *lines], **files)
    write_lines(run / "starts.jsonl", [{"generation": 3, **start} for start in starts])
    write_page(run / "report.html", page(run, make_run(run / "other", [step_line(1)])))
    assert len(Elements((run / "report.html").read_text()).scripts) == 3


@pytest.mark.parametrize("depth", [50, 900, 5000])
def test_settings_that_are_nested_deeply(tmp_path: Path, depth: int) -> None:
    run = make_run(tmp_path / "run", [step_line(1)])
    (run / "config.json").write_text('{"a": ' * depth + "1" + "}" * depth)
    assert "<title>run" in page(run)


def test_a_new_metric_has_a_chart_of_its_own() -> None:
    @dataclass(frozen=True)
    class More(StepMetrics):
        target_fraction: float | None = number("targets over tokens", "%", is_optional=True)
        rank_seconds: Mapping[str, float] | None = entries("seconds of a step by rank")

    known = list(own_charts())
    # Names of user code, which no chart of charts.json can know.
    assert ("recorded/*",) in [chart.series for chart in known]
    numbers, objects = [chart for chart in own_charts(More) if chart not in known]
    assert (numbers.title, numbers.unit, numbers.series) == (
        "Target fraction",
        "%",
        ("target_fraction",),
    )
    assert numbers.only_some_runs
    assert objects.series == ("rank_seconds/*",)


def test_each_chart_and_each_series_is_drawn_once() -> None:
    names = [chart.name for chart in CHARTS]
    assert len(names) == len(set(names))
    series = [(chart.table, one) for chart in CHARTS for one in chart.series]
    assert len(series) == len(set(series))
