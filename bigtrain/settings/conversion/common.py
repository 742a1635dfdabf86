"""Settings that files of several trainers have: batch, precision, schedule, data, ... Pure."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bigtrain.errors import Problem
from bigtrain.settings.conversion.accepted_values import NUMBER, POSITIVE, SHARE
from bigtrain.settings.conversion.draft import Draft, is_unset
from bigtrain.settings.conversion.tables import KeyRow, Table, read, with_values

# Names of HF Trainer's optimizers, and the optimizer of bigtrain with the same update. Without
# torchao's adamw_torch_8bit, whose blocks differ, and adamw_anyprecision with bfloat16 moments.
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
    **dict.fromkeys(("adamw_apex_fused", "paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), "lion"),
}
SCHEDULE_OPTIONS = with_values(
    {
        "min_lr": read("`schedule.min_lr_ratio`"),
        "min_lr_rate": read("`schedule.min_lr_ratio`"),
        "num_cycles": read("`schedule.cycles`"),
    },
    [(NUMBER, "min_lr"), (SHARE, "min_lr_rate"), (POSITIVE, "num_cycles")],
)
"""Keywords of schedules of transformers."""


class KeyDefault(NamedTuple):
    """A key of a trainer that has a number, and the trainer's default."""

    key: str
    default: float


def read_values(draft: Draft, table: Table) -> None:
    """Replace the values of the file by the values that the trainer reads. A value that the trainer
    does not take is a problem, and replaced by an example of a legal value, so that the problems of
    other keys are found, too."""
    draft.keys = read_members(draft, "", draft.keys, table)


def read_members(draft: Draft, prefix: str, keys: Mapping[str, Any], table: Table) -> Any:
    """Return the keys of a dictionary with the values that the trainer reads. prefix: path of the
    dictionary in the file, as ``datasets.0.``."""
    members = {}
    for name, value in keys.items():
        path = f"{prefix}{name}"
        is_read = value is not None and name in table and path not in draft.omitted
        members[name] = _read_value(draft, path, value, table[name]) if is_read else value
    return members


def _read_value(draft: Draft, path: str, value: Any, row: KeyRow) -> Any:
    """Return the value at `path` as the trainer reads it, with the keys within it. Adds a problem
    and returns an example if the trainer does not take the value."""
    try:
        value = value if row.accepted is None else row.accepted.read(value)
        if row.members and isinstance(value, list):
            for entry in value:
                if not isinstance(entry, Mapping):
                    raise ValueError(f"must hold keys and values in each entry, not {entry!r}")
    except ValueError as error:
        draft.problems.append(
            Problem(path, value, f"{error}, as in {draft.trainer}", "correct it in the file")
        )
        draft.unreadable.add(path)
        return None if row.accepted is None else row.accepted.example
    if row.members and isinstance(value, Mapping):
        return read_members(draft, f"{path}.", value, row.members)
    if row.members and isinstance(value, list):
        return [
            read_members(draft, f"{path}.{number}.", entry, row.members)
            for number, entry in enumerate(value)
        ]
    return value


def set_optimizer(draft: Draft, key: str, default: str) -> None:
    """Set ``optimizer.type`` from the name of HF Trainer under `key`."""
    name = draft.value(key, default)
    if name not in OPTIMIZERS:
        rule = f"is not an optimizer of bigtrain with the same update ({', '.join(OPTIMIZERS)})"
        draft.refuse(key, rule, f"--omit {key} takes {default}")
        return
    draft.set("optimizer.type", OPTIMIZERS[name])


def set_adam(draft: Draft, beta_keys: Sequence[str], eps_key: str) -> None:
    """Set betas and eps, whose defaults in HF Trainer are 0.9, 0.999 and 1e-8."""
    betas = [draft.number(beta_keys[0], 0.9), draft.number(beta_keys[1], 0.999)]
    draft.set("optimizer.betas", betas)
    if draft.run["optimizer"].get("type") != "lion":  # Lion's update has no eps
        draft.set("optimizer.eps", draft.number(eps_key, 1e-8))


def set_schedule(draft: Draft, key: str, default: str, options: Mapping[str, Any]) -> None:
    """Set the schedule from the name of HF Trainer under `key`. options: keywords of the schedule
    (lr_scheduler_kwargs)."""
    # Settings of the section schedule, by the name of HF Trainer. Options that a schedule reads are
    # removed from `options`: one that remains has no counterpart.
    name = draft.value(key, default)
    options = {option: options[option] for option in options if option in SCHEDULE_OPTIONS}
    zero_floor = {"min_lr_ratio": 0.0}
    schedules: dict[str, dict[str, Any]] = {
        "linear": {"type": "linear", **zero_floor},
        "cosine": {"type": "cosine", **zero_floor},
        "constant": {"type": "constant"},
        "constant_with_warmup": {"type": "constant"},
    }
    if name == "cosine_with_min_lr" and "min_lr_rate" in options:
        schedules[name] = {"type": "cosine", "min_lr_ratio": options.pop("min_lr_rate")}
    if name == "cosine_with_min_lr" and "min_lr" in options:
        ratio = float(options.pop("min_lr")) / (draft.run["optimizer"]["lr"] or 1.0)
        schedules[name] = {"type": "cosine", "min_lr_ratio": ratio}
    if name == "cosine_with_restarts":
        schedules[name] = {"type": "cosine", **zero_floor, "cycles": options.pop("num_cycles", 1)}
    if name == "cosine" and options.get("num_cycles") == 0.5:
        options.pop("num_cycles")  # the default: half a wave
    if name not in schedules or options:
        extra = f" with {options}" if options else ""
        similar = difflib.get_close_matches(str(name), schedules, n=1)
        fix = f"did you mean {similar[0]}? " if similar and name not in schedules else ""
        fix += "schedule.type=NAME:FUNCTION"
        draft.refuse(key, f"{name}{extra} is not a schedule of bigtrain", fix)
        return
    for setting, value in schedules[name].items():
        draft.set(f"schedule.{setting}", value)
    # Warm-up.
    warmup_steps, ratio = draft.number("warmup_steps", 0), draft.number("warmup_ratio", 0)
    if 0 < warmup_steps < 1:  # transformers 5 takes a ratio here
        warmup_steps, ratio = 0, warmup_steps
    if name == "constant" and (warmup_steps or ratio):
        draft.notes.append(f"{key} = 'constant' has no warm-up, so the file's warm-up is not used")
    elif warmup_steps:
        draft.set("schedule.warmup_steps", int(warmup_steps))
    elif ratio:
        draft.set("schedule.warmup_ratio", ratio)
    draft.notes.append(
        "the warm-up begins above zero, and the decay ends at its minimum: step s here has the "
        "learning rate of step s + 1 of transformers"
    )


def set_batch(
    draft: Draft, micro_batch: KeyDefault, accumulation: KeyDefault, model_ranks: int = 1
) -> None:
    """Set the batch from the keys of the samples of a device and of the accumulation steps.
    model_ranks: ranks that share the samples of a micro-batch."""
    micro_batch_size = draft.number(*micro_batch)
    steps = draft.number(*accumulation)
    draft.set("batch.micro_batch_size", micro_batch_size)
    if draft.world_size is None:
        draft.refuse(
            micro_batch.key,
            f"the global batch is {micro_batch_size} x {steps} x the number of devices that share "
            "the data, and the file does not have this number",
            "--world-size N, the devices that the file was run with",
        )
        return
    data_size = max(1, draft.world_size // model_ranks)
    draft.set("batch.global_batch_size", int(micro_batch_size * steps * data_size))


def set_length(draft: Draft, epochs: KeyDefault, steps_key: str) -> None:
    """Set the length of the run: steps if the file has a positive number, else epochs."""
    max_steps = draft.number(steps_key, -1)
    if max_steps > 0:
        draft.set("train.steps", int(max_steps))
    else:
        draft.set("train.epochs", float(draft.number(*epochs)))


def set_dtype(draft: Draft, *, default: str) -> None:
    """Set ``precision.dtype`` from bf16 and fp16 of HF Trainer. default: the dtype if the file has
    neither key."""
    if draft.value("bf16") in (True, "auto", "full"):
        dtype = "bfloat16"
        if draft.value("bf16") == "auto":
            draft.notes.append("bf16 = 'auto': precision.dtype=bfloat16, on every device")
    elif draft.value("fp16") is True:
        dtype = "float16"
    else:
        is_float32 = draft.value("bf16") is False or draft.value("fp16") is False
        dtype = "float32" if is_float32 else default
    draft.set("precision.dtype", dtype)


def set_attention(draft: Draft, attention: object) -> None:
    """Set the attention from transformers' name of the implementation; note an unknown name."""
    if attention in ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"):
        draft.set("model.attention", attention)
    elif attention is not None:
        draft.notes.append(
            f"attn_implementation = {attention!r}: model.attention=auto, the same result"
        )


def set_noise(draft: Draft, *keys: str) -> None:
    """Set the noise on embeddings from the first of `keys` that the file has; 0 adds none."""
    alphas = [draft.number(key) for key in keys if draft.value(key)]
    if alphas:
        draft.set("model.neftune_noise_alpha", alphas[0])


def set_engine(draft: Draft, key: str) -> None:
    """Set the DeepSpeed JSON that the file names. A JSON that is not on this machine is only noted,
    since the engine does not change the mathematics."""
    path = draft.value(key)
    if path is None:
        return
    if draft.run["optimizer"].get("weight_decay"):
        draft.notes.append(
            f"{key}: HF Trainer with an optimizer in this JSON also decays norms and biases; a run "
            "does not"
        )
    if isinstance(path, str) and Path(path).is_file():
        draft.set("engine.deepspeed_config", path)
    else:
        text = (
            "is not a file here, and the run has its default, zero1: engine.deepspeed_config=PATH"
        )
        draft.notes.append(f"{key} = {str(path)[:60]!r}: {text}")


def set_trackers(draft: Draft, names: object) -> None:
    """Set the trackers that bigtrain has, and list others."""
    names = names if isinstance(names, list) else [names]
    trackers = [name for name in names if name in ("tensorboard", "wandb", "mlflow", "comet_ml")]
    if trackers:
        draft.set("logging.trackers", trackers)
    for name in names:
        if name not in trackers and not is_unset(name):
            draft.notes.append(f"report_to = {name!r}: is not one of bigtrain's trackers")


def set_steps(draft: Draft, key: str, section: str) -> None:
    """Set the period of saves or evaluations, `section` of the run. A period below 1 is a share of
    the run: set in epochs, or only noted if the length of the run is in steps."""
    period = draft.number(key)
    if not period:
        return
    epochs = draft.run["train"].get("epochs")
    if period >= 1:
        draft.set(f"{section}.every_steps", int(period))
    elif epochs:
        draft.set(f"{section}.every_epochs", round(period * epochs, 9))
    else:
        path = f"{section}.every_steps"
        draft.notes.append(f"{key} = {period}: a share of the run has no counterpart -> {path}=N")


def held_out_options(draft: Draft, key: str) -> list[str]:
    """Return the options of `tokenize` for a share of held-out rows; a number of rows is noted."""
    held_out = draft.number(key, 0)
    if 0 < held_out < 1:
        return ["--held-out", str(held_out)]
    if held_out:
        draft.notes.append(f"{key} = {held_out:g} rows: --held-out takes a share of them")
    return []


def shard_directories(names: Sequence[object]) -> list[str]:
    """Return a directory for the shards of each dataset."""
    return ["shards/"] if len(names) == 1 else [f"shards-{name}/" for name in names]


def tokenize_command(source: str, tokenizer: str, options: Sequence[str], output: str) -> str:
    """Return the command that writes the shards of `source` to `output`."""
    words = ["--input", source, "--tokenizer", tokenizer, *options, "--output", output]
    return f"bigtrain tokenize {shlex.join(words)}"


def set_data(draft: Draft, commands: Sequence[str], outputs: Sequence[str]) -> None:
    """Set the data: one dataset, or several that are each read once per epoch. commands: that write
    the datasets; outputs: their directories."""
    draft.commands += commands
    if len(outputs) == 1:
        draft.set("data.path", outputs[0])
    elif outputs:
        draft.set("data.sources", [{"path": output, "epochs": 1.0} for output in outputs])


def model_name(draft: Draft) -> str:
    """Return the model that the run starts from, whose tokenizer makes the shards: as the file, or
    the user's ``model.path``, names it."""
    path_of_user = draft.given_settings.get("model.path", "TOKENIZER")
    return str(draft.value("model_name_or_path", path_of_user))


def set_packing(draft: Draft, *, packs: bool, length_key: str) -> None:
    """Set how rows become samples: packed and isolated, or each row in a separate sample.
    length_key: key of the file with the tokens of a sample."""
    draft.set("data.packing", "best_fit" if packs else "none")
    draft.set("data.long_documents", "truncate")
    # The user's packing replaces this one after the conversion, and has no long documents.
    if draft.given_settings.get("data.packing") == "concatenate":
        draft.run["data"].pop("long_documents")
        return
    if not packs:
        draft.notes.append(
            f"data.packing = none: a sample is one row, padded to {length_key}; best_fit packs "
            "several rows into one, with less work, and a step then has more rows"
        )
    draft.notes.append(
        f"rows longer than {length_key} are truncated here; other trainers may drop them"
    )
