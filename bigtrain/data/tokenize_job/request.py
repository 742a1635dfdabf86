"""What `bigtrain tokenize` was asked for, and how its inputs are read. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bigtrain.data.documents.parts import ReadOptions
from bigtrain.data.shards.manifest import WORK_DIRECTORY, OptionsRecord
from bigtrain.data.sources.discovery import Selection
from bigtrain.data.tokenize_job.work_division import WorkerRank
from bigtrain.data.tokenizers.selection import Choice


@dataclass(frozen=True)
class BuildRequest:
    """What `bigtrain tokenize` was asked for. `workers` and `share` do not change the result.

    `chat_template`: a file that conversations are rendered by, instead of the tokenizer's own.
    """

    selection: Selection
    options: OptionsRecord
    tokenizer: str
    output: Path
    chat_template: Path | None
    encoder: Choice
    workers: int | None
    share: WorkerRank

    def reading(self) -> ReadOptions:
        return ReadOptions(
            self.selection,
            self.options.text_keys,
            self.options.max_document_bytes,
            self.options.chat,
            self.options.chat_format,
            self.options.learned == "last",
            scratch=self.output / WORK_DIRECTORY,
        )
