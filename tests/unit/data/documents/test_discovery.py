"""Documents from every kind of input, and what is said of those that cannot be read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from bigtrain.data.documents.discovery import find_sources
from bigtrain.data.documents.files import Selection
from bigtrain.data.documents.formats import DocumentReader, part_reader
from bigtrain.data.documents.reader import BadDocument, ReadOptions, RejectedDocuments, SourcePart
from bigtrain.errors import DataError

TEXTS = ["first\r\n", "", "zweite Zeile äöü", "第三 \u2028 line", 'tab\tand \\ quote" \0 nul']

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


def read(
    *inputs: Path | str,
    text_key: str = "text",
    skip: bool = False,
    limit: int = 1 << 20,
    bad: list[BadDocument] | None = None,
    quotes: Any = None,
    **selection: Any,
) -> list[str]:
    chosen = Selection(inputs=[str(i) for i in inputs], **selection)
    options = ReadOptions(chosen, tuple(text_key.split(",")), limit, quotes=quotes)
    rejects = RejectedDocuments(skip, (bad if bad is not None else []).append)
    reader = DocumentReader(find_sources(chosen), options, rejects)
    documents = [text for batch in reader.text_batches() for text in batch]
    assert reader.total_bytes is None or reader.bytes_done == reader.total_bytes
    return documents


def lines(texts: Sequence[object] = TEXTS, key: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, key: text}) + "\n" for text in texts).encode()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.jsonl{suffix}", COMPRESS[suffix](lines() + b"\n  \n" + lines()))
    assert read(path) == TEXTS * 2


@pytest.mark.parametrize("suffix", COMPRESS)
def test_text_files_are_taken_as_they_stand(tmp_path: Path, suffix: str) -> None:
    for number, text in enumerate(TEXTS):
        write(tmp_path / f"{number}.txt{suffix}", COMPRESS[suffix](text.encode()))
    assert read(tmp_path) == TEXTS


def test_several_zstd_frames_and_none(tmp_path: Path) -> None:
    compress = zstandard.ZstdCompressor().compress
    path = write(tmp_path / "a.jsonl.zst", compress(lines()) + compress(lines()))
    assert read(path) == TEXTS * 2
    assert read(write(tmp_path / "b.jsonl.zst", b"")) == []


@pytest.mark.parametrize("suffix", [s for s in COMPRESS if s])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_corrupt_compression_is_never_the_end_of_the_data(
    tmp_path: Path, suffix: str, damage: str
) -> None:
    content = COMPRESS[suffix](lines([f"{n * n}" for n in range(5000)]))
    content = content[: len(content) // 2] if damage == "cut" else b"garbage" + content
    path = write(tmp_path / f"a.jsonl{suffix}", content)
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} cannot be read: "):
        read(path, skip=True)


def test_parquet(tmp_path: Path) -> None:
    table = pyarrow.table({"id": range(5), "body": TEXTS})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path, text_key="body") == TEXTS
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text' -> --text-key: body, id"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"a\.parquet row 0: 'id' is not text but int"):
        read(tmp_path, text_key="id")
    write(tmp_path / "b.parquet", b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"b\.parquet cannot be read"):
        read(tmp_path / "b.parquet")


def test_whatever_datasets_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "a.csv", b'text,n\n"one, two",1\nthree,2\n')
    assert read(tmp_path / "a.csv") == ["one, two", "three"]
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == TEXTS
    both = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a", None]})})
    both.save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match=r"both row 1: 'text' is not text but nothing"):
        read(tmp_path / "both")
    with pytest.raises(DataError, match=r"has no split test -> --dataset-split: train"):
        read(tmp_path / "both", dataset_split="test")
    with pytest.raises(DataError, match=r"no column 'body' -> --text-key: text"):
        read(tmp_path / "saved", text_key="body")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "a"', "not JSON"),
        (b'["text"]', "not a JSON object but list"),
        (b'{"body": "a", "id": 1}', "no key 'text'; keys here: body, id"),
        (b'{"text": null}', "'text' is not text but nothing"),
        (b'{"text": 5}', "'text' is not text but int"),
        (b'{"text": "\xe4"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "the text contains half of a surrogate pair"),
        (b'{"text": ' + b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_lines_are_named_or_skipped(tmp_path: Path, line: bytes, why: str) -> None:
    good = b'{"text": "good"}\n'
    path = write(tmp_path / "a.jsonl", good + line + b"\n" + good)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:2: {why}")
    fix = "--format FORMAT --key NAME=KEY" if "body" in why else "-> fix it"
    assert str(caught.value).endswith(f"{fix}, or skip such documents: --skip-bad")
    assert read(path, skip=True) == ["good", "good"]


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"one\ntwo\nthr\xff")
    write(tmp_path / "b.txt", b"good")
    with pytest.raises(DataError, match=r"a\.txt:3: not UTF-8"):
        read(tmp_path)
    assert read(tmp_path, skip=True) == ["good"]
    write(Path(f"{tmp_path}/a\udce4.txt"), b"x")
    with pytest.raises(DataError, match=r"a\\udce4\.txt': the name is not UTF-8 -> rename it"):
        read(tmp_path)


def test_choice_among_the_files_of_a_folder(tmp_path: Path) -> None:
    names = ("b.py", "a.py", "sub/c.py", "sub/d.txt", "skip/e.py", "sub/skip/f.py", "test_g.py")
    for name in names:
        write(tmp_path / name, name.encode())
    assert read(tmp_path) == ["sub/d.txt"]
    python = {"suffixes": [".py"]}
    assert read(tmp_path, exclude=["skip"], **python) == ["a.py", "b.py", "sub/c.py", "test_g.py"]
    assert read(tmp_path, exclude=["sub/*", "test_*"], **python) == ["a.py", "b.py", "skip/e.py"]
    assert read(f"{tmp_path}/*.py") == ["a.py", "b.py", "test_g.py"]
    assert read(f"{tmp_path}/**/*.py", exclude=["s*"]) == ["a.py", "b.py", "test_g.py"]
    assert read(tmp_path / "a.py", f"{tmp_path}/a*") == ["a.py"]


def test_inputs_that_match_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a.md", b"x")
    with pytest.raises(DataError, match=r"no file there ends with .*; found: \.md \(1\) -> name"):
        find_sources(Selection([str(tmp_path)]))
    with pytest.raises(DataError, match="no file matches"):
        find_sources(Selection([f"{tmp_path}/*.txt"]))
    for missing in ("nothing.jsonl", f"{tmp_path}/nothing", "./x", "a b"):
        with pytest.raises(DataError, match="no such file, folder or glob"):
            find_sources(Selection([missing]))
    with pytest.raises(DataError, match="no input remains: --exclude matches every file"):
        find_sources(Selection([f"{tmp_path}/*.md"], exclude=["*.md"]))
    with pytest.raises(DataError, match="and no such dataset on the Hugging"):
        find_sources(Selection(["nobody/no-such-dataset"]))


def test_true_lines_in_the_middle_of_a_file(tmp_path: Path) -> None:
    """A part that begins anywhere names the line of the file, by counting those before it."""
    good, bad = b'{"text": "good"}\n', b'{"text": 5}\n'
    path = write(tmp_path / "a.jsonl", good * 7 + bad + good * 5)
    size = path.stat().st_size
    selection = Selection([str(path)])
    (source,) = find_sources(selection)
    for begin in range(0, len(good) * 7 + 1):
        part = SourcePart(source, begin, size, size - begin)
        reader = part_reader(part, ReadOptions(selection), RejectedDocuments(False))
        with pytest.raises(DataError, match=r"a\.jsonl:8: 'text' is not text but int"):
            list(reader.blocks())


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.xz", "a.parquet"])
def test_documents_that_are_too_large(tmp_path: Path, name: str) -> None:
    texts = ["small", "x" * 5000, "small"]
    path = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(pyarrow.table({"text": texts}), path)
        where = "a.parquet row 1: the document"
    elif "jsonl" in name:
        write(path, COMPRESS[".gz" if name.endswith("gz") else ""](lines(texts)))
        where = f"{name}:2: the line"
    else:
        write(path, COMPRESS[".xz" if name.endswith("xz") else ""](b"x" * 5000))
        where = f"{name}: the document"
    with pytest.raises(DataError) as caught:
        read(path, limit=4999)
    assert f"{where} is larger than --max-document-bytes 4,999 -> " in str(caught.value)
    bad: list[BadDocument] = []
    assert read(path, limit=4999, skip=True, bad=bad) == ([] if "txt" in name else ["small"] * 2)
    assert len(bad) == 1
    assert len(read(path, limit=5100)) == (1 if "txt" in name else 3)


def test_several_text_keys(tmp_path: Path) -> None:
    rows = [
        {"title": "T", "body": "B"},
        {"title": "", "body": "only body"},
        {"title": None, "body": "no title"},
        {"body": "neither", "x": 1},
    ]
    expected = ["T\nB", "only body", "no title", "neither"]
    path = write(tmp_path / "a.jsonl", b"".join(json.dumps(r).encode() + b"\n" for r in rows))
    assert read(path, text_key="title,body") == expected
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", text_key="title,body") == expected
    assert read(tmp_path / "a.parquet", text_key="missing,body")[0] == "B"
    write(path, b'{"x": 1}\n')
    with pytest.raises(DataError, match=r"a.jsonl:1: no key 'title' or 'body'; keys here: x"):
        read(path, text_key="title,body")
    write(path, b'{"title": null, "body": 3}\n')
    with pytest.raises(DataError, match=r":1: 'title' or 'body' is not text but int"):
        read(path, text_key="title,body")


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        (b'text,n\r\n"a ""quoted"" word",1\r\n', ['a "quoted" word']),
        (b'n,text\n1,"two\r\nlines"\n\n2,\n', ["two\r\nlines", ""]),
        ("\ufefftext\nä\nnan".encode(), ["ä", "nan"]),
    ],
)
def test_csv(tmp_path: Path, content: bytes, documents: list[str]) -> None:
    assert read(write(tmp_path / "a.csv", content)) == documents


def test_tsv(tmp_path: Path) -> None:
    content = b'n\ttext\n1\t"a, ""quoted""\ttab"\n2\tb\n'
    documents = ['a, "quoted"\ttab', "b"]
    assert read(write(tmp_path / "a.tsv", content)) == documents
    assert read(write(tmp_path / "a.tsv.gz", gzip.compress(content))) == documents
    wrong = write(tmp_path / "b.tsv", b"text\tn\na\t1\nb,2\nc\t3\n")
    with pytest.raises(DataError, match=r"b\.tsv:3: 1 fields, the header has 2"):
        read(wrong)
    assert read(wrong, skip=True) == ["a", "c"]


def test_quotes_of_tsv_have_one_meaning(tmp_path: Path) -> None:
    said = write(tmp_path / "a.tsv", b'text\tn\n"Hello" she said\t1\nb "c"\t2\n')
    swallowed = write(tmp_path / "b.tsv", b'text\tn\n"a\t1\nb"\t2\n')
    quoted = write(tmp_path / "c.tsv", b'text\tn\n"a ""b"" c"\t1\n')
    for path in (said, swallowed, quoted):
        with pytest.raises(DataError, match=r"tsv:2 has .*--quotes quote, or --quotes letter"):
            read(path)
    assert read(said, quotes="letter") == ['"Hello" she said', 'b "c"']
    assert read(swallowed, quotes="letter") == ['"a', 'b"']
    assert read(quoted, quotes="letter") == ['"a ""b"" c"']
    assert read(quoted, quotes="quote") == ['a "b" c']
    every = write(tmp_path / "d.tsv", b'"text"\t"n"\n"a"\t"1"\n')  # all fields are quoted
    assert read(every) == ["a"]
    csv = write(tmp_path / "e.csv", b'text,n\n"Hello" she said,1\n')
    with pytest.raises(DataError, match="a quote is a letter of the text: --quotes letter"):
        read(csv)
    assert read(csv, quotes="letter") == ['"Hello" she said']


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.tsv"])
def test_byte_order_marks_are_no_text(name: str, tmp_path: Path) -> None:
    text = {"txt": "hello", "jsonl": '{"text": "hello"}\n', "json": '[{"text": "hello"}]'}.get(
        name[2:], '"text"\n"hello"\n'
    )
    assert read(write(tmp_path / name, b"\xef\xbb\xbf" + text.encode())) == ["hello"]
    for encoding in ("utf-16", "utf-16-be", "utf-32"):
        mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
        path = write(tmp_path / name, mark + text.encode(encoding))
        family = encoding[:6].upper()
        with pytest.raises(DataError, match=f"not UTF-8 but {family} -> convert it: iconv -f"):
            read(path)


@pytest.mark.parametrize(
    ("content", "message", "documents"),
    [
        (b"text,n\na,1\nb\nc,2\n", r"a\.csv:3: 1 fields, the header has 2", ["a", "c"]),
        (b'text\n"a\nb"\n\xff\nc\n', r"a\.csv:4: not UTF-8", ["a\nb", "c"]),
        (b"text,n\n" + b"a" * 60 + b",1\nb,2\n", "larger than --max-document-bytes 50", None),
        (b'text\n"a', r"a\.csv:2 cannot be read as csv: unexpected end of data", None),
        (b'text\na\n"b" c\n', r"a\.csv:3 cannot be read as csv: ',' expected after", None),
        (b'text\n"' + b"a\n" * 60, r"a\.csv:2 cannot be read as csv: field larger", None),
        (b"", r"a\.csv: no column 'text' -> --text-key: none", None),
    ],
)
def test_csv_that_is_wrong(
    tmp_path: Path, content: bytes, message: str, documents: list[str] | None
) -> None:
    path = write(tmp_path / "a.csv", content)
    with pytest.raises(DataError, match=message):
        read(path, limit=50)
    if documents is not None:
        assert read(path, limit=50, skip=True) == documents


def test_an_input_named_twice_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "a.txt", b"a")
    write(tmp_path / "b.txt", b"b")
    with pytest.raises(DataError, match="is named twice, as input 1 and 3, but would be read once"):
        find_sources(Selection([str(file), str(tmp_path), f"{tmp_path}/./a.txt"]))
    assert read(file, tmp_path) == ["a", "b"]
    assert caplog.messages == [f"1 files match several inputs and are read once: {file}"]


RUN = ("run_id", "log.txt", "metrics.jsonl", "starts.jsonl", "hangs/step-3/report.txt",
       "tokenizer/merges.txt", "hf/notes.txt", "reference/sums.parquet")  # fmt: skip


@pytest.mark.parametrize(
    ("store", "pattern", "below"),
    [("", "", ""), ("", "/**/*.txt", "runs/first/"), ("memory:/", "", "corpus/")],
)
def test_what_a_run_writes_is_no_document(
    store: str, below: str, pattern: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever the run's directory is, also where texts of the user are in it."""
    texts = ["a.txt", "corpus/b.txt", "corpus/log.txt.txt", "old/log.txt", "old/checkpoints/c.txt"]
    for name in [*texts, *(below + name for name in RUN)]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text\n")
    if store:
        fsspec.filesystem("memory").put(f"{tmp_path}/", f"{tmp_path}/", recursive=True)
    root = f"{store}{tmp_path}"
    found = find_sources(Selection([f"{root}{pattern}"]))
    assert {source.record.path.removeprefix(f"{root}/") for source in found} == set(texts)
    [line] = [r.getMessage() for r in caplog.records if "a run of bigtrain wrote" in r.getMessage()]
    assert f"{below}log.txt" in line
    # A file that is named is read.
    assert len(find_sources(Selection([f"{root}/{below}log.txt"]))) == 1
