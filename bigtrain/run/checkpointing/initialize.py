"""Initialization of a new run from existing weights: `model.path`, or `checkpoint.initialize_from`,
of which only the weights are loaded, into the model of `model.config`. Nothing is rounded: a run or
checkpoint provides its fp32 masters, a Hugging Face directory the tensors in its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bigtrain.engine.checkpoint.snapshot import read_weights, restore_weights
from bigtrain.errors import CheckpointError, ConfigError, ModelError, Problem
from bigtrain.models.export.base_record import shortened
from bigtrain.models.weights.checksums import (
    FileSum,
    Sums,
    changes_of,
    files_read_with,
    sum_of,
)
from bigtrain.models.weights.import_hf import Weights, find_weights
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.context import RunContext
from bigtrain.run.preflight import Inputs
from bigtrain.run.segment_context import BaseWeights, SegmentContext
from bigtrain.settings.run_config import ModelSection, RunConfig

KEY = "checkpoint.initialize_from"


@dataclass(frozen=True)
class WeightsSource:
    """Source of the initial weights: `checkpoint` (a run's or a checkpoint's directory),
    `hugging_face` (a directory or hub name), or neither (random)."""

    checkpoint: Path | None = None
    hugging_face: str | None = None

    def building(self, config: RunConfig) -> RunConfig:
        """Return the configuration to build the model with, without random initialization of
        weights that are loaded from Hugging Face files."""
        if self.hugging_face is None or config.model.path is not None:
            return config
        section = ModelSection.model_validate(
            {**config.model.model_dump(), "path": self.hugging_face, "config": None}
        )
        return config.model_copy(update={"model": section})

    def find(self, config: RunConfig, inputs: Inputs) -> Weights | None:
        """Return the Hugging Face weights that a run starts from; None if there are none, or if it
        resumes. Reads file headers only, on any rank. Raises ModelError as `find_weights`."""
        if self.hugging_face is None or checkpoints.list_steps(Path(config.output.directory)):
            return None
        return self._find_weights(config, inputs)

    def _find_weights(self, config: RunConfig, inputs: Inputs) -> Weights:
        assert self.hugging_face is not None
        key = KEY if config.model.path is None else "model.path"
        hf_config, growth = inputs.hf_config, inputs.growth
        if growth is not None:
            from bigtrain.models.weights.vocabulary import base_configuration

            hf_config = base_configuration(hf_config, growth)
        return find_weights(self.hugging_face, hf_config, key, seed=config.seed)

    def fill(
        self, context: SegmentContext, weights: Weights | None, sums: Sums | None = None
    ) -> BaseWeights | None:
        """Load the initial weights into the new engine, and return the Hugging Face weights it has
        read, if any. Collective. `weights`: as returned by `find`; `sums`: their checksums, if
        they were verified before. Raises CheckpointError on every rank without a complete
        checkpoint of this model, ModelError for unreadable or changed files."""
        engine, inputs = context.engine, context.inputs
        if self.hugging_face is not None:
            weights = weights or self._find_weights(context.config, inputs)
            base = BaseWeights(weights, sums or verify_weights(context, weights))
            if unused := weights.unused():
                context.log.info(
                    f"{weights.setting}: these tensors are not part of the model that transformers "
                    f"builds, and are not trained: {shortened(unused)}"
                )

            # Add rows to the embedding and the head if the vocabulary grows.
            growth, model = inputs.growth, context.config.model
            if growth is not None:
                from bigtrain.models.weights.vocabulary import grown_weights

                weights = grown_weights(
                    weights,
                    inputs.hf_config,
                    growth,
                    model,
                    context.config.seed,
                    on_main_rank=context.long_work.on_main_rank,
                )
                assert model.vocabulary is not None
                context.log.info(
                    f"vocabulary grown from {growth.before} to {growth.after} rows "
                    f"({model.vocabulary.new_rows}): {', '.join(growth.names)}"
                )
            read_weights(engine, weights)
            return base
        # A checkpoint provides float32 masters; without one the weights stay random.
        checkpoint = self.checkpoint
        if checkpoint is None:
            return None
        try:
            directory = context.long_work.on_main_rank(
                lambda: find_checkpoint(checkpoint, context.log.info)
            )
            listing = checkpoints.list_tensors(directory)
            restore_weights(engine, directory / checkpoints.TENSORS, listing)
        except CheckpointError as error:
            raise CheckpointError(f"{KEY}: {error}") from error
        context.log.info(f"weights initialized from {directory}")
        return None


def verify_weights(context: RunContext, weights: Weights) -> Sums:
    """Return checksums of the files of `weights`; each rank reads a part of the files. Collective.
    Raises ModelError on every rank if they differ from those listed by an export or an earlier
    launch."""
    world, directory = context.world, weights.files[0].parent

    def sum_rank_files() -> tuple[Sums, list[str]]:
        """Return the checksums of this rank's part of the files, and problems of the files."""
        sums: dict[str, FileSum] = {}
        problems: list[str] = []
        try:
            files = [path.absolute() for path in files_read_with(weights.files)]
            sizes = [path.stat().st_size for path in files]
            from bigtrain.data.shards.verification import rank_slice

            for number in rank_slice(sizes, world.rank, world.size):
                sums[str(files[number])] = sum_of(files[number])
            problems += changes_of(sums, directory, context.directory)
        except (OSError, ModelError) as error:
            problems.append(str(error))
        return sums, problems

    all_sums: dict[str, FileSum] = {}
    all_problems: set[str] = set()
    for rank_sums, rank_problems in context.long_work.on_every_rank(sum_rank_files):
        all_sums |= rank_sums
        all_problems |= set(rank_problems)
    if all_problems:
        lines = "\n".join(f"  {text}" for text in sorted(all_problems))
        raise ModelError(
            f"{weights.setting}: its files are corrupt or have changed -> restore them; if "
            f"the change is intended, remove the list:\n{lines}"
        )
    return all_sums


def weights_source(config: RunConfig) -> WeightsSource:
    """Return the source of the run's weights. Raises ConfigError for an `initialize_from` that
    cannot be used."""
    source = config.checkpoint.initialize_from
    if source is None:
        return WeightsSource(hugging_face=config.model.path)
    path = Path(source)
    if path.resolve() == Path(config.output.directory).resolve():
        raise ConfigError(
            Problem(
                KEY,
                source,
                "is this run's own output.directory, from which a run resumes automatically",
                "remove it, or set another output.directory",
            )
        )
    is_run = (path / "checkpoints").is_dir()
    is_checkpoint = (path / checkpoints.MANIFEST).is_file()
    if is_run or is_checkpoint:
        return WeightsSource(checkpoint=path)
    # A run without checkpoints has a `config.json`, too, and `deepspeed.json` next to it.
    if (path / "config.json").is_file() and not (path / "deepspeed.json").is_file():
        return WeightsSource(hugging_face=source)
    is_hub_name = not source.startswith((".", "/", "~")) and source.count("/") <= 1
    if path.exists() or not is_hub_name:
        rule = "is not a run, checkpoint or Hugging Face folder" if path.exists() else "not found"
        raise ConfigError(Problem(KEY, source, rule, "name a directory with weights"))
    return WeightsSource(hugging_face=source)


def find_checkpoint(directory: Path, warn: Callable[[str], None]) -> Path:
    """Return the checkpoint that `directory`, a run's or a checkpoint's, initializes a run from.
    Reads the complete checkpoint. Raises CheckpointError if there is none, or it is corrupt."""
    if not (directory / checkpoints.MANIFEST).is_file():
        return checkpoints.find(directory, None, "small", warn)
    reason = checkpoints.find_corruption(directory)
    if reason is not None:
        raise CheckpointError(f"corrupt: {reason}")
    return directory
