"""What people type wrong: one error that names what is wrong and what to do, exit code 2, no files.

`tests/launch/test_bad_input.py` has mistakes that need a world of processes, or a special state.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.cli import main as bigtrain
from bigtrain.train import main as train
from tests.launch.conftest import Inputs, snapshot

CHECK = "check --config run.yaml --world-size 2"
TRAIN = "train.py --config run.yaml"

MISTAKES: dict[str, tuple[str, ...]] = {
    # Settings: names.
    f"{CHECK} optimizer.learning_rate=1e-4": ("unknown key", "did you mean optimizer.lr?"),
    f"{CHECK} train.step=100": ("did you mean train.steps?",),
    f"{CHECK} trian.steps=100": ("did you mean train?",),
    f"{CHECK} steps=100": ("did you mean profile.steps or train.steps?",),
    f"{CHECK} lr=1e-4": ("did you mean optimizer.lr?",),
    f"{CHECK} --train.steps 100": ("is written train.steps=VALUE, without dashes",),
    f"{CHECK} --epochs 3": ("is written train.epochs=VALUE, without dashes",),
    f"{CHECK} train.steps": ("train.steps: is not an override -> write section.key=value",),
    f"{CHECK} train.steps =100": ("write train.steps=100, without spaces",),
    f"{CHECK} engine.json": ("is not an override -> --deepspeed_config engine.json",),
    # Settings: values.
    f"{CHECK} optimizer.lr=fast": ("must be a number -> write a number",),
    f"{CHECK} optimizer.lr=1e-4,": ("'1e-4,': must be a number",),
    f"{CHECK} optimizer.lr=-1": ("greater than 0 -> write a number more than 0",),
    f"{CHECK} train.steps=0": ("-> nearest: 1",),
    f"{CHECK} train.steps=1.5": ("must be a whole number -> nearest: 1 or 2",),
    f"{CHECK} parallel.tensor=two": ("must be a whole number -> write a number",),
    f"{CHECK} seed=abc": ("seed = 'abc': must be a whole number",),
    f"{CHECK} checkpoint.every_steps=never": ("must be a whole number",),
    f"{CHECK} evaluation.every_steps=-1": ("-> nearest: 1",),
    f"{CHECK} precision.dtype=fp8": ("'float32', 'bfloat16' or 'float16'", "one of these"),
    f"{CHECK} precision.dtype=half": ("did you mean float16?",),
    f"{CHECK} optimizer.type=adam": ("did you mean adamw?",),
    f"{CHECK} optimizer.betas=0.9": ("must be a list -> write a list: optimizer.betas=[a, b]",),
    f"{CHECK} optimizer.betas=[0.9,0.95,0.99]": ("must have 2, not 3 -> write 2 values",),
    f"{CHECK} schedule.type=cosin": ("did you mean cosine?",),
    f"{CHECK} schedule.warmup_steps=100000": ("-> schedule.warmup_steps=12 or less",),
    f"{CHECK} model.attention=flash": ("did you mean flash_attention_2?",),
    f"{CHECK} objective.type=dpo": ("did you mean preference?",),
    f"{CHECK} objective.type=sft": ("did you mean next_token?",),
    f"{CHECK} logging.trackers=wandb": ("must be a list -> write a list",),
    f"{CHECK} logging.trackers=[tensorbord]": ("did you mean tensorboard?",),
    f"{CHECK} adapters.type=lorra": ("did you mean lora?",),
    f"{CHECK} adapters.rank=8": ("model.path names none -> set model.path",),
    f"{CHECK} output.directory=~/runs": ("must be written out", "-> /"),
    f"{CHECK} model.path=missing": ("exactly one of", "-> model.config=null"),
    f"{CHECK} data.path=~/shards": ("data.path = '~/shards': must be written out", "-> /"),
    f"{CHECK} seed=true": ("must be a number, not true or false -> write a number",),
    # Layouts.
    f"{CHECK} parallel.tensor=3": ("into complete heads -> nearest: 2 or 4",),
    f"{CHECK} parallel.pipeline=5": ("is more than the model's 2 layers -> parallel.pipeline=2",),
    f"{CHECK} batch.micro_batch_size=3": ("must be a multiple of", "-> nearest: 6 or 12"),
    f"{CHECK} batch.global_batch_size=7": ("-> nearest: 4 or 8",),
    f"{CHECK} batch.sequence_length=4096": ("max_position_embeddings = 64 -> at most 64",),
    f"{TRAIN} parallel.tensor=2": ("must be a multiple", "-> start 2 processes"),
    # The engine.
    f"{CHECK} engine.deepspeed_config=zero4": ("did you mean zero3?",),
    f"{CHECK} engine.deepspeed_config=engine.json": ("is not JSON", "-> correct the file"),
    f"{CHECK} --deepspeed_config utf16.json": ("is UTF-16, not UTF-8 -> iconv -f UTF-16",),
    f"{CHECK} --deepspeed_config fights.json": (
        "contradicts batch.micro_batch_size",
        '-> remove it from fights.json or write "auto"',
    ),
    f"{TRAIN} --deepspeed_config missing.json": ("neither a file nor the name", "names:"),
    f"{TRAIN} --deepspeed ds_config.json": ("-> --deepspeed_config ds_config.json",),
    # The file of the run, and the command line.
    "check --config run.yml --world-size 2": ("did you mean run.yaml?",),
    "check --config quikstart --world-size 2": ("did you mean quickstart?",),
    "check --config folder.yaml --world-size 2": ("is a directory -> a YAML file",),
    "check --config tabs.yaml --world-size 2": ("line 2, column 1", "-> write spaces instead of t"),
    "check --config tab.yaml --world-size 2": ("line 2, column 8", "-> write spaces instead of ta"),
    "check --config nbsp.yaml --world-size 2": ("-> write spaces instead of non-breaking spaces",),
    "check --config list.yaml --world-size 2": ("must hold sections -> begin with `model:`",),
    "check --config empty.yaml --world-size 2": ("must hold sections",),
    "check --config utf16.yaml --world-size 2": ("is UTF-16, not UTF-8 -> iconv -f UTF-16",),
    "check --config latin.txt --world-size 2": ("is not UTF-8 text: byte 0xe9 at 3 -> save it",),
    "check --config twice.yaml --world-size 2": ("key 'seed' is given twice",),
    "check --config texts.jsonl --world-size 2": ("line 2", "-> correct the line"),
    "check --config run.yaml --world-size 0": ("must be at least 1 -> start at least one",),
    "check --config run.yaml --world-size zero": ("'zero' is not a whole number", "--help"),
    "check --world-size 2": ("required: --config -> ", "bigtrain check --help"),
    "train.py run.yaml": ("required: --config -> --config RUN.yaml",),
    "train.py --config nothing.yaml": ("neither a file nor the name of a recipe -> ",),
    f"{TRAIN} optimizer.lr_rate=1": ("unknown key",),
    f"{TRAIN} data.path=missing": ("does not exist -> make it with `bigtrain tokenize",),
    f"{TRAIN} data.path=shard": ("shard does not exist -> did you mean shards? Or make it with",),
    f"{TRAIN} data.path=renamed": (
        "train-00000.bin cannot be read: No such file or directory -> rename train-00000.bin.old ",
    ),
    f"{TRAIN} data.path=removed": (
        "held_out-00000.idx cannot be read: No such file or directory -> restore the file, or remo",
    ),
    f"{TRAIN} data.path=unlisted": ("it has no manifest.json -> make it with `bigtrain tokenize",),
    f"{TRAIN} output.directory=texts.jsonl/run": ("is not a directory -> choose another",),
    f"{TRAIN} checkpoint.initialize_from=missing": ("-> a directory with weights",),
    "chekc --config run.yaml": ("unknown command chekc -> did you mean check?",),
    "train --config run.yaml": ("-> a launcher starts training: deepspeed bigtrain/train.py",),
    # Data.
    "tokenize --input text.jsonl --tokenizer tokenizer --output s": ("did you mean texts.jsonl?",),
    "tokenize --input texts.jsonl --tokenizer no-tokenizer --output s": (
        "has no tokenizer (tokenizer.json or tokenizer_config.json) -> train one",
    ),
    "tokenize --input texts.jsonl --tokenizer endless --output s": (
        "endless has no end-of-sequence token",
        '-> set eos_token in its tokenizer_config.json: "eos_token": "<|endoftext|>"',
    ),
    "tokenize --input texts.jsonl --output s": ("required: --tokenizer -> ", "tokenize --help"),
    "tokenize --inputs texts.jsonl --tokenizer tokenizer --output s": ("required: --input",),
    "check --config run.yaml --worldsize 2": ("did you mean --world-size?",),
    "tokenize --input empty.jsonl --tokenizer tokenizer --output s": (
        "the input has no training tokens",
        "-> files with text",
    ),
    "tokenize --input broken.jsonl --tokenizer tokenizer --output s": (
        "broken.jsonl:2: not JSON",
        "--skip-bad",
    ),
    "tokenize --input numbers.jsonl --tokenizer tokenizer --output s": ("is not text but int",),
    "tokenize --input other_key.jsonl --tokenizer tokenizer --output s": (
        "no key 'text'; keys here: content",
    ),
    "tokenize --input latin.txt --tokenizer tokenizer --output s": ("latin.txt:1: not UTF-8",),
    "tokenize --input chats.jsonl --chat-key messages --tokenizer tokenizer --output s": (
        "has no chat template -> specify one: --chat-template FILE",
    ),
    "tokenize --input texts.jsonl --tokenizer tokenizer --output tokenizer": (
        "exists and is not empty",
        "-> choose another --output",
    ),
    "tokenize --input texts.jsonl --held-out 2 --tokenizer tokenizer --output s": ("--help",),
    "tokenizer --input texts.jsonl --vocab-size 100 --output t": ("-> 257 or more",),
    "tokenizer --input texts.jsonl --vocab-size 4k --output t": ("'4k'", "--help"),
    "tokenize --input list.jsonl --tokenizer tokenizer --output s": (
        "list.jsonl:1: not a JSON object but list -> name a file that is one list .json",
    ),
    "tokenize --input mixed.jsonl --chat-template turns.jinja --tokenizer tokenizer --output s": (
        "mixed.jsonl:2: no key 'messages'",
        "one format at a time",
    ),
    "tokenize --input chats.jsonl --chat-template half.jinja --tokenizer tokenizer --output s": (
        "is invalid: line 1",
        "-> correct the line, or render by another template: --chat-template FILE",
    ),
    "tokenize --input chats.jsonl --chat-template users.jinja --tokenizer tokenizer --output s": (
        "does not write the content of message 2 -> use a template that does",
    ),
    "tokenize --input chats.jsonl --chat-template utf16.json --tokenizer tokenizer --output s": (
        "--chat-template utf16.json is UTF-16, not UTF-8 -> iconv",
    ),
    # The other commands.
    "hostfile --check marked-hosts": ("begins with a byte order mark", "-> sed -i"),
    "hostfile --check utf16.json": ("is UTF-16, not UTF-8 -> iconv",),
    "convert utf16.yaml --output o.yaml": ("is UTF-16, not UTF-8 -> iconv",),
    "start --model model --data missing.jsonl": ("does not exist -> a file that exists",),
    "start --model model --data texts.jsonl": ("model has no tokenizer", "-> train one"),
    "start --model tokenizer --data chats.jsonl --devices 8xH900": ("no such device", "nearest"),
    "start --model tokenizer --data chats.jsonl --devices eight": ("write e.g. 2, 2xCPU or 8xH10",),
    "start --model tokenizer --data chats.jsonl --devices 0": ("write e.g. 2, 2xCPU or 8xH100-8",),
    "start --model endless --data texts.jsonl": ('"eos_token": "<|endoftext|>"',),
    "start --model tokenizer --data texts.jsonl --output texts.jsonl": ("is not a directory",),
    "start --model adapter --data chats.jsonl": (
        "is the folder of an adapter",
        "-> the model with its adapters merged in: `bigtrain export --merge`",
    ),
    "start --data texts.jsonl": ("required: --model -> bigtrain start --help",),
    "export --run missing --output e": ("no such directory -> name a run's output.directory",),
    "export --run not-a-run --output e": ("has no usable checkpoint -> name a run's",),
    "checkpoints --run missing": ("no such directory -> name a run's output.directory",),
    "report --run not-a-run": ("has no metrics.jsonl", "-> name a run's output.directory"),
    "plan --config run.yaml --gpus 8xH101": ("no such device", "nearest names: H100-80GB"),
    "plan --config run.yaml --gpus eight": ("-> write e.g. 64xH100-80GB",),
    "plan --config run.yaml": ("--gpus: is required for a plan",),
    "generate --model no-tokenizer --prompt hi": ("has no config.json", "-> an export's"),
    "inspect missing": ("-> make one with `bigtrain tokenize --output`",),
    "convert missing.yaml": ("no such file -> the path of the other trainer's file",),
    "init --data shards --output run.yaml": ("may have been edited -> another --output",),
    "launch slurm --config missing.yaml": ("neither a file nor the name of a recipe",),
}


@pytest.fixture(scope="module")
def desk(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a user has it, with files that are wrong in one way each."""
    desk = tmp_path_factory.mktemp("desk")
    tree: dict[str, Any] = yaml.safe_load(inputs.run_yaml.read_text())
    for name in ("tokenizer", "shards"):
        shutil.copytree(getattr(inputs, name), desk / name)
    shutil.copy(inputs.texts, desk / "texts.jsonl")
    tree["data"]["path"], tree["output"]["directory"] = "shards", "runs/mine"
    (desk / "run.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    model = desk / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tree["model"]["config"]))
    chats = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi."}]}
    ]
    (desk / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats * 9))
    (desk / "broken.jsonl").write_text('{"text": "good"}\n{"text": "bad\n')
    (desk / "numbers.jsonl").write_text('{"text": 5}\n{"text": 6}\n')
    (desk / "other_key.jsonl").write_text('{"content": "a"}\n{"content": "b"}\n')
    (desk / "empty.jsonl").write_text("")
    (desk / "latin.txt").write_bytes("caf\xe9\n".encode("latin-1"))
    (desk / "tabs.yaml").write_text("model:\n\tpath: x\n")
    (desk / "tab.yaml").write_text("model:\n  path:\tx\n")
    (desk / "nbsp.yaml").write_text("model:\n  path: x\n \xa0path: y\n", encoding="utf-8")
    (desk / "list.yaml").write_text("- model\n")
    (desk / "empty.yaml").write_text("")
    (desk / "twice.yaml").write_text((desk / "run.yaml").read_text() + "seed: 4\n")
    (desk / "engine.json").write_text('{"zero_optimization": {"stage": 1},}')
    (desk / "fights.json").write_text('{"train_micro_batch_size_per_gpu": 3}')
    (desk / "utf16.json").write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-16")
    (desk / "utf16.yaml").write_text((desk / "run.yaml").read_text(), encoding="utf-16")
    (desk / "marked-hosts").write_text("localhost slots=2\n", encoding="utf-8-sig")
    (desk / "list.jsonl").write_text(json.dumps(chats) + "\n")
    mixed = [*chats, {"instruction": "Add.", "output": "3"}]
    (desk / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    turns = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (desk / "turns.jinja").write_text(turns)
    (desk / "users.jinja").write_text(turns.replace("m.content", "m.content * (m.role == 'user')"))
    (desk / "half.jinja").write_text(turns.removesuffix("%}"))
    (desk / "folder.yaml").mkdir()
    (desk / "no-tokenizer").mkdir()
    shutil.copytree(desk / "tokenizer", desk / "adapter")
    (desk / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (desk / "not-a-run").mkdir()
    shutil.copytree(desk / "tokenizer", desk / "endless")
    tokenizer_config = json.loads((desk / "endless/tokenizer_config.json").read_text())
    del tokenizer_config["eos_token"]
    (desk / "endless/tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name in ("renamed", "removed", "unlisted"):
        shutil.copytree(desk / "shards", desk / name)
    (desk / "renamed/train-00000.bin").rename(desk / "renamed/train-00000.bin.old")
    (desk / "removed/held_out-00000.idx").unlink()
    (desk / "unlisted/manifest.json").unlink()
    return desk


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_error_with_its_remedy(
    typed: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setattr("tempfile.tempdir", str(desk.parent))
    before = snapshot(desk)
    program, *words = typed.split()
    try:
        code: object = train(words) if program == "train.py" else bigtrain([program, *words])
    except SystemExit as error:  # of argparse
        code = error.code
    printed = capsys.readouterr()
    assert code == 2, printed
    assert "Traceback" not in printed.err
    assert printed.err.count("\n") <= 2, printed.err  # one error, below how many there are
    for part in MISTAKES[typed]:
        assert part in printed.err, printed.err
    assert snapshot(desk) == before


def test_there_are_many_mistakes() -> None:
    assert len(MISTAKES) >= 105
