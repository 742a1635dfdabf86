"""`bigtrain start`: what it writes, what it refuses, and how it continues; without the training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from bigtrain.cli import main
from bigtrain.commands import start
from bigtrain.settings.loading import load_run_config
from tests.support.chats import save_chat_tokenizer, turns
from tests.support.datasets import write_dataset

CHATS = [{"messages": turns(f"what is {n} plus 1?", f"it is {n + 1}")} for n in range(60)]
PAIRS = [{"prompt": f"is {n} even?", "chosen": "yes", "rejected": "who knows"} for n in range(60)]
TEXTS = [{"text": f"a text about {n} and more, and about {n + 1}"} for n in range(60)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base model, and rows of three formats."""
    monkeypatch.chdir(tmp_path)
    save_chat_tokenizer(tmp_path / "base")
    config = LlamaConfig(
        vocab_size=512, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    for name, rows in (("chats", CHATS), ("pairs", PAIRS), ("texts", TEXTS)):
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of each training, which ends with the exit code that is its last word."""
    calls: list[list[str]] = []

    def train(words: list[str], started: start.StartRecord, devices: str | None) -> int:
        calls.append([*words, str(started.num_ranks)])
        return 75 if len(calls) == 1 else 0

    monkeypatch.setattr(start, "_train", train)
    return calls


@pytest.mark.parametrize(
    ("data", "more", "expected"),
    [
        ("chats", [], {"packing": "best_fit", "objective": "next_token", "lr": 2e-5}),
        ("chats", ["--chat"], {"packing": "best_fit", "objective": "next_token", "lr": 2e-5}),
        (
            "pairs",
            ["--adapters"],
            {"packing": "concatenate", "objective": "preference", "lr": 5e-6},
        ),
        ("texts", ["--text"], {"packing": "concatenate", "objective": "next_token", "lr": 2e-5}),
    ],
)
def test_the_format_decides_the_run(
    folder: Path,
    trained: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    data: str,
    more: list[str],
    expected: dict[str, Any],
) -> None:
    command = ["start", "--model", "base", "--data", f"{data}.jsonl", *more]
    assert main(command) == 75
    said = capsys.readouterr()
    assert "$ bigtrain tokenize --input" in said.out
    assert said.err.endswith(
        f"stopped and saved; the same command continues; next:\n  bigtrain {' '.join(command)}\n"
    )
    place = Path(f"runs/base-{data}")
    run = load_run_config(str(place / "run.yaml"))
    found = {
        "packing": run.data.packing, "objective": run.objective.type, "lr": run.optimizer.lr
    }  # fmt: skip
    assert found == expected
    assert (run.adapters is None) == ("--adapters" not in more)
    assert (run.train.epochs, run.output.directory) == (1.0, str(place / "run"))
    assert run.batch.sequence_length <= 256
    # What the user changes is kept, and the shards are not made again.
    text = (place / "run.yaml").read_text().replace("epochs: 1.0", "epochs: 2.0")
    (place / "run.yaml").write_text(text)
    manifest = (place / "shards/manifest.json").stat().st_mtime_ns
    assert main(command) == 0
    assert f"{place}/run.yaml: used as it is" in capsys.readouterr().out
    assert (place / "run.yaml").read_text() == text
    assert (place / "shards/manifest.json").stat().st_mtime_ns == manifest
    assert trained == [["--config", str(place / "run.yaml"), "1"]] * 2


def test_a_start_that_was_interrupted_before_the_run_yaml(
    folder: Path,
    trained: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    command = ["start", "--model", "base", "--data", "texts.jsonl"]
    for function in ("_tokenize", "_write_run"):
        with monkeypatch.context() as patched:
            patched.setattr(start, function, interrupted)
            assert main(command) == 130
        said = capsys.readouterr().err
        assert said.endswith(
            f"stopped; the same command continues; next:\n  bigtrain {' '.join(command)}\n"
        )
    assert not Path("runs/base-texts/run.yaml").exists()
    assert main(command) == 75
    assert len(trained) == 1


def test_other_options_and_other_files_are_refused(
    folder: Path, trained: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["start", "--model", "base", "--data", "texts.jsonl"]
    main(command)
    capsys.readouterr()
    assert main([*command, "--epochs", "3"]) == 2
    said = capsys.readouterr().err
    assert "was started with other options: --model base --data texts.jsonl -> " in said
    Path("mine").mkdir()
    Path("mine/notes.txt").touch()
    assert main([*command, "--output", "mine"]) == 2
    assert "--output = 'mine': holds files of something else" in capsys.readouterr().err
    for content in ("{", '["a"]', '{"colour": 1}'):
        Path("mine/start.json").write_text(content)
        assert main([*command, "--output", "mine"]) == 2
        assert "its start.json is no record of a start (" in capsys.readouterr().err
    assert len(trained) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--model", "missing/", "--data", "chats.jsonl"], "--model = 'missing/': no such"),
        (["--model", "base", "--data", "chat.jsonl"], "--data = 'chat.jsonl': does not exist"),
        (["--model", "base", "--data", "texts.jsonl", "--chat"], "--chat: "),
        (["--model", "base", "--data", "pairs.jsonl", "--chat"], "rows of --format preference"),
        (["--model", "plain", "--data", "chats.jsonl", "--chat"], "has no chat template"),
        (["--model", "base", "--data", "chats.jsonl", "--preference"], "rows of --format messages"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_tokenized(
    folder: Path,
    trained: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    words: str,
) -> None:
    shutil.copytree("base", "plain")
    Path("plain/chat_template.jinja").unlink()
    assert main(["start", *more]) == 2
    assert words in capsys.readouterr().err
    assert trained == []
    assert not list(folder.glob("runs/*/run.yaml"))
    # Corrected options are not those of another start.
    assert main(["start", "--model", "base", "--data", "chats.jsonl"]) == 75


def test_options_of_another_command_are_explained(
    folder: Path, trained: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A remedy of `bigtrain tokenize` may name options that only this command has."""
    rows = [*map(json.dumps, CHATS), "no JSON"]
    (folder / "broken.jsonl").write_text("\n".join(rows))
    assert main(["start", "--model", "base", "--data", "broken.jsonl", "--chat"]) == 2
    refused, explained = capsys.readouterr().err.splitlines()[-2:]
    assert "--skip-bad" in refused
    assert explained.startswith("--skip-bad: of `bigtrain tokenize`; run the command above with")
    assert explained.endswith("bigtrain start --model base --data SHARDS")
    assert trained == []


def test_shards_are_used_and_several_machines_are_named(
    folder: Path, trained: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(folder / "shards", vocab_size=512)
    command = ["start", "--model", "base", "--data", "shards", "--devices", "16xH100-80GB"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "tokenize" not in said
    assert "next:\n  deepspeed --hostfile HOSTFILE " in said
    assert trained == []
    assert load_run_config("runs/base-shards/run.yaml").precision.dtype == "bfloat16"


def test_documents_are_held_out_only_where_they_can_be_measured(
    folder: Path,
    trained: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fraction of a small file is shorter than a sample; the user did not ask for it."""
    answers = [{"prompt": f"{n}+1?", "completion": f"it is {n + 1}"} for n in range(120)]
    rated = [{**answer, "label": True} for answer in answers]
    texts = [{"text": f"a text about {n} and more, and about {n + 1}"} for n in range(120)]
    cases = {"rated": (rated, "1 answers have no other"), "short": (texts, "has 35 tokens, too")}
    for name, (rows, reason) in cases.items():
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        command = ["start", "--model", "base", "--data", f"{name}.jsonl"]
        main(command)
        said = capsys.readouterr().out
        assert reason in said, said
        assert "; tokenized again without held-out documents\n" in said
        # The shards and the run have none, and the same command keeps them.
        shards = Path(f"runs/base-{name}/shards")
        assert "held_out" not in json.loads((shards / "manifest.json").read_text())["splits"]
        assert not load_run_config(f"runs/base-{name}/run.yaml").evaluation.every_steps
        assert not list(shards.parent.glob(".*"))
        main(command)
        assert "tokenized again" not in capsys.readouterr().out
    assert len(trained) == 4


def test_data_of_less_than_a_sample_are_refused(
    folder: Path, trained: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("one.jsonl").write_text(json.dumps({"text": "hello there"}))
    assert main(["start", "--model", "base", "--data", "one.jsonl"]) == 2
    refused = capsys.readouterr().err
    assert "too short for one global batch: 8 training tokens are 0 samples of 64" in refused
    assert trained == []


@pytest.mark.parametrize(
    ("devices", "code", "words", "num_ranks"),
    [
        ("2", 75, "planning for 2xCPU", "2"),
        ("2xH100-80GB", 0, "for 2 GPUs, and this machine has no GPU; start it on one that", None),
        ("1xH100-80GB", 0, "next:\n  python ", None),
        ("0", 2, "--devices = '0': is not a number of devices, or that and their name", None),
        ("2x", 2, "write e.g. 2, 2xCPU or 8xH100-80GB", None),
        ("CPU", 2, "write e.g. 2, 2xCPU or 8xH100-80GB", None),
    ],
)
def test_devices_are_those_of_this_machine_or_the_run_starts_elsewhere(
    folder: Path,
    trained: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    devices: str,
    code: int,
    words: str,
    num_ranks: str | None,
) -> None:
    monkeypatch.setattr(start, "_num_gpus", lambda: 0)
    command = ["start", "--model", "base", "--data", "chats.jsonl", "--devices", devices]
    assert main(command) == code
    said = capsys.readouterr()
    assert words in said.out + said.err
    assert [call[-1] for call in trained] == ([] if num_ranks is None else [num_ranks])


def test_more_gpus_than_this_machine_has_are_refused(
    folder: Path,
    trained: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(start, "_num_gpus", lambda: 2)
    command = ["start", "--model", "base", "--data", "chats.jsonl", "--devices", "4"]
    assert main(command) == 2
    assert "--devices = '4': this machine has 2 GPUs -> 2; or" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (75, "stopped and saved; the same command continues; next:"),
        (77, "a newer launch of this run has taken over, and this one stopped writing; the same"),
        (2, "refused; once that is mended, in runs/base-chats/run.yaml or in the data, the same"),
        (137, "ended with exit code 137; the same command continues; next:"),
    ],
)
def test_every_end_names_the_next_command(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr(start, "_train", lambda *_: code)
    command = ["start", "--model", "base", "--data", "chats.jsonl"]
    assert main(command) == code
    said = capsys.readouterr().err
    assert words in said
    assert said.endswith(f"next:\n  bigtrain {' '.join(command)}\n")


def _with_config(**values: int) -> None:
    config = json.loads(Path("base/config.json").read_text())
    Path("base/config.json").write_text(json.dumps(config | values))


def _with_pickled_weights() -> None:
    Path("base/model.safetensors").rename("base/pytorch_model.bin")


def _with_half_of_the_weights() -> None:
    content = Path("base/model.safetensors").read_bytes()
    Path("base/model.safetensors").write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("change", "more", "words"),
    [
        (None, ["--sequence-length", "4096"], "max_position_embeddings = 256"),
        (lambda: _with_config(intermediate_size=48), [], "has shape [32, 16], the model's"),
        (lambda: _with_config(num_hidden_layers=2), [], "no tensor there is the model's"),
        (_with_pickled_weights, [], "is a pickle"),
        (_with_half_of_the_weights, [], "model.path = 'base': "),
    ],
)
def test_options_and_weights_are_checked_before_anything_is_tokenized(
    folder: Path,
    trained: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[], None] | None,
    more: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(start, "_tokenize", lambda *_: pytest.fail("tokenized"))
    if change is not None:
        change()
    before = sorted(folder.rglob("*"))
    assert main(["start", "--model", "base", "--data", "texts.jsonl", *more]) == 2
    assert words in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("epochs", ["0", "-1", "nan"])
def test_epochs_are_more_than_zero(epochs: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("start", "init"):
        with pytest.raises(SystemExit):
            main([command, "--model", "base", "--data", "texts.jsonl", f"--epochs={epochs}"])
        assert f"--epochs: {epochs} is not a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.yaml", "model:\n  path: base\n", "is a file of settings"),
        ("engine.json", '{"zero_optimization": {"stage": 2}}', "has the keys zero_optimization"),
        ("empty.jsonl", "", "is empty"),
        ("missing.jsonl", None, "does not exist"),
    ],
)
def test_files_that_are_no_data_are_refused(
    folder: Path,
    trained: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | None,
    words: str,
) -> None:
    if content is not None:
        Path(name).write_text(content)
    before = sorted(folder.rglob("*"))
    assert main(["start", "--model", "base", "--data", name]) == 2
    refused = capsys.readouterr().err
    assert f"--data = '{name}': " in refused
    assert words in refused
    assert sorted(folder.rglob("*")) == before
    # Settings may be documents, if that is said.
    if name == "run.yaml":
        Path(name).write_text(content * 200 if content else "")
        assert main(["start", "--model", "base", "--data", name, "--text"]) == 75


def test_a_refused_start_may_be_repeated_with_other_options(
    folder: Path, trained: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """With other data only where no shards would be lost."""
    words = ["start", "--model", "base", "--output", "out", "--data"]
    Path("short.jsonl").write_text(json.dumps({"text": "hello there"}))
    assert main([*words, "short.jsonl"]) == 2
    assert main([*words, "short.jsonl", "--sequence-length", "128"]) == 2
    capsys.readouterr()
    assert main([*words, "texts.jsonl", "--epochs", "2"]) == 2
    assert "its shards are tokens of that data -> the same model" in capsys.readouterr().err
    shutil.rmtree("out/shards")
    assert main([*words, "texts.jsonl", "--epochs", "2"]) == 75
    assert load_run_config("out/run.yaml").train.epochs == 2.0


def test_nothing_remains_of_a_start_that_is_refused_while_it_tokenizes(
    folder: Path, trained: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.jsonl").write_text('{"text": "a"}\nno JSON')
    before = sorted(folder.rglob("*"))
    words = ["start", "--model", "base", "--data", "broken.jsonl"]
    assert main([*words, "--output", "a/b/c"]) == 2
    assert main(words) == 2
    assert sorted(folder.rglob("*")) == before


def test_the_error_of_a_contradicting_option_has_one_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["start", "--model", "base", "--data", "pairs.jsonl", "--chat"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "bigtrain start: 1 problem in the options of bigtrain start",
        "  --chat: pairs.jsonl has rows of --format preference -> remove --chat",
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "lists.json",
            [[{"role": "user", "content": "a"}]],
            "not a JSON object but list -> an obj",
        ),
        ("nested.json", {"data": [{"text": "a"}]}, "-> a file of the rows under 'data': jq -c '.d"),
        ("numbers.jsonl", 7, "not a JSON object but int"),
        ("dolly.jsonl", {"instruction": "a", "response": "b", "context": "c"}, "--key input=conte"),
    ],
)
def test_a_file_without_known_rows_is_refused_before_it_is_tokenized(
    name: str, content: Any, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_text(json.dumps(content))
    assert main(["start", "--model", "base", "--data", name]) == 2
    assert words in capsys.readouterr().err


def test_rows_without_text_are_no_documents(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["start", "--model", "base", "--data", "chats.jsonl", "--text"]) == 2
    rule = "--data = 'chats.jsonl': its first row has the keys messages, and no text -> bigtrain "
    command = "tokenize --input chats.jsonl --tokenizer base --text-key KEY --output shards/"
    assert f"{rule}{command}, and then --data shards/" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_models_that_are_no_directories_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of a model, and a recipe, which has no trained weights."""
    for command in ("start", "init"):
        words = [command, "--data", "texts.jsonl", "--model"]
        for model, rule in (
            ("base/config.json", "is a file, and a model is a directory -> its directory, such as"),
            ("quickstart", "is a recipe, whose weights are random"),
        ):
            assert main([*words, model]) == 2
            assert f"--model = '{model}': {rule}" in capsys.readouterr().err
    assert not Path("runs").exists()
