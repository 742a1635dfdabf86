"""The table of DeepSpeed keys covers exactly what is accepted, and names tests that exist."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from bigtrain.settings.deepspeed.accepted import (
    REFUSED_BLOCKS,
    ROWS,
    TEST,
    not_tried,
    row_of,
    rows_of,
)
from bigtrain.settings.deepspeed.engine_config import check_file_alone
from bigtrain.settings.deepspeed.keys import key_table
from bigtrain.settings.deepspeed.ownership import OPTIMIZER_PARAMETERS
from tests.support.worlds import ROOT
from tests.unit.settings.deepspeed.test_engine_config import known_leaves, problems_of, tree_of

ODD: list[Any] = [True, False, None, 0, 1, -1, 2, 3, 1000, 10**15, 0.0, 1.0, 0.5, 1.5, -0.5, 1e300]
ODD += [float("inf"), "", "true", "1", "fp32", "bf16", "fp16", "cpu", "nvme", "none", "info"]
ODD += [[], ["x"], [""], [1], [None]]
# Leaves that `keys.json` does not name: blocks of which DeepSpeed knows no keys.
BELOW = {f"optimizer.params.{name}" for name in OPTIMIZER_PARAMETERS}
BELOW |= {"pipeline.pipe_partitioned", "pipeline.grad_partitioned"}
# No class of values is accepted; each has its reason.
REFUSED = {"vocabulary_size", "data_types.keep_in_fp32_modules"}


def accepted_keys() -> set[str]:
    """Every key that no block and no deprecation refuses."""
    leaves = {*known_leaves(), *BELOW} - {"pipeline", "optimizer.params"}
    refused = tuple(f"{block}." for block in REFUSED_BLOCKS)
    return {key for key in leaves if not f"{key}.".startswith(refused) and not is_deprecated(key)}


def is_deprecated(key: str) -> bool:
    node: Mapping[str, Any] = key_table()
    for name in key.split("."):
        node = node.get("keys", {}).get(name, {})
    return "deprecated" in node


def test_every_key_has_a_row_or_is_refused() -> None:
    keys = accepted_keys()
    assert len(keys) > 100
    assert {row.key for row in ROWS} == keys - REFUSED
    for key in (*REFUSED, "pipeline.stages", "zero_optimization.leaf_module.modules"):
        assert problems_of(tree_of(key, 8 if key == "vocabulary_size" else "x")), key


def test_what_the_file_check_accepts_is_in_the_table() -> None:
    for key, value in itertools.product(sorted(accepted_keys()), ODD):
        problems = check_file_alone(tree_of(key, value), "x.json")
        assert sum(row.takes(value) for row in rows_of(key)) <= 1, (key, value)
        row = row_of(key, value)
        assert row is not None or problems, f"{key} = {value!r} is accepted without a row"
        if row is not None and row.verdict == "trained":
            assert problems == [], f"{key} = {value!r} has a row and is refused"


def test_refusals_name_the_legal_values() -> None:
    (text,) = problems_of({"zero_optimization": {"allgather_bucket_size": 7}})
    assert text == (
        "x.json: zero_optimization.allgather_bucket_size = 7: DeepSpeed takes even numbers only -> "
        "multiples of 2 from 2, or omit it"
    )
    (text,) = problems_of({"gradient_predivide_factor": 2.0})
    assert text.endswith("-> 1, or omit it")
    (text,) = problems_of({"vocabulary_size": 7})
    assert text.endswith("-> remove it")


def test_rows_are_proven_or_say_why_not() -> None:
    for row in ROWS:
        values = (*row.examples, *row.together)
        assert all(row.takes(value) for value in values), row
        assert all(row_of(row.key, value) is row for value in values), row
        if row.verdict == "trained":
            assert row.engines, row
            assert values or row.key == "zero_optimization.stage"
        else:
            assert not values, row
            assert row.note or row.verdict == "owned", row


def test_the_cases_are_made_of_the_table() -> None:
    """A row without a case fails here: the file's cases come from `examples` and `together`."""
    tree = ast.parse((ROOT / TEST).read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"test_key", "test_other_key", "test_key_alone", "test_keys_with"} <= functions.keys()
    engines = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ENGINES"
    )
    assert isinstance(engines, ast.Dict)
    names = {ast.literal_eval(key) for key in engines.keys if key is not None}
    assert {engine for row in ROWS for engine in row.engines} <= names
    for maker, source in (("single_cases", "row.examples"), ("joint_cases", "row.together")):
        assert source in ast.unparse(functions[maker])


@pytest.mark.parametrize(
    ("raw", "dtype", "named"),
    [
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "bfloat16", True),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": False}}, "bfloat16", False),
        ({"fp16": {"hysteresis": 2}}, "bfloat16", False),
        ({"fp16": {"hysteresis": 2}}, "float16", True),
        ({"aio": {"queue_depth": 8}}, "bfloat16", False),
        ({"zero_force_ds_cpu_optimizer": True}, "bfloat16", False),
        (
            {
                "zero_force_ds_cpu_optimizer": True,
                "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
            },
            "bfloat16",
            True,
        ),
    ],
)
def test_a_run_names_what_nothing_has_tried(raw: dict[str, Any], dtype: str, named: bool) -> None:
    assert bool(not_tried(raw, dtype)) is named
