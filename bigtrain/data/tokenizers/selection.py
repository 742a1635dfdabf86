"""Selection of the fastest encoder that equals the reference, and of the next one if it does not.

Units written by a fast encoder before it was found wrong are built again, so no token depends on
the selection.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal, get_args

from bigtrain.data.tokenizers.encoders import FAST_ENCODERS, Encoder, EncoderError, ReferenceEncoder
from bigtrain.data.tokenizers.equivalence import check_equivalence
from bigtrain.errors import DataError

logger = logging.getLogger(__name__)

Choice = Literal["auto", "gigatoken", "fastokens", "reference"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


@dataclass
class EncoderQueue:
    """Encoders to use, fastest first, and the reasons why earlier ones were rejected.

    `current` agrees with the reference on the edge cases; the reference itself is the last.
    """

    reference: ReferenceEncoder
    candidates: list[type[Encoder]]
    reasons: list[str] = field(default_factory=list)
    current: Encoder = field(init=False)

    def __post_init__(self) -> None:
        self._advance()

    @property
    def reason(self) -> str:
        """Reason why this encoder is used and no faster one; empty for the fastest."""
        return "; ".join(self.reasons)

    def reject(self, why: str) -> None:
        """Reject the current encoder, select the next, and log it."""
        self._note(self.current, why)
        self._advance()

    def _note(self, encoder: Encoder, why: str) -> None:
        self.reasons.append(f"not {encoder.engine()}: {why}")
        logger.warning("encoder %s is not used: %s", encoder.engine(), why)

    def _advance(self) -> None:
        while self.candidates:
            reference = self.reference
            kind = self.candidates.pop(0)
            encoder = kind(
                reference.tokenizer_json,
                reference.end_of_document_id,
                reference.parse_special_tokens,
                reference.beginning_ids,
            )
            try:
                check_equivalence(encoder, reference)
            except EncoderError as error:
                self._note(encoder, str(error))
                continue
            self.current = encoder
            return
        self.current = self.reference


def choose_encoder(
    reference: ReferenceEncoder, choice: Choice, read_once: bool = False
) -> EncoderQueue:
    """Return the encoders that `choice` allows; the current one agrees on the edge cases.

    `read_once`: the input can be read only once, so no unit could be rebuilt if a fast encoder
    turns out wrong; then only the reference is used. Raises DataError for an unknown choice.
    """
    if choice not in CHOICES:
        raise DataError(f"--encoder {choice}: not one of {', '.join(CHOICES)}")
    if choice == "reference":
        return EncoderQueue(reference, [], ["requested: --encoder reference"])
    if read_once:
        reason = "the input can be read only once, so a fast encoder's work could not be repeated"
        logger.warning("the reference encoder is used: %s", reason)
        return EncoderQueue(reference, [], [reason])
    if choice == "auto":
        return EncoderQueue(reference, list(FAST_ENCODERS.values()))
    return EncoderQueue(reference, [FAST_ENCODERS[choice]])
