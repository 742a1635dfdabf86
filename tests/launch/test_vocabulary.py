"""Tokens added to a pretrained model: the page on it as it stands, its export, its adapters."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bigtrain.cli import main as bigtrain
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.errors import ConfigError
from bigtrain.python_api.configuring import check
from bigtrain.settings.loading import load_run_config
from tests.launch.conftest import VOCAB_SIZE, Inputs, metrics, snapshot, train, trained
from tests.parity.plain import plain_training
from tests.parity.test_vocabulary import resized
from tests.support.pages import page_text

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

PAGE = page_text("docs/howto/vocabulary.md")
COMMANDS, YAML, SAME, GROW = re.findall(r"^```\w*\n(.*?)^```", PAGE, flags=re.M | re.S)
ADD, TOKENIZE, TRAIN = (shlex.split(line) for line in COMMANDS.splitlines())
SPECIAL, PLAIN = ["<|im_start|>", "<|im_end|>"], "東京"


@pytest.fixture(scope="module")
def place(inputs: Inputs, finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page has been typed."""
    place = tmp_path_factory.mktemp("grown")
    shutil.copytree(finished_run / "hf", place / "base")
    shutil.copy(inputs.texts, place / "texts.jsonl")
    (place / "grown.yaml").write_text(YAML)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert bigtrain(ADD[1:]) == 0
        assert bigtrain(shlex.split(SAME)[1:]) == 0
        assert bigtrain(TOKENIZE[1:]) == 0
        assert bigtrain(shlex.split(GROW)[1:]) == 0
    assert TRAIN[:2] == ["python", "bigtrain/train.py"]
    tree = yaml.safe_load(YAML)
    tree["model"]["path"] = str(place / "base")
    tree["data"]["path"] = str(place / "grown-shards")
    tree["output"]["directory"] = str(place / "runs/grown")
    (place / "here.yaml").write_text(yaml.safe_dump(tree))
    every = "checkpoint.every_steps=3", "logging.every_steps=1"
    output = trained("--config", place / "here.yaml", *every)
    assert f"vocabulary grown from {VOCAB_SIZE} to 384 rows (mean_covariance)" in output
    return place


def test_the_export_is_what_plain_transformers_loads(place: Path) -> None:
    hf = place / "runs/grown/hf"
    model = AutoModelForCausalLM.from_pretrained(hf)
    tokenizer = AutoTokenizer.from_pretrained(hf)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 384
    ids = tokenizer.convert_tokens_to_ids([*SPECIAL, PLAIN])
    assert ids == [VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2]
    assert tokenizer(f"Ada {PLAIN}").input_ids[-1] == ids[2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == PLAIN
    assert model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False).shape == (1, 6)
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    rows = model.get_input_embeddings().weight[VOCAB_SIZE:].detach()
    mean = base.get_input_embeddings().weight.detach().mean(0)
    assert 0 < float((rows - mean).abs().max()) < 0.1  # six steps after


def test_the_tokenizer_of_the_yaml_is_that_of_the_options(place: Path) -> None:
    assert snapshot(place / "grown-tokenizer") == snapshot(place / "same-tokenizer")


def adding(place: Path, tmp_path: Path, *settings: str) -> str:
    """What a run with these settings of ``tokenizer`` is refused with, before it has a
    directory."""
    run = tmp_path / "run"
    with pytest.raises(ConfigError) as error:
        check(place / "here.yaml", f"output.directory={run}", *settings, inputs=True)
    assert not run.exists()
    return str(error.value)


def test_data_of_another_tokenizer_is_refused(place: Path, inputs: Inputs, tmp_path: Path) -> None:
    text = adding(place, tmp_path, f"data.path={inputs.shards}")
    assert (
        "tokenizer.add_special_tokens = ['<|im_start|>', '<|im_end|>', '東京']: no tokens" in text
    )
    assert "bigtrain tokenizer --config RUN.yaml --output DIR" in text
    turned = adding(place, tmp_path, "tokenizer.add_special_tokens=[<|im_end|>, <|im_start|>]")
    assert "<|im_end|> has id 321 in the tokenizer that the data" in turned
    assert "would get 320 -> the order of the ids: [<|im_start|>, <|im_end|>]" in turned
    fewer = adding(place, tmp_path, "tokenizer.add_tokens=[]")
    assert "tokenizer.add_tokens: the tokenizer that the data was tokenized with" in fewer
    assert "has also 東京 -> add them too" in fewer
    plain = adding(
        place,
        tmp_path,
        "tokenizer.add_special_tokens=[<|im_start|>]",
        "tokenizer.add_tokens=[<|im_end|>, 東京]",
    )
    assert "tokenizer.add_tokens = '<|im_end|>': is a control token" in plain
    nowhere = adding(place, tmp_path, f"tokenizer.base={tmp_path / 'nowhere'}")
    assert "nowhere': tokenizer" in nowhere
    assert "-> tokenizer.base=DIRECTORY, or a hub name" in nowhere
    grown = place / "grown-tokenizer"
    known = adding(place, tmp_path, f"tokenizer.base={grown}")
    assert "= '<|im_start|>': is already a token of" in known
    assert "with id 320 -> remove it" in known
    train_tokenizer([["another text"]], 257).save(tmp_path / "other")
    other = adding(place, tmp_path, f"tokenizer.base={tmp_path / 'other'}")
    assert "was made from another one -> name the one that it was made from" in other


def test_a_run_resumes_with_its_rows(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(place / "runs/grown", run)
    shutil.rmtree(run / "checkpoints/step-00000006")
    (place / "base").rename(place / "gone")  # which a resumed run does not read but for its config
    try:
        (place / "base").mkdir()
        shutil.copy(place / "gone/config.json", place / "base")
        more = f"output.directory={run}", "logging.every_steps=1"
        finished = train("--config", place / "here.yaml", *more)
    finally:
        shutil.rmtree(place / "base")
        (place / "gone").rename(place / "base")
    assert finished.code == 0, finished.output
    assert metrics(run)[6] == metrics(place / "runs/grown")[6]


def test_a_larger_tokenizer_is_refused_without_it(place: Path, tmp_path: Path) -> None:
    finished = train(
        "--config",
        place / "here.yaml",
        "model.vocabulary=null",
        "tokenizer=null",
        f"output.directory={tmp_path / 'run'}",
    )
    assert finished.code == 2
    assert f"model vocab_size = {VOCAB_SIZE}: too small" in finished.output
    assert "grow the weights: model.vocabulary.new_rows=mean_covariance" in finished.output
    assert not (tmp_path / "run").exists()


def test_a_grown_base_is_for_adapters(place: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(place / "grown-base")
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    assert model.config.vocab_size == VOCAB_SIZE + 3
    weight = model.get_input_embeddings().weight.detach()
    assert torch.equal(weight[:VOCAB_SIZE], base.get_input_embeddings().weight)
    mean = base.get_input_embeddings().weight.detach().mean(0)
    torch.testing.assert_close(weight[VOCAB_SIZE:], mean.expand(3, -1), rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="grow the base first, by `bigtrain grow`"):
        load_run_config(str(place / "here.yaml"), ["adapters.rank=4", "tokenizer=null"])
    with pytest.raises(ConfigError, match="the base of adapters must already have rows"):
        load_run_config(str(place / "here.yaml"), ["adapters.rank=4", "model.vocabulary=null"])


@pytest.mark.slow
def test_added_tokens_train_alike_in_stages(place: Path, tmp_path: Path) -> None:
    """The run of the page, whose key `tokenizer` says which tokens: as plain transformers and torch
    train the model that transformers has resized for them."""
    every = ["schedule.type=constant", "logging.every_steps=1"]
    config = load_run_config(str(place / "here.yaml"), every).model_dump(mode="json")
    assert config["tokenizer"]["add_tokens"] == [PLAIN]
    start = resized(
        place / "base", tmp_path / "resized", config["model"]["vocabulary"], VOCAB_SIZE + 3, 0
    )
    assert config["seed"] == 0
    (tmp_path / "train_00000.bin").symlink_to(place / "grown-shards/train-00000.bin")
    expected = plain_training(tmp_path, start, config)
    run = tmp_path / "stages"
    arguments = ["--config", place / "here.yaml", "--deepspeed_config", "zero0"]
    where = f"output.directory={run}"
    trained(*arguments, *every, "parallel.pipeline=2", where, num_processes=2)
    losses = [loss for _, loss in sorted(metrics(run).items())]
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32)
    for key, weight in expected.weights.items():
        torch.testing.assert_close(
            model.get_parameter(key).detach(),
            weight,
            rtol=0,
            atol=1e-5,
            msg=lambda m, at=key: f"{at}: {m}",
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_learn_the_new_rows_of_a_grown_base(place: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(place / "base")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "base")
    words = ["grow", "--model", tmp_path / "base", "--tokenizer", place / "grown-tokenizer"]
    assert bigtrain([*map(str, words), "--output", str(tmp_path / "grown")]) == 0
    run = tmp_path / "run"
    adapters = "adapters={rank: 4, modules_to_save: [embed_tokens, lm_head]}"
    settings = [f"model.path={tmp_path / 'grown'}", f"output.directory={run}", adapters]
    no_tokens = "model.vocabulary=null", "tokenizer=null"
    trained("--config", place / "here.yaml", *no_tokens, *settings)
    state = load_file(run / "hf/adapter_model.safetensors")  # which plain peft has loaded
    [embedding] = [t for name, t in state.items() if "embed_tokens" in name]
    before = load_file(tmp_path / "grown/model.safetensors")["model.embed_tokens.weight"]
    assert embedding.shape == before.shape == (VOCAB_SIZE + 3, 32)
    assert (embedding[-1] - before[-1]).abs().max() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--add-token", "<|endoftext|>"], "is already a token of .*, with id 0 -> remove it"),
        (["--add-token", " "], "must have a non-space character"),
        (["--add-token", "ab cd", "--add-special-token", "ab cd"], "added twice"),
        ([], "nothing to add to the tokenizer"),
        (["--add-token", "xyz", "--vocab-size", "300"], "--base uses a trained tokenizer"),
        (["--add-token", "xyz", "train.steps=2"], "= 'train.steps=2': .* --config RUN.yaml"),
        (["--config", "quickstart"], "--config = 'quickstart': defines the .* except"),
    ],
)
def test_what_cannot_be_added(
    arguments: list[str],
    message: str,
    inputs: Inputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["tokenizer", "--base", str(inputs.tokenizer), "--output", str(tmp_path / "out")]
    assert bigtrain([*words, *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
