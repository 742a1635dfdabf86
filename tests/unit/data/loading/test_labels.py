"""Labels of a run's datasets, and of its micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bigtrain.data.loading.dataset_checks import check_rows
from bigtrain.data.loading.held_out import open_held_out_datasets
from bigtrain.data.loading.loader import open_held_out, open_training_data
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.settings.batch_plan import plan_batch
from tests.support.rated import write_rated
from tests.support.run_trees import llama, run_config


def config_of(*sources: Path, **sections: Any) -> Any:
    batch = {"sequence_length": 32, "micro_batch_size": 2}
    data = {"sources": [{"path": str(path), "weight": 1} for path in sources]}
    kind = {"type": "classification"}
    return run_config(model=llama(64), objective=kind, data=data, batch=batch, **sections)


def test_datasets_have_the_same_labels_in_the_same_order(tmp_path: Path) -> None:
    names = {"one": ("low", "high"), "same": ("low", "high"), "turned": ("high", "low")}
    paths = {
        name: write_rated(tmp_path / name, vocab_size=64, labels=labels)
        for name, labels in names.items()
    }
    rated = write_rated(tmp_path / "rated", vocab_size=64)
    datasets = {path: open_dataset(path) for path in (*paths.values(), rated)}
    one, same, turned = paths.values()
    for sources, rules in (
        ((one, same), []),
        ((one, turned), ["has other labels than the first one (high, low, not low, high)"]),
        ((rated,), ["has no samples with labels, which classification reads"]),
    ):
        tables = [datasets[path].table for path in sources]
        problems = check_rows(config_of(*sources), tables)
        assert [problem.rule for problem in problems] == rules
    held_out = [{"name": "others", "path": str(turned)}]
    config = config_of(one, evaluation={"held_out": held_out})
    _, problems = open_held_out_datasets(config, [datasets[one]], "sizes")
    assert [problem.rule for problem in problems] == ["has other labels than the training data"]


def test_a_micro_batch_has_the_labels_of_its_samples(tmp_path: Path) -> None:
    labels = ("low", "middle", "high")
    paths = [
        write_rated(tmp_path / str(n), vocab_size=64, shards=(9 + n,), held_out=3, labels=labels)
        for n in range(2)
    ]
    known = {}
    for path in paths:
        dataset = open_dataset(path)
        for split in ("train", "held_out"):
            for shard in dataset.shards(split):  # type: ignore[arg-type]
                for number in range(shard.num_documents):
                    tokens = tuple(shard.document(number).tolist())
                    known[tokens] = int(shard.labels[number])
    config = config_of(*paths)
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    batches = open_training_data(config, plan, 0)
    parts = [part for step in range(3) for part in batches.step(4 * step)]
    batches.close()
    for source in open_held_out(config, replace(plan, rows_per_sample=1), 0):
        parts += source.batches
    seen = []
    for part in parts:
        assert part.classes is not None
        assert part.classes.dtype == torch.int64
        for ids, targets, label in zip(part.input_ids, part.labels, part.classes, strict=True):
            if length := int((targets != -100).sum()):
                seen.append(int(label))
                assert known[tuple(ids[:length].tolist())] == int(label)
    assert len(seen) == 3 * 4 + 2 * 3
    assert set(seen) == {0, 1, 2}
