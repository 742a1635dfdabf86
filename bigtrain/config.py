"""The run YAML as frozen pydantic models: the one owner of everything that changes the mathematics.

Pure: no I/O here (`bigtrain.config_loading` reads files), no torch. Unknown keys are errors at any
depth. Every field says its unit. What the engine does with memory and communication is owned by
the DeepSpeed JSON (`ds_configs/`), where processes run by the launcher.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which Hugging Face causal LM, and how its layers run."""

    path: str | None = Field(
        default=None,
        description="directory or hub name whose weights and configuration the run starts from",
    )
    config: str | dict[str, Any] | None = Field(
        default=None,
        description="start from random weights: a directory or hub name whose configuration is "
        "used, or the configuration itself with its model_type",
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of the Hugging Face configuration to change (not the vocabulary when "
        "weights are loaded)",
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = Field(
        default="auto",
        description="attention implementation of transformers; auto: sdpa where the model has it, "
        "or else eager",
    )
    gradient_checkpointing: Literal["none", "full"] | PositiveInt = Field(
        default="none",
        description="recompute activations in the backward pass: none, full (every layer), or n "
        "(every n-th layer, starting with the first)",
    )
    frozen: tuple[str, ...] = Field(
        default=(),
        description="parameters that are not trained: shell patterns of their names, such as "
        "model.embed_tokens.*",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError(
                "exactly one of model.path (trained weights) and model.config (random weights) "
                "must be set"
            )
        if isinstance(self.config, dict) and "model_type" not in self.config:
            raise ValueError("model.config must name a model_type, for example model_type: llama")
        return self


class SourceSection(Section):
    """One dataset of a mixture."""

    path: str = Field(description="directory written by `bigtrain tokenize`")
    name: str | None = Field(
        default=None,
        description="what its held-out loss is called; default: the directory's own name, or its "
        "path where two have the same",
    )
    weight: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="share of the run's samples, relative to the other sources' weights",
    )
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="instead of weights: how often this source is read while every other one is "
        "read as often as its own epochs say; the share is epochs times its number of samples",
    )


class DataSection(Section):
    """Which token shards, and how samples are cut from them."""

    path: str | None = Field(
        default=None, description="directory written by `bigtrain tokenize`: the only dataset"
    )
    sources: tuple[SourceSection, ...] = Field(
        default=(),
        description="instead of path: datasets to mix, each read without repetition until its own "
        "epoch ends",
    )
    tokenizer: str | None = Field(
        default=None,
        description="tokenizer the shards must have been made with (directory or hub name); "
        "default: the one stored beside the shards",
    )
    mask_end_of_document: bool = Field(
        default=False,
        description="give no loss to the token after an end-of-document token, which cannot be "
        "predicted from the document before it (Megatron's eod_mask_loss)",
    )
    document_boundaries: Literal["ignore", "isolate"] = Field(
        default="ignore",
        description="of documents that share a sample; ignore: attention sees the documents "
        "before; isolate: neither attention nor loss crosses a boundary, and positions, in tokens, "
        "count from each document's beginning in the sample",
    )
    packing: Literal["concatenate", "best_fit"] = Field(
        default="concatenate",
        description="how documents become samples; concatenate: one after another, cut where a "
        "sample is full; best_fit: whole, several in a sample that has room for them "
        "(best-fit-decreasing), padded at the end, and always isolated",
    )
    long_documents: Literal["cut", "truncate"] = Field(
        default="cut",
        description="best_fit, of documents longer than a sample; cut: several samples, the later "
        "ones without what was before; truncate: one, the rest is not trained on",
    )
    chunk_length: PositiveInt | None = Field(
        default=None,
        description="tokens of the pieces whose order is random, a multiple of "
        "batch.sequence_length and by default equal to it: the longest sequence with which the run "
        "can ever go on without reading anything twice in an epoch",
    )
    verify: Literal["sizes", "contents"] = Field(
        default="sizes",
        description="of the shards before training; contents: also read all of them, divided over "
        "the processes, and compare their checksums",
    )
    workers: PositiveInt = Field(
        default=1,
        description="threads of each process that read the batches of coming steps, one step each; "
        "more hide the delays of a network file system",
    )

    @model_validator(mode="after")
    def _one_kind_of_share(self) -> Self:
        if (self.path is None) == (not self.sources):
            raise ValueError(
                "exactly one of data.path (one dataset) and data.sources (a mixture) must be set"
            )
        kinds = {(s.weight is not None, s.epochs is not None) for s in self.sources}
        if kinds and kinds not in ({(True, False)}, {(False, True)}):
            raise ValueError(
                "data.sources: every source must have a weight, or every one epochs, and none both"
            )
        paths = [source.path for source in self.sources]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:
            raise ValueError(f"data.sources: {twice} is listed twice; give it one weight")
        if len(set(self.names)) != len(self.names):
            raise ValueError("data.sources: two sources have the same name")
        return self

    @model_validator(mode="after")
    def _packs_have_no_chunks(self) -> Self:
        if self.packing == "best_fit" and self.chunk_length is not None:
            raise ValueError(
                f"data.chunk_length = {self.chunk_length}: packed documents (data.packing = "
                "'best_fit') are packed anew for another sequence length; leave it out"
            )
        return self

    @property
    def isolates(self) -> bool:
        """Whether documents that share a sample are kept apart."""
        return self.packing == "best_fit" or self.document_boundaries == "isolate"

    @property
    def mixture(self) -> tuple[SourceSection, ...]:
        """The sources, however they were given; `path` is a mixture of one."""
        if self.path is not None:
            return (SourceSection(path=self.path, weight=1.0),)
        return self.sources

    @property
    def names(self) -> tuple[str, ...]:
        """What the sources of `mixture` are called."""
        own = [PurePath(source.path).name for source in self.mixture]
        return tuple(
            source.name or (name if own.count(name) == 1 else source.path)
            for source, name in zip(self.mixture, own, strict=True)
        )

    def key_of(self, source_index: int) -> str:
        """The configuration key that names the path of a source."""
        return "data.path" if self.path is not None else f"data.sources.{source_index}.path"


class BatchSection(Section):
    """The global batch (mathematics) and the micro-batch (a memory knob)."""

    sequence_length: PositiveInt = Field(description="tokens per sample")
    global_samples: PositiveInt | None = Field(
        default=None, description="samples per optimizer step over all processes"
    )
    global_tokens: PositiveInt | None = Field(
        default=None,
        description="the same in tokens; must be a multiple of sequence_length",
    )
    micro_samples: PositiveInt = Field(
        default=1, description="samples per forward pass of one process"
    )

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if (self.global_samples is None) == (self.global_tokens is None):
            raise ValueError(
                "exactly one of batch.global_samples and batch.global_tokens must be set"
            )
        if self.global_tokens is not None and self.global_tokens % self.sequence_length:
            below = self.global_tokens // self.sequence_length * self.sequence_length
            nearest = (
                f"{below} or {below + self.sequence_length}"
                if below
                else (f"{self.sequence_length}")
            )
            raise ValueError(
                f"batch.global_tokens = {self.global_tokens} is not a multiple of "
                f"batch.sequence_length = {self.sequence_length}; nearest: {nearest}"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step, however the batch was given."""
        if self.global_samples is not None:
            return self.global_samples
        assert self.global_tokens is not None
        return self.global_tokens // self.sequence_length


class ParallelSection(Section):
    """Parallel degrees; the data-parallel size is what remains of the world."""

    tensor: PositiveInt = Field(default=1, description="tensor-parallel size")
    pipeline: PositiveInt = Field(default=1, description="pipeline stages")
    sequence: PositiveInt = Field(default=1, description="sequence-parallel (Ulysses) size")


class TrainSection(Section):
    """How long to train."""

    steps: PositiveInt = Field(description="optimizer steps of the whole run")


class OptimizerSection(Section):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) with decay and no-decay groups."""

    type: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = Field(description="peak learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="decoupled decay of the decay group"
    )
    decay_embeddings: bool = Field(
        default=True,
        description="whether embeddings are in the decay group; biases, norms and every other "
        "parameter of fewer than two dimensions never are",
    )
    clip_norm: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="global gradient norm to clip to; 0 turns clipping off"
    )


class ScheduleSection(Section):
    """Learning rate over steps: linear warm-up, then `type`. See `bigtrain.schedule`."""

    type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = Field(
        default=0, description="optimizer steps from zero to the peak"
    )
    decay_steps: PositiveInt | None = Field(
        default=None,
        description="cosine and linear: steps after warm-up until the minimum (default: the rest "
        "of the run); wsd: length of the final decay (default: a tenth of the run)",
    )
    min_lr_ratio: Fraction = Field(
        default=0.1, description="final learning rate as a fraction of the peak"
    )


class PrecisionSection(Section):
    """Number formats."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16",
        description="of parameters in forward and backward; masters and optimizer are float32",
    )
    gradient_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="in which gradients are accumulated and reduced; default: float32 wherever "
        "the engine can, which is everywhere but ZeRO 0 below float32 and float16",
    )
    initial_loss_scale_power: Annotated[int, Field(ge=0, le=32)] = Field(
        default=16, description="float16 only: dynamic loss scaling starts at 2 to this power"
    )


class CheckpointSection(Section):
    """When checkpoints are written and which are kept."""

    every_steps: PositiveInt | None = Field(
        default=None, description="optimizer steps between saves; default: only at the end"
    )
    keep_last: PositiveInt = Field(default=2, description="newest whole checkpoints kept")
    keep_every_steps: PositiveInt | None = Field(
        default=None, description="checkpoints of multiples of this many steps are kept for good"
    )
    keep_best: NonNegativeInt = Field(
        default=0, description="checkpoints kept for their held-out loss, the lowest ones"
    )
    verify: Literal["sizes", "contents"] = Field(
        default="sizes",
        description="of tensor files before a resume: compare sizes, or read and checksum them "
        "whole; what a resume reads of them is checked in either case",
    )
    asynchronous: bool = Field(
        default=True,
        description="train on while a copy in host memory is written; false: wait for the disk",
    )
    max_failures: PositiveInt = Field(
        default=3, description="saves failing one after the other that end the run"
    )
    initialize_from: str | None = Field(
        default=None,
        description="take the weights a new run starts from, and nothing else, from this run "
        "directory, checkpoint or Hugging Face directory or hub name; the model is model.config's",
    )
    allow_changes: tuple[str, ...] = Field(
        default=(),
        description="settings that may differ from the checkpoint's when a run goes on: sections "
        "or keys, such as data, batch.sequence_length, optimizer.lr; other data goes on where each "
        "source stands, with nothing read twice in its epoch",
    )


class LoggingSection(Section):
    """What is written down while training."""

    every_steps: PositiveInt = Field(
        default=10, description="optimizer steps between lines of metrics.jsonl and the log"
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "comet_ml"], ...] = Field(
        default=(), description="trackers of accelerate.tracking that get the same metrics"
    )
    project: str = Field(default="bigtrain", description="project name given to the trackers")


class EvaluationSection(Section):
    """Loss on the held-out documents."""

    every_steps: PositiveInt | None = Field(
        default=None, description="optimizer steps between evaluations; default: only at the end"
    )
    samples: PositiveInt = Field(
        default=256,
        description="held-out samples per evaluation, always the same ones; of each source",
    )


class OutputSection(Section):
    """Where the run writes."""

    directory: str = Field(description="run directory; everything a run writes is below it")
    export: bool = Field(
        default=True, description="write a verified Hugging Face directory at the end of the run"
    )


class EngineSection(Section):
    """Which DeepSpeed JSON says how the engine works."""

    deepspeed_config: str = Field(
        default="zero1",
        description="name in ds_configs/ or path of a DeepSpeed JSON; --deepspeed_config wins",
    )


class RunConfig(Section):
    """One training run. Read it with `bigtrain.config_loading.load_run_config`."""

    model: ModelSection
    data: DataSection
    batch: BatchSection
    train: TrainSection
    optimizer: OptimizerSection
    output: OutputSection
    parallel: ParallelSection = ParallelSection()
    schedule: ScheduleSection = ScheduleSection()
    precision: PrecisionSection = PrecisionSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()
    evaluation: EvaluationSection = EvaluationSection()
    engine: EngineSection = EngineSection()
    seed: NonNegativeInt = Field(default=0, description="of weights, dropout and sample order")

    @model_validator(mode="after")
    def _weights_have_one_source(self) -> Self:
        source = self.checkpoint.initialize_from
        if source is not None and self.model.path is not None:
            raise ValueError(
                f"checkpoint.initialize_from = {source!r} and model.path = {self.model.path!r} "
                "both name the weights to start from; set model.config instead of model.path, or "
                "leave out checkpoint.initialize_from"
            )
        return self

    @model_validator(mode="after")
    def _best_is_known(self) -> Self:
        if self.checkpoint.keep_best == 0 or self.checkpoint.every_steps is None:
            return self
        every, evaluated = self.checkpoint.every_steps, self.evaluation.every_steps
        if evaluated is None or every % evaluated:
            raise ValueError(
                f"checkpoint.keep_best = {self.checkpoint.keep_best} needs a held-out loss at "
                f"every checkpoint: evaluation.every_steps = {evaluated} must divide "
                f"checkpoint.every_steps = {every}"
            )
        return self

    @model_validator(mode="after")
    def _boundaries_have_a_mask(self) -> Self:
        # transformers' flash attention reads boundaries from positions at micro-batch 1 only, and
        # ignores them silently above.
        if self.data.isolates and self.model.attention.startswith("flash"):
            packs = self.data.packing == "best_fit"
            asked = "packing = 'best_fit'" if packs else "document_boundaries = 'isolate'"
            raise ValueError(
                f"model.attention = {self.model.attention!r} cannot isolate documents "
                f"(data.{asked}); set model.attention=sdpa"
            )
        return self

    @model_validator(mode="after")
    def _chunks_hold_samples(self) -> Self:
        length, chunk_length = self.batch.sequence_length, self.data.chunk_length
        if chunk_length is not None and chunk_length % length:
            raise ValueError(
                f"data.chunk_length = {chunk_length} is not a multiple of batch.sequence_length = "
                f"{length}; nearest: {-(-chunk_length // length) * length}"
            )
        return self

    @model_validator(mode="after")
    def _changes_are_of_settings(self) -> Self:
        for entry in self.checkpoint.allow_changes:
            section, _, key = entry.partition(".")
            fields = getattr(type(getattr(self, section, None)), "model_fields", {})
            if entry == "seed":
                raise ValueError(
                    "checkpoint.allow_changes: seed cannot change in a run: which samples it has "
                    "read follows from it"
                )
            if section not in type(self).model_fields or (key and key not in fields):
                raise ValueError(
                    f"checkpoint.allow_changes: {entry} is neither a section nor a key "
                    "(section.key) of a run"
                )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.schedule.warmup_steps > self.train.steps:
            raise ValueError(
                f"schedule.warmup_steps = {self.schedule.warmup_steps} is more than train.steps = "
                f"{self.train.steps}"
            )
        return self
