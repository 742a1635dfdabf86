"""Results of a run: metrics, weights, an export, and text generation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bigtrain.errors import ConfigError, DataError, Problem

if TYPE_CHECKING:
    import torch

    from bigtrain.models.generation import Conversation

Kind = Literal["step", "evaluation", "event", "outer_step"]


@dataclass(frozen=True)
class Exported:
    """Export: its directory, the step of its checkpoint, and its Hub address, if it
    was pushed there."""

    directory: Path
    step: int
    address: str | None = None


def read_metrics(run: str | Path, kind: Kind | None = "step") -> list[dict[str, Any]]:
    """Return the lines of a run's ``metrics.jsonl``, in order; also of a running run.

    run: a run directory. kind: logged steps, evaluations, events or outer steps; None: all lines.
    The fields are those of docs/reference/metrics.md. Raises DataError if the file is missing or
    corrupt.
    """
    from bigtrain.run.reporting.metrics_lines import kind_of, read_lines

    lines = read_lines(Path(run) / "metrics.jsonl")
    return [line for line in lines if kind is None or kind_of(line) == kind]


def read_metric_columns(run: str | Path, kind: Kind | None = "step") -> dict[str, list[Any]]:
    """Return `read_metrics` as a list of values by field, with None if a line has no such
    field, in the format of pandas, polars and plots."""
    lines = read_metrics(run, kind)
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [line.get(name) for line in lines] for name in names}


def load_state_dict(run: str | Path, step: int | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint by their Hugging Face names, on the CPU.

    run: a run directory, whose checkpoint of `step` is read (default: the newest complete
    one), or the directory of one checkpoint. Trained weights are the float32 masters, exactly;
    buffers have their own dtype; for a run with adapters, only the adapters. Every checksum is
    compared, for any topology that wrote the checkpoint. Raises CheckpointError.
    """
    return dict(_weights(Path(run), step))


def _weights(run: Path, step: int | None) -> Iterator[tuple[str, torch.Tensor]]:
    from bigtrain.engine.checkpoint.lazy import open_weights
    from bigtrain.run.checkpointing import checkpoints

    directory = run
    if step is not None or not (run / checkpoints.MANIFEST).is_file():
        directory = checkpoints.find(run, step, "small")
    listing = checkpoints.list_tensors(directory)
    for name, tensor in open_weights(directory / checkpoints.TENSORS, listing).items():
        yield name, tensor.read()


def export_run(
    run: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    merge: bool = False,
    max_shard_size: str = "5GB",
    push_to_hub: str | None = None,
    private: bool = False,
    warn: Callable[[str], None] | None = None,
) -> Exported:
    """Write a checkpoint's weights as a verified Hugging Face directory.

    step: of the checkpoint (default: the newest complete one). best: select the best one
    by the run's ``evaluation.best``. dtype: of the stored weights
    (default: the one the run computed in; of adapters float32). merge: adapters into the weights of
    their base. max_shard_size: of a weight file. push_to_hub: also upload to this OWNER/NAME,
    private if it is new and `private`. warn: gets a line on each newer checkpoint that is corrupt
    and skipped (default: print to standard error).

    Raises ConfigError before anything is written if the Hub cannot be used, CheckpointError or
    ModelError if the checkpoint cannot be exported faithfully; `output` is then unchanged.
    """
    from bigtrain.models.export.hub import push_to_hub as push
    from bigtrain.models.export.hub import refuse_unreachable

    if private and push_to_hub is None:
        rule = "applies to a repository, but none is named"
        raise ConfigError(Problem("--private", None, rule, "--push-to-hub OWNER/NAME"))
    if best and step is not None:
        rule = "both select a checkpoint"
        raise ConfigError(Problem("--best and --step", step, rule, "remove one of them"))
    if push_to_hub is not None:
        refuse_unreachable(push_to_hub)
    # Imports take seconds, which the refusals above avoid.
    from bigtrain.run.checkpointing.listing import best_step
    from bigtrain.run.reporting.library_log import import_log

    with import_log(shown=False):  # DeepSpeed logs the detected machine
        from bigtrain.run.checkpointing.export import export_run as export

    exported_step = export(
        Path(run),
        Path(output),
        step=best_step(Path(run)) if best else step,
        dtype=dtype,
        max_shard_size=max_shard_size,
        merge=merge,
        warn=warn or (lambda text: print(text, file=sys.stderr, flush=True)),
    )
    address = None
    if push_to_hub is not None:
        message = f"Step {exported_step} of a run with bigtrain"
        address = push(Path(output), push_to_hub, private=private, message=message)
    return Exported(Path(output), exported_step, address)


def generate(
    model: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Return `prompt` and its continuation by a Hugging Face directory or Hub model.

    temperature: 0 always selects the most likely token. top_p: nucleus to sample from. seed: of the
    sampling. Raises ModelError if the model cannot be loaded, or the prompt is empty.
    """
    from bigtrain.models.generation import Sampling
    from bigtrain.models.generation import generate as continued

    sampling = Sampling(temperature, top_p, seed)
    return continued(
        str(model),
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        tokenizer=_tokenizer_of(str(model)),
    )


def open_conversation(
    model: str | Path,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Conversation:
    """Return a chat with a Hugging Face directory or Hub model by its tokenizer's chat template:
    ``answer(messages)`` is its answer, which ends at the template's end of a turn.

    The other parameters are those of `generate`; max_new_tokens: of one answer. Raises ModelError
    if the model cannot be loaded, or has no chat template.
    """
    from bigtrain.models.generation import Conversation, Sampling

    sampling = Sampling(temperature, top_p, seed)
    return Conversation(
        str(model),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        tokenizer=_tokenizer_of(str(model)),
    )


def _tokenizer_of(model: str) -> Any:
    """Return the tokenizer of a model's directory from its tokenizer.json; None if there is
    none, or none that can tokenize documents."""
    from bigtrain.data.tokenizers.tokenizer import load_tokenizer

    if not (Path(model) / "tokenizer.json").is_file():
        return None
    try:
        return load_tokenizer(model).huggingface
    except DataError:
        return None
