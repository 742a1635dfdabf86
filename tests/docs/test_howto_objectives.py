"""The page on objectives: its runs train, and its loss is that of next_token where it should be."""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bigtrain.cli import main
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.errors import LaunchError
from tests.launch.conftest import Inputs, finished_run, inputs, metrics, run_tree
from tests.support.lives import run_script
from tests.support.pages import page_text
from tests.support.worlds import ROOT

PAGE = page_text("docs/howto/objectives.md")
WORKER = ROOT / "tests/launch/extension_worker.py"

__all__ = ["finished_run", "inputs"]
pytestmark = pytest.mark.distributed


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, flags=re.M | re.S)


@pytest.fixture
def folder(inputs: Inputs, tmp_path: Path) -> Path:
    """A directory with the page's files, and a run of the shards."""
    (tmp_path / "losses.py").write_text(blocks("python")[0])
    tree = run_tree(inputs.shards, tmp_path / "run") | {"train": {"steps": 4}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path


def write_rows(path: Path) -> None:
    """Sums with a right and a wrong answer, as JSON lines."""
    chooser = random.Random(0)
    with path.open("w") as file:
        for _ in range(60):
            left, right = chooser.randint(1, 9), chooser.randint(1, 9)
            chosen, rejected = f" {left + right}.", f" {left * right + 1}, or so."
            row = {"prompt": f"{left} + {right} =", "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(row) + "\n")


def own(folder: Path, world_size: int, name: str, gamma: float, *more: str) -> dict[int, float]:
    section = yaml.safe_load(blocks("yaml")[5])["objective"]
    section["settings"]["gamma"] = gamma
    objective = f"objective={json.dumps(section)}"
    arguments = ("--config", "run.yaml", objective, f"output.directory={name}", *more)
    run_script(world_size, WORKER, folder, *arguments)
    return metrics(folder / name)


@pytest.mark.slow
def test_focal_loss_without_focus_is_the_cross_entropy(folder: Path) -> None:
    run_script(1, WORKER, folder, "--config", "run.yaml")
    expected = metrics(folder / "run"), metrics(folder / "run", "held_out_loss")
    for name, more in (
        ("plain", ()),
        ("chunks", ("model.loss=chunked", "model.loss_chunk_tokens=9")),
    ):
        losses = own(folder, 2, name, 0.0, *more)
        assert losses == pytest.approx(expected[0], rel=1e-6)
        assert metrics(folder / name, "held_out_loss") == pytest.approx(expected[1], rel=1e-6)
    chances = [row["chance"] for row in metrics(folder / "chunks", "recorded").values()]
    assert all(0 < chance < 1 for chance in chances)
    focused = own(folder, 1, "focused", 2.0)
    assert all(focused[step] < expected[0][step] for step in focused)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return batch.row_sums", "loss returned of shape [2]"),
        pytest.param(
            "return batch.nothing",
            "AttributeError: 'ObjectiveBatch' object has no attribute",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_faulty_loss_names_its_line(folder: Path, body: str, text: str) -> None:
    (folder / "losses.py").write_text(
        "class Focal:\n    def __init__(self, gamma): ...\n"
        f"    def loss(self, batch):\n        {body}\n"
    )
    with pytest.raises(LaunchError) as caught:
        own(folder, 2, "faulty", 1.0)
    assert text in str(caught.value)
    assert re.search(rf"{folder}/losses.py:[34]", str(caught.value))
    assert "exit codes [2, 2]" in str(caught.value)


@pytest.mark.slow
def test_the_preference_run_of_the_page(inputs: Inputs, folder: Path, finished_run: Path) -> None:
    shutil.copytree(finished_run / "hf", folder / "base")
    write_rows(folder / "pairs.jsonl")
    (command,) = re.findall(r"^bigtrain (tokenize --input pairs.*)", PAGE, flags=re.M)
    with chdir(folder):
        assert main(command.split()) == 0
    (folder / "preference.yaml").write_text(blocks("yaml")[0])
    shutil.copytree(folder / "pairs", folder / "others")
    more = ("evaluation.held_out=[{name: others, path: others}]",)
    run_script(2, WORKER, folder, "--config", "preference.yaml", *more)
    rows = metrics(folder / "runs/preference", "recorded")
    assert list(rows) == [5, 10]
    assert rows[10]["rewards/margins"] > rows[5]["rewards/margins"] > 0
    sets = metrics(folder / "runs/preference", "held_out_sources")[10]
    assert sets.keys() == {"pairs", "others"}
    assert sets["pairs"].keys() == {"loss", "pairs", "metrics"}
    assert sets["pairs"] == sets["others"]
    losses = metrics(folder / "runs/preference")
    assert losses[10] < losses[5]
    assert (folder / "runs/preference/hf/adapter_model.safetensors").exists()
    lengths = [len(document["input_ids"]) for document in open_dataset(folder / "pairs")]
    short = f"batch.sequence_length={max(lengths) - 2}"
    other = (*more, short, "output.directory=runs/short")
    with pytest.raises(LaunchError, match="longer than a sample"):
        run_script(1, WORKER, folder, "--config", "preference.yaml", *other)
    assert not (folder / "runs/short").exists()
    run_script(
        *(1, WORKER, folder, "--config", "preference.yaml", *other),
        *("data.long_documents=truncate", "output.export=false", "train.steps=2"),
    )
    log = (folder / "runs/short/log.txt").read_text()
    assert re.search(r"pairs: \d+ of \d+ answers are truncated, which loses \d.\d\d% ", log)


@pytest.mark.slow
def test_the_distillation_of_the_page(inputs: Inputs, folder: Path, finished_run: Path) -> None:
    for name in ("base", "teacher"):
        shutil.copytree(finished_run / "hf", folder / name)
    shutil.copytree(inputs.shards, folder / "shards")
    teacher, student, live = blocks("yaml")[6:9]
    (folder / "teacher.yaml").write_text(teacher)
    (folder / "distill.yaml").write_text(student)
    (command,) = re.findall(r"^bigtrain (score --config teacher.*)", PAGE, flags=re.M)
    with chdir(folder):
        assert main(command.split()) == 0
    run_script(2, WORKER, folder, "--config", "distill.yaml")
    losses = metrics(folder / "runs/distilled")
    assert list(losses) == [5, 10]
    # The student is the teacher: half of its loss has no divergence yet.
    held_out = metrics(folder / "runs/distilled", "held_out_loss")
    assert 0 < losses[5] < 0.6 * next(iter(held_out.values()))
    (folder / "live.yaml").write_text(
        yaml.safe_dump(yaml.safe_load(student) | yaml.safe_load(live))
    )
    run_script(2, WORKER, folder, "--config", "live.yaml", "output.directory=runs/live")
    # Scores are stored in 16 bit, and its teacher's are not.
    assert metrics(folder / "runs/live") == pytest.approx(losses, abs=1e-3)


@pytest.mark.slow
def test_the_kto_run_of_the_page(inputs: Inputs, folder: Path, finished_run: Path) -> None:
    shutil.copytree(finished_run / "hf", folder / "base")
    write_rows(folder / "pairs.jsonl")
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    with (folder / "rated.jsonl").open("w") as file:
        for number, row in enumerate(pairs):
            side = "rejected" if number % 3 else "chosen"
            rated = {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            file.write(json.dumps(rated) + "\n")
    (folder / "kto.yaml").write_text(blocks("yaml")[1])
    (tokenizing,) = re.findall(r"^bigtrain (tokenize --input rated.*)", PAGE, flags=re.M)
    (training,) = re.findall(r"^torchrun (.* kto.yaml)", PAGE, flags=re.M)
    option, size, program, *arguments = training.split()
    assert (option, program) == ("--nproc_per_node", "bigtrain/train.py")
    with chdir(folder):
        assert main(tokenizing.split()) == 0
    run_script(int(size), WORKER, folder, *arguments)
    rows = metrics(folder / "runs/kto", "recorded")
    assert list(rows) == [5, 10]
    names = {"kl", "logps/chosen", "logps/rejected"}
    names |= {f"rewards/{name}" for name in ("chosen", "rejected", "margins")}
    assert rows[10].keys() == names
    assert rows[10]["rewards/chosen"] > rows[10]["rewards/rejected"]
    losses = metrics(folder / "runs/kto")
    assert losses[10] < losses[5]
    assert (folder / "runs/kto/hf/adapter_model.safetensors").exists()
    assert "nats per answer" in (folder / "runs/kto/hf/README.md").read_text()
    shutil.move(folder / "rated", folder / "pairs")
    (folder / "run.yaml").write_text(blocks("yaml")[0])
    assert "has no preference pairs, which preference reads" in refused(folder)
    text = refused(folder, "objective={type: next_token}")
    assert "has answers with labels (kto)" in text
    assert "objective.type=kto" in text


def prepared_reward_run(folder: Path, finished_run: Path) -> list[str]:
    """Make the inputs of the page's reward run; return the arguments of train.py."""
    shutil.copytree(finished_run / "hf", folder / "base")
    write_rows(folder / "preferences.jsonl")
    (folder / "reward.yaml").write_text(blocks("yaml")[2])
    (tokenizing,) = re.findall(r"^bigtrain (tokenize --input preferences.*)", PAGE, flags=re.M)
    (training,) = re.findall(r"^torchrun (.* reward.yaml)", PAGE, flags=re.M)
    option, size, program, *arguments = training.split()
    assert (option, size, program) == ("--nproc_per_node", "2", "bigtrain/train.py")
    with chdir(folder):
        assert main(tokenizing.split()) == 0
    return arguments


@pytest.mark.slow
def test_the_reward_run_of_the_page(inputs: Inputs, folder: Path, finished_run: Path) -> None:
    arguments = prepared_reward_run(folder, finished_run)
    run_script(2, WORKER, folder, *arguments)
    rows = metrics(folder / "runs/reward", "recorded")
    assert list(rows) == [5, 10]
    names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    assert rows[10].keys() == names
    assert rows[10]["rewards/accuracies"] == 1.0
    losses = metrics(folder / "runs/reward")
    assert losses[10] < losses[5]
    export = folder / "runs/reward/hf"
    assert "nats per pair" in (export / "README.md").read_text()
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    texts = ["2 + 3 = 5.", "2 + 3 = 7, or so."]
    with torch.no_grad():
        scores = [float(model(**tokenizer(text, return_tensors="pt")).logits) for text in texts]
    assert scores[0] > scores[1]
    assert {path.name for path in export.iterdir()} >= {"config.json", "tokenizer.json"}
    tensors = load_file(export / "model.safetensors")
    assert "score.weight" in tensors
    assert not any("lm_head" in name for name in tensors)
    shutil.copyfile(folder / "reward.yaml", folder / "run.yaml")
    for settings, text in (
        (["adapters={type: lora}"], "does not name score, the head that scores"),
        (["model.loss=chunked"], "a score head makes no logits of tokens"),
        (["evaluation.prompts=[hello]"], "trains a model that predicts no tokens"),
        (
            ["model.path=runs/reward/hf", "objective={type: preference, loss: simpo}"],
            "is a model that scores samples, and objective.type = preference trains one",
        ),
    ):
        assert text in refused(folder, *settings)


@pytest.mark.slow
def test_a_reward_model_is_a_base_and_has_adapters(
    inputs: Inputs, folder: Path, finished_run: Path
) -> None:
    arguments = prepared_reward_run(folder, finished_run)
    run_script(1, WORKER, folder, *arguments)
    losses = metrics(folder / "runs/reward")
    again = ("model.path=runs/reward/hf", "output.directory=runs/again", "optimizer.lr=1e-9")
    run_script(1, WORKER, folder, *arguments, *again, "output.export=false")
    assert metrics(folder / "runs/again")[5] < losses[5] - 0.1
    own = (
        *("adapters={type: lora, rank: 4, modules_to_save: [score]}", "optimizer.lr=1e-3"),
        "output.directory=runs/adapted",
    )
    run_script(2, WORKER, folder, *arguments, *own, "engine.deepspeed_config=zero3")
    assert (folder / "runs/adapted/hf/adapter_model.safetensors").exists()
    with chdir(folder):
        assert main(["export", "--run", "runs/adapted", "--merge", "--output", "merged"]) == 0
        tokenizer = AutoTokenizer.from_pretrained("merged")
        base = AutoModelForSequenceClassification.from_pretrained("base", num_labels=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name
            adapted = PeftModel.from_pretrained(base, "runs/adapted/hf").eval()
        merged = AutoModelForSequenceClassification.from_pretrained("merged").eval()
    inputs_of = tokenizer("2 + 3 = 5.", return_tensors="pt")
    with torch.no_grad():
        expected, score = (float(one(**inputs_of).logits) for one in (adapted, merged))
    assert score == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_the_classification_run_of_the_page(
    inputs: Inputs, folder: Path, finished_run: Path
) -> None:
    shutil.copytree(finished_run / "hf", folder / "base")
    with (folder / "sums.jsonl").open("w") as file:
        for left in range(1, 10):
            for right in range(1, 10):
                label: int | str = ("small", 1)[left + right > 9]
                file.write(json.dumps({"text": f"{left} + {right}", "label": label}) + "\n")
    (folder / "classification.yaml").write_text(blocks("yaml")[3])
    (tokenizing,) = re.findall(r"^bigtrain (tokenize --input sums.*)", PAGE, flags=re.M)
    (training,) = re.findall(r"^torchrun (.* classification.yaml)", PAGE, flags=re.M)
    with chdir(folder):
        assert main(tokenizing.split()) == 0
    run_script(2, WORKER, folder, *training.split()[3:], "train.steps=40")
    rows = metrics(folder / "runs/classification", "recorded")
    assert rows[40].keys() == {"accuracy"}
    assert rows[40]["accuracy"] > 0.8
    export = folder / "runs/classification/hf"
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    assert model.config.id2label == {0: "small", 1: "large"}
    tokenizer = AutoTokenizer.from_pretrained(export)
    texts = ["1 + 2", "9 + 8"]
    with torch.no_grad():
        scores = model(**tokenizer(texts, return_tensors="pt")).logits
    assert scores.argmax(-1).tolist() == [0, 1]
    shutil.copyfile(folder / "classification.yaml", folder / "run.yaml")
    text = refused(folder, "objective={type: next_token}")
    assert "has samples with labels, which next_token would not read" in text
    config = json.loads((export / "config.json").read_text())
    config["id2label"] = {"0": "large", "1": "small"}
    (export / "config.json").write_text(json.dumps(config))
    text = refused(folder, "model.path=runs/classification/hf")
    assert "has a score head for large, small, and the data has small, large" in text


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(LaunchError) as caught:
        run_script(1, WORKER, folder, "--config", "run.yaml", *overrides)
    return str(caught.value)


def test_settings_that_pairs_do_not_have(folder: Path) -> None:
    text = refused(folder, "objective={type: preference, loss: simpo}", "data.packing=best_fit")
    assert "data.packing = 'best_fit': each answer of a pair is a row of its own" in text
    text = refused(folder, "objective={type: preference, loss: sigmoid, gamma: 1.0}")
    assert "objective.gamma = 1.0 has no effect with objective.loss = sigmoid" in text
    text = refused(folder, "objective={type: preference, loss: simpo}")
    assert "longer than a sample" in text or "no preference pairs" in text
    assert "predicted" not in text  # before the process group


LAYOUTS = {
    "chunks": ["model.loss=chunked", "model.loss_chunk_tokens=9"],
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2", "engine.deepspeed_config=zero1"],
}


@pytest.mark.slow
def test_terms_are_the_same_in_every_layout(folder: Path) -> None:
    section = json.dumps(yaml.safe_load(blocks("yaml")[4])["objective"] | {"z_loss": 0.01})
    run_script(1, WORKER, folder, "--config", "run.yaml")
    run_script(
        1, WORKER, folder, "--config", "run.yaml", f"objective={section}", "output.directory=one"
    )
    losses, norms = metrics(folder / "one"), metrics(folder / "one", "grad_norm")
    assert all(losses[step] > loss + 0.2 for step, loss in metrics(folder / "run").items())
    for name, layout in LAYOUTS.items():
        arguments = (f"objective={section}", f"output.directory={name}", *layout)
        run_script(2, WORKER, folder, "--config", "run.yaml", *arguments)
        assert metrics(folder / name) == pytest.approx(losses, rel=1e-5), name
        assert metrics(folder / name, "grad_norm") == pytest.approx(norms, rel=1e-4), name
        held_out = metrics(folder / name, "held_out_loss")
        assert held_out == pytest.approx(metrics(folder / "one", "held_out_loss"), rel=1e-5), name
