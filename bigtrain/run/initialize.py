"""`checkpoint.initialize_from`: a new run that starts from the weights of something that exists.

The model is always that of `model.config`; only its weights come from elsewhere, so the optimizer,
the schedule and the data begin anew. Of a run or a checkpoint they are the fp32 masters, rounded
nowhere; of a Hugging Face directory what it holds, as with `model.path`, which names both the model
and its weights and therefore excludes this setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from bigtrain.config import ModelSection, RunConfig
from bigtrain.engine.build import TrainEngine
from bigtrain.engine.checkpoint import restore_weights
from bigtrain.errors import CheckpointError, ConfigError, ModelError, Problem
from bigtrain.run import checkpoints
from bigtrain.run.session import Session

KEY = "checkpoint.initialize_from"


@dataclass(frozen=True)
class WeightsSource:
    """Where the weights come from: `checkpoint` (a run's or a checkpoint's directory), or
    `hugging_face` (a directory or hub name), or neither."""

    checkpoint: Path | None = None
    hugging_face: str | None = None

    @contextmanager
    def building(self, config: RunConfig) -> Iterator[RunConfig]:
        """The configuration to build the model with; its errors name this setting."""
        if self.hugging_face is None:
            yield config
            return
        section = ModelSection.model_validate(
            {**config.model.model_dump(), "path": self.hugging_face, "config": None}
        )
        try:
            yield config.model_copy(update={"model": section})
        except ModelError as error:
            raise ModelError(str(error).replace("model.path", KEY)) from error

    def fill(self, session: Session, engine: TrainEngine) -> None:
        """Give an engine that was just built the weights of a checkpoint. Collective.

        Raises CheckpointError on every process if there is none that is whole and of this model.
        """
        if self.checkpoint is None:
            return
        found: list[Path | CheckpointError | None] = [None]
        if session.world.is_main:
            try:
                found = [_find(self.checkpoint)]
            except CheckpointError as error:
                found = [error]
        dist.broadcast_object_list(found, src=0)
        directory = found[0]
        if not isinstance(directory, Path):
            raise CheckpointError(f"{KEY}: {directory}")
        try:
            restore_weights(engine, directory / checkpoints.TENSORS)
        except CheckpointError as error:
            raise CheckpointError(f"{KEY}: {error}") from error
        session.say(f"weights initialized from {directory}")


def weights_source(config: RunConfig) -> WeightsSource:
    """What `checkpoint.initialize_from` names. Raises ConfigError if it cannot be used."""
    source = config.checkpoint.initialize_from
    if source is None:
        return WeightsSource()
    path = Path(source)
    if path.resolve() == Path(config.output.directory).resolve():
        raise ConfigError(
            Problem(
                KEY,
                source,
                "is this run's own output.directory, which a run goes on from by itself",
                "leave it out, or set another output.directory",
            )
        )
    if (path / "checkpoints").is_dir() or (path / checkpoints.MANIFEST).is_file():
        return WeightsSource(checkpoint=path)
    if (path / "config.json").is_file() and not (path / "deepspeed.json").is_file():
        return WeightsSource(hugging_face=source)
    if path.exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        what = "is no run, checkpoint or Hugging Face directory" if path.exists() else "not found"
        raise ConfigError(Problem(KEY, source, what, "name one that holds a checkpoint or weights"))
    return WeightsSource(hugging_face=source)


def _find(directory: Path) -> Path:
    if not (directory / checkpoints.MANIFEST).is_file():
        return checkpoints.find(directory, None, "small")
    reason = checkpoints.damage(directory)
    if reason is not None:
        raise CheckpointError(f"damaged: {reason}")
    return directory
