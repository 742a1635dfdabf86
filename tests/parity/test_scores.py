"""`bigtrain score` against transformers, on topologies; killed passes, references and filters."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import bigtrain
from bigtrain.cli import main
from bigtrain.errors import LaunchError
from tests.parity.objective_runs import (
    LAYOUTS,
    VOCAB_SIZE,
    compare,
    log_probabilities,
    save_experts,
    save_llama,
    train,
)
from tests.parity.test_objectives import STEPS, plain_run, root, run_of
from tests.support.lives import run_forked_world
from tests.support.pairs import write_pairs
from tests.support.worlds import ROOT

__all__ = ["root"]
pytestmark = [pytest.mark.distributed]

WORKER = ROOT / "tests/launch/command_worker.py"
SLOW = pytest.mark.slow
TOP_K = 5


@pytest.fixture(scope="module")
def place(root: Path) -> Path:
    """The directory of pairs and model, with a run YAML."""
    (root / "run.yaml").write_text(yaml.safe_dump(run_of(root, "sigmoid", full=True)))
    # With weights of the size of real ones, since float32 logits of 10 are known to 1e-6 only.
    save_llama(root / "mild", seed=1, spread=0.05)
    save_experts(root / "mild", root / "mild experts")
    return root


def score(place: Path, world_size: int, *arguments: str, **environment: str) -> str:
    words = [str(WORKER), str(place), "score", "--config", "run.yaml", *arguments]
    return run_forked_world(world_size, words, environment)


def files(output: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file()
    }


def plain_scores(place: Path, longest: int, base: str) -> list[tuple[np.ndarray, Any]]:
    """Of each training document: log-probabilities of its tokens (0 without a target), and of all
    tokens of the vocabulary, in pieces of `longest` tokens."""
    model = AutoModelForCausalLM.from_pretrained(place / base, dtype=torch.float32).eval()
    scores = []
    for document in bigtrain.open_dataset(place / "pairs"):
        tokens, labels = (torch.from_numpy(document[key]) for key in ("input_ids", "labels"))
        values = np.zeros(len(tokens), np.float32)
        every = np.zeros((len(tokens), VOCAB_SIZE), np.float32)
        for begin in range(0, len(tokens) - 1, longest):
            part = slice(begin, begin + longest)
            ids, own = tokens[part][None], labels[begin + 1 : begin + 1 + longest][None]
            ids = ids[:, : own.shape[1]]
            with torch.no_grad():
                inside = slice(begin + 1, begin + 1 + ids.shape[1])
                values[inside] = log_probabilities(model, ids, own)[0].numpy()
                logits = model(input_ids=ids, use_cache=False).logits[0]
                every[inside] = logits.log_softmax(-1).numpy()
        scores.append((values, every))
    return scores


@pytest.mark.parametrize(
    ("name", "world_size", "more"),
    [
        pytest.param("zero2", 2, ["engine.deepspeed_config=zero2"], marks=SLOW),
        ("zero3", 2, ["--deepspeed-config", "zero3", "model.loss=chunked"]),
        pytest.param("tensor", 2, ["parallel.tensor=2"], marks=SLOW),
        pytest.param("sequence", 2, ["parallel.sequence=2"], marks=SLOW),
        pytest.param("ring", 2, ["parallel.sequence={ring: 2}"], marks=SLOW),
        pytest.param("pipeline", 2, ["parallel.pipeline=2"], marks=SLOW),
        pytest.param("experts", 2, ["parallel.expert=2"], marks=SLOW),
        pytest.param("pieces", 2, ["batch.sequence_length=9"], marks=SLOW),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_scores_are_transformers_log_probabilities(
    place: Path, name: str, world_size: int, more: list[str]
) -> None:
    if name == "pieces":  # documents of any length, which pairs may not have
        more = [*more, "data.long_documents=truncate"]
    base = "mild experts" if name == "experts" else "mild"
    more = [*more, f"model.path={base}"]
    kind = ("--kind", "top-k", "--top-k", str(TOP_K), "--part-tokens", "3000")
    score(place, world_size, "--output", f"top-{name}", *kind, *more)
    tokens = ("--kind", "tokens", "--part-tokens", "500", *more)
    score(place, world_size, "--output", f"tokens-{name}", *tokens)
    scores, by_token = (bigtrain.open_scores(place / f"{k}-{name}") for k in ("top", "tokens"))
    longest = 9 if name == "pieces" else 32
    expected = plain_scores(place, longest, base)
    if name == "pieces":
        expected = [(v * (np.arange(len(v)) <= 9), e) for v, e in expected]
    sums = scores.sums("train")
    np.testing.assert_allclose(sums, [v.sum(dtype=np.float64) for v, _ in expected], rtol=1e-6)
    assert (scores.targets("train") == [(v != 0).sum() for v, _ in expected]).all()
    np.testing.assert_allclose(by_token.sums("train"), sums, rtol=1e-6)
    parts = by_token.parts("train")
    assert len(parts) > 2
    values = np.concatenate([by_token.part(part, "tokens") for part in parts])
    np.testing.assert_allclose(values, np.concatenate([v for v, _ in expected]), atol=1e-6, rtol=0)
    top = np.concatenate([scores.part(part, "top_values") for part in scores.parts("train")])
    ids = np.concatenate([scores.part(part, "top_ids") for part in scores.parts("train")])
    every, targets = np.concatenate([e for _, e in expected]), values != 0
    best = -np.sort(-every[targets], -1)[:, :TOP_K]
    np.testing.assert_allclose(top[targets], best, atol=1e-6, rtol=0)
    picked = np.take_along_axis(every, ids.astype(np.int64), -1)[targets]
    np.testing.assert_allclose(top[targets], picked, atol=1e-6, rtol=0)
    assert not top[~targets].any()


@pytest.mark.slow
def test_a_killed_pass_writes_the_same_bytes(place: Path) -> None:
    more = ("--part-tokens", "500")
    score(place, 2, "--output", "all", *more)
    with pytest.raises(LaunchError):
        score(place, 2, "--output", "killed", *more, BIGTRAIN_KILL_AFTER="3")
    before = files(place / "killed")
    assert 2 <= sum(name.endswith(".json") for name in before) <= 4
    assert not any(name.endswith("/scores.json") for name in before)
    with pytest.raises(bigtrain.DataError, match="are not complete"):
        bigtrain.open_scores(place / "killed")
    kept = next(path for path in (place / "killed").rglob("train-00000.sums.npy"))
    at = kept.stat().st_mtime_ns
    damaged = next(path for path in (place / "killed").rglob("train-00001.sums.npy"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    score(place, 2, "--output", "killed", *more)
    assert files(place / "killed") == files(place / "all")
    assert kept.stat().st_mtime_ns == at
    again = score(place, 1, "--output", "killed", *more)
    assert "documents scored" not in again
    assert "held_out: 16 documents" in again
    with pytest.raises(LaunchError, match="sequence_length: 32 there, 40 now"):
        score(place, 1, "--output", "killed", *more, "batch.sequence_length=40")


@pytest.mark.slow
def test_scores_made_beforehand_are_the_reference(place: Path) -> None:
    score(place, 2, "--output", "reference", "--kind", "tokens", "--part-tokens", "900")
    tree = run_of(place, "sigmoid", full=True, **LAYOUTS["zero3"].sections)
    tree["objective"]["reference"] = str(place / "reference")
    train(place, "stored", tree | {"train": {"steps": STEPS // 2}}, 2)
    shutil.rmtree(place / "reference")  # the run has its own
    more = {"checkpoint": {**tree["checkpoint"], "allow_changes": ["train.steps"]}}
    lines = train(place, "stored", tree | more, 1)
    unrecorded = ("logps/chosen", "logps/rejected")
    plain = plain_run(place, "sigmoid", full=True)
    compare(place / "stored", lines, plain, unrecorded=unrecorded)


@pytest.fixture(scope="module")
def of_random(place: Path) -> str:
    """Scores of random weights."""
    score(place, 1, "--output", "of_random", "model={config: base, overrides: {}}")
    return "objective.reference=of_random"


def refused(place: Path, *overrides: str) -> str:
    """What a run with these settings says, which ends before its first step."""
    worker = [str(ROOT / "tests/launch/extension_worker.py"), str(place), "--config", "run.yaml"]
    with pytest.raises(LaunchError) as caught:
        run_forked_world(1, [*worker, "output.directory=refused", *overrides], {})
    assert "exit code 2" in str(caught.value)
    assert not list((place / "refused").glob("checkpoints/*"))
    return str(caught.value)


def test_scores_of_other_data_are_refused(place: Path) -> None:
    write_pairs(place / "others", vocab_size=VOCAB_SIZE, seed=3)
    score(place, 1, "--output", "of_others", "data.path=others", "data.allow_other_tokenizer=true")
    text = refused(place, "objective.reference=of_others")
    assert "objective.reference = 'of_others': of_others has scores of" in text
    assert "others (" in text
    assert "pairs (" in text


@pytest.mark.slow
def test_scores_of_another_model_are_refused(place: Path, of_random: str) -> None:
    text = refused(place, of_random)
    assert "has scores of the model random weights of seed" in text
    assert "this run begins with" in text


@pytest.mark.slow
def test_scores_that_do_not_fit_the_run_are_refused(place: Path, of_random: str) -> None:
    text = refused(place, "objective={type: preference, loss: simpo, reference: of_random}")
    assert "objective.reference = of_random has no effect with objective.loss = simpo" in text
    quantized = "adapters={type: lora, quantization: nf4}"
    assert "the run computes with those in 4 bits" in refused(place, of_random, quantized)
    text = refused(place, of_random, "batch.sequence_length=20")
    assert "longer than a sample" in text


def test_documents_are_kept_by_their_perplexity(place: Path) -> None:
    limits = ("--min-perplexity", "150", "--max-perplexity", "240")
    output = score(place, 2, "--output", "all_of_it", "--filter", "kept", *limits)
    assert "filter:   documents of perplexity 150 to 240 under" in output
    values = bigtrain.open_scores(place / "all_of_it").perplexities["train"]
    inside = (values >= 150) & (values <= 240)
    pairs = np.repeat(inside[0::2] & inside[1::2], 2)
    assert 0 < pairs.sum() < inside.sum() < len(values)
    before, after = (bigtrain.open_dataset(place / name) for name in ("pairs", "kept"))
    expected = [document for document, keep in zip(before, pairs, strict=True) if keep]
    assert len(after) == len(expected)
    for one, other in zip(after, expected, strict=True):
        for key in ("input_ids", "labels"):
            np.testing.assert_array_equal(one[key], other[key])
    bigtrain.verify_shards(place / "kept")
    with pytest.raises(LaunchError, match=r"no training document of .* -> other limits"):
        score(place, 1, "--output", "all_of_it", "--filter", "none", "--max-perplexity", "1")
    with pytest.raises(LaunchError, match="nothing was written"):
        score(place, 1, "--output", "all_of_it", "--filter", "kept", *limits)


def test_what_a_pass_refuses(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    for overrides, text in (
        (("precision.dtype=float16",), "precision.dtype=bfloat16"),
        (("--filter", "x"), "--filter = 'x': has no limits"),
        (("--max-perplexity", "3"), "limits have no effect without a directory"),
        (("--top-k", "3"), "--top-k = 3: has no effect"),
    ):
        words = ("score", "--config", "run.yaml", "--output", "refused_pass")
        assert main([*words, *overrides]) == 2
        assert text in capsys.readouterr().err
    assert not (place / "refused_pass").exists()
