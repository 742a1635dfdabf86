"""`bigtrain convert`: a run YAML from the configuration of another trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from bigtrain.commands.arguments import Overrides
from bigtrain.system.arguments import Argument, File, Positive
from bigtrain.system.next_commands import next_lines


@dataclass(frozen=True, kw_only=True)
class ConvertArguments:
    """Command line of `bigtrain convert`."""

    file: Annotated[Path, "FILE", Argument("file")]
    """YAML or JSON of Axolotl, LLaMA-Factory, HF TrainingArguments, TRL, GPT-NeoX or Megatron-LM"""
    also: Annotated[tuple[Path, ...], "FILE", Argument(nargs="+")] = ()
    """further files of the same run, as GPT-NeoX takes several; a key counts in the last one"""
    world_size: Positive | None = None
    """devices that the file was run with, from which the global batch follows (default: only files
    that have the global batch)"""
    trainer: Annotated[
        Literal["axolotl", "llama-factory", "gpt-neox", "megatron", "trainer"] | None,
        Argument("--from"),
    ] = None
    """whose file it is; trainer: HF TrainingArguments and TRL (default: as its keys say)"""
    task: Literal["pretrain", "sft", "dpo", "orpo", "kto", "reward"] | None = None
    """program that reads the file: run_clm.py (pretrain), or a trainer of TRL (default: as its keys
    say)"""
    omit: Annotated[tuple[str, ...], "KEY", Argument(nargs="+")] = ()
    """do without these keys, which change the mathematics and have no counterpart"""
    output: File = Path("run.yaml")
    """the run YAML to write (default: run.yaml)"""
    force: bool = False
    """replace --output if it exists (default: refuse)"""
    overrides: Overrides = ()


def run(args: ConvertArguments) -> int:
    """Write the YAML, and print the next commands and what has no counterpart. Raises ConfigError,
    OutputError."""
    from bigtrain.python_api.converting import convert

    # A setting after `--omit KEY` is still a setting: no key of a file has an equals sign.
    settings_after_omit = [word for word in args.omit if "=" in word]
    converted = convert(
        args.file,
        *args.also,
        overrides=[*args.overrides, *settings_after_omit],
        world_size=args.world_size,
        trainer=args.trainer,
        task=args.task,
        omit=[word for word in args.omit if "=" not in word],
        output=args.output,
        force=args.force,
    )
    print(f"wrote {args.output} from a file of {converted.trainer}")
    if converted.notes:
        print("without a setting of its own:")
        print(*(f"  {note}" for note in converted.notes), sep="\n")
    print(next_lines(*converted.next_commands))
    return 0
