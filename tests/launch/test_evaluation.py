"""What is measured while a run trains: it changes nothing, and is what plain libraries measure."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from bigtrain.cli import main as bigtrain
from bigtrain.data.samples.shuffle import SampleOrder
from bigtrain.data.shards.manifest import read_manifest
from bigtrain.run.checkpointing import checkpoints
from tests.launch.conftest import STEPS, Inputs, metrics, tokenize, train, trained, write_documents
from tests.support.lives import run_script
from tests.support.pages import page_text
from tests.support.worlds import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

PROMPTS = ["Ada proved", "Emmy Noether", "Grace"]
NEW_TOKENS = 12
DROPOUT = "model.config.attention_dropout=0.2"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def other_shards(inputs: Inputs, directory: Path) -> Path:
    texts = write_documents(directory / "others.jsonl", 20, seed=9)
    return tokenize(texts, inputs.tokenizer, directory / "others")


def evaluating(run: Path, *more: str) -> list[str]:
    prompts = json.dumps(PROMPTS)
    return [
        f"output.directory={run}",
        "evaluation.every_steps=2",
        f"evaluation.prompts={prompts}",
        f"evaluation.max_new_tokens={NEW_TOKENS}",
        *more,
    ]


@pytest.fixture(scope="module")
def evaluated(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process with a second set, prompts and a best checkpoint."""
    root = tmp_path_factory.mktemp("evaluated")
    others = other_shards(inputs, root)
    sets = json.dumps([{"name": "others", "path": str(others)}])
    settings = evaluating(
        root / "run",
        f"evaluation.held_out={sets}",
        "evaluation.best.metric=held_out_bits_per_byte/others",
        "evaluation.early_stopping={patience: 4}",
        "checkpoint.keep_best=1",
        "checkpoint.keep_last=1",
        DROPOUT,
    )
    trained("--config", inputs.run_yaml, *settings)
    return root / "run"


def test_evaluating_changes_no_step(evaluated: Path, inputs: Inputs, tmp_path: Path) -> None:
    """Bit for bit, dropout included: the other run measures its last step alone."""
    run = tmp_path / "run"
    settings = [f"output.directory={run}", "evaluation.every_steps=null", "output.export=false"]
    trained("--config", inputs.run_yaml, *settings, DROPOUT)
    for key in ("loss", "grad_norm"):
        assert metrics(evaluated, key) == metrics(run, key)
    assert metrics(evaluated, "held_out_loss")[STEPS] == metrics(run, "held_out_loss")[STEPS]


def test_sets_have_figures_of_their_own(evaluated: Path, inputs: Inputs) -> None:
    evaluations = [x for x in lines_of(evaluated / "metrics.jsonl") if "held_out_loss" in x]
    assert [line["step"] for line in evaluations] == [2, 4, 6, 8, 10, 12]
    last = evaluations[-1]
    sources = last["held_out_sources"]
    assert set(sources) == {"shards", "others"}
    # A set of its own does not count in the mean.
    assert last["held_out_loss"] == sources["shards"]["loss"]
    others = evaluated.parent / "others"
    model = AutoModelForCausalLM.from_pretrained(evaluated / "hf").eval()
    assert sources["others"]["loss"] == pytest.approx(plain_loss(model, others), rel=1e-5)
    record = read_manifest(others)
    per_byte = record.num_tokens("held_out") / sum(s.text_bytes for s in record.shards("held_out"))
    bits = sources["others"]["loss"] / math.log(2) * per_byte
    assert sources["others"]["bits_per_byte"] == pytest.approx(bits, rel=1e-9)


def plain_loss(model: Any, shards: Path, samples: int = 8, length: int = 32) -> float:
    """Of the first samples in the fixed order, by transformers."""
    files = sorted(shards.glob("held_out*.bin"))
    tokens = torch.from_numpy(
        np.concatenate([np.fromfile(f, np.uint16) for f in files]).astype("l")
    )
    order = SampleOrder((len(tokens) - 1) // length, 0)
    total = count = 0.0
    with torch.no_grad():
        for window in order.windows(0, min(samples, (len(tokens) - 1) // length)).tolist():
            row = tokens[window * length : (window + 1) * length + 1]
            logits = model(input_ids=row[None, :-1]).logits[0]
            total += float(F.cross_entropy(logits, row[1:], reduction="sum"))
            count += length
    return total / count


def test_prompts_are_continued_as_transformers_does(evaluated: Path) -> None:
    samples = lines_of(evaluated / "samples.jsonl")
    steps = [2, 4, 6, 8, 10, 12]
    assert [(one["step"], one["prompt"]) for one in samples] == [
        (step, prompt) for step in steps for prompt in PROMPTS
    ]
    assert [one["text"] for one in samples[-len(PROMPTS) :]] == [
        greedy(evaluated / "hf", prompt) for prompt in PROMPTS
    ]


def greedy(directory: Path, prompt: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(generated[0, ids.shape[1] :]))


def test_the_best_checkpoint_stays_and_is_exported(evaluated: Path, tmp_path: Path) -> None:
    figures = {
        line["step"]: line["held_out_sources"]["others"]["bits_per_byte"]
        for line in lines_of(evaluated / "metrics.jsonl")
        if "held_out_sources" in line
    }
    best = min((figures[step], step) for step in (4, 8, 12))[1]
    assert checkpoints.list_steps(evaluated) == sorted({best, 12})
    state = checkpoints.read_state(checkpoints.checkpoint_path(evaluated, 12))
    assert state["evaluation"]["held_out_bits_per_byte/others"] == figures[12]
    lowest = min((value, step) for step, value in figures.items())
    assert state["best"]["value"] == lowest[0]
    words = ["export", "--run", evaluated, "--best", "--output", tmp_path / "best"]
    assert bigtrain(list(map(str, words))) == 0
    assert f"| step | {best} of" in (tmp_path / "best/README.md").read_text()


@pytest.mark.slow
def test_a_run_that_gets_no_better_ends_and_is_complete(inputs: Inputs, tmp_path: Path) -> None:
    """By a difference that no evaluation makes; the same command then finds nothing to do, and
    without early stopping the run goes on."""
    run = tmp_path / "run"
    settings = ["--config", inputs.run_yaml, f"output.directory={run}", "evaluation.every_steps=2"]
    stop = "evaluation.early_stopping={patience: 2, min_delta: 100}"
    output = trained(*settings, stop)
    expected = (
        "step 6: early stopping: held_out_loss has not improved by more than 100 for 2 "
        "evaluations; its best value is "
    )
    assert expected in output
    assert checkpoints.list_steps(run) == [4, 6]
    assert json.loads((run / "exported.json").read_text()) == {"step": 6}
    output = trained(*settings, stop)
    assert f"complete: the run is at step 6 of {STEPS} and has stopped early" in output
    trained(*settings)
    assert max(metrics(run)) == STEPS


# --- tasks of lm-eval ---

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {file}
test_split: train
output_type: {kind}
"""


def write_tasks(directory: Path) -> Path:
    """Tasks of a few documents, one of each kind of request. The figure of tiny_said is of every
    token of a prompt, also of what a chat template writes around it."""
    directory.mkdir()
    questions = [
        {"q": "Ada proved", "a": [" a theorem.", " the orbit.", " an invariant."], "n": n % 3}
        for n in range(7)
    ]
    texts = [
        {"text": f"Grace measured the orbit. {'Emmy taught the café. ' * n}"} for n in range(9)
    ]
    for name, rows in (("questions", questions), ("texts", texts)):
        (directory / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = directory / "questions.json"
    choice = TASK.format(
        name="tiny_choice", file=directory / "questions.json", kind="multiple_choice"
    )
    choice += "doc_to_text: '{{q}}'\ndoc_to_choice: '{{a}}'\ndoc_to_target: n\n"
    choice += "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    text = TASK.format(
        name="tiny_text", file=directory / "texts.json", kind="loglikelihood_rolling"
    )
    text += "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list:\n"
    text += "  - metric: word_perplexity\n  - metric: bits_per_byte\n"
    answer = TASK.format(name="tiny_answer", file=asked, kind="generate_until")
    answer += "doc_to_text: '{{q}}'\ndoc_to_target: ' a theorem'\n"
    answer += "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 8\n"
    answer += "metric_list:\n  - metric: exact_match\n"
    said = TASK.format(name="tiny_said", file=asked, kind="loglikelihood")
    said += "doc_to_text: '{{q}}'\ndoc_to_target: ' a theorem'\n"
    said += "metric_list:\n  - metric: perplexity\n"
    tasks = {"choice": choice, "text": text, "answer": answer, "said": said}
    for name, content in tasks.items():
        (directory / f"{name}.yaml").write_text(content)
    return directory


TASKS = ("tiny_choice", "tiny_text", "tiny_answer", "tiny_said")


def lm_eval_figures(hf: Path, directory: Path, **options: Any) -> dict[str, float]:
    """What lm-eval itself says of an export; options: of its `simple_evaluate`."""
    import lm_eval

    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={hf},dtype=float32",
        tasks=list(TASKS),
        task_manager=lm_eval.tasks.TaskManager(include_path=str(directory)),
        bootstrap_iters=0,
        device="cpu",
        **options,
    )
    return {
        f"{task}/{key.removesuffix(',none')}": value
        for task, figures in results["results"].items()
        for key, value in figures.items()
        if key.endswith(",none") and "stderr" not in key
    }


@pytest.mark.slow
def test_figures_of_tasks_are_those_of_lm_eval(inputs: Inputs, tmp_path: Path) -> None:
    """In pipeline stages; a chat of one process is in test_chat.py."""
    pytest.importorskip("lm_eval")
    directory = write_tasks(tmp_path / "tasks")
    settings = evaluating(
        tmp_path / "run",
        f"evaluation.tasks=[{','.join(TASKS)}]",
        f"evaluation.tasks_directory={directory}",
        "evaluation.tasks_every_steps=4",
        "evaluation.best={metric: tasks/tiny_text/bits_per_byte}",
        "checkpoint.keep_best=1",
        "logging.trackers=[tensorboard]",
    )
    arguments = ["--config", inputs.run_yaml, "--deepspeed_config", "zero0", "parallel.pipeline=2"]
    trained(*arguments, *settings, num_processes=2)
    run = tmp_path / "run"
    lines = [line for line in lines_of(run / "metrics.jsonl") if "tasks" in line]
    assert [line["step"] for line in lines] == [4, 8, 12]
    expected = lm_eval_figures(run / "hf", directory)
    assert len(expected) == 6
    assert lines[-1]["tasks"] == pytest.approx(expected, rel=1e-5)
    assert [one["text"] for one in lines_of(run / "samples.jsonl")[-len(PROMPTS) :]] == [
        greedy(run / "hf", prompt) for prompt in PROMPTS
    ]
    plain = train(
        *arguments,
        f"output.directory={tmp_path / 'plain'}",
        "evaluation.every_steps=null",
        "output.export=false",
        num_processes=2,
    )
    assert plain.code == 0, plain.output
    for key in ("loss", "grad_norm"):
        assert metrics(run, key) == metrics(tmp_path / "plain", key)
    assert "tiny_text/bits_per_byte (lm-eval)" in (run / "hf/README.md").read_text()


@pytest.mark.slow
def test_a_missing_task_is_refused_before_anything_exists(inputs: Inputs, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    directory = write_tasks(tmp_path / "tasks")
    settings = [
        f"output.directory={tmp_path / 'run'}",
        "evaluation.tasks=[tiny_choise]",
        f"evaluation.tasks_directory={directory}",
    ]
    finished = train("--config", inputs.run_yaml, *settings)
    assert finished.code == 2
    assert "evaluation.tasks = 'tiny_choise': lm-eval has no such task" in finished.output
    assert "did you mean tiny_choice" in finished.output
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_page_as_it_stands(inputs: Inputs, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    page = page_text("docs/howto/evaluation.md")
    command, content = re.findall(r"^```\w*\n(.*?)^```", page, flags=re.M | re.S)
    assert shlex.split(command)[:3] == ["python", "bigtrain/train.py", "--config"]
    (tmp_path / "shards").symlink_to(inputs.shards)
    other_shards(inputs, tmp_path)
    write_tasks(tmp_path / "tasks")
    (tmp_path / shlex.split(command)[3]).write_text(content)
    (tmp_path / "ds_configs").symlink_to(ROOT / "ds_configs")
    worker = ROOT / "tests/launch/extension_worker.py"
    run_script(1, worker, tmp_path, *shlex.split(command)[2:])
    run = tmp_path / "runs/evaluated"
    lines = [line for line in lines_of(run / "metrics.jsonl") if "tasks" in line]
    assert [line["step"] for line in lines] == [4, 8]
    assert {"tiny_choice/acc", "tiny_choice/acc_norm"} == set(lines[-1]["tasks"])
    assert set(lines[-1]["held_out_sources"]) == {"shards", "others"}
    assert len(lines_of(run / "samples.jsonl")) == 4
    assert bigtrain(["export", "--run", str(run), "--best", "--output", str(tmp_path / "b")]) == 0
