"""User code that a run names: everything wrong with it is one problem with file and line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigtrain.cli import main
from bigtrain.errors import ConfigError
from bigtrain.planner.run_prediction import layout_of
from bigtrain.settings.loading import load_run_config, parse_run_config
from bigtrain.settings.lr_schedule import learning_rate_at
from bigtrain.settings.resolve import resolve_run
from bigtrain.system.extras import install_line
from tests.support.run_trees import llama, run_tree

RUN = run_tree(
    model=llama(64),
    batch={"global_batch_size": 8, "micro_batch_size": 1},
    train={"steps": 10},
    optimizer={"lr": 0.5},
)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of the module `user_code`, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path / "user_code.py"
    sys.modules.pop("user_code", None)


def resolved(**sections: Any) -> Any:
    return resolve_run(parse_run_config({**RUN, **sections}), 1)


def schedule_of(name: str, **settings: Any) -> dict[str, Any]:
    return {"type": f"user_code:{name}", "settings": settings}


def callback_of(name: str, **settings: Any) -> list[dict[str, Any]]:
    return [{"type": f"user_code:{name}", "settings": settings}]


def refused(sections: dict[str, Any], code: Path, text: str | None, *expected: str) -> None:
    """Check that a run of user code with this content has one problem, with these texts."""
    if text is not None:
        code.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolved(**sections)
    for part in expected:
        assert part.format(file=code, folder=code.parent) in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_schedule_is_the_factor_of_every_step(code: Path) -> None:
    code.write_text("def half(step, total, start=1.0):\n    return start * (1 - step / total)\n")
    config = resolved(schedule=schedule_of("half", start=0.5)).config
    rates = [learning_rate_at(step, 0.5, config.schedule, 10) for step in range(10)]
    assert rates == [0.5 * (0.5 * (1 - step / 10)) for step in range(10)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", ["user_code.py has no half"]),
        ("halve = len\n", ["did you mean halve?"]),
        ("half = 1\n", ["is not a function"]),
        ("import no_such_module\n", ["No module named 'no_such_module' ({file}:1)"]),
        ("\n\nx = 1 / 0\n", ["its module fails: ZeroDivisionError: division by zero ({file}:3)"]),
        ("\ndef half(:\n", ["SyntaxError", "({file}:2)"]),
        ("import sys\nsys.exit(3)\n", ["SystemExit: 3 ({file}:2)"]),
        ("\ndef half(step):\n    return 1.0\n", ["and takes (step)", "in {file}:2"]),
        ("def half(step, total):\n    return 'a'\n", ["it is 'a', not a number"]),
        ("def half(step, total):\n    return step - 5\n", ["of step 0 of 10: ValueError"]),
        (
            "def half(s, t):\n    return 1 / (7 - s)\n",
            ["of step 7 of 10: ZeroDivisionError", "({file}:2)"],
        ),
        ("def half(s, t):\n    return float('nan') if s == 9 else 1\n", ["it is nan"]),
        ("a = []\ndef half(s, t):\n    a.append(1)\n    return len(a)\n", ["called again"]),
        (None, ["there is no module user_code in {folder}, PYTHONPATH"]),
    ],
)
def test_a_faulty_schedule(code: Path, text: str | None, expected: list[str]) -> None:
    refused({"schedule": schedule_of("half")}, code, text, *expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class Watch:\n    x = 1\n", "has none of the methods of a callback"),
        ("class Watch:\n    def on_step_end(self, v): ...\n", "rename it to step(self, view)"),
        ("class Watch:\n    def step(self): ...\n", "step is called as step(self, view)"),
        ("class Watch:\n\n    def step(self): ...\n", "in {file}:3"),
        ("class Watch:\n    async def step(self, view): ...\n", "step is a coroutine"),
        (
            "class Watch:\n    ranks = 'one'\n    def end(self, v): ...\n",
            "ranks = 'one' is neither",
        ),
        ("def Watch(): ...\n", "is not a class ({file}:1)"),
        (
            "class Watch:\n    def __init__(self, a): ...\n    def end(self, v): ...\n",
            "callbacks.0.settings = {{}}: Watch is called as Watch(), and takes (a)",
        ),
    ],
)
def test_a_faulty_callback(code: Path, text: str, expected: str) -> None:
    refused({"callbacks": callback_of("Watch")}, code, text, expected)


@pytest.mark.parametrize("name", ["mine", "mine:", ":Watch", "mine.py:Watch:x", "my-code:Watch"])
def test_a_name_that_is_not_one(name: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:Name"):
        parse_run_config({**RUN, "callbacks": [{"type": name}]})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class Own: ...\n", "is not a PreTrainedModel of transformers ({file}:1)"),
        ("def Own(config): ...\n", "is not a PreTrainedModel of transformers ({file}:1)"),
        (
            "class Own:\n    from_pretrained = print\n",
            "the model_type of its config_class is '', empty ({file}:1)",
        ),
        (
            "class C:\n    model_type = 'llama'\nclass Own:\n    config_class = C\n"
            "    from_pretrained = print\n",
            "the model_type of its config_class is 'llama', transformers' own ({file}:3)",
        ),
    ],
)
def test_a_faulty_model_class(code: Path, text: str, expected: str) -> None:
    model = {"type": "user_code:Own", "config": {"vocab_size": 64}}
    refused({"model": model}, code, text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class Own:\n    def lose(self, batch): ...\n", "has no loss ({file}:1)"),
        ("class Own:\n    def loss(self): ...\n", "loss is called as loss(self, batch)"),
        (
            "class Own:\n    unit = 'words'\n    def loss(self, batch): ...\n",
            "unit = 'words' is not one of tokens, rows, pairs ({file}:1)",
        ),
        (
            "class Own:\n    def __init__(self, a): ...\n    def loss(self, batch): ...\n",
            "objective.settings = {{}}: Own is called as Own(), and takes (a)",
        ),
        (
            "class Own:\n    reference = True\n    def loss(self, batch): ...\n",
            "reference = True asks for log-probabilities without adapters",
        ),
    ],
)
def test_a_faulty_objective(code: Path, text: str, expected: str) -> None:
    refused({"objective": {"type": "user_code:Own"}}, code, text, expected)


def test_an_objective_of_pairs_reads_two_rows_of_a_sample(code: Path) -> None:
    code.write_text("class Own:\n    unit = 'pairs'\n    def loss(self, batch): ...\n")
    run = resolved(objective={"type": "user_code:Own"})
    assert run.plan.tokens_per_step == 2 * 8 * 8
    assert "8 samples x 2 rows x 8 tokens" in run.plan.equation()
    with pytest.raises(ConfigError, match="each answer of a pair is a row of its own"):
        resolved(objective={"type": "user_code:Own"}, data={"path": "x", "packing": "best_fit"})


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"schedule": {"type": "cosin"}}, "did you mean cosine?"),
        (
            {"schedule": {"type": "mine:f", "warmup_steps": 3}},
            "schedule.warmup_steps = 3 would have no effect",
        ),
        (
            {"schedule": {"type": "linear", "settings": {"a": 1}}},
            "schedule.type = 'linear' is bigtrain's own",
        ),
        ({"callbacks": callback_of("Watch", a=object())}, "not a valid JSON"),
        ({"objective": {"beta": 0.2}}, "= 0.2 has no effect with objective.type = next_token"),
        (
            {"objective": {"type": "preference", "gamma": 1.0}},
            "no effect with objective.loss = sigmoid",
        ),
        ({"objective": {"type": "kto", "undesirable_weight": 0}}, "input should be greater than 0"),
        ({"objective": {"type": "next_tokn"}}, "did you mean next_token?"),
        ({"objective": {"type": "preference", "loss": "dpo"}}, "has TRL's name -> sigmoid"),
        ({"objective": {"type": "preference", "loss": "aot"}}, "is no mean over pairs -> sigmoid"),
        ({"objective": {"type": "preference", "loss": "ip"}}, "'hinge', 'ipo', 'robust'"),
        (
            {"objective": {"type": "preference", "loss": "exo_pair"}},
            "label_smoothing = 0: exo_pair takes its logarithm -> 0.001",
        ),
        (
            {"objective": {"type": "preference", "label_smoothing": 0.5}},
            "at one half or more, the rejected answers would be learned -> below 0.5",
        ),
        (
            {"objective": {"type": "preference", "loss": "hinge", "label_smoothing": 0.1}},
            "label_smoothing = 0.1 has no effect with objective.loss = hinge",
        ),
    ],
    ids=lambda _: "",
)
def test_settings_without_effect(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run_config({**RUN, **sections})
    assert expected in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.fixture
def adapted(tmp_path: Path) -> dict[str, Any]:
    """Sections of a run of adapters."""
    config = {"model_type": "llama", "num_attention_heads": 2, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return {"model": {"path": str(tmp_path)}, "adapters": {"type": "lora"}}


def test_kto_reads_an_answer_and_a_mismatched_one(adapted: dict[str, Any]) -> None:
    run = resolved(**adapted, objective={"type": "kto"})
    assert run.plan.tokens_per_step == 2 * 8 * 8
    layout = layout_of(run)
    assert (layout.num_rows, layout.num_reference_rows) == (1, 3)  # with gradients, and without
    stored = layout_of(resolved(**{**adapted, "adapters": None}, objective={"type": "kto"}))
    assert (stored.num_rows, stored.num_reference_rows) == (1, 1)
    pairs = layout_of(resolved(**adapted, objective={"type": "preference"}))
    assert (pairs.micro_batch_size, pairs.num_rows, pairs.num_reference_rows) == (1, 2, 2)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (
            "webhok",
            {},
            "callbacks.0.type = 'webhok': input should be 'webhook', 'prometheus', 'opentelemetry' "
            "or 'trainjob', or code of yours as package.module:Name -> did you mean webhook?",
        ),
        (
            "webhook",
            {"url": "https://hooks/secret"},
            "callbacks.0.settings.url: a webhook's address is a secret, and settings are recorded "
            "and logged -> write it to an environment variable or file, named in "
            "callbacks.0.settings.url_env or url_file",
        ),
        (
            "webhook",
            {"url_env": "https://hooks/secret'"},
            "pattern '^[A-Za-z_]\\w*$' -> the default: 'BIGTRAIN_WEBHOOK_URL'",
        ),
        (
            "webhook",
            {"url_file": "https://hooks/secret'"},
            "url_file: string should match pattern '^[^:]+$' -> the default: None",
        ),
        ("webhook", {"stall_seconds": -1}, "input should be greater than 0 -> the default: 1800.0"),
        ("prometheus", {"prot": 1}, "0.settings.prot: unknown key -> did you mean port?"),
        ("trainjob", {"port": 1}, "port: unknown key -> it has no settings: omit them"),
    ],
)
def test_a_callback_of_bigtrain(kind: str, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(callbacks=[{"type": kind, "settings": settings}])
    assert expected in str(caught.value)
    assert "callbacks.0." in str(caught.value)
    assert "hooks/secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("prometheus", "prometheus_client"),
        ("opentelemetry", "opentelemetry.sdk"),
        ("opentelemetry", "opentelemetry.exporter.otlp.proto.http"),
    ],
)
def test_a_callback_whose_library_is_not_installed(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved(callbacks=[{"type": name}])
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ModuleNotFoundError
    with pytest.raises(ConfigError) as caught:
        resolved(callbacks=[{"type": name}])
    rule = f"callbacks.0.type = '{name}': needs {module}, which is not installed"
    assert f"{rule} -> {install_line(name)}" in str(caught.value)


def test_only_callbacks_of_the_user_may_record_metrics() -> None:
    shipped, own = [{"type": "trainjob"}], [{"type": "user_code:Watch"}]
    configs = [parse_run_config({**RUN, "callbacks": one}) for one in (shipped, own)]
    assert [config.has_user_callbacks for config in configs] == [False, True]
    assert [config.records_metrics for config in configs] == [False, True]


SAMPLES = {"path": "shards", "samples": {"type": "tests.support.streams:Items"}}


def test_samples_of_the_user_are_not_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before anything is opened."""
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**RUN, "data": SAMPLES}))
    words = ["score", "--config", str(path), "--output", str(tmp_path / "scores")]
    assert main(words) == 2
    said = capsys.readouterr().err
    [line] = [line for line in said.splitlines() if "data.samples" in line]
    assert line.strip() == (
        "data.samples.type = 'tests.support.streams:Items': scores are stored next to documents of "
        "shards, and these are samples of your code -> data.samples=null scores the shards of "
        "data.path; or tokenize rows with input_ids"
    )
    assert not (tmp_path / "scores").exists()
    resolve_run(load_run_config(str(path), ["data.samples=null"]), 1, scores=True)


def test_where_samples_of_the_user_are_refused() -> None:
    """By a teacher, which has not read them, and as a stream at several sites."""
    with pytest.raises(ConfigError) as caught:
        resolved(data=SAMPLES, objective={"type": "distillation", "teacher": "scores"})
    [problem] = [one for one in caught.value.problems if one.key.startswith("data")]
    assert problem.key == "data.samples"
    assert problem.remedy == "data.samples=null, with documents written by bigtrain tokenize"
    sites = {"count": 2, "inner_steps": 5, "server": "http://127.0.0.1:9", "token_file": "token"}
    data = {**SAMPLES, "samples": {"type": "tests.support.streams:Shuffled"}}
    with pytest.raises(ConfigError) as caught:
        resolved(data=data, sites=sites)
    assert "sites" in [problem.key for problem in caught.value.problems]


OWN = "user_code:Own"


@pytest.mark.parametrize(
    ("name", "adapters", "keys", "expected"),
    [
        (OWN, {"dora": True}, {}, "dora = True: changes the model also with its adapters off"),
        (OWN, {"modules_to_save": ["lm_head"]}, {}, "['lm_head']: changes the model also with"),
        *(
            (name, {}, {"model_type": "mixtral", "num_local_experts": 4}, "would count in the load")
            for name in ("preference", "kto", OWN)
        ),
    ],
    ids=["dora", "modules", "preference", "kto", "own"],
)
def test_a_reference_is_refused_by_the_fact_not_by_the_name(
    code: Path,
    adapted: dict[str, Any],
    name: str,
    adapters: dict[str, Any],
    keys: dict[str, Any],
    expected: str,
) -> None:
    code.write_text(
        "class Own:\n    unit = 'pairs'\n    reference = True\n    def loss(self, batch): ...\n"
    )
    resolved(**adapted, objective={"type": name})
    path = Path(adapted["model"]["path"]) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    with pytest.raises(ConfigError) as caught:
        resolved(**{**adapted, "adapters": {"type": "lora", **adapters}}, objective={"type": name})
    assert expected in str(caught.value)
