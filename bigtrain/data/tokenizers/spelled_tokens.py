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
        # One pattern for each prefix of names, which is searched by the prefix: 20 times faster.
        names_by_prefix: dict[bytes, list[bytes]] = {}
        for name in sorted(names - {b""}, key=len, reverse=True):
            names_by_prefix.setdefault(name[:2], []).append(name)
        self._patterns = [
            re.compile(b"|".join(map(re.escape, group))) for group in names_by_prefix.values()
        ]

    def count(self, contents: Sequence[bytes]) -> Counter[str]:
        """Return how often documents, given as UTF-8, have the text of every special token."""
        joined = b"\0".join(contents)
        counts: Counter[str] = Counter()
        for pattern in self._patterns:
            counts.update(match.decode("utf-8") for match in pattern.findall(joined))
        return counts
