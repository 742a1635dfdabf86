"""Cost of an encoder without I/O on text already in memory: a separate process, which has done
nothing before and has read all of the text.

    python benchmarks/support/encoder_alone.py LINES.jsonl TOKENIZER LIBRARY FORM

Prints CPU seconds and seconds on the clock as JSON, of the encoding only. No ends of documents are
added. FORM: `one_call` gives the library all documents at once, which it divides among the cores
itself; `batches` gives it a megabyte at a time from as many threads as there are cores, whose
memory stays in a processor's cache; `parsed_batches` parses lines of JSON for each batch as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import orjson

from bigtrain.data.documents.formats import document_batches
from bigtrain.data.tokenizers.encoders import FAST_ENCODERS, ReferenceEncoder
from bigtrain.data.tokenizers.tokenizer import load_tokenizer


def text_of(line: bytes) -> bytes:
    return bytes(orjson.loads(line)["text"].encode())


def main(path: str, tokenizer: str, library: str, form: str) -> None:
    kind = FAST_ENCODERS.get(library, ReferenceEncoder)
    encoder = kind(load_tokenizer(tokenizer).encoder().tokenizer_json, None)
    encoder.encode_utf8([b"x"])  # loads the library
    lines = Path(path).read_bytes().splitlines()
    contents = lines if form == "parsed_batches" else [text_of(line) for line in lines]
    del lines

    def encode(batch: list[bytes]) -> None:
        encoder.encode_utf8([text_of(c) for c in batch] if form == "parsed_batches" else batch)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cpu_began, began = time.process_time(), time.perf_counter()
        batches = [contents] if form == "one_call" else document_batches([contents])
        for _ in pool.map(encode, batches):
            pass
        print(json.dumps([time.process_time() - cpu_began, time.perf_counter() - began]))


if __name__ == "__main__":
    main(*sys.argv[1:])
