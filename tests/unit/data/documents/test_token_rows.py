"""Rows that are already tokenized: what is learned of them, and what of them is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow
import pytest
from pyarrow import parquet

from bigtrain.cli import main
from bigtrain.data.documents.chat_formats import FORMATS, Conversations, document_in, nearest
from bigtrain.data.documents.token_rows import TokenRow
from bigtrain.data.shards.manifest import read_manifest
from tests.support.chats import save_chat_tokenizer
from tests.unit.commands.test_tokenize_chat import documents_of

KNOWN = FORMATS["tokens"]


def read(row: dict[str, Any]) -> tuple[TokenRow | None, str]:
    content, why = document_in(row, KNOWN.keys[:1], Conversations(KNOWN, KNOWN.keys))
    return (None if content is None else TokenRow.of_document(orjson.loads(content))), why


@pytest.mark.parametrize(
    ("row", "tokens", "learned", "padding"),
    [
        ({"input_ids": [5, 6, 7]}, [5, 6, 7], [1, 1, 1], 0),
        ({"input_ids": "[5, 6, 7]", "labels": [-100, -100, 7]}, [5, 6, 7], [0, 0, 1], 0),
        ({"input_ids": [5, 6], "loss_mask": [False, True]}, [5, 6], [0, 1], 0),
        ({"input_ids": [5, 6], "token_weights": [0.0, 1.0], "weight": 1}, [5, 6], [0, 1], 0),
        ({"input_ids": [5, 6], "loss_mask": [0, 1], "weight": 0}, [5, 6], [0, 0], 0),
        (
            {
                "input_ids": [5, 6, 7, 0],
                "completion_mask": [0, 1, 1, 0],
                "assistant_masks": [1, 0, 1, 0],
                "labels": [-100, -100, 7, -100],
                "attention_mask": [1, 1, 1, 0],
            },
            [5, 6, 7],
            [0, 0, 1],
            1,
        ),
        ({"input_ids": [0, 0, 5, 0], "attention_mask": [0, 0, 1, 0]}, [5], [1], 3),
    ],
)
def test_a_row_is_learned_as_it_says(
    row: dict[str, Any], tokens: list[int], learned: list[int], padding: int
) -> None:
    token_row, why = read(row)
    assert token_row is not None, why
    assert token_row.tokens.tolist() == tokens
    assert token_row.learned.astype(int).tolist() == learned
    assert token_row.padding == padding
    assert nearest(row) is KNOWN
    assert nearest({"text": "", **row}) is None


@pytest.mark.parametrize(
    ("ids", "more", "why"),
    [
        ([], {}, "it has no tokens"),
        (5, {}, "is not a list of integers but int"),
        ([5, "a"], {}, "its input_ids has 'a', which is not an integer"),
        ([1.5], {}, "its input_ids has 1.5"),
        ([True, False], {}, "which is not an integer"),
        ([[1], [2, 3]], {}, "is a list of lists"),
        ([5, 6], {"labels": [-100]}, "labels has 1 values, and input_ids has 2"),
        ([5, 6], {"labels": [-100, 7]}, "labels has 7 at token 1, whose input_ids"),
        ([5, 6, 7], {"labels": [6, 7, -100]}, "not of the next one"),
        ([5, 6], {"loss_mask": [0, 0.5]}, "has 0.5: a token is learned or not"),
        ([5, 6], {"loss_weights": [0.5, -1]}, "its loss_weights has -1: a weight is"),
        ([5, 6], {"loss_weights": [0.5, float("nan")]}, "its loss_weights has nan"),
        ([5, 6], {"token_weights": [1e39, 1]}, "its token_weights has 1e+39"),
        ([5, 6], {"weight": float("inf")}, "its weight has inf"),
        ([5, 6], {"loss_weights": ["a", 1]}, "its loss_weights has 'a'"),
        ([5, 6], {"loss_weights": [1, 3e38], "weight": 2}, "its weight times those of its tokens "),
        ([5, 6], {"loss_weights": [1]}, "loss_weights has 1 values, and input_ids"),
        (
            [5, 6],
            {"loss_weights": [1, 1], "token_weights": [1, 1]},
            "it has token_weights and loss_weights -> keep one of them",
        ),
        ([5, 6], {"loss_mask": [0, None]}, "its loss_mask has None"),
        ([5, 6, 7], {"attention_mask": [1, 0, 1]}, "0 between tokens with 1"),
        ([5, 6], {"attention_mask": [0, 0]}, "is 0 for every token"),
        ([5, 6], {"attention_mask": [0, 1], "labels": [5, 6]}, "token 0 is to be learned (labels)"),
        ([5, 6], {"loss_mask": [0, 1], "labels": [5, 6]}, "labels and loss_mask contradict each"),
        ([5, 6], {"completion_mask": [0]}, "completion_mask has 1 values"),
        ([2**64 - 100], {}, "its input_ids has 18446744073709551516, more than 63"),
        ([5, 2**70], {}, "its input_ids has 1180591620717411303424, which is not an"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(ids: Any, more: dict[str, Any], why: str) -> None:
    token_row, reason = read({"input_ids": ids, **more})
    assert token_row is None
    assert reason.startswith("'input_ids' is not a row of tokens: ")
    assert why in reason


@pytest.mark.parametrize(
    ("row", "learned", "weights"),
    [
        ({"loss_weights": [0.5, 1, 0]}, [1, 1, 0], [0.5, 1, 1]),
        ({"token_weights": "[3, 1, 1]"}, [1, 1, 1], [3, 1, 1]),
        ({"weight": 0.25, "labels": [-100, 6, 7]}, [0, 1, 1], [1, 0.25, 0.25]),
        ({"weight": 2, "loss_weights": [0.5, 0.5, 0]}, [1, 1, 0], None),
        ({"loss_weights": [0.1, 2, 3], "attention_mask": [0, 1, 1]}, [1, 1], [2, 3]),
    ],
)
def test_losses_have_weights(
    row: dict[str, Any], learned: list[int], weights: list[float] | None
) -> None:
    token_row, why = read({"input_ids": [5, 6, 7], **row})
    assert token_row is not None, why
    assert token_row.learned.astype(int).tolist() == learned
    assert (None if token_row.weights is None else token_row.weights.tolist()) == weights


ROWS = [
    {"input_ids": list(range(n + 2, n + 9)), "labels": [-100] * 3 + list(range(n + 5, n + 9))}
    for n in range(40)
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_rows_become_shards(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    source, out = tmp_path / f"rows.{kind}", tmp_path / "out"
    padded = [{**ROWS[0], "attention_mask": [1] * 7}, *ROWS[1:]]
    padded.append({"input_ids": [1, 2, 0], "labels": [1, 2, -100], "attention_mask": [1, 1, 0]})
    table = pyarrow.Table.from_pylist(padded)
    if kind == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in padded))
    elif kind == "parquet":
        parquet.write_table(table, source)
    else:
        with pyarrow.ipc.new_file(source, table.schema) as file:
            file.write_table(table)
    words = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--output", out]
    assert main([*map(str, words)]) == 0
    said = capsys.readouterr()
    assert "match --format tokens" in said.err
    assert "tokens of padding, attention_mask 0: 1" in said.out
    assert "rows of tokens as they were, with nothing added" in said.out
    manifest = read_manifest(out)
    assert manifest.options.chat_format == "tokens"
    assert manifest.unrendered == {"padding": 1}
    assert manifest.tokenizer.chat_template is None
    expected = [(row["input_ids"], [0] * 3 + [1] * 4) for row in ROWS]
    assert documents_of(out) == [*expected, ([1, 2], [1, 1])]
    assert main(["inspect", str(out), "--mask", "--document", "0"]) == 0
    assert "(4 tokens of these are learned)" in capsys.readouterr().out


def test_a_token_outside_of_the_vocabulary_and_options_of_text_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    source, out = tmp_path / "rows.jsonl", tmp_path / "out"
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 999_999]}, {"input_ids": [4]}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--output", out]
    command = [*map(str, words), "--format", "tokens"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"{source}:2: token 1 of the row is 999999, the tokenizer has ids 0 to" in said
    for option in (
        ["--learn", "last"],
        ["--parse-special-tokens"],
        ["--end-of-document", "<|im_end|>"],
        ["--role", "a=user"],
        ["--beginning-of-text", "always"],
    ):
        assert main([*command, *option]) == 2
        assert option[0] in capsys.readouterr().err
    assert main([*command, "--skip-bad"]) == 0
    assert read_manifest(out).skipped_documents == 2
    assert "no token after the first to train on" in (out / "errors.jsonl").read_text()
    assert np.array_equal([tokens for tokens, _ in documents_of(out)], [[1, 2, 3]])
