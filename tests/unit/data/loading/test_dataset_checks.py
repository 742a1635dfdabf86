"""What is refused before a run starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bigtrain.data.loading.dataset_checks import check_datasets, open_checked
from bigtrain.data.shards.manifest import read_manifest, write_manifest
from bigtrain.data.tokenizers.model_tokens import known_vocab_size
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.settings.run_config import RunConfig
from tests.support.datasets import write_dataset
from tests.support.run_trees import llama, run_config


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("checks") / "d", vocab_size=50)


def config_for(path: Path, *, vocab_size: int = 50, **sections: Any) -> RunConfig:
    return run_config(**{"model": llama(vocab_size), "data": {"path": str(path)}, **sections})


def texts(config: RunConfig, *arguments: int) -> list[str]:
    datasets, problems = open_checked(config)
    all_problems = check_datasets(config, datasets, *arguments).problems if datasets else problems
    return [str(problem) for problem in all_problems]


@pytest.mark.parametrize("vocab_size", [50, 64, 50 + 1024])
def test_a_dataset_that_fits(dataset: Path, vocab_size: int) -> None:
    assert texts(config_for(dataset, vocab_size=vocab_size)) == []


def test_missing(dataset: Path, tmp_path: Path) -> None:
    (problem,) = texts(config_for(tmp_path / "none"))
    assert problem.startswith("data.path = ")
    assert "none does not exist -> make it with `bigtrain tokenize --output`" in problem
    data = mixture(tmp_path / "a", dataset, tmp_path / "b")
    first, second = texts(config_for(dataset, data=data))
    assert first.startswith("data.sources.0.path = ")
    assert second.startswith("data.sources.2.path = ")


@pytest.mark.parametrize(
    ("vocab_size", "rule"), [(49, "too small"), (32, "too small"), (50 + 1025, "too large")]
)
def test_shards_of_another_tokenizer(dataset: Path, vocab_size: int, rule: str) -> None:
    (problem,) = texts(config_for(dataset, vocab_size=vocab_size))
    assert problem.startswith(f"model vocab_size = {vocab_size}: {rule}: the shards were made with")
    assert "has 50 tokens" in problem
    assert texts(config_for(dataset), vocab_size) == [problem]


def test_too_short(dataset: Path) -> None:
    batch = {"sequence_length": 300, "global_batch_size": 1000}
    problems = texts(config_for(dataset, batch=batch))
    assert len(problems) == 2
    assert "too short for one global batch" in problems[0]
    assert "one step takes 1000" in problems[0]
    assert "the held-out split has" in problems[1]


def test_tokenizer_of_the_run(dataset: Path, tmp_path: Path) -> None:
    train_tokenizer([["some text"]], 257).save(tmp_path / "t")
    data = {"path": str(dataset), "tokenizer": str(tmp_path / "t")}
    (problem,) = texts(config_for(dataset, data=data))
    assert "a different tokenizer than that of the shards (synthetic, 50" in problem
    data["tokenizer"] = str(tmp_path / "none")
    (problem,) = texts(config_for(dataset, data=data))
    assert problem.startswith("data.tokenizer = ")


def test_vocabulary_as_far_as_it_is_known(tmp_path: Path) -> None:
    def known(**model: Any) -> int | None:
        return known_vocab_size(config_for(tmp_path, model=model).model)

    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    nested = {"model_type": "x", "text_config": {"vocab_size": 9}}
    assert known(path=str(tmp_path)) == 7
    assert known(config=str(tmp_path), overrides={"vocab_size": 8}) == 8
    assert known(config=nested) == 9
    assert known(config="nobody/on-the-hub") is None
    assert known(config={"model_type": "llama"}) is None


def mixture(*paths: Path) -> dict[str, Any]:
    return {"sources": [{"path": str(path), "weight": 1} for path in paths]}


def test_sources_of_two_tokenizers(dataset: Path, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other", vocab_size=48)
    (problem,) = texts(config_for(dataset, data=mixture(dataset, other)))
    assert problem.startswith(
        f"data.sources.1.path = '{other}': was made with a different tokenizer"
    )
    assert "hash 0000000000000000, 48 tokens, end of document 0" in problem
    assert f"than {dataset} (synthetic, hash 0000000000000000, 50 tokens" in problem


def test_a_source_shorter_than_one_sample(dataset: Path, tmp_path: Path) -> None:
    short = write_dataset(tmp_path / "short", vocab_size=50, num_documents=1)
    batch = {"sequence_length": 100, "global_batch_size": 2}
    first, second = texts(config_for(dataset, data=mixture(dataset, short), batch=batch))
    assert first.startswith("data.sources.1.path = ")
    assert "training tokens, too few for one sample of 100 + 1" in first
    assert "the held-out split has" in second


def test_one_source_under_two_names(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(dataset)
    (problem,) = texts(config_for(dataset, data=mixture(dataset, tmp_path / "link")))
    assert problem.startswith(f"data.sources.1.path = '{tmp_path / 'link'}': is the same directory")
    assert f"as data.sources.0.path = {dataset} -> list it once, with the sum of both" in problem


@pytest.mark.parametrize("link", ["file", "folder", "tokenizer itself", "pipe"])
def test_links_out_of_a_dataset_are_not_followed(tmp_path: Path, link: str) -> None:
    """A dataset that somebody hands over must not take a file of this machine into the run."""
    data, secret = write_dataset(tmp_path / "d", vocab_size=50), tmp_path / "secret"
    (secret / "inner").mkdir(parents=True)
    (secret / "inner" / "shadow").write_text("root")
    tokenizer = data / "tokenizer"
    if link == "tokenizer itself":
        tokenizer.rmdir()
        tokenizer.symlink_to(secret)
    else:
        (tokenizer / "tokenizer.json").write_text("{}")
        (tokenizer / "alias.json").symlink_to("tokenizer.json")
        assert texts(config_for(data)) == []
        if link == "file":
            (tokenizer / "merges.txt").symlink_to("../../secret/inner/shadow")
        elif link == "folder":
            (tokenizer / "more").symlink_to(secret / "inner")
        else:
            os.mkfifo(tokenizer / "merges.txt")
    (problem,) = texts(config_for(data))
    assert problem.startswith(f"data.path = '{data}': {tokenizer}")
    assert ("outside of the dataset" in problem) == (link != "pipe")
    assert problem.endswith("-> check the origin of this dataset, and replace links by files")


def test_snapshots_of_the_hub_are_links_to_their_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--a--b"
    data = write_dataset(repository / "snapshots" / "0123", vocab_size=50)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "abcd").write_text("{}")
    (data / "tokenizer" / "tokenizer.json").symlink_to("../../../blobs/abcd")
    assert texts(config_for(data)) == []


def with_record(path: Path, **values: Any) -> Path:
    manifest = read_manifest(path)
    tokenizer = manifest.tokenizer.model_copy(update=values)
    write_manifest(path, manifest.model_copy(update={"tokenizer": tokenizer}))
    return path


@pytest.mark.parametrize("masked", [False, True])
def test_sources_whose_texts_begin_differently(dataset: Path, masked: bool, tmp_path: Path) -> None:
    """Conversations begin as their template writes; what has no record begins with nothing."""
    other = write_dataset(tmp_path / "other", vocab_size=50, seed=1, masked=masked)
    data = {**mixture(dataset, with_record(other, beginning_ids=(7,))), "packing": "best_fit"}
    problems = texts(config_for(dataset, data=data))
    if masked:
        assert problems == []
        return
    (problem,) = problems
    assert "its texts begin with token 7, those of" in problem
    assert "with no special token -> tokenize both with the same --beginning" in problem
    with_record(other, beginning_ids=())
    assert texts(config_for(dataset, data=data)) == []


def test_conversations_of_a_mixture_have_one_chat_template(dataset: Path, tmp_path: Path) -> None:
    """Plain text beside them has none."""
    first, second = (
        write_dataset(tmp_path / name, vocab_size=50, seed=seed, masked=True)
        for seed, name in enumerate(("first", "second"), 1)
    )
    with_record(first, chat_template="a" * 16)
    with_record(second, chat_template="b" * 16)
    data = {**mixture(dataset, first, second), "packing": "best_fit"}
    (problem,) = texts(config_for(dataset, data=data))
    assert problem.startswith(
        f"data.sources.2.path = '{second}': its conversations were rendered by"
    )
    assert f"than those of {first}, and" in problem
    with_record(second, chat_template="a" * 16)
    assert texts(config_for(dataset, data=data)) == []


def test_sources_that_end_documents_differently(dataset: Path, tmp_path: Path) -> None:
    """Only refused where a loss depends on the token that ends them."""
    other = write_dataset(tmp_path / "other", vocab_size=50, seed=1)
    data = mixture(dataset, with_record(other, end_of_document_id=3))
    assert texts(config_for(dataset, data=data)) == []
    (problem,) = texts(config_for(dataset, data={**data, "mask_end_of_document": True}))
    assert "end of document 3" in problem
