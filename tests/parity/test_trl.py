"""Objectives under DeepSpeed against TRL's own trainers in one process, on the same rows.

TRL's ORPO has another first term than its paper (the mean over all tokens of a batch, prompts
included), so `test_objectives.py` compares that loss with a plain loop only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import bigtrain
from bigtrain.parity.adapters import with_adapters
from bigtrain.settings.loading import parse_run_config
from tests.parity.objective_runs import LAYOUTS, VOCAB_SIZE, read_steps, steps_of, train
from tests.parity.test_objectives import (
    BETA,
    CENTERING,
    DESIRABLE,
    KTO_BETA,
    LENGTH,
    PAIRED,
    SMOOTHING,
    UNDESIRABLE,
    plain_head_model,
    root,
)
from tests.parity.test_objectives import run_of as objective_run_of

__all__ = ["root"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),  # TRL's calls
]

STEPS, BATCH_SIZE = 10, 8
OF_DPO = tuple(loss for loss in PAIRED if loss not in ("simpo", "orpo"))
"""Losses of pairs that TRL's DPOTrainer has."""
STIFF = ("sppo_hard", "discopop")
"""Losses whose gradient changes so fast with the margin that large updates amplify rounding."""
SETTINGS: dict[str, dict[str, Any]] = {
    **{loss: {"beta": BETA, "loss_type": [loss]} for loss in OF_DPO},
    "robust": {"beta": BETA, "loss_type": ["robust"], "label_smoothing": SMOOTHING},
    "exo_pair": {"beta": BETA, "loss_type": ["exo_pair"], "label_smoothing": SMOOTHING},
    "simpo": {"beta": BETA, "loss_type": "simpo", "simpo_gamma": 0.4, "cpo_alpha": 0.0},
    "kto": {
        "beta": KTO_BETA,
        "desirable_weight": DESIRABLE,
        "undesirable_weight": UNDESIRABLE,
    },
    "reward": {"center_rewards_coefficient": CENTERING},
}
TRAINERS = {
    **dict.fromkeys(OF_DPO, ("trl", "DPO")),
    "simpo": ("trl.experimental.cpo", "CPO"),
    "kto": ("trl", "KTO"),
    "reward": ("trl", "Reward"),
}
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
METRICS = {
    "kto": {name: name for name in ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins")},
    "reward": {"rewards/margins": "margin", "rewards/accuracies": "accuracy"},
}
"""Names by TRL of recorded metrics, where they are not `REWARDS`."""


def run_of(root: Path, name: str, *, full: bool, **sections: Any) -> dict[str, Any]:
    more = {"train": {"steps": STEPS}, "evaluation": {}, **sections}
    tree = objective_run_of(root, name, full=full, **more)
    tree["optimizer"]["weight_decay"] = 0.0
    if name in STIFF:
        tree["optimizer"]["lr"] = 1e-4
    return tree


def rows_of(tree: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return prompt and answer of each row, in the order in which a run trains on them."""
    rows = []
    for part in (part for parts in read_steps(tree, 2) for part in parts):
        for ids, labels in zip(part.input_ids, part.labels, strict=True):
            targets = (labels != -100).nonzero().flatten().tolist()
            tokens = [*ids[: targets[-1] + 1].tolist(), int(labels[targets[-1]])]
            rows.append((tokens[: targets[0] + 1], tokens[targets[0] + 1 :]))
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
        model = plain_head_model(root, 1)
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


# Each objective with all weights (or without adapters) and with adapters, on one layout; which
# layouts make no difference is in `test_objectives.py`.
CASES = [
    ("sigmoid", True, "zero1"),
    ("sigmoid", False, "tensor sequence"),
    ("ipo", True, "stages"),
    ("ipo", False, "zero3"),
    *((loss, True, "zero1") for loss in OF_DPO if loss not in ("sigmoid", "ipo")),
    ("simpo", True, "tensor"),
    ("kto", True, "sequence"),
    ("kto", False, "zero0"),
    ("reward", True, "zero3"),
    ("reward", False, "tensor stages"),
]


@pytest.mark.parametrize(("name", "full", "layout"), CASES)
def test_an_objective_is_trls(root: Path, name: str, full: bool, layout: str) -> None:
    """Losses, metrics, norms of gradients and weights of all steps."""
    wanted = by_trl(root, name, full)
    place = LAYOUTS[layout]
    tree = run_of(root, name, full=full, **place.sections)
    run = f"{name}-{full}-{layout}".replace(" ", "-")
    rows = steps_of(train(root, run, tree, place.world_size))
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
