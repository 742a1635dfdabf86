"""`bigtrain init` writes a run YAML that `bigtrain check` accepts, from options or from answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pexpect
import pytest
import yaml

from bigtrain.cli import main
from bigtrain.settings.commented_yaml import SHIPPED
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.run_config import RunConfig

SMALL = ["--steps", "100", "--sequence-length", "256", "--global-batch-size", "8"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_written_is_planned_commented_and_accepted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "shards").mkdir()
    (folder / "shards/manifest.json").write_text("{}")
    given = ["--new-model", "quickstart", "--data", "shards", "--devices", "2xCPU"]
    assert main(["init", *given, *SMALL, "--run-directory", "runs/one"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "wrote run.yaml; next:"
    assert "bigtrain check --config run.yaml --world-size 2\n" in said
    assert "deepspeed --num_accelerators 2 " in said
    assert "tokenize" not in said
    assert main(["check", "--config", "run.yaml", "--world-size", "2"]) == 0
    text = Path("run.yaml").read_text()
    assert text.startswith(f"# yaml-language-server: $schema={SHIPPED}\n")
    assert "predicted, not measured: " in text
    run = load_run_config("run.yaml")
    assert (run.train.steps, run.output.directory, run.data.path) == (100, "runs/one", "shards")
    assert (run.checkpoint.every_steps, run.schedule.warmup_steps) == (10, 3)
    # Comments are the settings' own words, so they cannot drift.
    words = " ".join(line.strip(" #") for line in text.splitlines())
    for section, key in (("batch", "sequence_length"), ("optimizer", "lr"), ("train", "steps")):
        assert RunConfig.model_fields[section].annotation.descriptions()[key] in words


def test_the_default_directory_can_be_that_of_a_run(folder: Path) -> None:
    """runs/quickstart is what `make quickstart` leaves: shards, a tokenizer and a run below it."""
    given = ["init", "--new-model", "quickstart", "--data", "shards", "--force"]
    (folder / "shards").mkdir()
    (folder / "shards/manifest.json").write_text("{}")
    expected = ["runs/quickstart", "runs/quickstart-2", "runs/quickstart-3", "runs/quickstart-3"]
    for number, directory in enumerate(expected):
        assert main([*given, *SMALL]) == 0
        assert load_run_config("run.yaml").output.directory == directory
        Path(directory).mkdir(parents=True, exist_ok=True)
        # A run that was begun there may go on.
        Path(directory, "other" if number < 2 else "metrics.jsonl").touch()


def test_text_is_tokenized_first(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "some/model", "--data", "chats.jsonl", "--chat", "--adapters"]
    assert main(["init", *given, "--lr", "1e-4", "--output", "new/tuned.yaml"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == (
        "bigtrain tokenize --input chats.jsonl --tokenizer some/model --held-out 0.02 "
        "--output shards/"
    )
    assert lines[3].startswith("python ")
    tree = yaml.safe_load(Path("new/tuned.yaml").read_text())
    assert tree["data"] == {"path": "shards/", "packing": "best_fit"}
    assert tree["adapters"]["targets"] == "all-linear"
    assert load_run_config("new/tuned.yaml").optimizer.lr == 1e-4


def test_a_file_that_exists_is_replaced_by_force_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "run.yaml"
    path.write_text("mine")
    given = ["init", "--new-model", "quickstart", "--data", "texts/"]
    assert main(given) == 2
    assert "run.yaml'" in (said := capsys.readouterr().err)
    assert "-> another --output, or --force to replace it" in said
    assert path.read_text() == "mine"
    assert main([*given, "--force"]) == 0
    assert load_run_config(str(path)).data.path == "shards/"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "--model or --new-model and --data: is required when stdin is not a terminal"),
        (["--model", "m"], "--data: is required"),
        (["--new-model", "quickstart", "--data", "d", "--adapters"], "--adapters: require trained"),
        (
            ["--new-model", "quickstart", "--data", "d", "--devices", "2xAbacus"],
            "--devices = 'Abacus': no such device",
        ),
        (
            ["--model", "no/such", "--data", "d", "--devices", "2xCPU"],
            "--devices = '2xCPU': cannot",
        ),
        (["--new-model", "./nowhere", "--data", "d"], "no such directory"),
    ],
)
def test_what_is_missing_or_wrong_is_one_error_and_no_file(
    folder: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    assert main(["init", *given]) == 2
    assert said in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_what_is_said_of_the_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["init", "--new-model", "quickstart", "--force", "--data"]
    (folder / "texts").mkdir()
    for data, is_missing in (
        ("texts", False),
        ("owner/name", False),
        ("s3://bucket/rows.jsonl", False),
        ("nowhere/", True),
        ("rows.jsonl", True),
    ):
        assert main([*given, data, "--chat"]) == 0
        said = capsys.readouterr()
        assert (f"note: {data} does not exist yet" in said.err) == is_missing
        assert said.out.endswith("bigtrain generate --model runs/quickstart/hf --chat\n")


def test_answers_that_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-D, and Ctrl-C."""

    def no_answer(_question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", no_answer)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["init"]) == 2
    command = f"{sys.executable} -m bigtrain init"
    with pexpect.spawn(command, cwd=str(folder), encoding="utf-8", timeout=600) as terminal:
        terminal.expect("trained weights")
        terminal.sendintr()
        terminal.expect(pexpect.EOF)
        assert "Traceback" not in str(terminal.before)
    assert terminal.exitstatus == 130
    assert list(folder.iterdir()) == []


def test_a_person_is_asked_at_a_terminal(folder: Path) -> None:
    command = f"{sys.executable} -m bigtrain.cli init"
    with pexpect.spawn(command, cwd=str(folder), encoding="utf-8", timeout=600) as terminal:
        for question, answer in (
            ("trained weights", "perhaps"),
            ("answer yes or no", "no"),
            ("Configuration .*quickstart", ""),
            ("Data", ""),
            ("Data", "texts/"),
            ("texts/ does not exist; enter it again", "texts/"),
            ("conversations", ""),
            ("Devices", ""),
            ("Optimizer steps", "many"),
            ("an integer", "50"),
            ("Tokens per sample", "256"),
            ("Samples per step", "8"),
        ):
            terminal.expect(question)
            terminal.sendline(answer)
        terminal.expect("wrote run.yaml; next:")
        terminal.expect(pexpect.EOF)
    assert terminal.exitstatus == 0
    run = load_run_config(str(folder / "run.yaml"))
    assert (run.train.steps, run.batch.global_batch_size) == (50, 8)
    assert run.model.config["model_type"] == "llama"
