"""Sentences of a Markdown page, with their numbers of words."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^ *(```|~~~)")
_HEADING = re.compile(r"^#{1,6} ")
_ITEM = re.compile(r"^ *([-*+]|\d+\.) +")
_LOWER = r"(?:accelerate|bigtrain|llama|peft|ssh|tokens|torch|transformers|vLLM)\b"
"""Names that begin a sentence in lower case."""
_SENTENCE_END = re.compile(rf"(?<=[.!?])[)\"']?\s+(?=[A-Z0-9`\"'(\[*<-]|{_LOWER})")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|et al|vs|etc|No)\.$")


def sentences(markdown: str) -> list[str]:
    """Return the sentences of paragraphs, list items and cells of tables.

    Headings, code blocks, and cells and items without a verb's room (fewer than four words) are no
    sentences. Code within a line, and the text of a link, are as many words as a reader sees.
    """
    found: list[str] = []
    for block in _blocks(markdown):
        parts = _SENTENCE_END.split(_plain(block))
        merged: list[str] = []
        for part in parts:
            if merged and _ABBREVIATION.search(merged[-1]):
                merged[-1] += f" {part}"
            else:
                merged.append(part)
        found += [part for part in merged if num_words(part) >= 4]
    return found


def num_words(text: str) -> int:
    """Return the number of words; signs of their own (``|``, ``->``, ``+``) are none."""
    return sum(1 for word in text.split() if re.search(r"\w", word))


def _blocks(markdown: str) -> list[str]:
    """Return paragraphs, list items and cells of tables, each as one line."""
    blocks: list[str] = []
    is_code, is_open = False, False
    for line in re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL).splitlines():
        if _FENCE.match(line):
            is_code = not is_code
            is_open = False
        elif is_code:
            continue
        elif line.lstrip().startswith("|"):
            is_open = False
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            blocks += [cell.strip() for cell in cells if cell.strip(" -:")]
        elif not line.strip() or _HEADING.match(line):
            is_open = False
        elif _ITEM.match(line):
            blocks.append(_ITEM.sub("", line))
            is_open = True
        elif is_open:
            blocks[-1] += f" {line.strip()}"
        else:
            blocks.append(line.strip())
            is_open = True
    return blocks


def _plain(text: str) -> str:
    """Return a line as a reader sees it: without the addresses of links; code is one word."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "Code", text)
    return re.sub(r"<[^>]*>|\*\*", " ", text)
