"""Which files of a base are compared with what a run began with."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.models.weights.checksums import (
    BASE_MODEL,
    TOKEN_FILES,
    TOKENIZER_FILES,
    changed_files,
    files_read_with,
    sum_of,
    write_sums,
)


@pytest.mark.parametrize("name", ["config.json", *TOKENIZER_FILES])
def test_files_that_decide_tokens_or_numbers_are_compared(name: str, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    for path in (base / name, base / "model.safetensors"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("as it was")
    run.mkdir()
    read = files_read_with([base / "model.safetensors"])
    write_sums(run / BASE_MODEL, {str(path.absolute()): sum_of(path) for path in read})
    assert changed_files(base, run) == []
    (base / name).write_text("changed!!")
    is_compared = name in ("config.json", *TOKEN_FILES)  # a template decides neither
    assert len(changed_files(base, run)) == is_compared
