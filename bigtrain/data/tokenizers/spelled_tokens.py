"""Control tokens that texts spell: counted, because they are encoded as letters."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class SpelledTokens:
    """Counter of the special tokens' texts in documents. Can be pickled."""

    tokenizer_json: str = field(repr=False)

    def __post_init__(self) -> None:
        added = json.loads(self.tokenizer_json).get("added_tokens") or []
        names = {token["content"].encode("utf-8") for token in added if token["special"]}
        # A pattern of names with one beginning is searched by it: twenty times faster.
        by_beginning: dict[bytes, list[bytes]] = {}
        for name in sorted(names - {b""}, key=len, reverse=True):
            by_beginning.setdefault(name[:2], []).append(name)
        self._patterns = [
            re.compile(b"|".join(map(re.escape, group))) for group in by_beginning.values()
        ]

    def count(self, contents: Sequence[bytes]) -> Counter[str]:
        """Return how often documents, given as UTF-8, have the text of each special token."""
        joined = b"\0".join(contents)
        found: Counter[str] = Counter()
        for pattern in self._patterns:
            found.update(match.decode("utf-8") for match in pattern.findall(joined))
        return found
