"""`bigtrain start`: from a model and a file to a trained model, in one command."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from bigtrain.errors import EXIT_STOPPED, EXIT_USER_ERROR, BigtrainError, ConfigError, Problem
from bigtrain.system.arguments import Argument, Directory, Positive, command_words
from bigtrain.system.next_commands import next_lines, train_line

if TYPE_CHECKING:
    from bigtrain.python_api.new_run import NewRun

RECORD = "start.json"
"""File of the directory with the options that it was started with."""
RUN_YAML, SHARDS, RUN = "run.yaml", "shards", "run"
_HELD_OUT = 0.02


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
    """plan the layout for these: 8xH100-80GB, 2xCPU (default: the GPUs of this machine, else one
    process on its CPU)"""
    epochs: Annotated[float, "E"] = 1.0
    """times that the data is read (default: 1)"""
    sequence_length: Positive | None = None
    """tokens per sample (default: by the data, at most the model's positions)"""
    output: Directory | None = None
    """directory for shards, run YAML and run (default: runs/MODEL-DATA)"""


@dataclass(frozen=True)
class StartRecord:
    """Record of a start: its options, the ranks (0: not planned yet), and the ranks of a node."""

    options: list[str]
    num_ranks: int = 0
    ranks_per_node: int = 0

    def write(self, directory: Path) -> None:
        """Write the record into `directory`, which is made."""
        from bigtrain.system.files import write_whole

        directory.mkdir(parents=True, exist_ok=True)
        write_whole(directory / RECORD, json.dumps(asdict(self)).encode("utf-8"))


def run(args: StartArguments) -> int:
    """Tokenize, write the run YAML, train and export; return the exit code of the run. This command
    continues it. Raises BigtrainError."""
    directory = args.output or Path("runs") / f"{_stem(args.model)}-{_stem(args.data)}"
    started = _read_record(directory, command_words(args))
    new_run = _checked_run(args, directory)
    started.write(directory)

    # Shards: of the format that is found, unless they are shards already.
    if new_run.is_tokenized:
        shards = Path(new_run.data)
    else:
        shards = directory / SHARDS
        try:
            _tokenize(args, shards)
        except BigtrainError as error:
            _remove_if_unused(directory)
            _explain_options(args, str(error))
            raise

    # The run YAML: written once, and the user's from then on.
    run_yaml = directory / RUN_YAML
    if started.num_ranks and run_yaml.exists():
        print(f"{run_yaml}: used as it is")
    else:
        started = _write_run(args, new_run, shards, run_yaml)
    words = ["--config", str(run_yaml)]
    if started.num_ranks > started.ranks_per_node:
        line = train_line(words, started.num_ranks, started.ranks_per_node)
        print(f"{run_yaml}: a run of several machines is started on them; {next_lines(line)}")
        return 0

    # The run trains and exports, and ends with the commands that use its model.
    code = _train(words, started.num_ranks)
    if code:
        end_text = f"ended with exit code {code}; the same command continues"
        if code == EXIT_STOPPED:
            end_text = "stopped and saved; the same command continues"
        elif code == EXIT_USER_ERROR:
            end_text = f"refused; once that is mended, in {run_yaml} or in the data, the same "
            end_text += "command continues"
        same_command = shlex.join(["bigtrain", "start", *command_words(args)])
        print(f"{end_text}; {next_lines(same_command)}", file=sys.stderr)
    return code


def _explain_options(args: StartArguments, reason: str) -> None:
    """Say how options that `reason` names and `start` does not have are used."""
    options = {f"--{field.name.replace('_', '-')}" for field in fields(args)}
    foreign_options = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", reason)) - options)
    if foreign_options:
        line = shlex.join(["bigtrain", "start", "--model", args.model, "--data", "SHARDS"])
        text = f"{' and '.join(foreign_options)}: of the command `bigtrain tokenize` above; run it "
        _to_stderr(f"{text}with that, and then, with the directory that it writes: {line}")


def _remove_if_unused(directory: Path) -> None:
    """Remove the directory of a start that has written nothing but its record."""
    if [entry.name for entry in directory.iterdir()] == [RECORD]:
        (directory / RECORD).unlink()
        directory.rmdir()


def _stem(name: str) -> str:
    """Return the last part of a model's or file's name, without suffixes."""
    return Path(name.rstrip("/")).name.split(".jsonl")[0].removesuffix(Path(name).suffix) or "data"


def _read_record(directory: Path, options: list[str]) -> StartRecord:
    """Return the record of an earlier start in `directory`, or a new one. Raises ConfigError for
    other options, and for a directory of something else."""
    try:
        started = StartRecord(**json.loads((directory / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        if directory.is_dir() and any(directory.iterdir()):
            rule, remedy = "holds files of something else than a start", "another --output"
            raise ConfigError(Problem("--output", str(directory), rule, remedy)) from None
        return StartRecord(options)
    if started.options != options and [entry.name for entry in directory.iterdir()] != [RECORD]:
        rule = f"was started with other options: {shlex.join(started.options)}"
        remedy = f"the same options (settings: edit {directory / RUN_YAML}), or another --output"
        raise ConfigError(Problem("--output", str(directory), rule, remedy))
    return started if started.options == options else StartRecord(options)


def _checked_run(args: StartArguments, directory: Path) -> NewRun:
    """Return the run to be written, of data that may not be tokenized yet. Raises ConfigError for a
    model or data that do not exist, and for conversations without a chat template."""
    from bigtrain.python_api.new_run import NewRun, check_names

    new_run = NewRun(
        data=args.data,
        model=args.model,
        chat=args.chat,
        preference=args.preference,
        adapters=args.adapters,
        epochs=args.epochs,
        sequence_length=args.sequence_length,
        run_directory=str(directory / RUN),
    )
    if new_run.names_nothing_here:
        raise ConfigError(Problem("--data", args.data, "does not exist", "a file that exists"))
    if args.devices is not None:
        from bigtrain.planner.tables.hardware import find_device

        number, _, device = args.devices.partition("x")
        if not number.isdigit() or not device:
            rule = "is not a number of devices and their name"
            raise ConfigError(Problem("--devices", args.devices, rule, "write e.g. 8xH100-80GB"))
        find_device(device, "--devices")
    check_names(new_run, _to_stderr)
    if Path(args.model).is_dir() and not new_run.is_tokenized:
        from bigtrain.data.tokenizers.tokenizer import load_tokenizer
        from bigtrain.settings.hf_config_keys import inspect_configuration
        from bigtrain.settings.run_config import ModelSection

        # A wrong directory is refused before anything is written.
        load_tokenizer(args.model)
        _, problems = inspect_configuration(ModelSection(path=args.model))
        if problems:
            raise ConfigError(problems)
    return new_run


def _devices_here() -> str | None:
    """Return the GPUs of this machine; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    return f"{torch.cuda.device_count()}x{torch.cuda.get_device_name()}"


def _tokenize(args: StartArguments, shards: Path) -> None:
    """Tokenize the data into `shards`, or continue; a finished dataset is kept. Raises DataError,
    also for conversations if the rows have another format."""
    from bigtrain.data.shards.inspection import summary
    from bigtrain.data.tokenize_job.options import TokenizeOptions
    from bigtrain.python_api.tokenizing import build_tokens, row_problem

    row_format: Literal["auto", "text", "preference"] = "auto"
    if args.text:
        row_format = "text"
    elif args.preference:
        row_format = "preference"
    options = TokenizeOptions(
        inputs=[args.data],
        tokenizer=args.model,
        output=shards,
        held_out=_HELD_OUT,
        format=row_format,
    )
    if args.chat:
        row_problem(options, "--chat")
    _show(shlex.join(["bigtrain", "tokenize", *command_words(options)]))
    result = build_tokens(options)
    print(summary(shards, result.manifest))


def _write_run(args: StartArguments, new_run: NewRun, shards: Path, run_yaml: Path) -> StartRecord:
    """Write the run YAML for the layout that is planned, and the record. Raises BigtrainError."""
    from dataclasses import replace

    from bigtrain.python_api.new_run import write_new_run

    planned = replace(new_run, data=str(shards), devices=args.devices or _devices_here())
    written = write_new_run(planned, run_yaml, force=True, say=_to_stderr)
    print(f"wrote {' and '.join(map(str, written.files))}, which you may edit")
    started = StartRecord(command_words(args), written.num_ranks, written.ranks_per_node)
    started.write(run_yaml.parent)
    return started


def _train(words: list[str], num_ranks: int) -> int:
    """Train on this machine; return the exit code. Ctrl-C and SIGTERM stop the run after a saved
    step."""
    from bigtrain.system.local_world import free_port
    from bigtrain.system.shipped_files import checkout

    program = [str(checkout() / "bigtrain/train.py"), *words]
    command = [sys.executable, *program]
    if num_ranks > 1:
        launcher = ["-m", "deepspeed.launcher.runner", "--quiet", "--master_port", str(free_port())]
        command = [sys.executable, *launcher, "--num_accelerators", str(num_ranks), *program]
    _show(train_line(words, num_ranks))
    process = subprocess.Popen(command)
    # A terminal sends Ctrl-C to the run, too; other signals are passed on.
    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(
            signal.SIGTERM, lambda number, _: process.send_signal(number)
        ),
    }
    try:
        code = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _show(command: str) -> None:
    print(f"\n$ {command}", flush=True)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
