"""Sections on the data: shards, packing of documents into samples, batch size, added tokens."""

import os.path
from bisect import bisect_right
from itertools import accumulate, pairwise
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from bigtrain.settings.sections.base import PositiveInt, Section, nearest_multiples
from bigtrain.settings.sections.extensions import SamplesSection


class SourceSection(Section):
    """One dataset of a mixture."""

    path: str
    """directory written by `bigtrain tokenize`"""
    name: str | None = None
    """name of its held-out loss; default: the directory's own name, or its path where two have the
    same name"""
    weight: Annotated[float, Field(gt=0)] | None = None
    """share of the run's samples, relative to the other sources' weights"""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """instead of weights: times this source is read while every other one is read as often as its
    own epochs set; the share is epochs times its number of samples"""


class DataSection(Section):
    """Token shards, and how documents are packed into samples."""

    path: str | None = None
    """directory written by `bigtrain tokenize`: the only dataset"""
    sources: tuple[SourceSection, ...] = ()
    """instead of path: datasets to mix, each read without repetition until its own epoch ends"""
    samples: SamplesSection | None = None
    """train on samples of code of yours, instead of the training documents of path, whose tokenizer
    and held-out documents the run uses; absent: on the shards"""
    tokenizer: str | None = None
    """tokenizer the shards must have been made with (directory or hub name); default: the one
    stored with the shards"""
    allow_other_tokenizer: bool = False
    """train weights (of model.path or checkpoint.initialize_from) on shards whose token ids mean
    other tokens than to the tokenizer in their directory; without it that is refused"""
    mask_end_of_document: bool = False
    """give no loss to the token after an end-of-document token, which cannot be predicted from the
    document before it (Megatron's eod_mask_loss)"""
    document_boundaries: Literal["ignore", "isolate"] = "ignore"
    """where documents share a sample; ignore: attention also sees the documents before; isolate:
    neither attention nor loss crosses a boundary, and positions, in tokens, start at 0 with each
    document in the sample"""
    packing: Literal["concatenate", "best_fit", "none"] = "concatenate"
    """how documents become samples; concatenate: one after another, split where a sample is full;
    best_fit: undivided, several in a sample that has room for them (best-fit-decreasing), padded at
    the end, and always isolated; none: one in a sample, padded at the end"""
    long_documents: Literal["cut", "truncate"] = "cut"
    """best_fit and none, for documents longer than a sample; cut: several samples, the later ones
    without the context before; truncate: one sample, the rest is dropped. Of preference pairs only
    truncate is possible; cut: a longer answer is refused"""
    balance_attention: bool = True
    """with packing best_fit: divide the samples of a step among the ranks by their attention, the
    sum of squares of the lengths of their documents, so that no rank waits for one with long
    documents; which samples a step has does not change"""
    chunk_length: PositiveInt | None = None
    """tokens of the chunks that are shuffled, a multiple of batch.sequence_length and by default
    equal to it; it is the longest sequence to which a running run can be extended
    (batch.sequence_length) with contiguous tokens: beyond it, samples of the current epoch are
    joined from several chunks"""
    verify: Literal["sizes", "contents"] = "sizes"
    """of the shards before training; contents: also read all of them, divided over the ranks, and
    compare their checksums. What a step reads is verified in any case"""
    workers: PositiveInt = 1
    """threads of each rank that read the batches of coming steps, one step each; more hide the
    delays of a network file system"""

    @model_validator(mode="after")
    def _one_kind_of_share(self) -> Self:
        if (self.path is None) == (not self.sources):
            fix = "data.path=null, or data.sources=[]"
            if self.path is None:
                fix = "data.path=SHARDS, or add data.sources"
            raise ValueError(
                "exactly one of data.path (one dataset) and data.sources (a mixture) must be set "
                f"-> {fix}"
            )
        # All sources have a weight and no epochs, or epochs and no weight.
        num_weights = sum(source.weight is not None for source in self.sources)
        num_epochs = sum(source.epochs is not None for source in self.sources)
        if (num_weights, num_epochs) not in ((len(self.sources), 0), (0, len(self.sources))):
            raise ValueError(
                "data.sources: every source must have a weight, or every one epochs, and none both "
                "-> write weight: 1 (or epochs: 1) in each, and omit the other"
            )
        paths = [os.path.normpath(source.path) for source in self.sources]
        for second, path in enumerate(paths):
            first = paths.index(path)
            if first < second:
                raise ValueError(
                    f"data.sources: {path} is listed twice; give it one weight, the sum of those "
                    f"of data.sources.{first} and data.sources.{second}"
                )
        if len(set(self.names)) != len(self.names):
            raise ValueError("data.sources: two sources have the same name")
        return self

    @model_validator(mode="after")
    def _samples_are_complete(self) -> Self:
        if self.samples is None:
            return self
        unread_settings = [
            f"data.{name} = {getattr(self, name)!r}"
            for name in ("packing", "chunk_length", "mask_end_of_document")
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        fix = "omit it"
        if self.path is None:
            unread_settings.insert(0, "data.sources")
        if not self.path:
            fix += "; name a dataset with the tokenizer in data.path"
        if unread_settings:
            raise ValueError(
                f"data.samples: {unread_settings[0]} has no meaning for items, each of which is "
                f"one sample -> {fix}"
            )
        return self

    @model_validator(mode="after")
    def _packs_have_no_chunks(self) -> Self:
        if self.has_complete_documents and self.chunk_length is not None:
            raise ValueError(
                f"data.chunk_length = {self.chunk_length}: samples of complete documents "
                f"(data.packing = {self.packing!r}) are made again for another sequence length; "
                "omit it"
            )
        return self

    @property
    def has_complete_documents(self) -> bool:
        """True if a sample is one or several complete documents, or a piece of a longer one."""
        return self.packing != "concatenate"

    @property
    def isolates(self) -> bool:
        """True if attention and loss do not cross documents that share a sample."""
        return self.packing == "best_fit" or self.document_boundaries == "isolate"

    @property
    def is_each_document_separate(self) -> bool:
        """True if attention crosses no documents: they are isolated, or share no sample."""
        return self.isolates or self.packing == "none"

    @property
    def mixture(self) -> tuple[SourceSection, ...]:
        """The sources; with `path`, a mixture with a single source."""
        if self.path is not None:
            return (SourceSection(path=self.path, weight=1.0),)
        return self.sources

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources of `mixture`."""
        directory_names = [PurePath(source.path).name for source in self.mixture]
        return tuple(
            source.name or (name if directory_names.count(name) == 1 else source.path)
            for source, name in zip(self.mixture, directory_names, strict=True)
        )

    def key_of(self, source_index: int) -> str:
        """Return the configuration key that names the path of a source."""
        return "data.path" if self.path is not None else f"data.sources.{source_index}.path"


class BatchPhaseSection(Section):
    """Phase of a run with a batch of its own. Omitted keys are those of the section ``batch``."""

    steps: PositiveInt
    """optimizer steps of the phase"""
    sequence_length: PositiveInt | None = None
    """tokens per sample"""
    global_batch_size: PositiveInt | None = None
    """samples per optimizer step over all ranks"""
    global_tokens: PositiveInt | None = None
    """the same in tokens; must be a multiple of sequence_length"""
    micro_batch_size: PositiveInt | None = None
    """samples per forward pass of one rank"""


class BatchSection(Section):
    """The global batch (mathematics) and the micro-batch (a memory knob)."""

    phases: tuple[BatchPhaseSection, ...] = ()
    """phases with another batch, in this order from the first step on; the keys below hold for the
    rest of train.steps"""
    sequence_length: PositiveInt
    """tokens per sample"""
    global_batch_size: PositiveInt | None = None
    """samples per optimizer step over all ranks"""
    global_tokens: PositiveInt | None = None
    """the same in tokens; must be a multiple of sequence_length"""
    micro_batch_size: PositiveInt = 1
    """samples per forward pass of one rank"""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if (self.global_batch_size is None) == (self.global_tokens is None):
            fix = "batch.global_batch_size=null, or batch.global_tokens=null"
            if self.global_tokens is None:
                fix = "batch.global_batch_size=SAMPLES"
            raise ValueError(
                "exactly one of batch.global_batch_size and batch.global_tokens must be set -> "
                f"{fix}"
            )
        if self.global_tokens is not None and self.global_tokens % self.sequence_length:
            nearest = nearest_multiples(self.global_tokens, self.sequence_length)
            raise ValueError(
                f"batch.global_tokens = {self.global_tokens} is not a multiple of "
                f"batch.sequence_length = {self.sequence_length}; nearest: {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _phases_have_batches(self) -> Self:
        for number in range(len(self.phases)):
            try:
                self.of_phase(number)
            except ValidationError as error:
                text = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(text.replace("batch.", f"batch.phases[{number}].")) from None
        return self

    def of_phase(self, number: int) -> "BatchSection":
        """Return the batch of phase `number` as a section without phases; the number after the last
        phase is the batch that this section itself sets."""
        values = self.model_dump(exclude={"phases"}, exclude_unset=True)
        if number == len(self.phases):
            return BatchSection(**values)
        phase_values = self.phases[number].model_dump(exclude={"steps"}, exclude_none=True)
        # A phase may give the global batch in the other unit.
        size_keys = {"global_batch_size", "global_tokens"}
        if phase_values.keys() & size_keys:
            values = {key: value for key, value in values.items() if key not in size_keys}
        return BatchSection(**(values | phase_values))

    def ends(self) -> tuple[int, ...]:
        """Return the last step of each phase."""
        return tuple(accumulate(phase.steps for phase in self.phases))

    def at(self, step: int) -> "BatchSection":
        """Return the batch of the step after `step` steps as a section without phases; `self` if
        there are none."""
        return self.of_phase(bisect_right(self.ends(), step)) if self.phases else self

    def tokens_until(self, step: int) -> int:
        """Return the tokens of the first `step` steps, for one row per sample."""
        bounds = [0, *(end for end in self.ends() if end < step), step]
        return sum(
            (end - begin) * self.at(begin).samples_per_step * self.at(begin).sequence_length
            for begin, end in pairwise(bounds)
        )

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step, however the batch was given."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        assert self.global_tokens is not None
        return self.global_tokens // self.sequence_length


class TokenizerSection(Section):
    """Tokens added to a tokenizer. `bigtrain tokenizer --config` writes the grown one, the data is
    tokenized with it, and a run compares it with that of the data."""

    base: str | None = None
    """directory, hub name or address of the tokenizer that tokens are added to; default:
    model.path"""
    add_special_tokens: tuple[str, ...] = ()
    """texts that become control tokens, such as <|im_start|>: the text of documents never becomes
    them, and decoding can skip them; their ids come first"""
    add_tokens: tuple[str, ...] = ()
    """texts that become one token each, wherever they occur"""

    @property
    def added(self) -> tuple[str, ...]:
        """All added texts, in the order of the ids."""
        return (*self.add_special_tokens, *self.add_tokens)

    def key_of(self, text: str) -> str:
        """Return the setting that names an added text."""
        name = "add_special_tokens" if text in self.add_special_tokens else "add_tokens"
        return f"tokenizer.{name}"

    @model_validator(mode="after")
    def _adds_each_text_once(self) -> Self:
        if not self.added:
            raise ValueError(
                "tokenizer adds no tokens -> name them in tokenizer.add_special_tokens or "
                "tokenizer.add_tokens; or omit tokenizer (data.tokenizer names one that the "
                "data must have been tokenized with)"
            )
        for number, text in enumerate(self.added):
            if not text.strip():
                raise ValueError(
                    f"{self.key_of(text)}: {text!r} must have characters other than spaces -> "
                    "omit it"
                )
            if text in self.added[:number]:
                raise ValueError(f"{self.key_of(text)}: {text} is to be added twice -> once")
        return self
