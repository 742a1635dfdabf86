"""Results of a run (metrics, weights, export, generation, checkpoints, report), and shards."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from bigtrain.errors import ConfigError, DataError, ModelError, Problem, without_secrets

if TYPE_CHECKING:
    import torch

    from bigtrain.models.generation import Conversation, Sampling
    from bigtrain.models.weights.vocabulary import VocabularyResize
    from bigtrain.run.checkpointing.listing import ListedCheckpoint

Kind = Literal["step", "evaluation", "event", "outer_step"]


@dataclass(frozen=True)
class Exported:
    """Export: directory, step of its checkpoint, and its Hub address, if it was pushed."""

    directory: Path
    step: int
    address: str | None = None


def read_metrics(run: str | Path, kind: Kind | None = "step") -> list[dict[str, Any]]:
    """Return the lines of a run's ``metrics.jsonl``, in order; also of a running run.

    run: a run directory. kind: logged steps, evaluations, events or outer steps; None: all lines;
    docs/reference/metrics.md has their fields. Raises DataError if the file is missing or corrupt.
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
    from bigtrain.engine.checkpoint.lazy import open_weights
    from bigtrain.run.checkpointing import checkpoints

    directory = Path(run)
    if step is not None or not (directory / checkpoints.MANIFEST).is_file():
        directory = checkpoints.find(directory, step, "small")
    listing = checkpoints.list_tensors(directory)
    weights = open_weights(directory / checkpoints.TENSORS, listing)
    return {name: tensor.read() for name, tensor in weights.items()}


def export_run(
    run: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    merge: bool = False,
    average: bool = False,
    max_shard_size: str = "5GB",
    push_to_hub: str | None = None,
    private: bool = False,
    warn: Callable[[str], None] | None = None,
) -> Exported:
    """Write a checkpoint's weights as a verified Hugging Face directory.

    step: of the checkpoint (default: the newest complete one). best: select the best one
    by the run's ``evaluation.best``. dtype: of the stored weights
    (default: the one the run computed in; of adapters float32). merge: adapters into the weights of
    their base. average: the moving average of the weights, of a run with ``optimizer.ema``.
    max_shard_size: of a weight file. push_to_hub: also upload to this OWNER/NAME,
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

    with import_log(is_shown=False):  # DeepSpeed logs the detected machine
        from bigtrain.run.checkpointing.export import export_run as export

    exported_step = export(
        Path(run),
        Path(output),
        step=best_step(Path(run)) if best else step,
        dtype=dtype,
        max_shard_size=max_shard_size,
        merge=merge,
        average=average,
        warn=warn or _to_stderr,
    )
    address = None
    if push_to_hub is not None:
        message = f"Step {exported_step} of a run with bigtrain"
        address = push(Path(output), push_to_hub, private=private, message=message)
    return Exported(Path(output), exported_step, address)


def merge_run(
    run: str | Path,
    output: str | Path,
    *,
    steps: Sequence[int] = (),
    last: int | None = None,
    weights: Sequence[float] = (),
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_size: str = "5GB",
    warn: Callable[[str], None] | None = None,
) -> list[int]:
    """Write the mean of several checkpoints of a run as a verified Hugging Face directory, and
    return their steps.

    steps or last: the checkpoints, or how many of the newest complete ones. weights: shares of
    each, oldest first or in the order of `steps` (default: equal). dtype, max_shard_size, warn: as
    for `export_run`. Sums are in float64.

    Raises ConfigError for checkpoints that are not several, CheckpointError if there are too few,
    ModelError for a run with adapters, or if the directory differs; `output` is then unchanged.
    """
    if bool(steps) == (last is not None):
        rule = "are both given" if steps else "are not given"
        raise ConfigError(Problem("--last and --steps", None, rule, "one of them: --last 3"))
    from bigtrain.run.reporting.library_log import import_log

    with import_log(is_shown=False):  # DeepSpeed logs the detected machine
        from bigtrain.run.checkpointing.averaging import chosen_steps
        from bigtrain.run.checkpointing.averaging import merge_run as merge

    warn = warn or _to_stderr
    selected_steps = chosen_steps(Path(run), steps, last, warn)
    merge(
        Path(run),
        Path(output),
        selected_steps,
        shares=weights,
        dtype=dtype,
        max_shard_size=max_shard_size,
        warn=warn,
    )
    return selected_steps


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _sampling(max_new_tokens: int, temperature: float, top_p: float, seed: int) -> Sampling:
    """Return the settings of a sampling. Raises ConfigError for values out of range."""
    problems = []
    if max_new_tokens < 1:
        problems.append(
            Problem("max_new_tokens", max_new_tokens, "must be at least 1", "for example 1")
        )
    if not 0 <= temperature < math.inf:
        rule = "must be a number, at least 0"
        problems.append(Problem("temperature", temperature, rule, "for example 0"))
    if not 0 < top_p <= 1:
        rule = "must be above 0 and at most 1"
        problems.append(Problem("top_p", top_p, rule, "for example 1"))
    if not 0 <= seed < 2**63:
        rule = "must be an integer from 0 to below 2^63"
        problems.append(Problem("seed", seed, rule, "for example 0"))
    if problems:
        raise ConfigError(problems, "the options of generate")
    from bigtrain.models.generation import Sampling

    return Sampling(temperature, top_p, seed)


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
    sampling. Raises ModelError if the model cannot be loaded, or the prompt is empty or too long,
    ConfigError for a number out of range.
    """
    sampling = _sampling(max_new_tokens, temperature, top_p, seed)
    from bigtrain.models.generation import generate as continued

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

    max_new_tokens: of an answer. Other parameters are as for `generate`. Raises ModelError if
    the model cannot be loaded, or has no chat template.
    """
    sampling = _sampling(max_new_tokens, temperature, top_p, seed)
    from bigtrain.models.generation import Conversation

    return Conversation(
        str(model),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        tokenizer=_tokenizer_of(str(model)),
    )


def _tokenizer_of(model: str) -> Any:
    """Return the tokenizer of a model's directory from its tokenizer.json; None if the file is
    missing, or cannot tokenize documents."""
    from bigtrain.data.tokenizers.tokenizer import load_tokenizer

    if not (Path(model) / "tokenizer.json").is_file():
        return None
    try:
        return load_tokenizer(model).huggingface
    except DataError:
        return None


NewRows = Literal["mean_covariance", "mean", "normal"]


def add_tokens(
    base: str | Path,
    output: str | Path,
    *,
    tokens: Sequence[str] = (),
    special_tokens: Sequence[str] = (),
) -> dict[str, int]:
    """Write the tokenizer `base` with tokens added to it into the directory `output`; return the
    id of each.

    base: directory or hub name. tokens: texts that become one token each. special_tokens: control
    tokens, which document text never becomes; their ids come first. All ids follow the
    highest existing one. Raises DataError; then no files remain.
    """
    from bigtrain.data.tokenizers.added_tokens import add_tokens as added
    from bigtrain.system.files import new_directory, require_free

    target = Path(output)
    require_free(target)
    tokenizer, ids = added(str(base), tokens, special_tokens)
    with new_directory(target) as directory:
        tokenizer.save(directory)
    return ids


def grow_model(
    model: str | Path,
    tokenizer: str | Path,
    output: str | Path,
    *,
    new_rows: NewRows = "mean_covariance",
    pad_to_multiple_of: int | None = None,
    seed: int = 0,
) -> VocabularyResize:
    """Write `model` with rows for the tokens of a grown `tokenizer` into the directory `output`, a
    verified Hugging Face directory; return the growth.

    model, tokenizer: directories or hub names. new_rows, pad_to_multiple_of: as
    ``model.vocabulary`` of a run. seed: of random rows. Raises ModelError or DataError;
    then nothing is written.
    """
    from bigtrain.data.tokenizers.tokenizer import load_tokenizer
    from bigtrain.models.export.grown import export_grown
    from bigtrain.settings.run_config import VocabularySection

    vocabulary = VocabularySection(new_rows=new_rows, pad_to_multiple_of=pad_to_multiple_of)
    loaded = load_tokenizer(str(tokenizer))
    with TemporaryDirectory(prefix="bigtrain-tokenizer-") as tokenizer_directory:
        loaded.save(Path(tokenizer_directory))
        return export_grown(
            str(model),
            Path(tokenizer_directory),
            loaded.vocab_size,
            Path(output),
            vocabulary=vocabulary,
            seed=seed,
        )


def list_checkpoints(run: str | Path) -> list[ListedCheckpoint]:
    """Return the checkpoints in a run directory, oldest first: complete or corrupt (by sizes; by
    contents of small files), the topology that wrote each, and why it is kept.

    Raises CheckpointError if there is none.
    """
    from bigtrain.run.checkpointing.listing import listed_checkpoints

    return listed_checkpoints(Path(run))


def verify_run(run: str | Path, step: int | None = None) -> dict[int, str | None]:
    """Read the checkpoints of a run again and compare every checksum; return by step why it is
    corrupt, None if it is complete.

    step: of one checkpoint (default: every checkpoint). Raises CheckpointError if there is none.
    """
    from bigtrain.run.checkpointing.listing import verify_checkpoints

    return dict(verify_checkpoints(Path(run), step))


def verify_model(directory: str | Path) -> int:
    """Read the weights of an export again and compare every checksum; return the number of
    files. Raise ModelError with every corrupt one, and for weights of one site of several."""
    from bigtrain.models.weights.checksums import corrupt_weights, is_of_one_site
    from bigtrain.settings.sections.sites import ONE_SITE

    num_files, corrupt = corrupt_weights(Path(directory))
    if corrupt:
        raise ModelError("\n".join(f"{directory} is corrupt: {text}" for text in corrupt))
    if is_of_one_site(Path(directory)):
        raise ModelError(
            f"{directory} has the weights of one site, {ONE_SITE} (README.md) -> verify and use "
            "the export of a site that ended with exit code 0"
        )
    return num_files


@dataclass(frozen=True)
class WrittenReport:
    """Report page: its path, its number of logged steps, and its size in bytes."""

    path: Path
    num_steps: int
    num_bytes: int


def write_report(
    run: str | Path, *, compare: Sequence[str | Path] = (), output: str | Path | None = None
) -> WrittenReport:
    """Write a run as one HTML page: curves, events, settings.

    compare: directories of more runs, drawn into the same charts. output: the page (default:
    report.html in the directory of `run`); an older report is replaced, any other file is not.
    Raises DataError and OutputError.
    """
    from bigtrain.report.page import page_html, write_page
    from bigtrain.report.run_files import open_runs

    runs = open_runs([Path(run), *map(Path, compare)], final=True)
    path = Path(run) / "report.html" if output is None else Path(output)
    html = page_html(runs)
    write_page(path, html)
    num_steps = sum(run_files.metrics.steps.num_rows for run_files in runs)
    return WrittenReport(path, num_steps, len(html))


@dataclass(frozen=True)
class Fetched:
    """Result of a fetch: its bytes, and for a run the step of the checkpoint."""

    directory: Path
    num_bytes: int
    step: int | None


def fetch(
    address: str,
    directory: str | Path,
    *,
    step: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Fetched:
    """Copy a run, a model or a dataset from an address (s3://, https://, ...) to a directory.

    step: for a run, the checkpoint to fetch (default: the newest complete one); no other is
    fetched. say: gets a line on each file. When called again, it resumes. Raises
    DataError; fetched files are kept.
    """
    from bigtrain.system.storage.copies import checkpoint_steps, fetch_tree, list_tree
    from bigtrain.system.storage.stores import is_address

    if not is_address(address):
        raise DataError(f"{address} is not an address, such as s3://bucket/runs/mine -> cp -r")
    # A fetch of a run has a single checkpoint, and everything outside of checkpoints/.
    address = address.rstrip("/")
    steps = checkpoint_steps(list(list_tree(address)))  # newest first; empty unless it is a run
    if step is not None and step not in steps:
        listed = ", ".join(map(str, steps)) or "none"
        raise DataError(
            f"{without_secrets(address)} has no complete checkpoint of step {step} -> one of "
            f"{listed}"
        )
    fetched_step = steps[0] if steps and step is None else step

    def is_wanted(name: str) -> bool:
        if not name.startswith("checkpoints/"):
            return True
        return fetched_step is not None and name.startswith(f"checkpoints/step-{fetched_step:08d}/")

    target = Path(directory)
    try:
        num_bytes = fetch_tree(address, target, is_wanted, say or (lambda text: None))
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error}") from error
    return Fetched(target, num_bytes, fetched_step)
