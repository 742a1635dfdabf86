"""What `bigtrain tokenize` was asked for, as reading, building and the manifest want it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bigtrain.data.documents.parts import ReadOptions
from bigtrain.data.shards.manifest import (
    DEFAULT_MAX_DOCUMENT_BYTES,
    DEFAULT_SHARD_BYTES,
    WORK_DIRECTORY,
    OptionsRecord,
)
from bigtrain.data.sources.discovery import Selection
from bigtrain.data.tokenize_job.work_division import WorkerRank
from bigtrain.data.tokenizers.selection import Choice


@dataclass(frozen=True)
class BuildRequest:
    """What `bigtrain tokenize` was asked for. `workers` and `share` do not change the result.

    `chat`: the only text key holds conversations, rendered by `chat_template`, a file, or else by
    the tokenizer's own template.
    """

    selection: Selection
    tokenizer: str
    output: Path
    text_keys: tuple[str, ...] = ("text",)
    chat: bool = False
    chat_template: Path | None = None
    held_out: float = 0.0
    shard_bytes: int = DEFAULT_SHARD_BYTES
    max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES
    max_bad_fraction: float = 0.0
    encoder: Choice = "auto"
    parse_special_tokens: bool = False
    workers: int | None = None
    share: WorkerRank = field(default_factory=WorkerRank)

    def reading(self) -> ReadOptions:
        """How documents are taken out of the inputs."""
        return ReadOptions(
            self.selection,
            self.text_keys,
            self.max_document_bytes,
            self.chat,
            scratch=self.output / WORK_DIRECTORY,
        )

    def options(self) -> OptionsRecord:
        """As the manifest says it."""
        return OptionsRecord(
            text_keys=self.text_keys,
            held_out=self.held_out,
            shard_bytes=self.shard_bytes,
            max_document_bytes=self.max_document_bytes,
            max_bad_fraction=self.max_bad_fraction,
            parse_special_tokens=self.parse_special_tokens,
            chat=self.chat,
            dataset_config=self.selection.dataset_config,
            dataset_split=self.selection.dataset_split,
        )
