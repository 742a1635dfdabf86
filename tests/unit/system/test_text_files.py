"""Text files of a user: UTF-8 with or without a byte order mark, or refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.system.text_files import TextFileError, read_text

TEXT = "model: Größe\nseed: 1\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_texts_of_all_editors_are_the_same(tmp_path: Path, encoding: str, line_end: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(TEXT.replace("\n", line_end).encode(encoding))
    assert read_text(path) == TEXT


@pytest.mark.parametrize(
    ("content", "rule", "fix"),
    [
        (TEXT.encode("utf-16"), "is UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8"),
        (TEXT.encode("utf-32"), "is UTF-32, not UTF-8", "iconv -f UTF-32 -t UTF-8"),
        (TEXT.encode("latin-1"), "byte 0xf6 at 9", "save it as UTF-8"),
        (b"ok\xff", "byte 0xff at 2", "save it as UTF-8"),
    ],
)
def test_other_encodings_are_refused(tmp_path: Path, content: bytes, rule: str, fix: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(TextFileError) as caught:
        read_text(path)
    assert rule in caught.value.rule
    assert caught.value.fix.startswith(fix)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TextFileError, match="cannot be read: No such file"):
        read_text(tmp_path / "run.yaml")
