"""`bigtrain start`: from a model and a file to a trained model, in one command."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from bigtrain.errors import (
    EXIT_STALE_LAUNCH,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    BigtrainError,
    ConfigError,
    Problem,
    one_line,
)
from bigtrain.system.arguments import (
    Argument,
    Directory,
    Positive,
    above_zero,
    add_arguments,
    command_words,
    read_arguments,
)
from bigtrain.system.next_commands import next_lines, train_line

if TYPE_CHECKING:
    from bigtrain.python_api.new_run import NewRun

RECORD = "start.json"
"""File of the directory with the options that it was started with."""
RUN_YAML, SHARDS, RUN = "run.yaml", "shards", "run"


@dataclass(frozen=True, kw_only=True)
class StartArguments:
    """Command line of `bigtrain start`."""

    model: Annotated[str, "ID_OR_DIR"]
    """trained weights to start from: name on the Hugging Face hub, or directory"""
    data: Annotated[str, "FILE"]
    """file, folder or Hub dataset of conversations, pairs or text; or token shards"""
    chat: Annotated[bool, Argument(one_of="at most one")] = False
    """the data are conversations (default: by the keys of the first row)"""
    preference: Annotated[bool, Argument(one_of="at most one")] = False
    """the data are pairs of answers, chosen and rejected: train by DPO (default: likewise)"""
    text: Annotated[bool, Argument(one_of="at most one")] = False
    """the data are documents of plain text (default: likewise)"""
    adapters: bool = False
    """train LoRA adapters (default: all weights)"""
    devices: Annotated[str | None, "NxDEVICE"] = None
    """plan the layout for these: 8xH100-80GB, 2xCPU; a number: of the devices of this machine
    (default: the GPUs of this machine, else one process on its CPU)"""
    epochs: Annotated[float, above_zero, "E"] = 1.0
    """times that the data is read (default: 1)"""
    sequence_length: Positive | None = None
    """tokens per sample (default: by the data, at most the model's positions)"""
    output: Directory | None = None
    """directory for shards, run YAML and run (default: runs/MODEL-DATA)"""


@dataclass(frozen=True)
class StartRecord:
    """Record of a start. options: its command line. num_ranks: of the planned layout; 0: not
    planned yet. on_gpus: the layout is for GPUs. held_out: fraction of the documents."""

    options: list[str]
    num_ranks: int = 0
    ranks_per_node: int = 0
    on_gpus: bool = False
    held_out: float = 0.02

    def write(self, directory: Path) -> None:
        """Write the record into `directory`, which is made. Raises OutputError."""
        from bigtrain.system.files import write_whole, writing

        with writing(directory, "make room, or choose another --output"):
            directory.mkdir(parents=True, exist_ok=True)
            write_whole(directory / RECORD, json.dumps(asdict(self)).encode("utf-8"))


def run(args: StartArguments) -> int:
    """Tokenize, write the run YAML, train and export; return the exit code of the run, and print
    how to continue unless it is 0. Raises BigtrainError."""
    directory = args.output or Path("runs") / f"{_stem(args.model)}-{_stem(args.data)}"
    same_command = next_lines(shlex.join(["bigtrain", "start", *command_words(args)]))
    try:
        code = _start(args, directory)
    except KeyboardInterrupt:
        print(f"\nstopped; the same command continues; {same_command}", file=sys.stderr)
        return 128 + signal.SIGINT
    if code:
        end_text = f"ended with exit code {code}; the same command continues"
        if code == EXIT_STOPPED:
            end_text = "stopped and saved; the same command continues"
        elif code == EXIT_STALE_LAUNCH:
            end_text = "a newer launch of this run has taken over, and this one stopped writing; "
            end_text += "the same command takes it over again"
        elif code == EXIT_USER_ERROR:
            end_text = f"refused; once that is mended, in {directory / RUN_YAML} or in the data, "
            end_text += "the same command continues"
        print(f"{end_text}; {same_command}", file=sys.stderr)
    return code


def _start(args: StartArguments, directory: Path) -> int:
    """Tokenize, write the run YAML, train and export; return the exit code of the run. Raises
    BigtrainError."""
    record = _read_record(directory, args)
    new_run = _checked_new_run(args, directory)
    missing_folders = [path for path in (directory, *directory.parents) if not path.exists()]
    record.write(directory)

    # Shards: the data itself, or tokenized in the format of its rows.
    shards = Path(new_run.data) if new_run.is_tokenized else directory / SHARDS
    if not new_run.is_tokenized:
        try:
            _tokenize(args, shards, record.held_out)
        except BigtrainError as error:
            _remove_if_unused(directory, missing_folders)
            _add_note_on_options(args, error)
            raise

    # The run YAML: written once, and the user's from then on.
    from bigtrain.data.loading.dataset_checks import is_short_held_out

    run_yaml = directory / RUN_YAML
    if record.num_ranks and run_yaml.exists():
        print(f"{run_yaml}: used as it is")
    else:
        planned = replace(new_run, data=str(shards), devices=_named_devices(args.devices))
        try:
            record = _write_run(record, planned, run_yaml)
        except ConfigError as error:
            # Too few held-out documents are no error of the user, who has not asked for any.
            if new_run.is_tokenized or not all(map(is_short_held_out, error.problems)):
                _remove_if_unused(directory, missing_folders)
                raise
            print(f"{error.problems[0].rule}; tokenized again without held-out documents")
            # Renamed first, so that an interrupted removal leaves no directory that looks complete.
            removed = shards.with_name(f".{SHARDS}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            shards.rename(removed)
            shutil.rmtree(removed)
            record = replace(record, held_out=0.0)
            record.write(directory)
            _tokenize(args, shards, record.held_out)
            record = _write_run(record, planned, run_yaml)

    # A run for other machines is not started here.
    train_words = ["--config", str(run_yaml)]
    line = train_line(train_words, record.num_ranks, record.ranks_per_node)
    if record.num_ranks > record.ranks_per_node:
        print(f"{run_yaml}: a run of several machines is started on them; {next_lines(line)}")
        return 0
    if record.on_gpus and record.num_ranks > (num_gpus := _num_gpus()):
        has_text = f"has {num_gpus or 'no'} GPU{'s' if num_gpus > 1 else ''}"
        print(
            f"{run_yaml}: a run for {record.num_ranks} GPUs, and this machine {has_text}; start "
            f"it on one that has them; {next_lines(line)}"
        )
        return 0

    # The run trains and exports, and ends with the commands that use its model.
    return _train(train_words, record, args.devices)


def _add_note_on_options(args: StartArguments, error: BigtrainError) -> None:
    """Add a note to `error` on options of `bigtrain tokenize` that its remedies suggest, and that
    `start` does not have."""
    start_options = {f"--{field.name.replace('_', '-')}" for field in fields(args)}
    # Only remedies suggest options: a rule may name the format of rows as `--format NAME`.
    remedies = " ".join(re.findall(r" -> (.*)", str(error)))
    suggested_options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", remedies)
    foreign_options = sorted({*suggested_options} - start_options)
    if foreign_options:
        line = shlex.join(["bigtrain", "start", "--model", args.model, "--data", "SHARDS"])
        text = f"{' and '.join(foreign_options)}: of `bigtrain tokenize`; run the command above "
        error.add_note(f"{text}with what you need, and then, with the directory it writes: {line}")


def _remove_if_unused(directory: Path, missing_folders: list[Path]) -> None:
    """Remove the directory of a start that has written only its record, and the parents that the
    start has made. missing_folders: `directory` and its parents that were missing, innermost
    first."""
    if [entry.name for entry in directory.iterdir()] == [RECORD]:
        (directory / RECORD).unlink()
        directory.rmdir()
        for parent in missing_folders[1:]:
            if not any(parent.iterdir()):
                parent.rmdir()


def _stem(name: str) -> str:
    """Return the last part of a model's or file's name, without suffixes (also .jsonl.gz)."""
    last_part = Path(name.rstrip("/")).name
    return last_part.split(".jsonl")[0].removesuffix(Path(name).suffix) or "data"


def _read_record(directory: Path, args: StartArguments) -> StartRecord:
    """Return the record of an earlier start in `directory`, or a new one.

    A start that was refused before it had a run YAML may be repeated with other options, and with
    other data if it has written no shards. Raises ConfigError for options that contradict files of
    the earlier start, for a directory of something else, and for one that cannot be written.
    """
    from bigtrain.system.files import why_not_creatable

    # An earlier record, or a new one in an empty directory.
    options = command_words(args)
    if (rule := why_not_creatable(directory)) is not None:
        raise ConfigError(Problem("--output", str(directory), rule, "choose another one"))
    try:
        record = StartRecord(**json.loads((directory / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        if directory.is_dir() and any(directory.iterdir()):
            rule, remedy = "holds files of something else than a start", "another --output"
            raise ConfigError(Problem("--output", str(directory), rule, remedy)) from None
        return StartRecord(options)
    except (OSError, ValueError, TypeError) as error:
        rule = f"its {RECORD} is no record of a start ({one_line(error)})"
        remedy = "another --output; or restore the file, without which the run is not known"
        raise ConfigError(Problem("--output", str(directory), rule, remedy)) from error
    # Other options are allowed as long as nothing that depends on them was written.
    if record.options == options:
        return record
    rule = f"was started with other options: {shlex.join(record.options)}"
    if (directory / RUN_YAML).exists():
        remedy = f"the same options (settings: edit {directory / RUN_YAML}), or another --output"
        raise ConfigError(Problem("--output", str(directory), rule, remedy))
    parser = argparse.ArgumentParser()
    add_arguments(parser, StartArguments, has_help=False)
    earlier = read_arguments(parser.parse_args(record.options))
    data_options = ("model", "data", "chat", "preference", "text")
    if all(getattr(earlier, name) == getattr(args, name) for name in data_options):
        return StartRecord(options, held_out=record.held_out)
    if (directory / SHARDS).exists():
        rule = f"{rule}, and its shards are tokens of that data"
        remedy = f"the same model and data, another --output, or delete {directory / SHARDS}"
        raise ConfigError(Problem("--output", str(directory), rule, remedy))
    return StartRecord(options)


def _checked_new_run(args: StartArguments, directory: Path) -> NewRun:
    """Return the run to be written, whose data may not be tokenized yet. Raises ConfigError for a
    missing model or data, for options that the data or the run refuse, and for conversations
    without a chat template, ModelError for weights that cannot be read."""
    from bigtrain.python_api.new_run import NewRun, check_settings, with_checked_inputs

    new_run = NewRun(
        data=args.data,
        model=args.model,
        chat=args.chat,
        preference=args.preference,
        adapters=args.adapters,
        epochs=args.epochs,
        sequence_length=args.sequence_length,
        run_directory=str(directory / RUN),
        shards=str(directory / SHARDS),
    )
    if new_run.names_nothing_here:
        raise ConfigError(Problem("--data", args.data, "does not exist", "a file that exists"))
    if args.devices is not None:
        from bigtrain.planner.tables.hardware import find_device

        number, _, device = args.devices.partition("x")
        if not number.isdigit() or int(number) == 0 or args.devices.endswith("x"):
            rule = "is not a number of devices, or that and their name"
            remedy = "write e.g. 2, 2xCPU or 8xH100-80GB"
            raise ConfigError(Problem("--devices", args.devices, rule, remedy))
        if device:
            find_device(device, "--devices")
        else:
            _named_devices(args.devices)
    # A directory without a usable model is refused before files are written.
    if Path(args.model).is_dir() and not new_run.is_tokenized:
        from bigtrain.data.tokenizers.tokenizer import load_tokenizer
        from bigtrain.settings.hf_config_keys import inspect_configuration
        from bigtrain.settings.run_config import ModelSection

        load_tokenizer(args.model)
        _, problems = inspect_configuration(ModelSection(path=args.model))
        if problems:
            raise ConfigError(problems)
    new_run = with_checked_inputs(
        new_run, _to_stderr, "bigtrain start", infers_rows=True, is_text=args.text
    )
    if not (directory / RUN_YAML).exists():
        check_settings(new_run, "bigtrain start")
    return new_run


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _named_devices(devices: str | None) -> str | None:
    """Return `devices` as NxDEVICE, where a number N means devices of this machine; by default all
    GPUs of this machine. None: one process on its CPU. Raises ConfigError for more GPUs than this
    machine has."""
    if devices is not None and not devices.isdigit():
        return devices
    num_gpus = _num_gpus()
    if not num_gpus:
        return None if devices is None else f"{devices}xCPU"
    if devices is not None and int(devices) > num_gpus:
        rule = f"this machine has {num_gpus} GPUs"
        remedy = f"{num_gpus}; or with the name of the GPUs that it will have: {devices}xH100-80GB"
        raise ConfigError(Problem("--devices", devices, rule, remedy))
    import torch

    return f"{devices or num_gpus}x{torch.cuda.get_device_name()}"


def _tokenize(args: StartArguments, shards: Path, held_out: float) -> None:
    """Tokenize the data into `shards`, or continue; a finished dataset is kept. Raises
    DataError."""
    from bigtrain.data.shards.inspection import summary
    from bigtrain.data.tokenize_job.options import TokenizeOptions
    from bigtrain.python_api.tokenizing import build_tokens

    row_format: Literal["auto", "text", "preference"] = "auto"
    if args.text:
        row_format = "text"
    elif args.preference:
        row_format = "preference"
    options = TokenizeOptions(
        inputs=[args.data],
        tokenizer=args.model,
        output=shards,
        held_out=held_out,
        format=row_format,
    )
    _print_command(shlex.join(["bigtrain", "tokenize", *command_words(options)]))
    result = build_tokens(options)
    print(summary(shards, result.manifest))


def _write_run(record: StartRecord, planned: NewRun, run_yaml: Path) -> StartRecord:
    """Write the run YAML of `planned` and the record with its layout; return the record. Raises
    BigtrainError."""
    from bigtrain.python_api.new_run import write_new_run

    written = write_new_run(planned, run_yaml, force=True, say=_to_stderr, command="bigtrain start")
    print(f"wrote {' and '.join(map(str, written.files))}, which you may edit")
    record = replace(
        record,
        num_ranks=written.num_ranks,
        ranks_per_node=written.ranks_per_node,
        on_gpus=written.on_gpus,
    )
    record.write(run_yaml.parent)
    return record


def _train(train_words: list[str], record: StartRecord, devices: str | None) -> int:
    """Train on this machine; return the exit code. Ctrl-C and SIGTERM stop the run after a saved
    step."""
    from bigtrain.system.shipped_files import checkout

    program = [str(checkout() / "bigtrain/train.py"), *train_words]
    interrupt = signal.SIGINT
    if record.num_ranks > 1:
        # DeepSpeed's launcher would kill or leave behind ranks that save; the agent waits for them.
        agent = ["-m", "bigtrain.launchers.agent", "--fork", "bigtrain.forked_rank"]
        program = [*agent, "--standalone", f"--nproc-per-node={record.num_ranks}", *program]
        interrupt = signal.SIGTERM
    paths = [str(checkout()), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if devices is not None and devices.lower().endswith("cpu"):
        environment.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    _print_command(shlex.join(["python", *program]))
    # In a new process group, so that a terminal's Ctrl-C reaches the run once, by the handler.
    process = subprocess.Popen([sys.executable, *program], env=environment, process_group=0)
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        sent = interrupt if number == signal.SIGINT else signal.SIGTERM
        # A default argument keeps the `sent` of this iteration.
        handlers[number] = signal.signal(number, lambda *_, sent=sent: process.send_signal(sent))
    try:
        code = process.wait()
    finally:
        for number, earlier_handler in handlers.items():
            signal.signal(number, earlier_handler)
    return code if code >= 0 else 128 - code  # as a shell, for a process that a signal ended


def _print_command(command: str) -> None:
    print(f"\n$ {command}", flush=True)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
