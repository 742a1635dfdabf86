"""Objectives under DeepSpeed against TRL's own trainers in one process, on the same rows.

TRL's ORPO has another first term than its paper (the mean over all tokens of a batch, prompts
included), so `test_objectives.py` compares that loss with a plain loop only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import bigtrain
from bigtrain.data.loading.loader import open_training_data
from bigtrain.parity.adapters import with_adapters
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.parity import score_heads
from tests.parity.objective_runs import VOCAB_SIZE, save_llama, steps_of, train
from tests.support.pairs import write_pairs
from tests.support.rated import write_rated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),  # TRL's calls
]

LENGTH, STEPS, BETA, GAMMA = 32, 20, 0.3, 0.4
BATCH_SIZE = 8
DESIRABLE, UNDESIRABLE, CENTERING = 1.0, 1.4, 0.05
ADAPTERS = {"type": "lora", "rank": 4, "alpha": 16.0}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sigmoid": {"type": "preference", "loss": "sigmoid", "beta": BETA},
    "ipo": {"type": "preference", "loss": "ipo", "beta": BETA},
    "simpo": {"type": "preference", "loss": "simpo", "beta": BETA, "gamma": GAMMA},
    "kto": {
        "type": "kto",
        "beta": BETA,
        "desirable_weight": DESIRABLE,
        "undesirable_weight": UNDESIRABLE,
    },
    "reward": {"type": "reward", "center_rewards_coefficient": CENTERING},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": BETA, "loss_type": ["sigmoid"]},
    "ipo": {"beta": BETA, "loss_type": ["ipo"]},
    "simpo": {"beta": BETA, "loss_type": "simpo", "simpo_gamma": GAMMA, "cpo_alpha": 0.0},
    "kto": {
        "beta": BETA,
        "desirable_weight": DESIRABLE,
        "undesirable_weight": UNDESIRABLE,
    },
    "reward": {"center_rewards_coefficient": CENTERING},
}
TRAINERS = {
    "sigmoid": ("trl", "DPO"),
    "ipo": ("trl", "DPO"),
    "simpo": ("trl.experimental.cpo", "CPO"),
    "kto": ("trl", "KTO"),
    "reward": ("trl", "Reward"),
}
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
METRICS = {
    "kto": {name: name for name in ("kl", "rewards/chosen", "rewards/rejected")},
    "reward": {"rewards/margins": "margin", "rewards/accuracies": "accuracy"},
}
"""Names by TRL of recorded metrics, where they are not `REWARDS`."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, rated answers, and a small model with weights."""
    directory = tmp_path_factory.mktemp("trl")
    write_pairs(directory / "pairs", vocab_size=VOCAB_SIZE)
    write_rated(directory / "rated", vocab_size=VOCAB_SIZE, shards=(40,))
    save_llama(directory / "base")
    return directory


def run_of(root: Path, name: str, *, full: bool, **sections: Any) -> dict[str, Any]:
    saved = {"modules_to_save": ["score"]} if name == "reward" else {}
    return {
        "model": {"path": str(root / "base")},
        "objective": OBJECTIVES[name],
        "data": {
            "path": str(root / ("rated" if name == "kto" else "pairs")),
            "allow_other_tokenizer": True,
        },
        "batch": {
            "sequence_length": LENGTH,
            "global_batch_size": BATCH_SIZE,
            "micro_batch_size": 2,
        },
        "train": {"steps": STEPS},
        # With the default eps a gradient of 1e-8 moves a weight as far as one of 1, and so does its
        # rounding.
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0, "clip_norm": 1.0, "eps": 1e-5},
        "schedule": {"type": "constant"},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "checkpoint": {"every_steps": STEPS},
        "output": {"directory": str(root / "run"), "export": False},
        **({} if full else {"adapters": ADAPTERS | saved}),
        **sections,
    }


def rows_of(tree: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return prompt and answer of each row, in the order in which a run trains on them."""
    config = parse_run_config(tree)
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    batches = open_training_data(config, replace(plan, rows_per_sample=2), 0)
    rows = []
    for step in range(STEPS):
        for part in batches.step(BATCH_SIZE * step):
            for ids, labels in zip(part.input_ids, part.labels, strict=True):
                targets = (labels != -100).nonzero().flatten().tolist()
                tokens = [*ids[: targets[-1] + 1].tolist(), int(labels[targets[-1]])]
                rows.append((tokens[: targets[0] + 1], tokens[targets[0] + 1 :]))
    batches.close()
    return rows


def rated_rows(root: Path, rows: list[tuple[list[int], list[int]]]) -> list[dict[str, Any]]:
    """Return rows of TRL's KTO: each answer with the next row, an answer of another prompt."""
    dataset = bigtrain.open_dataset(root / "rated")
    labels = {
        tuple(shard.document(number).tolist()): bool(shard.labels[number])
        for shard in dataset.shards("train")
        for number in range(shard.num_documents)
    }
    return [
        {
            "prompt_ids": prompt,
            "completion_ids": answer,
            "KL_completion_ids": other,
            "label": labels[(*prompt, *answer)],
        }
        for (prompt, answer), (same, other) in zip(rows[0::2], rows[1::2], strict=True)
        if same == prompt
    ]


def pair_rows(name: str, rows: list[tuple[list[int], list[int]]]) -> list[dict[str, Any]]:
    """Return rows of TRL's DPO, reward or CPO."""
    pairs = []
    for (prompt, chosen), (same, rejected) in zip(rows[0::2], rows[1::2], strict=True):
        assert same == prompt
        if name == "reward":
            pairs.append({"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected})
        elif name == "simpo":
            pair: dict[str, Any] = {"prompt": "", "chosen": "", "rejected": ""}
            for kind, answer in (("chosen", chosen), ("rejected", rejected)):
                pair[f"{kind}_input_ids"] = prompt + answer
                pair[f"{kind}_attention_mask"] = [1] * len(prompt + answer)
                pair[f"{kind}_labels"] = [-100] * len(prompt) + answer
            pairs.append(pair)
        else:
            pairs.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    return pairs


@dataclass
class Recorded:
    """Loss of each step by TRL, its logged lines, and the trained model."""

    losses: list[float] = field(default_factory=list)
    lines: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def trainer_of(name: str, recorded: Recorded) -> tuple[Any, Any]:
    """Return TRL's configuration class of an objective and its trainer, which takes rows as they
    are, in their order, and records losses."""
    module, kind = TRAINERS[name]
    library = import_module(module)
    base: Any = getattr(library, f"{kind}Trainer")

    class AsGiven(base):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def tokenize_row(self, feature: Any, *_: Any, **__: Any) -> Any:
            return feature

        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            recorded.losses.append(float(loss.detach()))
            return loss

    return getattr(library, f"{kind}Config"), AsGiven


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the vocabulary of the data; 0 ends documents and fills rows."""
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    model = Tokenizer(WordLevel(words, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="t0", pad_token="t0")


@cache
def by_trl(root: Path, name: str, full: bool) -> Recorded:
    """Train by TRL."""
    from datasets import Dataset

    tree = run_of(root, name, full=full)
    config = parse_run_config(tree)
    rows = rows_of(tree)
    data = rated_rows(root, rows) if name == "kto" else pair_rows(name, rows)
    model: Any
    if name == "reward":
        model = score_heads.plain_model(root, 1)
    else:
        model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    if config.adapters is not None:
        model = with_adapters(model, config.adapters, config.seed)
    recorded = Recorded()
    config_class, trainer_class = trainer_of(name, recorded)
    section = config.optimizer
    arguments = config_class(
        output_dir=str(root / f"trl-{name}-{full}"),
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=STEPS,
        learning_rate=section.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=section.betas[0],
        adam_beta2=section.betas[1],
        adam_epsilon=section.eps,
        optim="adamw_torch",
        max_grad_norm=section.clip_norm,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        activation_checkpointing=False,
        disable_tqdm=True,
        max_length=LENGTH + 1,
        **SETTINGS[name],
    )
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )
    trainer.train()
    recorded.lines = [line for line in trainer.state.log_history if "grad_norm" in line]
    recorded.weights = trainer.model.state_dict()
    return recorded


# All that runs of preference training may have, with the fewest ranks: DeepSpeed has no ZeRO 3 in
# stages, and stages no sequence parallelism.
DEGREES: list[tuple[tuple[int, ...], dict[str, int]]] = [
    ((0, 1, 3), {}),
    ((0, 1, 3), {"tensor": 2}),
    ((0, 1, 3), {"sequence": 2}),
    ((0, 1, 3), {"tensor": 2, "sequence": 2}),
    ((0, 1), {"pipeline": 2}),
    ((0, 1), {"tensor": 2, "pipeline": 2}),
]
TOPOLOGIES: dict[str, tuple[str, dict[str, int]]] = {
    "-".join([f"zero{stage}", *degrees]): (f"zero{stage}", degrees)
    for stages, degrees in DEGREES
    for stage in stages
}


def cases() -> list[Any]:
    """Return all combinations; all but one are slow."""
    every = [
        (name, full, topology)
        for name in OBJECTIVES
        for full in (True, False)
        for topology in TOPOLOGIES
    ]
    return [
        pytest.param(
            *case,
            id=f"{case[0]}-{'full' if case[1] else 'lora'}-{case[2]}",
            marks=() if case == (every[0][0], True, "zero1") else pytest.mark.slow,
        )
        for case in every
    ]


@pytest.mark.parametrize(("name", "full", "topology"), cases())
def test_an_objective_is_trls(root: Path, name: str, full: bool, topology: str) -> None:
    """Losses, metrics, norms of gradients and weights of all steps."""
    wanted = by_trl(root, name, full)
    engine, degrees = TOPOLOGIES[topology]
    sections = {"engine": {"deepspeed_config": engine}, "parallel": degrees}
    tree = run_of(root, name, full=full, **sections)
    run = f"{name}-{full}-{topology}"
    rows = steps_of(train(root, run, tree, max(2, prod(degrees.values()))))
    assert len(rows) == STEPS == len(wanted.losses)
    assert [row["loss"] for row in rows] == pytest.approx(wanted.losses, abs=1e-5, rel=1e-5)
    norms = [line["grad_norm"] for line in wanted.lines]
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    names = METRICS.get(name, {name: name for name in REWARDS})
    for row, line in zip(rows, wanted.lines, strict=True):
        # A batch may have no answer of a kind; before the first update all rewards are 0.
        recorded = {
            own: row["recorded"][own]
            for own, other in names.items()
            if other in line and (row["step"] > 1 or own != "rewards/accuracies")
        }
        assert len(recorded) >= len(names) - 1
        expected = {own: line[names[own]] for own in recorded}
        assert recorded == pytest.approx(expected, abs=2e-5, rel=1e-5)
    trained = bigtrain.load_state_dict(root / run)
    keys = [key for key in trained if full or "lora_" in key or "modules_to_save" in key]
    assert len(keys) >= 8
    for key in keys:
        torch.testing.assert_close(trained[key], wanted.weights[key], atol=1e-5, rtol=1e-5)
