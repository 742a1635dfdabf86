"""Every objective under DeepSpeed against plain transformers and PyTorch in one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import cross_entropy, logsigmoid, sigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

import bigtrain
from bigtrain.cli import main
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.models.layers.parameters import seed_of
from bigtrain.objectives.preference import PairLoss
from bigtrain.run.checkpointing.listing import best_step
from tests.parity.conftest import each_case
from tests.parity.objective_runs import (
    ADAPTERS,
    IGNORED,
    LAYOUTS,
    SPREAD,
    VOCAB_SIZE,
    LossOf,
    Plain,
    compare,
    each_layout,
    log_probabilities,
    plain_training,
    read_steps,
    run_tree,
    save_experts,
    save_llama,
    steps_of,
    train,
    train_in_two,
)
from tests.support.lives import shared_server
from tests.support.pairs import write_pairs
from tests.support.rated import write_rated

pytestmark = [pytest.mark.distributed]

LENGTH, STEPS, BETA, KTO_BETA = 32, 6, 0.3, 0.5
DESIRABLE, UNDESIRABLE, CENTERING = 1.0, 1.4, 0.05
LABELS = ("low", "middle", "high")
PAIRED = get_args(PairLoss)
SMOOTHING = 0.1
HEADS = {"reward": 1, "classification": len(LABELS)}
DATA = {"kto": "rated", "classification": "labeled"}
PADDED = {"overrides": {"pad_token_id": 5}}
"""Another token than the one with which the dataset pads rows, and one of the data."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, rated answers, samples with labels, and small models with weights."""
    directory = tmp_path_factory.mktemp("objectives")
    write_pairs(directory / "pairs", vocab_size=VOCAB_SIZE, longest=LENGTH + 1)
    shards = (20, 1, 19)
    write_rated(directory / "rated", vocab_size=VOCAB_SIZE, shards=shards, held_out=7)
    write_rated(
        directory / "labeled", vocab_size=VOCAB_SIZE, shards=shards, held_out=9, labels=LABELS
    )
    save_llama(directory / "base")
    save_experts(directory / "base", directory / "experts")
    return directory


def objective_of(kind: str) -> dict[str, Any]:
    if kind == "kto":
        weights = {"desirable_weight": DESIRABLE, "undesirable_weight": UNDESIRABLE}
        return {"type": "kto", "beta": KTO_BETA, **weights}
    if kind == "reward":
        return {"type": "reward", "center_rewards_coefficient": CENTERING}
    if kind == "classification":
        return {"type": "classification"}
    further = {"gamma": 0.4} if kind == "simpo" else {}
    if kind in ("robust", "exo_pair"):
        further = {"label_smoothing": SMOOTHING}
    return {"type": "preference", "loss": kind, "beta": BETA, **further}


def run_of(root: Path, kind: str, *, full: bool = False, **sections: Any) -> dict[str, Any]:
    saved = {"modules_to_save": ["score"]} if kind in HEADS else {}
    decay = 0.1 if kind in HEADS else 0.0
    # DPO of all weights: with an eps of 1e-5 plain PyTorch's float32 is 1e-5 from its float64.
    eps = 1e-4 if full and kind == "sigmoid" else 1e-5
    optimizer = {"lr": 3e-3, "weight_decay": decay, "clip_norm": 1.0, "eps": eps}
    return run_tree(
        root,
        length=LENGTH,
        steps=STEPS,
        **{
            "objective": objective_of(kind),
            "data": {"path": str(root / DATA.get(kind, "pairs")), "allow_other_tokenizer": True},
            "optimizer": optimizer | ({"lr": 5e-3, "clip_norm": 0.2} if kind == "kto" else {}),
            # The last batch of two ranks is padded.
            "evaluation": {"every_steps": STEPS // 2, "samples": 7},
            **({} if full or kind in ("simpo", "orpo") else {"adapters": ADAPTERS | saved}),
            **sections,
        },
    )


# -- Plain losses: formulas of TRL 1.16, for a batch of all micro-batches --------------------------


def rows_in(parts: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels of all rows that have targets."""
    ids, labels = (torch.cat([getattr(p, name) for p in parts]) for name in ("input_ids", "labels"))
    present = (labels != IGNORED).any(-1)
    return ids[present], labels[present]


def paired_loss(
    kind: str, policy: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each pair, and rewards of rows (dpo_trainer.py, experimental/cpo,
    experimental/orpo); ORPO's first term as in its paper: the mean of a row."""
    if kind in ("sigmoid", "ipo"):
        ratios = policy - reference
        rewards = BETA * ratios
        if kind == "sigmoid":
            return -logsigmoid(BETA * (ratios[0::2] - ratios[1::2])), rewards
        means = ratios / lengths
        return (means[0::2] - means[1::2] - 1 / (2 * BETA)) ** 2, rewards
    means = policy / lengths
    chosen, rejected = means[0::2], means[1::2]
    if kind == "simpo":
        return -logsigmoid(BETA * (chosen - rejected - 0.4 / BETA)), BETA * means
    log_odds = (chosen - rejected) - (
        torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
    )
    return -chosen - BETA * logsigmoid(log_odds), BETA * means


def loss_of_pairs(
    kind: str, base: Any, model: Any, parts: list[Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids, labels = rows_in(parts)
    with torch.no_grad():
        reference = log_probabilities(base, ids, labels).sum(-1)
    policy = log_probabilities(model, ids, labels).sum(-1)
    values, rewards = paired_loss(kind, policy, reference, (labels != IGNORED).sum(-1))
    chosen, rejected = rewards[0::2], rewards[1::2]
    return values.mean(), {
        "rewards/accuracies": (chosen > rejected).float().mean(),
        "rewards/chosen": chosen.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/rejected": rejected.mean(),
    }


@cache
def places_of(path: Path) -> dict[tuple[int, ...], tuple[str, int, int]]:
    """Return split, number and label of each document, by its tokens, from the files."""
    places = {}
    for split in ("train", "held_out"):
        shards = open_dataset(path).shards(split)
        documents = [s.document(n) for s in shards for n in range(s.num_documents)]
        is_labeled = shards[0].labels_path is not None
        labels = np.concatenate([s.labels for s in shards]) if is_labeled else [0] * len(documents)
        for number, (tokens, label) in enumerate(zip(documents, labels, strict=True)):
            places[tuple(tokens.tolist())] = split, number, int(label)
    return places


def kto_loss(
    path: Path, divergences: list[float], base: Any, model: Any, parts: list[Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """As `kto_loss` of experimental/kto/kto_trainer.py; the divergence before it is clamped goes
    to `divergences`."""
    ids, labels = rows_in(parts)
    with torch.no_grad():
        reference = log_probabilities(base, ids, labels).sum(-1)
        others = log_probabilities(model, ids[1::2], labels[1::2]).sum(-1)
        divergence = (others - reference[1::2]).mean()
    divergences.append(float(divergence))
    kl = divergence.clamp(min=0)
    policy = log_probabilities(model, ids[0::2], labels[0::2]).sum(-1)
    last = [int((row != IGNORED).nonzero()[-1]) for row in labels[0::2]]
    answers = zip(ids[0::2].tolist(), labels[0::2].tolist(), last, strict=True)
    places = places_of(path)
    likes = torch.tensor([bool(places[(*row[: n + 1], own[n])][2]) for row, own, n in answers])
    ratios = policy - reference[0::2]
    chosen, rejected = ratios[likes], ratios[~likes]
    losses = torch.cat(
        [
            DESIRABLE * (1 - sigmoid(KTO_BETA * (chosen - kl))),
            UNDESIRABLE * (1 - sigmoid(KTO_BETA * (kl - rejected))),
        ]
    )
    return losses.mean(), {
        "kl": kl,
        "rewards/chosen": KTO_BETA * chosen.mean(),
        "rewards/rejected": KTO_BETA * rejected.mean(),
        "rewards/margins": KTO_BETA * (chosen.mean() - rejected.mean()),
        "logps/chosen": policy[likes].mean(),
        "logps/rejected": policy[~likes].mean(),
    }


def head_loss(
    path: Path, kind: str, model: Any, parts: list[Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of scores, each of a forward pass without padding (reward_trainer.py)."""
    ids, labels = rows_in(parts)
    documents = [row[: (own != IGNORED).sum()] for row, own in zip(ids, labels, strict=True)]
    scores = torch.cat([model(input_ids=one[None], use_cache=False).logits for one in documents])
    places = [places_of(path)[tuple(one.tolist())] for one in documents]
    if kind == "classification":
        classes = torch.tensor([label for *_, label in places])
        accuracy = (scores.argmax(-1) == classes).float().mean()
        return cross_entropy(scores, classes), {"accuracy": accuracy}
    for (split, chosen, _), (other, rejected, _) in zip(places[0::2], places[1::2], strict=True):
        assert (split, chosen + 1, chosen % 2) == (other, rejected, 0)
    high, low = scores[0::2, 0], scores[1::2, 0]
    loss = -logsigmoid(high - low).mean() + CENTERING * ((high + low) ** 2).mean()
    return loss, {
        "rewards/chosen": high.mean(),
        "rewards/rejected": low.mean(),
        "rewards/margins": (high - low).mean(),
        "rewards/accuracies": (high > low).float().mean(),
    }


def plain_head_model(root: Path, num_labels: int, padding: int = 0) -> Any:
    """Return the base with a head as a run draws it: by Llama's rule, from a stream of the head's
    name. padding: token that pads, which documents contain, too: its embedding is trained."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        root / "base", dtype=torch.float32, num_labels=num_labels, pad_token_id=padding
    )
    model.get_input_embeddings().padding_idx = None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed_of(0, "score"))
        model.score.weight.normal_(0.0, SPREAD)
    return model


DIVERGENCES: list[float] = []
"""KTO's, of all plain trainings."""


@cache
def plain_run(
    root: Path, kind: str, full: bool = False, base_name: str = "base", padding: int = 0
) -> Plain:
    tree, data = run_of(root, kind, full=full), root / DATA.get(kind, "pairs")
    loss_of: LossOf
    if kind in HEADS:
        model = plain_head_model(root, HEADS[kind], padding)
        loss_of = partial(head_loss, data, kind)
    else:
        model, base = (
            AutoModelForCausalLM.from_pretrained(root / base_name, dtype=torch.float32)
            for _ in range(2)
        )
        loss_of = partial(loss_of_pairs, kind, base.eval())
        if kind == "kto":
            loss_of = partial(kto_loss, data, DIVERGENCES, base)
    rows_per_sample = 1 if kind == "classification" else 2
    return plain_training(tree, model, loss_of, rows_per_sample=rows_per_sample)


def test_plain_runs_would_show_mistakes(root: Path) -> None:
    """A missing clamp of KTO, or a mean of clamped parts; heads that are not trained; rows of full
    length, which have no padding."""
    DIVERGENCES.clear()
    plain_run.cache_clear()
    plain_run(root, "kto")
    assert min(DIVERGENCES) < -0.05
    assert max(DIVERGENCES) > 0.05
    for kind, num_labels in HEADS.items():
        before = plain_head_model(root, num_labels).score.weight.detach()
        trained = plain_run(root, kind, full=True).weights["score.weight"]
        assert float((trained - before).abs().max()) > 1e-2
        assert max(map(len, places_of(root / DATA.get(kind, "pairs")))) == LENGTH


# -- Cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An objective and a layout. `then`: another one, or one rank if empty, that trains the second
    half."""

    kind: str
    layout: str
    full: bool = False
    then: str | None = None
    model: tuple[tuple[str, Any], ...] = ()
    slow: bool = True

    @property
    def name(self) -> str:
        resumed = "" if self.then is None else f"-then-{self.then or 'one'}"
        more = "-".join(key for key, _ in self.model)
        what = "full" if self.full else "adapters"
        return f"{self.kind}-{what}-{self.layout}{resumed}{more}".replace(" ", "-")

    @property
    def base(self) -> str:
        return "experts" if "experts" in self.layout else "base"


CHUNKED = (("loss", "chunked"), ("loss_chunk_tokens", 29))
RECOMPUTED = (("gradient_checkpointing", "full"),)
COMPILED = (("compile", "on"),)
PADDING = (("overrides", PADDED["overrides"]),)
ALL = (*("zero0", "zero1", "tensor", "sequence", "ring", "stages", "tensor stages"),)
ALL += ("tensor sequence", "both sequences")
CASES = [
    Case("sigmoid", "zero3", model=CHUNKED, slow=False),
    Case("kto", "zero3", full=True, then="", slow=False),
    Case("reward", "stages", full=True, model=PADDING, slow=False),
    Case("classification", "sequence", full=True, slow=False),
    *(Case("sigmoid", name, model=CHUNKED) for name in ALL),
    *(Case("ipo", name, model=CHUNKED) for name in ("zero3", "stages")),
    # Log-probabilities are compiled in one chunk; models with a head of their own have none.
    Case("sigmoid", "zero3", model=COMPILED),
    Case("orpo", "tensor stages", full=True, model=COMPILED),
    Case("kto", "sequence", full=True, model=COMPILED),
    Case("reward", "zero1", full=True, model=COMPILED),
    *(Case("simpo", name, full=True, model=CHUNKED) for name in ("zero1", "tensor sequence")),
    *(Case("orpo", name, full=True, model=CHUNKED) for name in ("ring", "tensor stages")),
    *(
        Case("kto", name, model=CHUNKED)
        for name in ("zero0", "tensor", "ring", "data stages", "sequence")
    ),
    *(Case("reward", name, full=True) for name in ("zero3", "tensor", "ring", "data stages")),
    Case("reward", "sequence", full=True, model=PADDING),
    Case("reward", "zero2", full=True, model=RECOMPUTED),
    *(Case("classification", n, full=True) for n in ("zero0", "tensor stages", "tensor sequence")),
    *(Case("reward", name) for name in ("zero3", "stages")),
    *(Case("classification", name) for name in ("tensor", "zero3 sequence")),
    # All weights against scores of the first ones: half on two ranks, the rest on one, which reads
    # the scores.
    *(
        Case("sigmoid", name, full=True, then="")
        for name in ("zero3", "tensor", "stages", "experts", "zero3 experts")
    ),
    *(Case("kto", name, full=True, then="") for name in ("zero3 sequence", "stages")),
    Case("kto", "zero1", then=""),
    # Stages compute no reference, so that its scores are made when the run resumes.
    Case("sigmoid", "zero1", then="stages"),
    Case("reward", "stages", full=True, then=""),
    Case("classification", "zero1", full=True, then="stages"),
]


@each_case(CASES)
def test_equals_a_plain_loop(root: Path, case: Case) -> None:
    layout = LAYOUTS[case.layout]
    tree = run_of(root, case.kind, full=case.full, **layout.sections)
    tree["model"] = {"path": str(root / case.base), **dict(case.model)}
    if case.then is None:
        lines = train(root, case.name, tree, layout.world_size)
    else:
        then = LAYOUTS[case.then].parallel if case.then else {}
        lines = train_in_two(root, case.name, tree, 2, then, 2 if then else 1)
    padding = dict(case.model).get("overrides", {}).get("pad_token_id", 0)
    plain = plain_run(root, case.kind, case.full, case.base, padding)
    unrecorded = ("logps/chosen", "logps/rejected") if case.kind in PAIRED else ()
    compare(root / case.name, lines, plain, unrecorded=unrecorded)
    if case.kind == "kto" and case.full:
        path = next((root / case.name / "reference").glob("data-*"))
        scores = bigtrain.open_scores(path)
        assert scores.sums("train").shape == scores.mismatched_sums("train").shape == (40,)
        assert float(abs(scores.sums("train") - scores.mismatched_sums("train")).max()) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapters", "layout"),
    [
        ("sigmoid", {"dora": True}, "zero3"),
        ("kto", {"dora": True}, "stages"),
        ("sigmoid", {"modules_to_save": ["lm_head"]}, "tensor"),
    ],
)
def test_adapters_that_cannot_be_turned_off_have_stored_scores(
    root: Path, kind: str, adapters: dict[str, Any], layout: str
) -> None:
    """The second half reads the scores of the first."""
    parallel = LAYOUTS[layout].sections
    tree = run_of(root, kind, adapters=ADAPTERS | adapters, **parallel)
    name = f"stored-{kind}-{layout}-{next(iter(adapters))}"
    lines = train_in_two(root, name, tree, 2)
    assert (root / name / "reference").is_dir()
    model, base = (
        AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32) for _ in range(2)
    )
    loss_of = partial(loss_of_pairs, kind, base.eval())
    if kind == "kto":
        loss_of = partial(kto_loss, root / "rated", DIVERGENCES, base.eval())
    plain = plain_training(tree, model, loss_of, rows_per_sample=2)
    unrecorded = ("logps/chosen", "logps/rejected") if kind in PAIRED else ()
    compare(root / name, lines, plain, unrecorded=unrecorded)


@pytest.mark.slow
def test_stages_are_exported_as_transformers_reads_them(root: Path) -> None:
    layout = LAYOUTS["stages"]
    train(root, "exported", run_of(root, "reward", full=True, **layout.sections), 2)
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="t0"))
    )
    tokenizer.save_pretrained(root / "exported/tokenizer")
    assert main(["export", "--run", str(root / "exported"), "--output", str(root / "hf")]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(root / "hf", dtype=torch.float32)
    for name, tensor in plain_run(root, "reward", full=True).weights.items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_scores_that_were_made_beforehand_are_the_same(root: Path) -> None:
    tree = run_of(root, "kto", full=True, **LAYOUTS["zero1"].sections)
    path = root / "scored.yaml"
    path.write_text(yaml.safe_dump(tree))
    words = ["-m", "bigtrain.cli", "score", "--config", str(path), "--output", str(root / "scores")]
    codes, printed = shared_server().live([], world_size=1, script=words)
    assert codes == [0], printed
    named = {**tree, "objective": {**tree["objective"], "reference": str(root / "scores")}}
    compare(root / "named", train(root, "named", named, 2), plain_run(root, "kto", full=True))


def test_lost_scores_are_refused(root: Path) -> None:
    tree = run_of(root, "sigmoid", full=True, train={"steps": 2}, checkpoint={"every_steps": 1})
    train(root, "lost", tree, 1)
    (lost,) = (root / "lost/reference").glob("data-*/train-00000.sums.npy")
    lost.unlink()
    more = ("train.steps=3", "checkpoint.allow_changes=[train.steps]")
    words = ["--config", str(root / "lost.yaml"), *more]
    codes, output = shared_server().live(words, world_size=2)
    assert codes == [2, 2]
    assert "the reference model of this run is gone with it" in output


@each_layout(["sequence"], ["zero1", "tensor", "stages", "tensor sequence"])
def test_a_sum_that_a_loss_records_does_not_depend_on_the_layout(root: Path, name: str) -> None:
    layout = LAYOUTS[name]
    tree = run_of(root, "simpo", full=True, train={"steps": 1}, **layout.sections)
    tree["objective"] = {"type": "tests.parity.objective_runs:SummedPairs"}
    tree["checkpoint"] = {"every_steps": None}
    lines = train(root, f"sums-{name}".replace(" ", "-"), tree, layout.world_size)
    ids, labels = rows_in(read_steps(tree, 2)[0])
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    with torch.no_grad():
        chosen = float(log_probabilities(model, ids, labels).sum(-1)[0::2].sum())
    (row,) = steps_of(lines)
    assert row["recorded"] == {"pairs": 8, "chosen": pytest.approx(chosen, rel=1e-5)}


def test_the_best_checkpoint_has_the_best_metric_of_the_objective(root: Path) -> None:
    tree = run_of(root, "reward", full=True, train={"steps": 5})
    best = {"metric": "held_out_rewards/margins", "mode": "max"}
    tree["evaluation"] = {"every_steps": 1, "samples": 7, "best": best}
    tree["checkpoint"] = {"every_steps": 1, "keep_last": 1, "keep_best": 1}
    lines = train(root, "best", tree, 2)
    margins = {
        line["step"]: line["held_out_metrics"]["rewards/margins"]
        for line in lines
        if "held_out_metrics" in line
    }
    assert len(margins) == 5
    assert all(line["held_out_pairs"] == 7 for line in lines if "held_out_pairs" in line)
    assert best_step(root / "best") == max(margins, key=lambda step: margins[step])


def test_a_best_metric_that_nothing_records_is_refused(root: Path) -> None:
    tree = run_of(root, "simpo", full=True, train={"steps": 2})
    tree["objective"] = {"type": "tests.parity.objective_runs:SummedPairs"}
    tree["evaluation"] = {"every_steps": 1, "best": {"metric": "held_out_lost", "mode": "max"}}
    tree["checkpoint"] = {"every_steps": 1, "keep_best": 1}
    path = root / "unrecorded.yaml"
    path.write_text(yaml.safe_dump({**tree, "output": {"directory": str(root / "unrecorded")}}))
    codes, printed = shared_server().live(["--config", str(path)], world_size=2)
    assert codes == [2, 2]
    assert "evaluation.best.metric = 'held_out_lost': nothing recorded it" in printed
    assert "held_out_chosen, held_out_loss, held_out_pairs" in printed
