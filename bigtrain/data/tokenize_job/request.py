"""Request to `bigtrain tokenize`, and its options for reading inputs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bigtrain.data.documents.parts import ReadOptions
from bigtrain.data.shards.manifest import WORK_DIRECTORY, OptionsRecord
from bigtrain.data.sources.discovery import Selection
from bigtrain.data.tokenize_job.work_division import WorkerRank
from bigtrain.data.tokenizers.chat_template import ChatTemplate
from bigtrain.data.tokenizers.selection import Choice
from bigtrain.data.tokenizers.tokenizer import NoChatTemplate, Tokenizer


@dataclass(frozen=True)
class BuildRequest:
    """Request to `bigtrain tokenize`. `workers` and `share` do not change the result.

    `chat_template`: a template file for conversations, instead of the tokenizer's own.
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
            roles=self.options.roles,
        )

    @property
    def needs_template(self) -> bool:
        """True if every document is rendered by a chat template; completions may be plain text."""
        return self.options.chat and self.options.chat_format != "prompt-completion"

    def beginning_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens with which plain-text documents begin. Raises as
        `Tokenizer.beginning`."""
        policy = self.options.beginning_of_text
        if policy is None:  # from a version before this setting
            policy = "auto" if self.options.chat else "never"
        return tokenizer.beginning(policy)

    def find_template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        """Return the chat template for its conversations; None if there are none, or if none is
        needed and the tokenizer has none. Raises DataError as `Tokenizer.chat_template`."""
        if not self.options.chat:
            return None
        try:
            return tokenizer.chat_template(self.chat_template)
        except NoChatTemplate:
            if self.needs_template:
                raise
            return None
