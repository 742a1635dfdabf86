"""Predictions beside published rows: errors, refusals, and what a file must hold."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

import pytest

from bigtrain.errors import ConfigError
from bigtrain.planner.published.evaluation import (
    COLUMNS,
    RowPrediction,
    error_table,
    predict,
    read_rows,
    summarize,
    write_rows,
)
from tests.support.tiers import examples
from tests.support.worlds import ROOT

ROWS = ROOT / "benchmarks" / "planner_rows.csv"
ROW = {
    "source": "a", "model": "Llama", "layers": "2", "hidden": "256", "heads": "4", "kv_heads": "2",
    "ffn": "512", "vocab": "1000", "seq": "128", "gpu": "A100-80GB", "num_gpus": "2", "dp": "2",
    "tp": "1", "pp": "1", "zero": "3", "micro_batch": "1", "global_batch": "4",
    "recompute": "none", "precision": "bf16", "tokens_per_s_per_gpu": "1000",
}  # fmt: skip


def test_published_rows_are_told_within_a_tenth() -> None:
    """And the table of the docs is the one that comes out."""
    rows = read_rows(ROWS)
    errors = summarize(rows, [predict(row) for row in rows])
    *sources, everything = errors
    assert everything.num_refused == 0
    assert everything.mean < 0.07
    assert everything.mean < everything.baseline / 10
    assert everything.memory_mean < 0.05
    assert everything.rank_correlation is not None
    assert everything.rank_correlation > 0.95
    assert all(source.mean < 0.09 for source in sources)
    assert error_table(errors) in (ROOT / "docs" / "planner.md").read_text()


def test_errors_against_hand_counts() -> None:
    rows = [{**ROW, "tokens_per_s_per_gpu": str(t), "peak_gib": "10"} for t in (100, 200, 400)]
    told = [RowPrediction(110.0, 11.0), RowPrediction(190.0, 9.0), RowPrediction(None, None, "why")]
    (errors,) = summarize(rows, told)
    assert (errors.num_rows, errors.num_refused, errors.memory_rows) == (3, 1, 2)
    assert errors.mean == pytest.approx(0.075)
    assert errors.worst == pytest.approx(0.1)
    assert errors.memory_mean == pytest.approx(0.1)
    # One model, utilizations 1 and 2: their mean 1.5 is half too much and a quarter too little.
    assert errors.baseline == pytest.approx((0.5 + 0.25) / 2)
    rows = [{**ROW, "tokens_per_s_per_gpu": str(t)} for t in (10, 20, 30, 40)]
    for order, expected in (((1, 2, 3, 4), 1.0), ((4, 3, 2, 1), -1.0)):
        (errors,) = summarize(rows, [RowPrediction(float(t), None) for t in order])
        assert errors.rank_correlation == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": ""}, "layers is empty"),
        ({"dp": "3"}, "dp x tp x pp x cp = 3 is not num_gpus = 2"),
        ({"global_batch": "5"}, "global_batch = 5 is not a multiple of dp = 2"),
        ({"gpu": "TPU-v4"}, "no such device"),
        ({"hidden": "many"}, "many"),
        ({"zero": "4"}, "zero = 4 is not a stage"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_its_reason(
    changes: dict[str, str], reason: str
) -> None:
    prediction = predict({**ROW, **changes})
    assert prediction.tokens_per_second is None
    assert reason in prediction.refused


def test_rows_come_back_with_three_columns(tmp_path: Path) -> None:
    rows = [dict(ROW), {**ROW, "dp": "3"}]
    write_rows(tmp_path / "out.csv", rows, [predict(row) for row in rows])
    with (tmp_path / "out.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert float(first["predicted_tokens_per_s_per_gpu"]) > 0
    assert float(first["predicted_peak_gib"]) > 0
    assert first["refused"] == ""
    assert second["predicted_tokens_per_s_per_gpu"] == ""
    assert "num_gpus" in second["refused"]
    assert {name: first[name] for name in ROW} == ROW


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("source,model\na,b\n", "has no columns layers, hidden"),
        (",".join(COLUMNS) + "\n", "has a header and no rows"),
        ("", "has no header"),
        (";".join(COLUMNS) + "\n", "has columns separated by ';' -> separate them by commas"),
        ("\t".join(COLUMNS) + "\n", "has columns separated by '.t'"),
        (",".join((*COLUMNS, "seq")) + "\n", "has the column seq twice"),
        (
            f"{','.join(COLUMNS)}\n{'1,' * 30}1\n",
            "more values in line 2 than columns in the header",
        ),
        (f'{",".join(COLUMNS)}\n"a', "cannot be read: unexpected end of data"),
    ],
)
def test_files_that_are_no_rows_are_one_error(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_rows(tmp_path / "rows.csv")
    assert len(caught.value.problems) == 1
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "none.csv")


def test_columns_may_have_spaces_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    header, values = ", ".join(ROW), ",".join(f'"{value}"' for value in ROW.values())
    path.write_text(f"{header}\n{values}\n", encoding="utf-8-sig")
    (row,) = read_rows(path)
    assert predict(row) == predict(ROW)
    path.write_bytes(path.read_bytes().replace(b"source", "señor".encode("latin-1")))
    with pytest.raises(ConfigError, match=r"is not UTF-8: .* -> save it as CSV in UTF-8"):
        read_rows(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens_per_s_per_gpu": "3000,5"}, "tokens_per_s_per_gpu = '3000,5' is not a positive"),
        ({"tokens_per_s_per_gpu": "3.000,5"}, "is not a positive number"),
        ({"layers": "3,2"}, "layers = 3,2 is not a count"),
        ({"kv_heads": "7"}, "kv_heads = 7 does not divide heads = "),
        ({"gpu": "Abacus"}, "gpu = Abacus: no such device in the hardware tables -> nearest"),
        ({"notes": "LoRA of rank 0"}, "rank = 0 is not a count"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, str], told: str) -> None:
    assert told in predict({**ROW, **changes}).refused


def test_rows_of_no_sense_are_refused_and_never_crash() -> None:
    draw = random.Random(0)
    for _ in range(examples(100)):
        row = dict(ROW)
        for name in draw.sample(sorted(ROW), 4):
            row[name] = draw.choice(["", "0", "-1", "nan", "1e9", "7", "x", "3.5"])
        prediction = predict(row)
        assert (prediction.tokens_per_second is None) == bool(prediction.refused)
        if prediction.tokens_per_second is not None:
            assert math.isfinite(prediction.tokens_per_second)
            assert prediction.tokens_per_second > 0


def test_rows_may_have_measured_speed_or_memory_alone(tmp_path: Path) -> None:
    names = [*COLUMNS, "peak_gib"]
    both = {**ROW, "tokens_per_s_per_gpu": "1,000", "peak_gib": "10 GiB"}
    rows = [both, {**both, "peak_gib": "n/a"}, {**both, "tokens_per_s_per_gpu": "-"}]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    read = read_rows(tmp_path / "rows.csv")
    (errors,) = summarize(read, [RowPrediction(1100.0, 9.0)] * 3)
    assert (errors.num_rows, errors.memory_rows, errors.num_refused) == (3, 2, 0)
    assert (errors.mean, errors.memory_mean) == (pytest.approx(0.1), pytest.approx(0.1))
    (tmp_path / "rows.csv").write_text(
        (tmp_path / "rows.csv").read_text().replace("10 GiB", "").replace('"1,000"', "")
    )
    # A row without a measurement is refused by itself, and the others are predicted.
    unmeasured, *_ = read_rows(tmp_path / "rows.csv")
    assert predict(unmeasured).refused == "neither tokens_per_s_per_gpu nor peak_gib is given"
    wrong = predict({**both, "tokens_per_s_per_gpu": "fast"})
    assert wrong.refused == "tokens_per_s_per_gpu = 'fast' is not a positive number"
    assert predict({**both, "tokens_per_s_per_gpu": ""}).refused == ""
    assert "nan" not in error_table(summarize([{**both, "tokens_per_s_per_gpu": ""}], [wrong]))


def test_a_guessed_shape_is_named_and_in_no_mean(tmp_path: Path) -> None:
    """Of a model of which only the size is known, and of a mixture without its experts."""
    size = {**ROW, "model": "Unheard-7B", "layers": "", "hidden": "", "heads": "", "ffn": ""}
    mixture = {**ROW, "model": "Unheard-MoE", "notes": "moe"}
    rows = [ROW, size, mixture, {**mixture, "notes": "moe of 8 experts"}]
    told = [predict(row) for row in rows]
    words = ["", "layers and hidden, by the number of parameters", "the number of experts", ""]
    divided = {**ROW, "model": "Unheard-30B", "params_b": "30", "ep": "2"}
    assert predict(divided).guessed == "the number of experts"
    assert [prediction.guessed for prediction in told] == words
    (errors,) = summarize(rows, told)
    (without,) = summarize([rows[0], rows[3]], [told[0], told[3]])
    assert (errors.num_rows, errors.num_guessed) == (4, 2)
    assert (errors.mean, errors.worst) == (without.mean, without.worst)
    assert "(2 of a guessed shape, not in the means)" in error_table([errors])
    path = tmp_path / "out.csv"
    write_rows(path, rows, told)
    written = csv.DictReader(path.read_text().splitlines())
    assert [row["guessed"] for row in written] == words
