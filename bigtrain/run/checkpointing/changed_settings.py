"""Whether a run may resume from a checkpoint with the settings, data and base model that it has
now. Not collective; imports no torch.

A checkpoint of adapters has no base weights: its `state.json` lists the checksums of the base's
files under `base`, and resume and export refuse a different base.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from bigtrain.data.samples.phases import Phase, SourcePhase, differences, next_phase
from bigtrain.errors import CheckpointError, CorruptCheckpointError
from bigtrain.models.weights.checksums import Sums, files_read_with, sum_of
from bigtrain.run.checkpointing import checkpoints
from bigtrain.settings.lr_schedule import learning_rate_at
from bigtrain.settings.run_config import BatchSection, RunConfig
from bigtrain.settings.sections.optimizer import OPTIMIZERS

# Settings that may change, since they do not change the mathematics. Every other setting must be
# equal. The data phases compare which tokens are read, in which proportions.
_FREE_SECTIONS = frozenset(
    "output logging checkpoint evaluation engine parallel profile watchdog guard callbacks".split()
)
_FREE = frozenset(
    """
    batch.micro_batch_size
    model.attention model.gradient_checkpointing model.loss model.loss_chunk_tokens model.tiled_mlp
    model.kernels model.compile model.activation_offload
    data.path data.sources data.tokenizer data.allow_other_tokenizer data.balance_attention
    data.verify data.workers
    objective.reference optimizer.ema
    sites.timeout_seconds sites.server sites.token_file sites.certificate_file sites.start_server
    """.split()
)
_PACKING_KEYS = ("batch.sequence_length", "data.packing", "data.long_documents")
"""Settings by which documents are packed."""
_SHAPE_KEYS = (
    "model.config",
    "model.type",
    "model.overrides",
    "model.path",
    "model.vocabulary",
)
"""Settings that may give tensors other shapes, into which no checkpoint can be read."""
_TRAINED_KEYS = (
    "model.frozen objective.type objective.mtp_weight adapters adapters.rank adapters.targets "
    "adapters.target_parameters adapters.modules_to_save adapters.dora adapters.init"
).split()
"""Settings by which other tensors may be trained, of which a checkpoint has no values or states."""


class Parameters(Protocol):
    """Parameters that decay, and matrices that Muon updates
    (`bigtrain.models.equivalence.parameter_plan`)."""

    def record(self) -> dict[str, Any]:
        """Return the record in a checkpoint."""


def refuse_other_run(
    config: RunConfig,
    sources: Sequence[SourcePhase] | None = None,
    parameters: Parameters | None = None,
) -> Path | None:
    """Return the checkpoint that the run would resume from, or None. Reads no tensors. Compares as
    `resumed_phases`, without `sources` or `parameters` if they are None. Raises CheckpointError for
    other settings."""
    directory = Path(config.output.directory)
    for path in checkpoints.usable(directory, lambda _reason: None):
        try:
            document = checkpoints.read_state(path)
        except CorruptCheckpointError:
            continue  # the run skips it, too, with a warning
        if sources is not None:
            resumed_phases(document, config, sources, path, parameters)
        else:
            _refuse_changes(_changed_settings(document, config), document, config, path)
        return path
    return None


def resumed_phases(
    document: dict[str, Any],
    config: RunConfig,
    sources: Sequence[SourcePhase],
    directory: Path,
    parameters: Parameters | None = None,
) -> tuple[Phase, ...]:
    """Return the data phases with which a run resumes from a checkpoint with the ``state.json``
    `document`: one more if the data has changed (`bigtrain.data.samples.phases`). `parameters`: of
    the current model. Raises CheckpointError with every changed setting that
    ``checkpoint.allow_changes`` does not name, and for a change of the data that cannot be
    followed."""
    changes = _changed_settings(document, config)
    if parameters is not None:
        changes += _changed_groups(document["parameters"], parameters, config)
    packing_before = document["config"]["data"].get("packing", "concatenate")
    if packing_before != "concatenate" or config.data.has_complete_documents:
        # Packing permutes the documents of an epoch, so a change leaves unknown what is unread.
        packing_lines = [f"  {key}: {text}" for key, text in changes if key in _PACKING_KEYS]
        if packing_lines:
            raise CheckpointError(
                f"{directory}: other settings pack the documents differently, so that the unread "
                "rest of the epoch is not known; restore the settings, or export the weights and "
                "begin a new run with them:\n" + "\n".join(packing_lines)
            )

    # The data phases so far, and one more if the data has changed.
    phases = tuple(Phase.from_json(phase) for phase in document["phases"])
    current_config = config.model_copy(update={"batch": config.batch.at(document["step"])})
    following = next_phase(phases[-1], current_config, sources, document["samples"])

    # Add the differences of the data, and list every setting once.
    listed_keys = {key for key, _ in changes}
    if _has_batch_phases(document, config):  # `_changed_batches` has compared the lengths
        listed_keys.add("batch.sequence_length")
    data_changes = differences(phases[-1], following)
    changes += [(key, text) for key, text in data_changes if key not in listed_keys]
    _refuse_changes(changes, document, config, directory, parameters)
    return phases if following is phases[-1] else (*phases, following)


def changed_rate(document: dict[str, Any], config: RunConfig) -> str | None:
    """Return a line about a learning rate of the next step that other settings change; None if the
    rate is unchanged, or was not recorded in `document`, the checkpoint's ``state.json``."""
    try:
        stored_config = RunConfig.model_validate(document["config"])
    except ValueError:  # of another release of bigtrain
        return None
    step = int(document["step"])

    def next_rate(run: RunConfig) -> float:
        return learning_rate_at(step, run.optimizer.lr, run.schedule, run.train.total_steps)

    before, now = next_rate(stored_config), next_rate(config)
    if math.isclose(before, now, rel_tol=1e-9) or step >= config.train.total_steps:
        return None
    keys = [
        key
        for key, _ in _changed_settings(document, config)
        if key.startswith(("train.", "schedule.", "optimizer."))
    ]
    return (
        f"learning rate of step {step + 1}: {now:.6g}; with the checkpoint's settings it would be "
        f"{before:.6g} (changed: {', '.join(keys)})"
    )


def changed_averages(document: dict[str, Any], config: RunConfig) -> str | None:
    """Return a line about averages of the weights (``optimizer.ema``) that the checkpoint with the
    ``state.json`` `document` has and the run does not continue, or the reverse; None if the
    averages continue with an equal decay."""
    before = document["engine"].get("ema")
    now = None if config.optimizer.ema is None else config.optimizer.ema.decay
    if before == now:
        return None
    if before is None:
        return (
            "optimizer.ema: the checkpoint has no averages of the weights; they begin with the "
            f"weights of step {document['step']}"
        )
    if now is None:
        return (
            "optimizer.ema is off: the checkpoint's averages of the weights are not continued, and "
            "later checkpoints have none"
        )
    return f"optimizer.ema.decay: {before:g} in the checkpoint, {now:g} from now on"


def _has_batch_phases(document: dict[str, Any], config: RunConfig) -> bool:
    return bool(config.batch.phases or document["config"]["batch"]["phases"])


def _changed_settings(document: dict[str, Any], config: RunConfig) -> list[tuple[str, str]]:
    """Return the settings of the mathematics that differ from the checkpoint's: for each the key,
    and a text with both values."""
    stored = document["config"]
    # A checkpoint of an older release lacks newer settings: their defaults, which change nothing,
    # stand for them.
    try:
        before = mathematics(RunConfig.model_validate(stored))
    except ValidationError:  # an extension that is no longer installed
        before = {}
    before |= _flat(stored)
    now = mathematics(config)
    changes = [
        (key, text)
        for key in sorted(before.keys() | now.keys())
        for text in _differences(before.get(key), now.get(key))
    ]
    if not _has_batch_phases(document, config):
        return changes
    # With phases, compare the batches of all steps instead of the settings.
    other_changes = [(key, text) for key, text in changes if not key.startswith("batch.")]
    stored_batch = BatchSection.model_validate(stored["batch"])
    return other_changes + _changed_batches(stored_batch, config, document)


def _changed_batches(
    stored: BatchSection, config: RunConfig, document: dict[str, Any]
) -> list[tuple[str, str]]:
    """Return the ranges of steps with a changed batch, as keys and texts. A range does not span the
    step of the checkpoint."""
    step = int(document["step"])

    def batch_text(batch: BatchSection) -> str:
        return f"{batch.samples_per_step} samples of {batch.sequence_length} tokens"

    bounds = sorted({0, step, *stored.ends(), *config.batch.ends()})
    changes = []
    for begin, end in zip(bounds, [*bounds[1:], None], strict=True):
        before, now = batch_text(stored.at(begin)), batch_text(config.batch.at(begin))
        if before != now:
            steps = f"steps {begin + 1} on" if end is None else f"steps {begin + 1} to {end}"
            is_trained = end is not None and end <= step
            trained_text = ", which the run has trained with" if is_trained else ""
            changes.append(("batch.phases", f"{steps}: {before} there{trained_text}, {now} now"))
    return changes


def _changed_groups(
    stored: dict[str, Any], parameters: Parameters, config: RunConfig
) -> list[tuple[str, str]]:
    """Return parameters whose optimizer group differs from the checkpoint's record `stored`, which
    may be of another release of bigtrain or transformers."""
    now = parameters.record()
    changes = []
    no_longer_decaying = sorted(set(stored["decaying"]) - set(now["decaying"]))
    newly_decaying = sorted(set(now["decaying"]) - set(stored["decaying"]))
    if config.optimizer.weight_decay:
        texts = [f"fell on {name} there, and not now" for name in no_longer_decaying]
        texts += [f"falls on {name} now, and did not there" for name in newly_decaying]
        changes += [("optimizer.weight_decay", text) for text in texts]
    if stored["matrices"] != now["matrices"]:
        names = sorted(set(stored["matrices"]) ^ set(now["matrices"]))
        changes.append(("optimizer.type", f"updates other matrices now: {', '.join(names)}"))
    return changes


def _differences(before: Any, now: Any) -> Iterator[str]:
    """Yield a text for two values that differ; for two dictionaries, which may be long, a text for
    each key that differs."""
    if before == now:
        return
    if not isinstance(before, dict) or not isinstance(now, dict):
        yield f"{before!r} there, {now!r} now"
        return
    for name in sorted(before.keys() | now.keys()):
        old_text = repr(before[name]) if name in before else "absent"
        new_text = repr(now[name]) if name in now else "absent"
        if old_text != new_text:
            yield f"{name}: {old_text} there, {new_text} now"


def _refuse_changes(
    changes: Sequence[tuple[str, str]],
    document: dict[str, Any],
    config: RunConfig,
    directory: Path,
    parameters: Parameters | None = None,
) -> None:
    """Raise CheckpointError for `changes` that ``checkpoint.allow_changes`` does not name, and for
    an optimizer or parameters whose states the checkpoint lacks."""
    # First the changes that no setting allows, lest the error below advises to allow them.
    stored_type = document["config"]["optimizer"].get("type", "adamw")
    stored = OPTIMIZERS.get(stored_type)
    needed_states = set(config.optimizer.facts.states)
    if stored is not None and not needed_states <= set(stored.states):
        raise CheckpointError(
            f"{directory}: has states of optimizer.type = {stored_type}, which "
            f"{config.optimizer.type} cannot continue -> optimizer.type={stored_type}, or export "
            "the weights and begin a new run with them"
        )
    if parameters is not None:
        # The moments of thawed parameters would begin at 0, and AdamW corrects that by its number
        # of steps, which all parameters share: the first updates would have another size.
        still_frozen = set(parameters.record()["frozen"])
        thawed = [name for name in document["parameters"]["frozen"] if name not in still_frozen]
        if thawed:
            names = thawed[0] + (f" and {len(thawed) - 1} more" if len(thawed) > 1 else "")
            raise CheckpointError(
                f"{directory}: {names} had no optimizer states there, being frozen, and would be "
                "trained now -> restore model.frozen, or begin a run of its own from these weights "
                f"in another output.directory: checkpoint.initialize_from={directory} with "
                "model.config, or model.path=EXPORT"
            )
    # Then every change that is not allowed; an allowed section allows every key.
    allowed = config.checkpoint.allow_changes
    refused = [
        (key, text)
        for key, text in changes
        if not any(f"{key}.".startswith(f"{entry}.") for entry in allowed)
    ]
    if refused:
        # With the changes that are allowed already, so that the value can be pasted.
        keys = ",".join(sorted({*allowed, *(key for key, _ in refused)}))
        remedy = (
            "or restore the settings (with these train.steps nothing would be left to do; with "
            f"more it could resume by checkpoint.allow_changes=[{keys}])"
            if config.train.total_steps <= document["step"]
            else f"restore the settings, or resume with these by checkpoint.allow_changes=[{keys}]"
        )
        for settings, rule in (
            (_SHAPE_KEYS, "leaves every tensor its shape"),
            (_TRAINED_KEYS, "trains no tensor that the checkpoint lacks"),
        ):
            if named := sorted({key for key, _ in refused} & {*settings}):
                remedy += f" (of {', '.join(named)} only what {rule} can change)"
        raise CheckpointError(
            f"{directory} belongs to a run with other settings; use another output.directory, "
            f"{remedy}:\n" + "\n".join(f"  {key}: {text}" for key, text in refused)
        )


def mathematics(config: RunConfig) -> dict[str, Any]:
    """Return the settings that change the mathematics, by name; the batch size in samples."""
    return _flat(config.model_dump(mode="json"))


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `config` by "section.key", without the free ones."""
    flat: dict[str, Any] = {}
    for section, value in config.items():
        if section in _FREE_SECTIONS:
            continue
        if isinstance(value, dict):
            settings = {f"{section}.{key}": item for key, item in value.items()}
        else:
            settings = {section: value}
        flat.update({name: item for name, item in settings.items() if name not in _FREE})
    # A batch given in tokens equals the same batch given in samples.
    tokens = flat.pop("batch.global_tokens", None)
    if tokens is not None:
        flat["batch.global_batch_size"] = tokens // flat["batch.sequence_length"]
    return flat


BASE = "base"
_CONFIG = "config.json"


def fingerprint(weights: Sums) -> dict[str, dict[str, object]]:
    """Return the entry `base` of `state.json`. `weights`: checksums of the base's weight files by
    absolute path. Reads the `config.json` next to them. Raises ModelError if it cannot."""
    first = Path(next(iter(weights)))
    entries = {Path(name).name: file_sum for name, file_sum in weights.items()}
    entries[_CONFIG] = sum_of(first.with_name(_CONFIG))
    return {
        name: {"bytes": file_sum.num_bytes, "xxh3": file_sum.xxh3}
        for name, file_sum in sorted(entries.items())
    }


def refuse_other_base(document: dict[str, Any], weights: Sums, directory: Path) -> None:
    """Compare the base named in a checkpoint's `state.json` (`document`) with the base read now.
    `weights`: as for `fingerprint`. `directory`: the checkpoint, for errors. Every rank may call
    it. Raises CheckpointError with all files that differ."""
    listed, current = document.get(BASE, {}), fingerprint(weights)
    lines = []
    for name in sorted(listed.keys() | current.keys()):
        # Older releases did not list tokenizer files: compare these only if they are listed.
        is_compared = name in listed or name == _CONFIG or name.endswith(".safetensors")
        before, now = listed.get(name), current.get(name)
        if is_compared and before != now:
            lines.append(f"  {name}: {_entry_text(before)} there, {_entry_text(now)} now")
    if lines:
        raise CheckpointError(
            f"{directory} has adapters of a base other than the current model.path -> restore its "
            "files, or set model.path to the directory that has them:\n" + "\n".join(lines)
        )


def _entry_text(entry: dict[str, object] | None) -> str:
    return "absent" if entry is None else f"{entry['bytes']} bytes, checksum {entry['xxh3']}"


def base_sums(files: tuple[Path, ...]) -> Sums:
    """Return checksums of the base's weight files and of the files next to them that affect its
    numbers, by absolute path. Raises ModelError if one cannot be read."""
    return {str(path.absolute()): sum_of(path) for path in files_read_with(files)}
