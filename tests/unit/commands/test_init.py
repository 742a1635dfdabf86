"""`bigtrain init` writes a run YAML that `bigtrain check` accepts, from options or from answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from bigtrain.cli import main
from bigtrain.python_api.new_run_inputs import read_shards
from bigtrain.settings.commented_yaml import SHIPPED, commented_yaml
from bigtrain.settings.hf_config_keys import given_ids, written_configuration
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.run_config import RunConfig
from tests.support.chats import save_chat_tokenizer, turns
from tests.support.datasets import write_dataset
from tests.support.pairs import write_pairs
from tests.support.worlds import ROOT

SMALL = ["--steps", "100", "--sequence-length", "128", "--global-batch-size", "8"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_written_is_planned_commented_and_accepted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(folder / "shards", vocab_size=50)
    given = ["--new-model", "quickstart", "--data", "shards", "--devices", "2xCPU"]
    assert main(["init", *given, *SMALL, "--run-directory", "runs/one"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "wrote run.yaml; next:"
    assert "bigtrain check --config run.yaml --world-size 2\n" in said
    assert "deepspeed --quiet --num_accelerators 2 " in said
    assert "tokenize" not in said
    assert main(["check", "--config", "run.yaml", "--world-size", "2"]) == 0
    text = Path("run.yaml").read_text()
    assert text.startswith("# Written by `bigtrain init`")
    assert str(ROOT) not in text
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
    write_dataset(folder / "shards", vocab_size=50)
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
        (
            ["--new-model", "quickstrat", "--data", "d"],
            "--new-model = 'quickstrat': is not here, and not in the Hub's cache -> did you mean "
            "quickstart?",
        ),
        (["--new-model", "llama3_8B", "--data", "d"], "did you mean llama3_8b?"),
        (["--model", "missing/", "--data", "d"], "--model = 'missing/': no such directory"),
        (["--model", "models/mine/hf", "--data", "d"], "no such directory"),
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
    (folder / "texts/chats.jsonl").write_text(json.dumps({"messages": turns("Hi", "Hello")}))
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


def test_a_folder_with_a_similar_name_is_meant(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "models/tuned").mkdir(parents=True)
    assert main(["init", "--model", "models/tunde", "--data", "d"]) == 2
    assert "did you mean models/tuned?" in capsys.readouterr().err
    # A name that the Hub may have is written, with a note where the Hub cannot be asked.
    assert main(["init", "--model", "owner/name", "--data", "owner/rows"]) == 0
    assert "note: owner/name is not here, and the Hub cannot be asked" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["quickstart", "llama3_8b", "gpt2_124m"])
def test_vocabulary_ids_and_length_are_those_of_the_shards(
    folder: Path, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    """Of any recipe: what is written trains on them, without another override."""
    shards = write_dataset(folder / "shards", vocab_size=50)
    facts = read_shards(str(shards))
    given = ["--new-model", recipe, "--data", "shards", "--global-batch-size", "2"]
    assert main(["init", *given]) == 0
    run = load_run_config("run.yaml")
    written = written_configuration(run.model)
    assert written["vocab_size"] == facts.vocab_size == 50
    assert given_ids(run.model) == []
    assert run.batch.sequence_length == 64
    inputs = ["--inputs"] if recipe == "quickstart" else []
    assert main(["check", "--config", "run.yaml", *inputs]) == 0
    assert "this run can start; next:" in capsys.readouterr().out


def test_rows_of_shards_decide_the_objective(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pairs(folder / "pairs", vocab_size=50)
    given = ["init", "--new-model", "quickstart", "--data", "pairs", "--force"]
    for more in ([], ["--preference"]):
        assert main([*given, *more]) == 0
        run = load_run_config("run.yaml")
        assert (run.objective.type, run.data.packing) == ("preference", "concatenate")
        longest = read_shards("pairs").long_document
        assert longest <= run.batch.sequence_length < longest + 64
    assert main([*given, "--chat"]) == 2
    assert "--chat: pairs has preference, not conversations" in capsys.readouterr().err
    write_dataset(folder / "text", vocab_size=50)
    for option, words in (
        ("--chat", "text has text, not conversations"),
        ("--preference", "text has no preference pairs"),
    ):
        data = ["--data", "text", option]
        assert main(["init", "--new-model", "quickstart", "--force", *data]) == 2
        assert words in capsys.readouterr().err


def test_conversations_need_a_chat_template(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a directory, and of a name in the Hub's cache; unknown elsewhere."""
    base = folder / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "llama"}')
    (base / "model.safetensors").touch()
    (base / "tokenizer_config.json").write_text("{}")
    given = ["init", "--model", "base", "--data", "chats.jsonl", "--chat", "--force"]
    assert main(given) == 2
    assert "--chat: the tokenizer of base has no chat template -> " in capsys.readouterr().err
    assert not (folder / "run.yaml").exists()
    for name, text in (
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}'),
        ("chat_template.jinja", "{{ messages }}"),
    ):
        (base / "tokenizer_config.json").write_text("{}")
        (base / name).write_text(text)
        assert main(given) == 0


def test_tracing_is_announced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(folder / "shards", vocab_size=50)
    given = ["--new-model", "quickstart", "--data", "shards", *SMALL]
    assert main(["init", *given]) == 0
    assert "traced" not in capsys.readouterr().err
    assert main(["init", *given, "--devices", "2xCPU", "--force"]) == 0
    assert "planning for 2xCPU: the model is traced" in capsys.readouterr().err


def test_the_schema_is_named_by_a_relative_path(folder: Path) -> None:
    """In a checkout; a path of this machine is of no use in a file that is shared."""
    tree = {"train": {"steps": 1}}
    assert "$schema" not in commented_yaml(tree, (), folder)
    (line, *_) = commented_yaml(tree, (), ROOT / "runs" / "mine").splitlines()
    name = line.removeprefix("# yaml-language-server: $schema=")
    assert not name.startswith("/")
    assert (ROOT / "runs" / "mine" / name).resolve() == SHIPPED


def test_shards_that_the_run_would_refuse_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(folder / "shards", vocab_size=50)
    given = ["--new-model", "quickstart", "--data", "shards", "--steps", "100"]
    assert main(["init", *given, "--sequence-length", "256", "--global-batch-size", "8"]) == 2
    assert "data.path = 'shards': too short for one global batch" in capsys.readouterr().err
    assert not Path("run.yaml").exists()


ROWS = {
    "chats": {"messages": turns("Hi", "Hello")},
    "pairs": {"prompt": "is 1 even? ", "chosen": "no", "rejected": "yes"},
    "rated": {"prompt": "is 1 even? ", "completion": "no", "label": True},
    "texts": {"text": "a text"},
    "other": {"lines": "a text", "author": "nobody"},
}


@pytest.mark.parametrize(
    ("data", "options", "problem"),
    [
        ("chats", [], "has rows of --format messages -> add --chat"),
        ("pairs", [], "has rows of --format preference -> add --preference"),
        (
            "rated",
            [],
            "-> bigtrain tokenize --input rated.jsonl --tokenizer TOKENIZER --format kto",
        ),
        (
            "other",
            [],
            "has the keys author, lines, and no text, conversation or pair -> bigtrain",
        ),
        ("pairs", ["--chat"], "--chat: pairs.jsonl has rows of --format preference -> --preferen"),
        ("texts", ["--chat"], "--chat: texts.jsonl has text without conversations -> remove"),
        ("texts", ["--preference"], "--preference: texts.jsonl has text without conversations"),
        ("chats", ["--preference"], "rows of --format messages -> --chat instead"),
        ("empty", [], "--data = 'empty.jsonl': is empty -> a file or folder with text or rows"),
    ],
)
def test_options_that_contradict_the_rows_are_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    data: str,
    options: list[str],
    problem: str,
) -> None:
    content = json.dumps(ROWS[data]) if data in ROWS else ""
    Path(f"{data}.jsonl").write_text(content)
    words = ["init", "--new-model", "quickstart", "--data", f"{data}.jsonl", *options]
    assert main(words) == 2
    refused = capsys.readouterr().err
    assert problem in refused
    assert "in the options of bigtrain init" in refused
    assert not Path("run.yaml").exists()


def test_data_that_are_no_data_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    Path("settings.yaml").write_text("a: 1")
    words = ["init", "--new-model", "quickstart", "--data"]
    for data, rule in (
        ("empty", "no file there ends with .txt"),
        ("settings.yaml", "is a file of settings"),
        ("*.jsonl", "no file matches"),
    ):
        assert main([*words, data]) == 2
        assert f"--data = '{data}': {rule}" in capsys.readouterr().err
        assert not Path("run.yaml").exists()
    # Names that the Hub may have, where it cannot be asked.
    assert main([*words, "missing"]) == 0
    assert "note: missing is not here, and the Hub cannot be asked" in capsys.readouterr().err


def test_shards_of_another_tokenizer_than_the_models_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_chat_tokenizer(folder / "other")
    Path("texts.txt").write_text("a text that is long enough for ten steps " * 200)
    words = ["--input", "texts.txt", "--tokenizer", "other", "--output", "shards"]
    assert main(["tokenize", *words]) == 0
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    config = LlamaConfig(vocab_size=512, num_attention_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained("base")
    save_chat_tokenizer(folder / "base")
    tokenizer = json.loads(Path("base/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[50:52]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    Path("base/tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["init", "--model", "base", "--data", "shards", *SMALL]) == 2
    refused = capsys.readouterr().err
    assert "was tokenized with a different tokenizer than that of model.path = base" in refused
    assert not Path("run.yaml").exists()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": turns("a", "b"), "chosen": turns("a", "b"), "rejected": turns("a", "c")},
        {
            "conversations": [{"from": "human", "value": "a"}],
            "chosen": {"from": "gpt", "value": "b"},
            "rejected": {"from": "gpt", "value": "c"},
        },
    ],
)
def test_commands_for_rows_of_several_formats_work_as_typed(
    row: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the error, for either format, and of the run with --preference."""
    save_chat_tokenizer(folder / "base")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=412, num_hidden_layers=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    given = ["init", "--model", "base", "--data", "rows.jsonl", "--shards", "later"]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "its first row has the keys of several formats" in said
    command = said.partition(" -> bigtrain ")[2].partition(", and then")[0].split()
    instead = said.strip().partition("; or instead ")[2].split()
    position = command.index("--format")
    is_messages = "messages" in row
    if is_messages:  # the other row has no answer in its conversation
        assert main(command) == 0
    assert main([*command[:position], *instead, "--output", "pairs"]) == 0
    assert read_shards("pairs").rows == "preference"
    capsys.readouterr()
    assert main([*given, "--preference"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (typed,) = [line for line in lines if line.startswith("bigtrain tokenize ")]
    assert "--format preference" in typed
    if is_messages:
        assert main([*typed.split()[1:], "--held-out", "0", "--output", "typed"]) == 0
